// The blocking client: one session at a time. Play several games at once with several clients, or with AsyncClient.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "async_client.hpp"

namespace brayx {

// Every call waits for its reply, at most `Options::timeout` (and `Options::reconnect` more when a connection breaks),
// and throws `Error`. One thread at a time. The destructor closes the connection; it does not stop a running session.
class Client {
  public:
    // Nothing is connected yet. Throws bad_config.
    explicit Client(std::string_view url, Options options = {}) : engine_(url, std::move(options)) {}

    // Starts a session, with a new id if none is given, and returns the service's answer.
    std::string start(std::string_view body = {}, std::string_view session = {}) {
        if (running()) throw Error("session_exists", "session " + session_ + " is running; stop it first");
        session_ = engine_.start(body, keep(), session);
        return wait();
    }

    // Sends one observation and returns the action.
    //
    // session_resumed means, once, that this tick was not applied and that the session continues at `next_tick()`, from a
    // snapshot; out_of_sequence means the same if session_resumed was lost with its connection. After deadline_exceeded
    // or connection_lost a numbered tick may be repeated with the same body.
    std::string tick(std::string_view body) {
        engine_.tick(session_, body, keep());
        return wait();
    }

    // Ends the session, optionally with the last observation, and returns the service's answer.
    std::string stop(std::string_view body = {}) {
        engine_.stop(session_, body, keep());
        return wait();
    }

    // One stateless request, without a session.
    std::string call(std::string_view body) {
        engine_.call(body, keep());
        return wait();
    }

    bool running() const { return engine_.running(session_); }

    // Id of the session that was started last.
    const std::string& session() const noexcept { return session_; }

    // Number of the next tick of the running session, from 0.
    std::int64_t next_tick() const { return engine_.next_tick(session_); }

    // Closes the connection and forgets the session, which is not stopped.
    void close() noexcept { engine_.close(); }

  private:
    Callback keep() {
        result_.reset();
        return [this](Result result) { result_ = std::move(result); };
    }

    std::string wait() {
        while (!result_) engine_.poll(std::chrono::seconds(1));  // ends, because every request has a deadline
        if (result_->error) throw Error(*result_->error);
        return std::move(result_->body);
    }

    AsyncClient engine_;
    std::string session_;
    std::optional<Result> result_;
};

}  // namespace brayx
