// Reads members of JSON objects, for error documents and small replies such as {"action": 1}. Not a JSON library.
//
// Takes any bytes and returns nothing for those it cannot read. It finds values but does not validate them.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace brayx::json {

namespace detail {

inline void append_utf8(std::string& out, std::uint32_t point) {
    if (point < 0x80) {
        out += static_cast<char>(point);
        return;
    }
    const int extra = point < 0x800 ? 1 : point < 0x10000 ? 2 : 3;
    const std::uint32_t lead = extra == 1 ? 0xC0 : extra == 2 ? 0xE0 : 0xF0;
    out += static_cast<char>(lead | (point >> (6 * extra)));
    for (int at = extra - 1; at >= 0; --at) out += static_cast<char>(0x80 | ((point >> (6 * at)) & 0x3F));
}

// Four hexadecimal digits at `at`.
inline std::optional<std::uint32_t> hex4(std::string_view text, std::size_t at) {
    std::uint32_t value = 0;
    if (at + 4 > text.size()) return std::nullopt;
    const char* const end = text.data() + at + 4;
    const auto parsed = std::from_chars(text.data() + at, end, value, 16);
    if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
    return value;
}

class Cursor {
  public:
    explicit Cursor(std::string_view text) : text_(text) {}

    // Whether `mark` comes next, after white space; if so, skips it.
    bool take(char mark) {
        skip_space();
        if (at_ >= text_.size() || text_[at_] != mark) return false;
        ++at_;
        return true;
    }

    // The text of the next value; nothing if there is no complete one.
    std::optional<std::string_view> value() {
        skip_space();
        const std::size_t from = at_;
        std::size_t depth = 0;
        do {
            skip_space();
            if (at_ >= text_.size()) return std::nullopt;
            const char mark = text_[at_];
            if (mark == '"') {
                if (!skip_string()) return std::nullopt;
            } else if (mark == '{' || mark == '[') {
                ++depth;
                ++at_;
            } else if (mark == '}' || mark == ']') {
                if (depth == 0) return std::nullopt;
                --depth;
                ++at_;
            } else if (mark == ',' || mark == ':') {
                if (depth == 0) return std::nullopt;
                ++at_;
            } else {
                while (at_ < text_.size() && kEnds.find(text_[at_]) == std::string_view::npos) ++at_;
            }
        } while (depth > 0);
        return text_.substr(from, at_ - from);
    }

  private:
    static constexpr std::string_view kSpace = " \t\r\n";
    static constexpr std::string_view kEnds = " \t\r\n,:\"{}[]";

    void skip_space() {
        while (at_ < text_.size() && kSpace.find(text_[at_]) != std::string_view::npos) ++at_;
    }

    bool skip_string() {
        for (++at_; at_ < text_.size(); ++at_) {
            if (text_[at_] == '\\') {
                ++at_;
            } else if (text_[at_] == '"') {
                ++at_;
                return true;
            }
        }
        return false;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

}  // namespace detail

// The decoded text of a JSON string, UTF-8; nothing if `value` is not a string.
inline std::optional<std::string> string(std::string_view value) {
    if (value.size() < 2 || value.front() != '"' || value.back() != '"') return std::nullopt;
    value = value.substr(1, value.size() - 2);
    std::string out;
    for (std::size_t at = 0; at < value.size(); ++at) {
        if (value[at] == '"') return std::nullopt;
        if (value[at] != '\\') {
            out += value[at];
            continue;
        }
        if (++at >= value.size()) return std::nullopt;
        constexpr std::string_view kNames = "\"\\/bfnrt";
        constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
        if (const std::size_t found = kNames.find(value[at]); found != std::string_view::npos) {
            out += kMeanings[found];
            continue;
        }
        auto point = value[at] == 'u' ? detail::hex4(value, at + 1) : std::nullopt;
        if (!point) return std::nullopt;
        at += 4;
        if (*point >= 0xD800 && *point < 0xE000) {  // one half of a pair; alone it stands for no character
            const auto low = value.substr(at + 1, 2) == "\\u" ? detail::hex4(value, at + 3) : std::nullopt;
            if (*point < 0xDC00 && low && *low >= 0xDC00 && *low < 0xE000) {
                point = 0x10000 + ((*point - 0xD800) << 10) + (*low - 0xDC00);
                at += 6;
            } else {
                point = 0xFFFD;
            }
        }
        detail::append_utf8(out, *point);
    }
    return out;
}

// The integer in `value`; nothing if it is not a 64-bit integer.
inline std::optional<std::int64_t> integer(std::string_view value) {
    std::int64_t number = 0;
    const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
    if (value.empty() || parsed.ec != std::errc() || parsed.ptr != value.data() + value.size()) return std::nullopt;
    return number;
}

// The raw value of `name` in the object `document`; decode it with `string` or `integer`.
inline std::optional<std::string_view> member(std::string_view document, std::string_view name) {
    detail::Cursor cursor(document);
    if (!cursor.take('{')) return std::nullopt;
    do {
        const auto key = cursor.value();
        if (!key || !cursor.take(':')) return std::nullopt;
        const auto value = cursor.value();
        if (!value) return std::nullopt;
        if (string(*key) == name) return value;
    } while (cursor.take(','));
    return std::nullopt;
}

}  // namespace brayx::json
