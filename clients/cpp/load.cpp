// Closed-loop load on a door: sessions with one tick in flight each. Linux only (epoll).
//
//     g++ -std=c++17 -O2 clients/cpp/load.cpp -o load
//     ./load --url tcp://127.0.0.1:8101 --sessions 16 --seconds 2
//
// Costs a fraction of what a client does, because the load and the server share the machine: requests are written once
// and patched; replies are checked for status and length, and with --check for content. Prints one JSON document. It uses
// none of the client's headers.
//
//   --url        tcp://host:port, http://host:port/prefix (POST /step) or ws://host:port/prefix (bare messages)
//   --sessions   number of sessions
//   --connections  number of connections; with tcp, sessions may share connections
//   --seconds    length of the measurement, after a warm-up
//   --body       echo (256 bytes, and the reply must be as long), cartpole (JSON) or image (64x64x3 bytes); of these
//                two the reply must not be an error
//   --bytes      with echo: size of the body, instead of 256
//   --check      with echo: each tick has a different body, and the reply must equal it
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kWarmUp{300};
constexpr std::chrono::seconds kStalled{10};  // without any reply for so long, the run has failed
constexpr std::size_t kNumberBytes = 16;      // of a checked body: its number, in hexadecimal
constexpr std::size_t kImageBytes = 64 * 64 * 3;
const std::string kCartPole = R"({"obs":[0.0273956,-0.00611216,0.03585979,0.0197368],"reward":1.0})";

enum class Door { tcp, http, websocket };
enum class Phase { starting, ticking, stopping, done };

struct Plan {
    std::string host, port, prefix;
    Door door = Door::tcp;
    std::size_t sessions = 16, connections = 0;
    double seconds = 2.0;
    std::string body = std::string(256, 'x');
    bool echo = true, check = false;
};

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

std::string system_error() { return std::generic_category().message(errno); }

struct Session {
    std::string id;
    std::string tick;           // the whole request
    std::size_t time_at = 0;    // in it: the frame's time
    std::size_t body_at = 0;    // in it: the body
    std::uint64_t number = 0;   // of the tick under way
    Phase phase = Phase::starting;
    Clock::time_point sent{};
};

struct Connection {
    int descriptor = -1;
    bool upgraded = false;  // of a WebSocket
    bool watches_writes = false;
    std::string out;
    std::size_t out_at = 0;
    std::vector<char> in = std::vector<char>(64 * 1024);
    std::size_t from = 0, to = 0;
    std::vector<Session> sessions;
};

void append_int64(std::string& out, std::uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift);
}

void write_int64(char* to, std::uint64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) *to++ = static_cast<char>(value >> shift);
}

std::uint64_t read_int64(const char* from) {
    std::uint64_t value = 0;
    for (int at = 0; at < 8; ++at) value = (value << 8) | static_cast<std::uint8_t>(from[at]);
    return value;
}

void write_number(char* to, std::uint64_t value) {
    for (std::size_t at = kNumberBytes; at-- > 0; value >>= 4) to[at] = "0123456789abcdef"[value & 15];
}

class Load {
  public:
    explicit Load(const Plan& plan) : plan_(plan), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
        if (epoll_ < 0) fail("epoll: " + system_error());
    }

    Load(const Load&) = delete;
    Load& operator=(const Load&) = delete;

    ~Load() {
        for (const Connection& connection : connections_) {
            if (connection.descriptor >= 0) close(connection.descriptor);
        }
        close(epoll_);
    }

    // Plays and prints the result; returns whether all went well.
    bool run() {
        connect_all();
        heard_ = Clock::now();
        from_ = to_ = Clock::time_point::max();
        std::vector<epoll_event> events(1024);
        while (alive_ > 0) {
            const int ready = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 100);
            if (ready < 0 && errno != EINTR) fail("epoll: " + system_error());
            now_ = Clock::now();
            if (now_ - heard_ > kStalled) fail("no reply for " + std::to_string(kStalled.count()) + " s");
            for (int at = 0; at < ready; ++at) {
                Connection& connection = connections_[events[static_cast<std::size_t>(at)].data.u64];
                if (connection.descriptor < 0) continue;
                if ((events[static_cast<std::size_t>(at)].events & ~static_cast<unsigned>(EPOLLOUT)) != 0) {
                    read(connection);
                }
                if (connection.descriptor >= 0) write(connection);
            }
        }
        report();
        return errors_ == 0 && !latencies_.empty();
    }

  private:
    // Connections

    void connect_all() {
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* found = nullptr;
        if (const int failed = getaddrinfo(plan_.host.c_str(), plan_.port.c_str(), &hints, &found); failed != 0) {
            fail(plan_.host + ": " + gai_strerror(failed));
        }
        std::random_device random;
        char run[17];
        std::snprintf(run, sizeof run, "%08x%08x", random(), random());
        connections_.resize(plan_.connections);
        for (std::size_t at = 0; at < plan_.connections; ++at) {
            Connection& connection = connections_[at];
            for (const addrinfo* each = found; each != nullptr && connection.descriptor < 0; each = each->ai_next) {
                open(connection, *each);
            }
            if (connection.descriptor < 0) {
                freeaddrinfo(found);
                fail("cannot connect to " + plan_.host + ":" + plan_.port + ": " + system_error());
            }
        }
        freeaddrinfo(found);
        for (std::size_t at = 0; at < plan_.sessions; ++at) {
            Connection& connection = connections_[at % plan_.connections];
            Session session;
            session.id = std::string("load-") + run + "-" + std::to_string(at);
            connection.sessions.push_back(std::move(session));
        }
        alive_ = starting_ = plan_.sessions;
        for (std::size_t at = 0; at < plan_.connections; ++at) {
            Connection& connection = connections_[at];
            epoll_event event{};
            event.events = EPOLLIN;
            event.data.u64 = at;
            epoll_ctl(epoll_, EPOLL_CTL_ADD, connection.descriptor, &event);
            for (std::size_t index = 0; index < connection.sessions.size(); ++index) start(connection, index);
            write(connection);
        }
    }

    static void open(Connection& connection, const addrinfo& address) {
        const int descriptor = socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, address.ai_protocol);
        if (descriptor < 0) return;
        const int on = 1;
        if (connect(descriptor, address.ai_addr, address.ai_addrlen) != 0) {
            const int error = errno;
            close(descriptor);
            errno = error;
            return;
        }
        setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) | O_NONBLOCK);
        connection.descriptor = descriptor;
    }

    void write(Connection& connection) {
        while (connection.out_at < connection.out.size()) {
            const ssize_t sent = send(connection.descriptor, connection.out.data() + connection.out_at,
                                      connection.out.size() - connection.out_at, MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
            if (sent < 0) fail("the door closed the connection (" + system_error() + ")");
            connection.out_at += static_cast<std::size_t>(sent);
        }
        const bool more = connection.out_at < connection.out.size();
        if (!more) {
            connection.out.clear();
            connection.out_at = 0;
        }
        if (more != connection.watches_writes) {
            connection.watches_writes = more;
            epoll_event event{};
            event.events = EPOLLIN | (more ? static_cast<unsigned>(EPOLLOUT) : 0U);
            event.data.u64 = static_cast<std::uint64_t>(&connection - connections_.data());
            epoll_ctl(epoll_, EPOLL_CTL_MOD, connection.descriptor, &event);
        }
    }

    // Handles all replies of one receive, so that the next ticks leave in one send.
    void read(Connection& connection) {
        std::vector<char>& in = connection.in;
        if (connection.to == in.size()) {
            if (connection.from > 0) {
                std::memmove(in.data(), in.data() + connection.from, connection.to - connection.from);
                connection.to -= connection.from;
                connection.from = 0;
            } else {
                in.resize(2 * in.size());
            }
        }
        ssize_t got = 0;
        do {
            got = recv(connection.descriptor, in.data() + connection.to, in.size() - connection.to, 0);
        } while (got < 0 && errno == EINTR);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got < 0) fail("the door closed the connection (" + system_error() + ")");
        if (got == 0) fail("the door closed the connection (in order)");
        connection.to += static_cast<std::size_t>(got);
        heard_ = now_ = Clock::now();
        while (connection.descriptor >= 0 && take(connection)) {
        }
        if (connection.from == connection.to) connection.from = connection.to = 0;
    }

    // Sessions

    std::string request(const Session& session, const char* kind, std::string_view body, std::uint64_t time) const {
        std::string out;
        if (plan_.door == Door::tcp) {
            const std::size_t no_key = 0, no_token = 0;
            for (const std::size_t size : {session.id.size(), std::strlen(kind), no_key, no_token, body.size()}) {
                append_int64(out, size);
            }
            append_int64(out, time);
            out += session.id;
            out += kind;
        } else {
            out = "POST " + plan_.prefix + "/step HTTP/1.1\r\nhost: " + plan_.host + ":" + plan_.port +
                  "\r\nsession: " + session.id + "\r\nstep_kind: " + kind +
                  "\r\ncontent-length: " + std::to_string(body.size()) + "\r\n\r\n";
        }
        return out.append(body);
    }

    // A frame from a client is masked; a mask of zeros changes nothing.
    static std::string frame(int opcode, std::string_view body) {
        std::string out(1, static_cast<char>(0x80 | opcode));
        if (body.size() < 126) {
            out += static_cast<char>(0x80 | body.size());
        } else {
            out += '\xfe';
            out += static_cast<char>(body.size() >> 8);
            out += static_cast<char>(body.size());
        }
        return out.append(4, '\0').append(body);
    }

    void start(Connection& connection, std::size_t index) {
        Session& session = connection.sessions[index];
        // The frame's time field has the session of the connection and the number of the request.
        session.number = 0;
        if (plan_.door == Door::websocket) {
            session.tick = frame(2, plan_.body);
            connection.out += "GET " + plan_.prefix + "/session HTTP/1.1\r\nhost: " + plan_.host + ":" + plan_.port +
                              "\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
                              "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\nsession: " +
                              session.id + "\r\n\r\n";
        } else {
            session.tick = request(session, "tick", plan_.body, 0);
            session.time_at = 5 * 8;
            connection.out += request(session, "start", "", time_of(index, 0));
        }
        session.body_at = session.tick.size() - plan_.body.size();
    }

    static std::uint64_t time_of(std::size_t index, std::uint64_t number) {
        return (static_cast<std::uint64_t>(index) << 40) | (number + 1);
    }

    void tick(Connection& connection, std::size_t index) {
        Session& session = connection.sessions[index];
        ++session.number;
        if (plan_.door == Door::tcp) write_int64(&session.tick[session.time_at], time_of(index, session.number));
        if (plan_.check) write_number(&session.tick[session.body_at + kNumberBytes], session.number);
        session.sent = now_;
        connection.out += session.tick;
    }

    void stop(Connection& connection, std::size_t index) {
        Session& session = connection.sessions[index];
        session.phase = Phase::stopping;
        ++session.number;
        connection.out += plan_.door == Door::websocket ? frame(8, std::string_view("\x03\xe8", 2))
                                                        : request(session, "stop", "", time_of(index, session.number));
    }

    void end(Connection& connection, std::size_t index) {
        connection.sessions[index].phase = Phase::done;
        --alive_;
        for (const Session& session : connection.sessions) {
            if (session.phase != Phase::done) return;
        }
        close(connection.descriptor);
        connection.descriptor = -1;
    }

    // Handles a reply. An error ends the session: the door has ended it, or its state is unknown.
    void answered(Connection& connection, std::size_t index, std::string_view body, bool good) {
        Session& session = connection.sessions[index];
        if (session.phase == Phase::done) fail("a reply came for a session that is over");
        const Phase phase = session.phase;
        if (good && phase == Phase::ticking) good = is_right(session, body);
        if (!good) {
            if (errors_++ == 0) {
                std::fprintf(stderr, "load: session %s got: %.*s\n", session.id.c_str(),
                             static_cast<int>(std::min<std::size_t>(body.size(), 300)), body.data());
            }
            if (phase == Phase::starting) started();
            end(connection, index);
            return;
        }
        switch (phase) {
            case Phase::starting:
                session.phase = Phase::ticking;
                // One half random, the other the number of the tick, so that a reply of another tick is detected.
                if (plan_.check) write_number(&session.tick[session.body_at], seed_ + (++made_ << 32));
                started();
                tick(connection, index);
                break;
            case Phase::ticking:
                if (session.sent >= from_ && now_ <= to_) {
                    latencies_.push_back(std::chrono::duration<double>(now_ - session.sent).count());
                }
                if (now_ < to_) {
                    tick(connection, index);
                } else {
                    stop(connection, index);
                }
                break;
            case Phase::stopping:
                end(connection, index);
                break;
            case Phase::done:
                break;
        }
    }

    bool is_right(const Session& session, std::string_view body) const {
        if (!plan_.echo) return !body.empty() && body.substr(0, 8) != "{\"error\"";
        if (body.size() != plan_.body.size()) return false;
        return !plan_.check || std::memcmp(body.data(), session.tick.data() + session.body_at, body.size()) == 0;
    }

    // The measurement begins when all sessions have started.
    void started() {
        if (--starting_ > 0) return;
        from_ = now_ + kWarmUp;
        to_ = from_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(plan_.seconds));
        cpu_at_start_ = cpu_seconds();
    }

    // Replies

    bool take(Connection& connection) {
        switch (plan_.door) {
            case Door::tcp: return take_frame(connection);
            case Door::http: return take_response(connection);
            case Door::websocket: return connection.upgraded ? take_message(connection) : take_upgrade(connection);
        }
        return false;
    }

    static std::string_view waiting(const Connection& connection) {
        return {connection.in.data() + connection.from, connection.to - connection.from};
    }

    bool take_frame(Connection& connection) {
        const std::string_view in = waiting(connection);
        if (in.size() < 24) return false;
        const std::uint64_t session_size = read_int64(in.data()), body_size = read_int64(in.data() + 8);
        if (session_size > 256 || body_size > (std::uint64_t{1} << 30)) {
            fail("what came is no reply of a brayx TCP door");
        }
        if (in.size() < 24 + session_size + body_size) return false;
        std::uint64_t time = read_int64(in.data() + 16);
        const bool error = (time >> 63) != 0;
        if (error) time = ~time;
        const std::string_view body = in.substr(24 + session_size, body_size);
        const std::size_t index = time >> 40;
        if (time == 0) fail("the door refused the connection: " + std::string(body.substr(0, 300)));
        if (index >= connection.sessions.size() || time != time_of(index, connection.sessions[index].number) ||
            in.substr(24, session_size) != connection.sessions[index].id) {
            fail("a reply came that answers nothing under way");
        }
        connection.from += 24 + session_size + body_size;
        answered(connection, index, body, !error);
        return true;
    }

    // Reads status and body of an HTTP reply and advances `connection.from`; false if it is incomplete.
    static bool take_head(Connection& connection, int& status, std::size_t& length) {
        const std::string_view in = waiting(connection);
        const std::size_t end = in.find("\r\n\r\n");
        if (end == in.npos) {
            if (in.size() > 64 * 1024) fail("what came is no HTTP");
            return false;
        }
        if (in.substr(0, 9) != "HTTP/1.1 " || end < 12) {
            fail("what came is no HTTP/1.1: " + std::string(in.substr(0, 100)));
        }
        status = std::atoi(in.data() + 9);
        bool sized = false;
        for (std::size_t at = in.find("\r\n"); at < end; at = in.find("\r\n", at + 2)) {
            constexpr std::string_view kName = "content-length:";
            if (strncasecmp(in.data() + at + 2, kName.data(), kName.size()) == 0) {
                length = std::strtoull(in.data() + at + 2 + kName.size(), nullptr, 10);
                sized = true;
            }
        }
        if (!sized && status >= 200) fail("an answer without a length: " + std::string(in.substr(0, 300)));
        if (length > (std::size_t{1} << 30)) fail("an answer of more than 1 GiB");
        if (in.size() < end + 4 + length) return false;
        connection.from += end + 4;
        return true;
    }

    bool take_response(Connection& connection) {
        int status = 0;
        std::size_t length = 0;
        if (!take_head(connection, status, length)) return false;
        const std::string_view body = waiting(connection).substr(0, length);
        connection.from += length;
        answered(connection, 0, body, status == 200);
        return true;
    }

    bool take_upgrade(Connection& connection) {
        int status = 0;
        std::size_t length = 0;
        if (!take_head(connection, status, length)) return false;
        connection.upgraded = status == 101;
        answered(connection, 0, waiting(connection).substr(0, length), connection.upgraded);
        return connection.upgraded;
    }

    bool take_message(Connection& connection) {
        const std::string_view in = waiting(connection);
        if (in.size() < 2) return false;
        std::size_t size = static_cast<std::uint8_t>(in[1]), head = 2;
        if (size >= 127) fail("a message of 64 KiB or more, or a masked one");
        if (size == 126) {
            if (in.size() < 4) return false;
            size = static_cast<std::size_t>(static_cast<std::uint8_t>(in[2])) << 8 | static_cast<std::uint8_t>(in[3]);
            head = 4;
        }
        if (in.size() < head + size) return false;
        const int opcode = in[0] & 0x0f;
        const std::string_view body = in.substr(head, size);
        connection.from += head + size;
        const bool stopping = connection.sessions[0].phase == Phase::stopping;
        const bool reply = (opcode == 1 || opcode == 2) && body.substr(0, 8) != "{\"error\"";
        if (opcode == 9) {
            connection.out += frame(10, body);
        } else if (opcode != 10) {
            answered(connection, 0, body, stopping ? opcode == 8 : reply);
        }
        return true;
    }

    // Figures

    static double cpu_seconds() {
        rusage used{};
        getrusage(RUSAGE_SELF, &used);
        const auto seconds = [](const timeval& time) {
            return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
        };
        return seconds(used.ru_utime) + seconds(used.ru_stime);
    }

    double percentile(double q) {
        if (latencies_.empty()) return 0.0;
        const double position = q * static_cast<double>(latencies_.size() - 1);
        const auto low = static_cast<std::size_t>(std::floor(position));
        const std::size_t high = std::min(low + 1, latencies_.size() - 1);
        return latencies_[low] + (latencies_[high] - latencies_[low]) * (position - static_cast<double>(low));
    }

    void report() {
        const double cpu_s = cpu_seconds() - cpu_at_start_;
        std::sort(latencies_.begin(), latencies_.end());
        std::printf("{\"ticks\": %zu, \"ticks_per_s\": %.1f, \"p50_s\": %.9f, \"p99_s\": %.9f, \"errors\": %zu, "
                    "\"cpu_s\": %.3f}\n",
                    latencies_.size(), static_cast<double>(latencies_.size()) / plan_.seconds, percentile(0.5),
                    percentile(0.99), errors_, cpu_s);
    }

    Plan plan_;
    int epoll_;
    std::vector<Connection> connections_;
    std::size_t alive_ = 0, starting_ = 0, errors_ = 0;
    std::uint64_t seed_ = std::random_device()(), made_ = 0;
    Clock::time_point now_ = Clock::now(), heard_{}, from_{}, to_{};
    std::vector<double> latencies_;
    double cpu_at_start_ = 0.0;
};

void read_url(Plan& plan, std::string_view url) {
    const std::size_t scheme_end = url.find("://");
    const std::string_view scheme = url.substr(0, scheme_end);
    const char* port = "80";
    if (scheme == "tcp") {
        plan.door = Door::tcp;
        port = "8101";
    } else if (scheme == "http") {
        plan.door = Door::http;
    } else if (scheme == "ws") {
        plan.door = Door::websocket;
    } else {
        fail("URL " + std::string(url) + ": expected tcp://, http:// or ws://");
    }
    const std::string_view rest = url.substr(scheme_end + 3);
    const std::size_t slash = std::min(rest.find('/'), rest.size());
    const std::size_t colon = std::min(rest.substr(0, slash).rfind(':'), slash);
    plan.host = rest.substr(0, colon);
    plan.port = colon < slash ? std::string(rest.substr(colon + 1, slash - colon - 1)) : port;
    plan.prefix = rest.substr(slash);
    while (!plan.prefix.empty() && plan.prefix.back() == '/') plan.prefix.pop_back();
}

Plan read_options(int argc, char** argv) {
    Plan plan;
    std::string url;
    std::size_t bytes = 0;
    for (int at = 1; at < argc; ++at) {
        const std::string name = argv[at];
        if (name == "--check") {
            plan.check = true;
            continue;
        }
        if (at + 1 >= argc) fail("option " + name + ": expected a value");
        const std::string value = argv[++at];
        const auto number = [&]() -> std::size_t {
            const long parsed = std::atol(value.c_str());
            if (parsed < 1) fail("option " + name + ": expected a number from 1, got " + value);
            return static_cast<std::size_t>(parsed);
        };
        if (name == "--url") {
            url = value;
        } else if (name == "--sessions") {
            plan.sessions = number();
        } else if (name == "--connections") {
            plan.connections = number();
        } else if (name == "--seconds") {
            plan.seconds = std::atof(value.c_str());
            if (!(plan.seconds > 0)) fail("option --seconds: expected a number above 0, got " + value);
        } else if (name == "--bytes") {
            bytes = number();
        } else if (name == "--body" && (value == "echo" || value == "cartpole" || value == "image")) {
            plan.echo = value == "echo";
            if (!plan.echo) plan.body = value == "image" ? std::string(kImageBytes, '\x7f') : kCartPole;
        } else {
            fail("option " + name + " " + value + ": expected --url, --sessions, --connections, --seconds, "
                 "--body echo|cartpole|image, --bytes or --check");
        }
    }
    read_url(plan, url);
    if (plan.connections == 0) plan.connections = plan.sessions;
    if (plan.connections > plan.sessions) fail("more connections than sessions");
    if (plan.door != Door::tcp && plan.connections != plan.sessions) {
        fail("over http and ws each session has a connection of its own");
    }
    if (bytes != 0 && !plan.echo) fail("--bytes is for --body echo");
    if (bytes != 0) plan.body = std::string(bytes, 'x');
    if (plan.check && !plan.echo) fail("--check is for --body echo");
    return plan;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        Load load(read_options(argc, argv));
        return load.run() ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "load: %s\n", error.what());
        return 1;
    }
}
