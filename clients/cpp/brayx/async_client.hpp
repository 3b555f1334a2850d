// Many sessions over one or a few connections, driven by the game's own loop: callbacks fire inside `poll()` alone.
//
//     brayx::AsyncClient client("tcp://127.0.0.1:8101", {}, 2);
//     std::string session = client.start("", [&](brayx::Result result) { ... });
//     while (playing) { client.poll(); /* the rest of the frame */ }
//
// One thread at a time. Only `poll` with an argument waits, and the look-up of a host name.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.hpp"
#include "sha256.hpp"
#include "socket.hpp"
#include "wire.hpp"

namespace brayx {

struct Options {
    // Time limit of one request, from its call to its reply, connecting included.
    std::chrono::milliseconds timeout{30'000};
    // One address of the service; with several (localhost is two) the next is tried then.
    std::chrono::milliseconds connect_timeout{5'000};
    // How long to try to reconnect after a connection breaks, in addition to `timeout`; 0: not at all. A start or a call
    // is repeated only if no byte of it was sent. A tick is always repeated, since this option numbers ticks. A stop is
    // always repeated, and has succeeded, with an empty reply, if the session is gone by then. A tick or a stop that is
    // answered with `overloaded` is repeated for the same time: a session that moves to another replica is so briefly.
    std::chrono::milliseconds reconnect{0};
    // Number the ticks, so that each is applied once however often it is sent; `reconnect` implies it.
    bool numbered = false;
    // Ask at each start for the session to be recorded, where the service does that on request.
    bool record = false;
    // Id of a key and its secret, if the service requires them. The machine's clock must be right.
    std::string key;
    std::string secret;
    // Limit on requests in flight, over all sessions.
    std::size_t max_in_flight = 4096;
    // A longer reply is refused, so that a wrong peer cannot fill this process's memory.
    std::size_t max_reply_bytes = 64 * 1024 * 1024;
};

// The result of a request: a body, or an error.
struct Result {
    std::string body;
    std::optional<Error> error;

    explicit operator bool() const noexcept { return !error; }
};

using Callback = std::function<void(Result)>;

class AsyncClient {
  public:
    // Sessions are assigned to connections round robin; a connection opens when first needed. Throws bad_config.
    explicit AsyncClient(std::string_view url, Options options = {}, std::size_t connections = 1)
        : options_(std::move(options)), endpoint_(net::parse_url(url)), call_prefix_(random_id() + "-") {
        if (connections == 0) throw Error("bad_config", "an AsyncClient needs at least one connection");
        if (options_.key.empty() != options_.secret.empty()) {
            throw Error("bad_config", "credentials are a key's id and its secret: one of them is missing");
        }
        if (!options_.key.empty() && !detail::is_session_id(options_.key)) {
            throw Error("bad_config", "a key's id is 1 to 256 printable ASCII characters without space");
        }
        options_.numbered = options_.numbered || options_.reconnect.count() > 0;
        for (std::size_t made = 0; made < connections; ++made) connections_.emplace_back(options_.max_reply_bytes);
    }

    AsyncClient(const AsyncClient&) = delete;
    AsyncClient& operator=(const AsyncClient&) = delete;

    // Starts a session (with a new id if none is given) and returns its id; tick it once `done` reports success.
    // This call and those below throw errors that are known at once (session_exists, session_unknown, session_error,
    // queue_full, bad_request), without calling `done`. All other results go to `done`, called from `poll`.
    std::string start(std::string_view body, Callback done, std::string_view session = {}) {
        std::string id = session.empty() ? random_id() : std::string(session);
        if (!detail::is_session_id(id)) {
            throw Error("bad_request", "a session's id is 1 to 256 printable ASCII characters without space");
        }
        if (lanes_.find(id) != lanes_.end()) {
            throw Error("session_exists", "session " + id + " is running here; stop it, or take another id");
        }
        check_room();
        submit(add_lane(id), Kind::start, body, std::move(done));
        return id;
    }

    // Sends one observation; `done` gets the action. After deadline_exceeded, connection_lost or transport_error a
    // numbered tick may be repeated with the same body: it is sent with the same number and applied once.
    void tick(std::string_view session, std::string_view body, Callback done) {
        submit(running_lane(session, "tick"), Kind::tick, body, std::move(done));
    }

    // Ends the session, optionally with the last observation.
    void stop(std::string_view session, std::string_view body, Callback done) {
        submit(running_lane(session, "stop"), Kind::stop, body, std::move(done));
    }

    // One stateless request. Any number may be in flight.
    void call(std::string_view body, Callback done) {
        check_room();
        // A unique id, because with credentials the time does not distinguish calls.
        submit(add_lane(call_prefix_ + std::to_string(++calls_)), Kind::call, body, std::move(done));
    }

    // Sends and receives, then fires the callbacks that are due, and returns their number. Waits up to `wait` for the
    // first one, but not if no request is in flight. A callback may call anything here. An exception of a callback leaves
    // this function, and the other callbacks fire at the next `poll`.
    std::size_t poll(std::chrono::milliseconds wait = std::chrono::milliseconds(0)) {
        const net::TimePoint until = net::Clock::now() + wait;
        do {
            turn(until);
        } while (ready_.empty() && in_flight_ > 0 && net::Clock::now() < until);
        std::size_t fired = 0;
        {
            const Firing mark(firing_);
            // A failure caused by a callback waits for the next poll, so that this one ends.
            for (const std::size_t due = ready_.size(); fired < due && !ready_.empty(); ++fired) {
                Ready next = std::move(ready_.front());
                ready_.pop_front();
                --in_flight_;
                if (next.done) next.done(std::move(next.result));
            }
        }
        for (Connection& connection : connections_) flush(connection);
        return fired;
    }

    // Requests whose callback has not fired yet.
    std::size_t in_flight() const noexcept { return in_flight_; }

    // Whether the session has started and not ended, as far as this side knows.
    bool running(std::string_view session) const {
        const auto lane = lanes_.find(session);
        return lane != lanes_.end() && lane->second.running;
    }

    // The number of a running session's next tick, counted whether or not ticks are numbered.
    std::int64_t next_tick(std::string_view session) const {
        const auto lane = lanes_.find(session);
        return lane == lanes_.end() ? 0 : lane->second.next_tick;
    }

    // Closes the connections and forgets every session and request; no callback fires. Sessions are not stopped.
    void close() noexcept {
        for (Connection& connection : connections_) {
            connection.reset();
            connection.waiting = 0;
        }
        lanes_.clear();
        ready_.clear();
        in_flight_ = 0;
    }

  private:
    enum class Kind { start, tick, stop, call };

    struct Request {
        Kind kind = Kind::call;
        std::string body;  // kept only while it may have to be sent (again)
        Callback done;
        std::int64_t time = 0;
        bool on_wire = false;  // over to the connection as it is now
        bool was_sent = false;  // over to some connection, once
        bool maybe_applied = false;  // a connection broke with it
        net::TimePoint sent_at{}, deadline{};
        std::optional<net::TimePoint> retry_until;  // set when it first did not get through
        std::optional<Error> refused;  // overloaded; it is sent again at `retry_at`
        net::TimePoint retry_at{};
        std::chrono::milliseconds backoff = kFirstBackoff;
    };

    struct Connection;

    // A session, or one stateless call: at most one request in flight.
    struct Lane {
        Connection* connection = nullptr;
        bool running = false;
        std::int64_t next_tick = 0;
        std::optional<Request> request;
    };
    using Lanes = std::map<std::string, Lane, std::less<>>;

    enum class State { closed, connecting, open };

    struct Connection {
        explicit Connection(std::size_t max_reply_bytes) : reader(max_reply_bytes) {}

        State state = State::closed;
        net::Socket socket;
        std::vector<net::Address> addresses;
        std::size_t next_address = 0;
        std::string failure;  // of the last attempt, for people
        std::string out;
        std::size_t out_at = 0;
        detail::ReplyReader reader;
        std::size_t waiting = 0;  // lanes with a request here
        // Abandoned requests whose reply may still come: session and time.
        std::multiset<std::pair<std::string, std::int64_t>, std::less<>> abandoned;
        net::TimePoint heard_at{}, retry_at{}, connect_until{};
        std::chrono::milliseconds backoff = kFirstBackoff;

        void reset() noexcept {
            state = State::closed;
            socket.close();
            out.clear();
            out_at = 0;
            reader.clear();
            abandoned.clear();
        }
    };

    struct Ready {
        Callback done;
        Result result;
    };

    struct Firing {
        explicit Firing(bool& flag) : flag_(flag), before_(std::exchange(flag, true)) {}
        ~Firing() { flag_ = before_; }
        bool& flag_;
        bool before_;
    };

    static constexpr std::chrono::milliseconds kFirstBackoff{10}, kMaxBackoff{500};
    static constexpr std::size_t kMaxAbandoned = 1024;
    static constexpr int kReadsInATurn = 16;  // so that one busy connection does not hold up a frame

    // Requests

    void check_room() const {
        if (in_flight_ >= options_.max_in_flight) {
            throw Error("queue_full", std::to_string(in_flight_) + " requests are under way, at most " +
                                          std::to_string(options_.max_in_flight) + " may be");
        }
    }

    Lanes::iterator add_lane(const std::string& id) {
        const auto lane = lanes_.try_emplace(id).first;
        lane->second.connection = &connections_[dealt_++ % connections_.size()];
        return lane;
    }

    Lanes::iterator running_lane(std::string_view session, const char* kind) {
        const auto lane = lanes_.find(session);
        if (lane == lanes_.end()) {
            throw Error("session_unknown", std::string(kind) + " without a running session: call start first");
        }
        if (lane->second.request) {
            throw Error("session_error", "session " + lane->first + " has a request under way: wait for its reply");
        }
        check_room();
        return lane;
    }

    void submit(Lanes::iterator lane, Kind kind, std::string_view body, Callback done) {
        Connection& connection = *lane->second.connection;
        // A connection that the service closed while it was idle is found here, before anything is sent over it.
        if (connection.state == State::open && connection.waiting == 0) receive(connection);
        const net::TimePoint now = net::Clock::now();
        Request& request = lane->second.request.emplace();
        request.kind = kind;
        request.done = std::move(done);
        request.deadline = now + options_.timeout;
        next_expiry_ = std::min(next_expiry_, request.deadline);
        ++connection.waiting;
        ++in_flight_;
        const bool open = connection.state == State::open;
        if (!open || options_.reconnect.count() > 0) request.body = body;
        if (open) {
            put(lane, body, now);
            if (!firing_) flush(connection);
        } else if (connection.state == State::closed && now >= connection.retry_at) {
            connect(connection);
        }
    }

    // Writes a request's frame to its connection's buffer.
    void put(Lanes::iterator lane, std::string_view body, net::TimePoint now) {
        Request& request = *lane->second.request;
        std::string kind = name_of(request.kind);
        if (request.kind == Kind::start && options_.record) kind += "+record";
        if (request.kind == Kind::tick && options_.numbered) kind += "#" + std::to_string(lane->second.next_tick);
        std::string token;
        if (options_.key.empty()) {
            request.time = ++counter_;
        } else {
            const auto since = std::chrono::system_clock::now().time_since_epoch();
            request.time = std::chrono::duration_cast<std::chrono::seconds>(since).count();
            token = detail::hmac_sha256_hex(
                options_.secret, options_.key + "\n" + lane->first + "\n" + std::to_string(request.time));
        }
        detail::append_request(lane->second.connection->out, lane->first, kind, options_.key, token, body,
                               request.time);
        request.refused.reset();
        request.on_wire = request.was_sent = true;
        request.sent_at = now;
    }

    // Takes the request off its lane, changes the session as the result says, and keeps the result for `poll`.
    void finish(Lanes::iterator lane, Result result) {
        Request request = std::move(*lane->second.request);
        lane->second.request.reset();
        --lane->second.connection->waiting;
        const bool repeated_stop = request.kind == Kind::stop && request.maybe_applied;
        if (repeated_stop && result.error && result.error->code() == "session_unknown") {
            result.error.reset();  // one that was sent before has done it
        }
        const std::optional<Error>& error = result.error;
        bool ended = request.kind == Kind::call || (error && error->ends_session());
        if (error && error->code() == "session_resumed") go_on_from(lane->second, error->detail("tick"));
        // `session_resumed` may have been lost with its connection; then only this error gives the next number.
        if (error && error->code() == "out_of_sequence") go_on_from(lane->second, error->detail("expected"));
        if (request.kind == Kind::start) {
            lane->second.running = !error;
            ended = error.has_value();
        } else if (request.kind == Kind::tick && !error) {
            ++lane->second.next_tick;
        } else if (request.kind == Kind::stop && !error) {
            ended = true;
        }
        if (ended) lanes_.erase(lane);
        ready_.push_back({std::move(request.done), std::move(result)});
    }

    static void go_on_from(Lane& lane, std::optional<std::int64_t> number) {
        if (number && *number >= 0) lane.next_tick = *number;
    }

    void fail(Lanes::iterator lane, const Error& error) { finish(lane, Result{{}, error}); }

    // Calls `visit` with every lane that has a request on `connection`; it may finish that request.
    template <typename Visit>
    void each_waiting(const Connection& connection, Visit visit) {
        for (auto lane = lanes_.begin(); lane != lanes_.end();) {
            const auto here = lane++;
            if (here->second.connection == &connection && here->second.request) visit(here);
        }
    }

    // Connections

    void turn(net::TimePoint until) {
        net::TimePoint now = net::Clock::now();
        retry(now);
        for (Connection& connection : connections_) {
            if (connection.state == State::closed && connection.waiting > 0 && now >= connection.retry_at) {
                connect(connection);
            }
            flush(connection);
        }
        watched_.clear();
        owners_.clear();
        if (!ready_.empty() || in_flight_ == 0) until = now;
        until = std::min({until, next_expiry_, next_retry_});
        for (Connection& connection : connections_) {
            if (connection.state == State::closed) {
                if (connection.waiting > 0) until = std::min(until, connection.retry_at);
                continue;
            }
            const bool connecting = connection.state == State::connecting;
            if (connecting) until = std::min(until, connection.connect_until);
            const bool writes = connecting || connection.out_at < connection.out.size();
            const int events = (connecting ? 0 : POLLIN) | (writes ? POLLOUT : 0);
            watched_.push_back({connection.socket.descriptor(), static_cast<short>(events), 0});
            owners_.push_back(&connection);
        }
        net::wait(watched_, until);
        now = net::Clock::now();
        for (std::size_t at = 0; at < watched_.size(); ++at) {
            Connection& connection = *owners_[at];
            if (connection.state == State::connecting) {
                if (watched_[at].revents != 0) {
                    connected(connection);
                } else if (now >= connection.connect_until) {
                    connection.failure = "no connection in time";
                    try_next_address(connection);
                }
            } else if (watched_[at].revents != 0) {
                flush(connection);
                if ((watched_[at].revents & ~POLLOUT) != 0 && connection.state == State::open) receive(connection);
            }
        }
        expire(now);
    }

    void connect(Connection& connection) {
        try {
            connection.addresses = net::resolve(endpoint_);  // anew each time: a service that moves is found again
        } catch (const Error& error) {
            connection.addresses.clear();
            connection.failure = error.what();
        }
        connection.next_address = 0;
        try_next_address(connection);
    }

    void try_next_address(Connection& connection) {
        while (connection.next_address < connection.addresses.size()) {
            int error = 0;
            connection.socket = net::begin_connect(connection.addresses[connection.next_address++], error);
            if (error == 0) {
                connection.state = State::connecting;
                connection.connect_until = net::Clock::now() + options_.connect_timeout;
                return;
            }
            connection.failure = net::describe(error);
        }
        broken(connection);
    }

    void connected(Connection& connection) {
        if (const int error = net::connect_error(connection.socket); error != 0) {
            connection.failure = net::describe(error);
            try_next_address(connection);
            return;
        }
        connection.state = State::open;
        const net::TimePoint now = net::Clock::now();
        each_waiting(connection, [&](Lanes::iterator lane) {
            put(lane, lane->second.request->body, now);
            if (options_.reconnect.count() == 0) std::string().swap(lane->second.request->body);
        });
        flush(connection);
    }

    void flush(Connection& connection) {
        while (connection.state == State::open && connection.out_at < connection.out.size()) {
            const std::string_view rest = std::string_view(connection.out).substr(connection.out_at);
            const net::Moved sent = net::send_some(connection.socket, rest);
            if (sent.over) {
                receive(connection);  // what the service said before it closed
                if (connection.state == State::open) {
                    connection.failure = net::describe(sent.error);
                    broken(connection);
                }
                return;
            }
            if (sent.bytes == 0) return;
            connection.out_at += sent.bytes;
        }
        connection.out.clear();
        connection.out_at = 0;
    }

    void receive(Connection& connection) {
        for (int reads = 0; reads < kReadsInATurn; ++reads) {
            std::size_t room = 0;
            char* const into = connection.reader.prepare(room);
            const net::Moved got = net::receive_some(connection.socket, into, room);
            if (got.over) {
                connection.failure = got.error == 0 ? "closed by the service" : net::describe(got.error);
                broken(connection);
                return;
            }
            if (got.bytes == 0) return;
            connection.reader.commit(got.bytes);
            connection.heard_at = net::Clock::now();
            try {
                detail::Reply reply;
                while (connection.state == State::open && connection.reader.next(reply)) take(connection, reply);
            } catch (const Error& error) {
                refuse(connection, error);
            }
            if (connection.state != State::open || got.bytes < room) return;
        }
    }

    void take(Connection& connection, const detail::Reply& reply) {
        if (!connection.abandoned.empty()) {
            const auto late = connection.abandoned.find(std::pair(std::string(reply.session), reply.time));
            if (late != connection.abandoned.end()) {
                connection.abandoned.erase(late);
                return;
            }
        }
        const auto lane = lanes_.find(reply.session);
        const bool ours = lane != lanes_.end() && lane->second.connection == &connection && lane->second.request &&
                          lane->second.request->on_wire && lane->second.request->time == reply.time;
        if (ours) {
            connection.backoff = kFirstBackoff;
            Result result;
            if (reply.is_error) {
                result.error = error_from_wire(reply.body);
                if (send_again_later(*lane->second.request, *result.error)) return;
            } else {
                result.body = reply.body;
            }
            finish(lane, std::move(result));
        } else if (reply.is_error && reply.time == detail::kNoRequest) {  // such as too_many_connections
            const Error cause = error_from_wire(reply.body);
            connection.failure = cause.what();
            broken(connection, &cause);
        } else {
            throw Error("transport_error", endpoint_.url + " answered a request that was not sent: is this a brayx "
                                               "TCP door?");
        }
    }

    // Whether a refused request waits for another try.
    bool send_again_later(Request& request, const Error& error) {
        const bool repeatable = request.kind == Kind::tick || request.kind == Kind::stop;
        if (!repeatable || options_.reconnect.count() == 0 || error.code() != "overloaded") return false;
        const net::TimePoint now = net::Clock::now();
        begin_retrying(request, now);
        if (now >= *request.retry_until) return false;
        request.on_wire = false;
        request.refused = error;
        request.retry_at = now + request.backoff;
        request.backoff = std::min(2 * request.backoff, kMaxBackoff);
        next_retry_ = std::min(next_retry_, request.retry_at);
        return true;
    }

    // A request that failed before keeps its window; `expire` checks its end.
    void begin_retrying(Request& request, net::TimePoint now) {
        if (!request.retry_until) {
            request.retry_until = now + options_.reconnect;
            request.deadline += options_.reconnect;
        }
        next_expiry_ = std::min(next_expiry_, *request.retry_until);
    }

    // Repeats refused requests whose pause is over.
    void retry(net::TimePoint now) {
        if (now < next_retry_) return;
        next_retry_ = net::TimePoint::max();
        for (auto lane = lanes_.begin(); lane != lanes_.end(); ++lane) {
            if (!lane->second.request || !lane->second.request->refused) continue;
            if (now >= lane->second.request->retry_at) {
                put(lane, lane->second.request->body, now);
            } else {
                next_retry_ = std::min(next_retry_, lane->second.request->retry_at);
            }
        }
    }

    // The connection ended: repeatable requests wait for the next connection, the others fail, with `cause` if given.
    void broken(Connection& connection, const Error* cause = nullptr) {
        connection.reset();
        const net::TimePoint now = net::Clock::now();
        connection.retry_at = now;
        if (connection.waiting == 0) return;
        each_waiting(connection, [&](Lanes::iterator lane) {
            Request& request = *lane->second.request;
            request.maybe_applied = request.maybe_applied || request.on_wire;
            request.on_wire = false;
            request.refused.reset();  // it goes out with the next connection
            const bool repeatable = !request.was_sent || request.kind == Kind::tick || request.kind == Kind::stop;
            if (!repeatable || options_.reconnect.count() == 0) {
                fail(lane, cause != nullptr ? *cause : lost(lane));
                return;
            }
            begin_retrying(request, now);
        });
        if (connection.waiting > 0) {
            connection.retry_at = now + connection.backoff;
            connection.backoff = std::min(2 * connection.backoff, kMaxBackoff);
        }
    }

    // The peer does not speak this protocol: all requests in flight on the connection fail.
    void refuse(Connection& connection, const Error& error) {
        connection.reset();
        connection.retry_at = net::Clock::now();
        each_waiting(connection, [&](Lanes::iterator lane) { fail(lane, error); });
    }

    void expire(net::TimePoint now) {
        if (now < next_expiry_) return;
        next_expiry_ = net::TimePoint::max();
        for (auto lane = lanes_.begin(); lane != lanes_.end();) {
            const auto here = lane++;
            if (!here->second.request) continue;
            const Request& request = *here->second.request;
            const bool reconnecting = !request.on_wire && request.retry_until;
            net::TimePoint due = request.deadline;
            if (reconnecting) due = std::min(due, *request.retry_until);
            if (now < due) {
                next_expiry_ = std::min(next_expiry_, due);
            } else {
                const std::optional<Error> refused = request.refused;
                give_up(here, refused ? *refused : now < request.deadline ? lost(here) : late(here));
            }
        }
        for (Connection& connection : connections_) {
            if (connection.abandoned.size() <= kMaxAbandoned) continue;
            connection.failure = "too many requests there have no reply";
            broken(connection);
        }
    }

    // A request timed out; its reply may still come.
    void give_up(Lanes::iterator lane, const Error& error) {
        Connection& connection = *lane->second.connection;
        const Request& request = *lane->second.request;
        if (request.on_wire) connection.abandoned.emplace(lane->first, request.time);
        // Nothing was received since the request was sent: the peer may be gone.
        const bool silent = !request.refused && (!request.on_wire || connection.heard_at < request.sent_at);
        fail(lane, error);
        if (connection.waiting == 0 && silent) connection.reset();
    }

    // Words

    Error lost(Lanes::iterator lane) const {
        const Request& request = *lane->second.request;
        if (!request.was_sent) {
            return Error("connect_failed", "cannot connect to " + endpoint_.url + " (" +
                                               lane->second.connection->failure +
                                               "): is the service running, and is the port right?");
        }
        return Error("connection_lost", endpoint_.url + ": the connection broke (" + lane->second.connection->failure +
                                            "); the " + describe(lane) + " may or may not have been applied");
    }

    Error late(Lanes::iterator lane) const {
        const Request& request = *lane->second.request;
        const auto waited = options_.timeout + (request.retry_until ? options_.reconnect : options_.timeout.zero());
        return Error("deadline_exceeded", endpoint_.url + ": " + (request.on_wire ? "no reply" : "no connection") +
                                              " within " + std::to_string(waited.count()) + " ms for the " +
                                              describe(lane));
    }

    static std::string describe(Lanes::iterator lane) {
        if (lane->second.request->kind == Kind::call) return "stateless call";
        return name_of(lane->second.request->kind) + std::string(" of session ") + lane->first;
    }

    static const char* name_of(Kind kind) {
        switch (kind) {
            case Kind::start: return "start";
            case Kind::tick: return "tick";
            case Kind::stop: return "stop";
            case Kind::call: return "";
        }
        return "";
    }

    static std::string random_id() {
        std::random_device random;
        std::string id;
        for (int word = 0; word < 4; ++word) {
            const std::uint32_t bits = random();
            for (int shift = 28; shift >= 0; shift -= 4) id += "0123456789abcdef"[(bits >> shift) & 15];
        }
        return id;
    }

    Options options_;
    net::Endpoint endpoint_;
    std::string call_prefix_;
    std::uint64_t calls_ = 0;
    std::int64_t counter_ = detail::kNoRequest;
    std::size_t dealt_ = 0;
    std::size_t in_flight_ = 0;
    bool firing_ = false;
    std::deque<Connection> connections_;  // never moved: lanes point to them
    Lanes lanes_;
    std::deque<Ready> ready_;
    net::TimePoint next_expiry_ = net::TimePoint::max();  // no request is due before
    net::TimePoint next_retry_ = net::TimePoint::max();  // nor is one sent again
    std::vector<net::Watched> watched_;
    std::vector<Connection*> owners_;
};

}  // namespace brayx
