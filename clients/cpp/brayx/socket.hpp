// The POSIX sockets of the client. A port to Windows replaces only this file (Winsock: WSAStartup, closesocket,
// ioctlsocket, WSAPoll). Knows nothing of frames.
//
// Every socket is non-blocking; only `wait` and the look-up of a host name block.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "error.hpp"

namespace brayx::net {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

struct Endpoint {
    std::string url, host, port;
};

// Host and port of tcp://host:port, [host] for an IPv6 address, port 8101 if none is given. Throws bad_config.
inline Endpoint parse_url(std::string_view url) {
    const auto refuse = [&url](const std::string& why) {
        return Error("bad_config", "URL '" + std::string(url) + "' cannot be used: " + why);
    };
    constexpr std::string_view kScheme = "tcp://";
    if (url.substr(0, kScheme.size()) != kScheme) throw refuse("expected tcp://host:port");
    std::string_view rest = url.substr(kScheme.size());
    while (!rest.empty() && rest.back() == '/') rest.remove_suffix(1);
    const std::size_t bracket = rest.substr(0, 1) == "[" ? rest.find(']') : 0;
    if (bracket == std::string_view::npos) throw refuse("the address in brackets does not end");
    const std::size_t colon = rest.find(':', bracket);
    const std::string_view port = colon == std::string_view::npos ? "8101" : rest.substr(colon + 1);
    std::string_view host = rest.substr(0, colon);
    if (bracket > 0) {
        if (host.size() != bracket + 1) throw refuse("expected tcp://[address]:port");
        host = host.substr(1, bracket - 1);
    }
    const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == port.npos;
    if (!digits || std::stoi(std::string(port)) > 65535) throw refuse("the port is a number up to 65535");
    if (host.empty() || host.find_first_of("/?#@ ") != host.npos) throw refuse("expected tcp://host:port");
    return {std::string(url), std::string(host), std::string(port)};
}

struct Address {
    sockaddr_storage storage{};
    socklen_t size = 0;
};

// All addresses of a host; a name takes as long as the system's resolver. Throws connect_failed.
inline std::vector<Address> resolve(const Endpoint& endpoint) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (const int failed = getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &hints, &found); failed != 0) {
        throw Error("connect_failed", "cannot connect to " + endpoint.url + " (" + gai_strerror(failed) +
                                          "): is the host name spelt right?");
    }
    std::vector<Address> addresses;
    for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
        Address address;
        address.size = each->ai_addrlen;
        std::copy_n(reinterpret_cast<const char*>(each->ai_addr), each->ai_addrlen,
                    reinterpret_cast<char*>(&address.storage));
        addresses.push_back(address);
    }
    freeaddrinfo(found);
    return addresses;
}

// Owns one descriptor.
class Socket {
  public:
    Socket() = default;
    explicit Socket(int descriptor) : descriptor_(descriptor) {}
    Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        if (this != &other) {
            close();
            descriptor_ = std::exchange(other.descriptor_, -1);
        }
        return *this;
    }
    ~Socket() { close(); }

    int descriptor() const noexcept { return descriptor_; }

    void close() noexcept {
        if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
    }

  private:
    int descriptor_ = -1;
};

// Starts to connect; `error` is 0 while that may still succeed: then wait until the socket is writable.
inline Socket begin_connect(const Address& address, int& error) {
    Socket socket(::socket(address.storage.ss_family, SOCK_STREAM, 0));
    if (socket.descriptor() < 0) {
        error = errno;
        return socket;
    }
    const int on = 1;
    fcntl(socket.descriptor(), F_SETFD, FD_CLOEXEC);
    fcntl(socket.descriptor(), F_SETFL, fcntl(socket.descriptor(), F_GETFL) | O_NONBLOCK);
    setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
#ifdef SO_NOSIGPIPE
    setsockopt(socket.descriptor(), SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    const auto* const to = reinterpret_cast<const sockaddr*>(&address.storage);
    const int failed = ::connect(socket.descriptor(), to, address.size);
    // After an interrupt it continues by itself.
    error = failed == 0 || errno == EINPROGRESS || errno == EINTR ? 0 : errno;
    return socket;
}

// The result of `begin_connect`, once the socket is writable: 0 or an errno.
inline int connect_error(const Socket& socket) {
    int error = 0;
    socklen_t size = sizeof error;
    return getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

// The result of one send or receive: bytes moved, nothing to do now (0, 0), or ended with an errno (0: closed in order).
struct Moved {
    std::size_t bytes = 0;
    bool over = false;
    int error = 0;
};

namespace detail {

template <typename Call>
Moved move(Call call) {
    for (;;) {
        const ssize_t moved = call();
        if (moved > 0) return {static_cast<std::size_t>(moved), false, 0};
        if (moved == 0) return {0, true, 0};
        if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
        if (errno != EINTR) return {0, true, errno};
    }
}

}  // namespace detail

inline Moved send_some(const Socket& socket, std::string_view data) {
#ifdef MSG_NOSIGNAL
    constexpr int kFlags = MSG_NOSIGNAL;
#else
    constexpr int kFlags = 0;
#endif
    return detail::move([&] { return ::send(socket.descriptor(), data.data(), data.size(), kFlags); });
}

inline Moved receive_some(const Socket& socket, char* into, std::size_t room) {
    return detail::move([&] { return ::recv(socket.descriptor(), into, room, 0); });
}

using Watched = pollfd;

// Waits until one of the sockets is ready as requested, or until `until`.
inline void wait(std::vector<Watched>& watched, TimePoint until) {
    for (;;) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        const auto bounded = std::clamp<decltype(left)>(left, 0, std::numeric_limits<int>::max());
        const int ready = ::poll(watched.data(), static_cast<nfds_t>(watched.size()), static_cast<int>(bounded));
        if (ready >= 0 || errno != EINTR) return;
    }
}

// The text of an errno.
inline std::string describe(int error) { return std::generic_category().message(error); }

}  // namespace brayx::net
