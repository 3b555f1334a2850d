// HMAC-SHA256 (RFC 2104 over FIPS 180-4), for tokens. Knows nothing of what is signed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace brayx::detail {

class Sha256 {
  public:
    static constexpr std::size_t kBlock = 64;
    using Digest = std::array<std::uint8_t, 32>;

    void update(std::string_view data) {
        for (const char byte : data) {
            block_[size_++ % kBlock] = static_cast<std::uint8_t>(byte);
            if (size_ % kBlock == 0) compress();
        }
    }

    Digest finish() {
        const std::uint64_t bits = size_ * 8;
        update(std::string_view("\x80", 1));
        while (size_ % kBlock != kBlock - 8) update(std::string_view("\0", 1));
        for (int shift = 56; shift >= 0; shift -= 8) {
            const char byte = static_cast<char>(bits >> shift);
            update(std::string_view(&byte, 1));
        }
        Digest digest{};
        for (std::size_t at = 0; at < digest.size(); ++at) {
            digest[at] = static_cast<std::uint8_t>(state_[at / 4] >> (24 - 8 * (at % 4)));
        }
        return digest;
    }

  private:
    static std::uint32_t rotate(std::uint32_t word, int by) { return (word >> by) | (word << (32 - by)); }

    void compress() {
        // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
        static constexpr std::array<std::uint32_t, 64> kRound = {
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
            0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
            0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
            0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
            0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
            0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
            0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
        std::array<std::uint32_t, 64> schedule{};
        for (std::size_t at = 0; at < 16; ++at) {
            for (std::size_t byte = 0; byte < 4; ++byte) schedule[at] = (schedule[at] << 8) | block_[4 * at + byte];
        }
        for (std::size_t at = 16; at < 64; ++at) {
            const std::uint32_t near = schedule[at - 2], far = schedule[at - 15];
            schedule[at] = schedule[at - 16] + (rotate(far, 7) ^ rotate(far, 18) ^ (far >> 3)) + schedule[at - 7] +
                           (rotate(near, 17) ^ rotate(near, 19) ^ (near >> 10));
        }
        auto [a, b, c, d, e, f, g, h] = state_;
        for (std::size_t at = 0; at < 64; ++at) {
            const std::uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
            const std::uint32_t one =
                h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice + kRound[at] + schedule[at];
            const std::uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
            h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
        }
        const std::array<std::uint32_t, 8> words = {a, b, c, d, e, f, g, h};
        for (std::size_t at = 0; at < 8; ++at) state_[at] += words[at];
    }

    // The first 32 bits of the fractional parts of the square roots of the first 8 primes.
    std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                           0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<std::uint8_t, kBlock> block_{};
    std::uint64_t size_ = 0;
};

inline std::string_view bytes(const Sha256::Digest& digest) {
    return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// HMAC-SHA256 of `message` in lower-case hexadecimal.
inline std::string hmac_sha256_hex(std::string_view secret, std::string_view message) {
    std::array<char, Sha256::kBlock> pad{};
    if (secret.size() > pad.size()) {
        Sha256 hash;
        hash.update(secret);
        const Sha256::Digest digest = hash.finish();
        bytes(digest).copy(pad.data(), digest.size());
    } else {
        secret.copy(pad.data(), pad.size());
    }
    const auto mix = [&pad](char with) {
        for (char& byte : pad) byte = static_cast<char>(byte ^ with);
        return std::string_view(pad.data(), pad.size());
    };
    Sha256 inner, outer;
    inner.update(mix(0x36));
    inner.update(message);
    outer.update(mix(0x36 ^ 0x5c));  // takes the inner pad off and puts the outer one on
    outer.update(bytes(inner.finish()));
    std::string hex;
    for (const std::uint8_t byte : outer.finish()) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
    }
    return hex;
}

}  // namespace brayx::detail
