// The one exception of this client: a code for programs, a message for people. Knows nothing of sockets.
//
// docs/protocol.md lists the codes of the service. The client's own are:
//   connect_failed     no connection; nothing was sent
//   connection_lost    the connection broke; the request may or may not have been applied
//   deadline_exceeded  no answer in time; the request may or may not have been applied
//   transport_error    the answer is not from brayx
//   bad_config         a URL or an option that cannot be used
//   bad_request        an invalid session id
//   bad_body           values that do not fit the contract
//   session_unknown    a tick or stop without a running session
//   session_exists     a start for a session that is running
//   session_error      a second request of a session while one is in flight
//   queue_full         more requests in flight than `Options::max_in_flight` allows
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "json.hpp"

namespace brayx {

class Error : public std::runtime_error {
  public:
    Error(std::string code, const std::string& message, std::string details = "{}")
        : std::runtime_error(message), said_(std::make_shared<const Said>(Said{std::move(code), std::move(details)})) {}

    // The wire's `error`, such as "session_lost".
    const std::string& code() const noexcept { return said_->code; }

    // The wire's `details`, as JSON text.
    const std::string& details() const noexcept { return said_->details; }

    // An integer among the details, such as `detail("tick")` of session_resumed.
    std::optional<std::int64_t> detail(std::string_view name) const {
        const auto value = json::member(said_->details, name);
        return value ? json::integer(*value) : std::nullopt;
    }

    // Whether the error means that the service has ended the session.
    bool ends_session() const noexcept {
        const std::string& code = said_->code;
        return code == "session_unknown" || code == "session_lost" || code == "session_exists" ||
               code == "session_error" || code == "agent_error";
    }

  private:
    struct Said {
        std::string code;
        std::string details;
    };
    std::shared_ptr<const Said> said_;  // shared, because an exception must not throw when it is copied
};

// The error in a service's document; any other bytes become a transport_error that quotes them.
inline Error error_from_wire(std::string_view document) {
    const auto raw_code = json::member(document, "error");
    const auto raw_message = json::member(document, "message");
    const auto code = raw_code ? json::string(*raw_code) : std::nullopt;
    const auto message = raw_message ? json::string(*raw_message) : std::nullopt;
    // A code is a name, so that it can be printed and compared as one.
    constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz_";
    if (code && message && !code->empty() && code->find_first_not_of(kLetters) == code->npos) {
        return Error(*code, *message, std::string(json::member(document, "details").value_or("{}")));
    }
    std::string quoted(document.substr(0, 200));
    for (char& byte : quoted) {
        if (byte < ' ' || byte > '~') byte = '?';
    }
    return Error("transport_error", "the service answered an error without a brayx error document: '" + quoted + "'");
}

}  // namespace brayx
