// Bray's TCP framing as bytes, see docs/protocol.md. Knows nothing of sockets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "error.hpp"

namespace brayx::detail {

constexpr std::size_t kMaxFieldBytes = 256;
constexpr std::size_t kReplyHeadBytes = 3 * 8;
constexpr std::int64_t kNoRequest = 0;  // time of an error that is of the connection; requests count from 1

inline void append_int64(std::string& out, std::int64_t value) {
    for (int shift = 56; shift >= 0; shift -= 8) out += static_cast<char>(static_cast<std::uint64_t>(value) >> shift);
}

inline std::int64_t read_int64(const char* from) {
    std::uint64_t value = 0;
    for (int at = 0; at < 8; ++at) value = (value << 8) | static_cast<std::uint8_t>(from[at]);
    return static_cast<std::int64_t>(value);
}

// Six big-endian int64 (the sizes of the five fields, then the time) and the fields.
inline void append_request(std::string& out, std::string_view session, std::string_view kind, std::string_view key,
                           std::string_view token, std::string_view body, std::int64_t time) {
    for (const std::string_view field : {session, kind, key, token, body}) {
        append_int64(out, static_cast<std::int64_t>(field.size()));
    }
    append_int64(out, time);
    for (const std::string_view field : {session, kind, key, token, body}) out += field;
}

struct Reply {
    std::string_view session;
    std::string_view body;
    std::int64_t time = 0;   // of the request that it answers
    bool is_error = false;  // then the body is an error document
};

// Reads replies from a stream of bytes.
class ReplyReader {
  public:
    explicit ReplyReader(std::size_t max_body_bytes) : max_body_bytes_(max_body_bytes) {}

    // Space for the next received bytes, at least `kChunk`; report with `commit` how many were written.
    char* prepare(std::size_t& room) {
        if (from_ == to_) from_ = to_ = 0;
        if (capacity_ - to_ < kChunk) {
            const std::size_t used = to_ - from_;
            if (capacity_ - used < kChunk || used > capacity_ / 2) {  // half full or more: grow, do not move again
                // Grow with the received bytes, not with the announced size, so that a wrong size costs no memory.
                const std::size_t capacity = std::max(2 * capacity_, used + kChunk);
                std::unique_ptr<char[]> larger(new char[capacity]);
                if (used > 0) std::memcpy(larger.get(), buffer_.get() + from_, used);
                buffer_ = std::move(larger);
                capacity_ = capacity;
            } else {
                std::memmove(buffer_.get(), buffer_.get() + from_, used);
            }
            from_ = 0;
            to_ = used;
        }
        room = capacity_ - to_;
        return buffer_.get() + to_;
    }

    void commit(std::size_t size) { to_ += size; }

    // Takes the next reply if it is complete; its texts are valid until `prepare`. Throws transport_error for bytes that
    // are not a reply.
    bool next(Reply& reply) {
        if (to_ - from_ < kReplyHeadBytes) return false;
        const char* const head = buffer_.get() + from_;
        const std::int64_t session_size = read_int64(head), body_size = read_int64(head + 8);
        if (session_size < 0 || session_size > static_cast<std::int64_t>(kMaxFieldBytes) || body_size < 0 ||
            static_cast<std::uint64_t>(body_size) > max_body_bytes_) {
            throw Error("transport_error", "a reply begins with sizes of session (0 to 256) and body (0 to " +
                                               std::to_string(max_body_bytes_) + ") as big-endian int64, got " +
                                               std::to_string(session_size) + " and " + std::to_string(body_size) +
                                               ": is this a brayx TCP door?");
        }
        const std::size_t session_bytes = static_cast<std::size_t>(session_size);
        const std::size_t body_bytes = static_cast<std::size_t>(body_size);
        if (to_ - from_ - kReplyHeadBytes < session_bytes + body_bytes) return false;
        reply.session = {head + kReplyHeadBytes, session_bytes};
        reply.body = {head + kReplyHeadBytes + session_bytes, body_bytes};
        const std::int64_t time = read_int64(head + 16);
        reply.is_error = time < 0;
        reply.time = reply.is_error ? ~time : time;
        from_ += kReplyHeadBytes + session_bytes + body_bytes;
        return true;
    }

    // Clears the buffer after a connection ended, and frees it if it grew large.
    void clear() {
        from_ = to_ = capacity_ = 0;
        buffer_.reset();
    }

  private:
    static constexpr std::size_t kChunk = 16 * 1024;

    std::size_t max_body_bytes_;
    std::unique_ptr<char[]> buffer_;  // not a string: that would be filled with zeros each time it grows
    std::size_t capacity_ = 0, from_ = 0, to_ = 0;
};

// A session's id: 1 to 256 printable ASCII characters without space.
inline bool is_session_id(std::string_view text) {
    return !text.empty() && text.size() <= kMaxFieldBytes &&
           std::all_of(text.begin(), text.end(), [](char byte) { return byte > ' ' && byte <= '~'; });
}

}  // namespace brayx::detail
