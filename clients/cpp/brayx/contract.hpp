// A game's contract, and bodies by it in packed encoding; see "Contracts" in docs/protocol.md. Knows nothing of sockets.
//
//     struct Seen { float position, speed; };
//     brayx::Contract contract;
//     contract.vector<Seen>("cart").discrete("push", 2);
//     contract.check(client.start(contract.start()));
//     const std::string reply = client.tick(brayx::Tick(contract, reward).add(seen).body());
//     const int push = brayx::Actions(contract, reply).choice("push");
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.hpp"
#include "json.hpp"

namespace brayx {

namespace detail {

static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4);

template <class Number>
constexpr const char* dtype_of() {
    if constexpr (std::is_same_v<Number, float>) return "float32";
    if constexpr (std::is_same_v<Number, double>) return "float64";
    if constexpr (std::is_same_v<Number, bool>) return "bool";
    constexpr bool is_signed = std::is_signed_v<Number>;
    if constexpr (sizeof(Number) == 1) return is_signed ? "int8" : "uint8";
    if constexpr (sizeof(Number) == 2) return is_signed ? "int16" : "uint16";
    if constexpr (sizeof(Number) == 4) return is_signed ? "int32" : "uint32";
    return "int64";
}

inline bool is_little_endian() {
    const std::uint16_t one = 1;
    char first = 0;
    std::memcpy(&first, &one, 1);
    return first == 1;
}

// Copies `count` numbers of `size` bytes, little-endian on one of the two sides.
inline void copy_little(char* to, const char* from, std::size_t size, std::size_t count) {
    if (size == 1 || is_little_endian()) {
        if (count > 0) std::memcpy(to, from, size * count);
        return;
    }
    for (std::size_t start = 0; start < size * count; start += size) {
        for (std::size_t byte = 0; byte < size; ++byte) to[start + byte] = from[start + size - 1 - byte];
    }
}

template <class Number>
void append_little(std::string& out, const Number* values, std::size_t count) {
    const std::size_t start = out.size();
    out.resize(start + sizeof(Number) * count);
    copy_little(&out[start], reinterpret_cast<const char*>(values), sizeof(Number), count);
}

inline std::string quoted(std::string_view text) {
    std::string out = "\"";
    for (const char byte : text) {
        if (byte == '"' || byte == '\\') out += '\\';
        out += byte;  // the service refuses names that are not printable
    }
    return out + '"';
}

template <class Number>
std::string number(Number value) {
    std::ostringstream out;
    out.imbue(std::locale::classic());
    out.precision(std::numeric_limits<Number>::max_digits10);
    out << value;
    return out.str();
}

}  // namespace detail

// What a game observes and what it can do. Each method adds a part and returns the contract; the order of the calls is
// that of the bodies.
class Contract {
  public:
    std::string behaviour = "agent";
    int team = 0;

    // Numbers of a dtype: float32, float64, bool, or an integer such as uint8.
    Contract& vector(std::string name, std::size_t size, const std::string& dtype = "float32") {
        return observe({std::move(name), dtype, size, 0},
                       "\"shape\":[" + detail::number(size) + "],\"dtype\":\"" + dtype + "\"");
    }

    // The fields of a struct of floats, in their order.
    template <class Struct>
    Contract& vector(std::string name) {
        static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % sizeof(float) == 0, "struct of floats");
        return vector(std::move(name), sizeof(Struct) / sizeof(float));
    }

    // A picture: rows from the top, in each pixels from the left, in each its channels.
    Contract& image(std::string name, std::size_t height, std::size_t width, std::size_t channels,
                    const std::string& dtype = "uint8") {
        return observe({std::move(name), dtype, height * width * channels, 0},
                       "\"kind\":\"image\",\"shape\":[" + detail::number(height) + "," + detail::number(width) + "," +
                           detail::number(channels) + "],\"dtype\":\"" + dtype + "\"");
    }

    // Up to `rows` rows of `columns` float32, whose order means nothing.
    Contract& entities(std::string name, std::size_t rows, std::size_t columns) {
        const std::string shape = "[" + detail::number(rows) + "," + detail::number(columns) + "]";
        return observe({std::move(name), "float32", columns, rows}, "\"kind\":\"entities\",\"shape\":" + shape);
    }

    // A whole number from `start`, int32, that is a name and no amount.
    Contract& category(std::string name, std::size_t size, std::int32_t start = 0) {
        return observe({std::move(name), "int32", 1, 0}, "\"kind\":\"category\",\"size\":" + detail::number(size) +
                                                             ",\"start\":" + detail::number(start));
    }

    // UTF-8 of at most `size` bytes.
    Contract& text(std::string name, std::size_t size) {
        return observe({std::move(name), "text", 1, size}, "\"kind\":\"text\",\"size\":" + detail::number(size));
    }

    // One of `size` choices from `start`; with a mask, ticks may say which are allowed.
    Contract& discrete(std::string name, std::size_t size, std::int32_t start = 0, bool mask = false) {
        return act({std::move(name), true, size, mask}, "\"kind\":\"discrete\",\"size\":" + detail::number(size) +
                                                            ",\"start\":" + detail::number(start) +
                                                            ",\"mask\":" + (mask ? "true" : "false"));
    }

    // `size` numbers from `low` to `high`.
    Contract& continuous(std::string name, std::size_t size, float low = -1, float high = 1) {
        return act({std::move(name), false, size, false}, "\"kind\":\"continuous\",\"size\":" + detail::number(size) +
                                                              ",\"low\":" + detail::number(low) +
                                                              ",\"high\":" + detail::number(high));
    }

    // A named reward and its weight; without any, a reward is one number.
    Contract& reward(const std::string& name, float weight) {
        rewards_ += (rewards_.empty() ? "" : ",") + detail::quoted(name) + ":" + detail::number(weight);
        ++num_rewards_;
        return *this;
    }

    // The body of a start. `rows`: of a session of several agents, whose ticks are `Rows`.
    std::string start(bool rows = false) const {
        return "{\"contract\":1,\"behaviour\":" + detail::quoted(behaviour) + ",\"team\":" + detail::number(team) +
               ",\"observations\":[" + said_observations_ + "],\"actions\":[" + said_actions_ + "],\"rewards\":{" +
               rewards_ + "},\"encoding\":\"packed\"" + (rows ? ",\"rows\":true}" : "}");
    }

    // Throws transport_error unless the reply to a start is that of a service which plays by contracts.
    void check(std::string_view reply) const {
        const auto version = json::member(reply, "contract");
        if (version && json::integer(*version) == 1) return;
        throw Error("transport_error", "the service takes no contracts: expected a job like game.yaml, got '" +
                                           std::string(reply.substr(0, 80)) + "'");
    }

  private:
    friend class Tick;
    friend class Rows;
    friend class Actions;

    struct Observation {
        std::string name;
        std::string dtype;
        std::size_t count;  // of numbers; of entities in a row
        std::size_t most;   // rows of entities, or bytes of a text; 0: the length does not vary
    };
    struct Action {
        std::string name;
        bool is_discrete;
        std::size_t size;
        bool mask;
    };

    Contract& observe(Observation part, const std::string& said) {
        said_observations_ += (observations_.empty() ? "" : ",") + named(part.name, said);
        observations_.push_back(std::move(part));
        return *this;
    }

    Contract& act(Action part, const std::string& said) {
        said_actions_ += (actions_.empty() ? "" : ",") + named(part.name, said);
        actions_.push_back(std::move(part));
        return *this;
    }

    static std::string named(const std::string& name, const std::string& said) {
        return "{\"name\":" + detail::quoted(name) + "," + said + "}";
    }

    std::vector<Observation> observations_;
    std::vector<Action> actions_;
    std::string said_observations_, said_actions_, rewards_;
    std::size_t num_rewards_ = 0;
};

// The body of a tick or a stop. Add each observation in the contract's order; a stop may have none. Throws bad_body for
// values that are not the contract's. The contract has to outlive it.
class Tick {
  public:
    // `reward`: what the game earned since the tick before.
    explicit Tick(const Contract& contract, float reward = 0) : Tick(contract, std::vector<float>{reward}) {}

    // `rewards`: the named ones, in their order.
    Tick(const Contract& contract, const std::vector<float>& rewards) : contract_(contract) {
        const std::size_t expected = contract.num_rewards_ > 0 ? contract.num_rewards_ : 1;
        check(rewards.size() == expected, "the tick", rewards.size(), expected, "rewards");
        detail::append_little(body_, rewards.data(), rewards.size());
        flags_ = body_.size();
        body_ += '\0';
    }

    template <class Number>
    Tick& add(const Number* values, std::size_t count) {
        const Contract::Observation& part = next(detail::dtype_of<Number>());
        if (part.most > 0) {
            const std::size_t most = part.count * part.most;
            check(count % part.count == 0 && count <= most, place(part), count, most, "numbers at most, in whole rows");
            append_count(count / part.count);
        } else {
            check(count == part.count, place(part), count, part.count, "numbers");
        }
        detail::append_little(body_, values, count);
        ends_.push_back(body_.size());
        return *this;
    }

    template <class Number>
    Tick& add(const std::vector<Number>& values) {
        return add(values.data(), values.size());
    }

    Tick& add(std::initializer_list<float> values) { return add(values.begin(), values.size()); }

    // A category, or a struct of floats.
    template <class Value, class = std::enable_if_t<std::is_trivially_copyable_v<Value> && !std::is_pointer_v<Value> &&
                                                    !std::is_convertible_v<Value, std::string_view>>>
    Tick& add(const Value& value) {
        if constexpr (std::is_arithmetic_v<Value>) {
            return add(&value, 1);
        } else {
            float fields[sizeof(Value) / sizeof(float)];
            std::memcpy(fields, &value, sizeof(Value));
            return add(fields, sizeof(Value) / sizeof(float));
        }
    }

    // A text.
    Tick& add(std::string_view text) {
        const Contract::Observation& part = next("text");
        check(text.size() <= part.most, place(part), text.size(), part.most, "bytes at most");
        append_count(text.size());
        body_ += text;
        ends_.push_back(body_.size());
        return *this;
    }

    // After the observations: 1 for each choice that is allowed, of all actions with a mask.
    Tick& mask(const std::vector<std::uint8_t>& allowed) {
        std::size_t expected = 0;
        for (const Contract::Action& part : contract_.actions_) expected += part.mask ? part.size : 0;
        check(added_ == contract_.observations_.size(), "the tick", added_, contract_.observations_.size(),
              "observations before its mask");
        check(allowed.size() == expected, "mask", allowed.size(), expected, "choices");
        detail::append_little(body_, allowed.data(), allowed.size());
        return flag(1);
    }

    // In a stop: the game ended by its own rules.
    Tick& terminated() { return flag(2); }

    // In a stop: the game was cut.
    Tick& truncated() { return flag(4); }

    std::string body() {
        const std::size_t expected = contract_.observations_.size();
        if (added_ == 0) flag(16);
        check(added_ == 0 || added_ == expected, "the tick", added_, expected, "observations");
        return body_;
    }

  private:
    friend class Rows;

    static std::string place(const Contract::Observation& part) { return "obs." + part.name; }

    static void check(bool is_right, const std::string& what, std::size_t count, std::size_t expected,
                      const char* unit) {
        if (is_right) return;
        throw Error("bad_body",
                    what + " has " + std::to_string(count) + ", expected " + std::to_string(expected) + " " + unit);
    }

    const Contract::Observation& next(const std::string& dtype) {
        check(added_ < contract_.observations_.size(), "the tick", added_ + 1, contract_.observations_.size(),
              "observations");
        const Contract::Observation& part = contract_.observations_[added_++];
        if (part.dtype == dtype) return part;
        throw Error("bad_body", place(part) + " is " + dtype + ", expected " + part.dtype);
    }

    void append_count(std::size_t count) {
        const auto length = static_cast<std::uint16_t>(count);
        detail::append_little(body_, &length, 1);
    }

    Tick& flag(int bit) {
        body_[flags_] = static_cast<char>(body_[flags_] | bit);
        return *this;
    }

    const Contract& contract_;
    std::string body_;
    std::size_t flags_ = 0, added_ = 0;
    std::vector<std::size_t> ends_;  // of the observations in the body
};

// The body of a tick of several agents: a row for each, which ends the agent's episode if it is terminated or truncated.
// Throws bad_body as `Tick`. The contract has to outlive it.
class Rows {
  public:
    explicit Rows(const Contract& contract) : contract_(contract) {}

    // `group`: number of the agent's group; 0: none.
    Rows& add(std::int32_t agent, const Tick& row, std::int32_t group = 0) {
        const std::size_t expected = contract_.observations_.size();
        Tick::check(row.ends_.size() == expected, "the row", row.ends_.size(), expected, "observations");
        agents_.push_back(agent);
        groups_.push_back(group);
        rows_.push_back(row);
        return *this;
    }

    std::string body() const {
        const auto rows = static_cast<std::uint16_t>(rows_.size());
        bool masked = false, grouped = false;
        for (std::size_t row = 0; row < rows_.size(); ++row) {
            masked = masked || (flags(row) & 1) != 0;
            grouped = grouped || groups_[row] != 0;
        }
        std::string out;
        detail::append_little(out, &rows, 1);
        out += static_cast<char>((masked ? 1 : 0) | (grouped ? 32 : 0));
        detail::append_little(out, agents_.data(), agents_.size());
        for (const Tick& row : rows_) out.append(row.body_, 0, row.flags_);  // rewards
        for (std::size_t row = 0; row < rows_.size(); ++row) out += static_cast<char>(flags(row) & 6);
        if (grouped) detail::append_little(out, groups_.data(), groups_.size());
        for (std::size_t part = 0; part < contract_.observations_.size(); ++part) {
            // The rows' lengths come before all of their values.
            const std::size_t length = contract_.observations_[part].most > 0 ? 2 : 0;
            for (const Tick& row : rows_) out.append(row.body_, first(row, part), length);
            for (const Tick& row : rows_) {
                const std::size_t from = first(row, part) + length;
                out.append(row.body_, from, row.ends_[part] - from);
            }
        }
        if (masked) add_masks(out);
        return out;
    }

  private:
    unsigned flags(std::size_t row) const { return static_cast<unsigned char>(rows_[row].body_[rows_[row].flags_]); }

    static std::size_t first(const Tick& row, std::size_t part) {
        return part == 0 ? row.flags_ + 1 : row.ends_[part - 1];
    }

    void add_masks(std::string& out) const {
        std::size_t from = 0;
        for (const Contract::Action& part : contract_.actions_) {
            if (!part.mask) continue;
            for (std::size_t row = 0; row < rows_.size(); ++row) {
                if (flags(row) & 1) out.append(rows_[row].body_, rows_[row].ends_.back() + from, part.size);
                else out.append(part.size, '\1');  // all choices are allowed
            }
            from += part.size;
        }
    }

    const Contract& contract_;
    std::vector<std::int32_t> agents_, groups_;
    std::vector<Tick> rows_;
};

// The reply to a tick. Throws transport_error if it is none of a game with this contract.
class Actions {
  public:
    Actions(const Contract& contract, std::string reply) : contract_(contract), reply_(std::move(reply)) {
        std::size_t expected = 0;
        for (const Contract::Action& part : contract.actions_) expected += bytes_of(part);
        if (reply_.size() == expected) return;
        throw Error("transport_error", "the reply has " + std::to_string(reply_.size()) + " bytes, expected " +
                                           std::to_string(expected));
    }

    // The actions of each row that did not end an episode, from the reply to `Rows`.
    static std::vector<Actions> of_rows(const Contract& contract, const std::string& reply) {
        std::size_t size = 0;
        for (const Contract::Action& part : contract.actions_) size += bytes_of(part);
        std::vector<Actions> rows;
        for (std::size_t from = 0; from < reply.size(); from += size) {
            rows.emplace_back(contract, reply.substr(from, size));
        }
        return rows;
    }

    // The choice of a discrete action, from its `start`.
    std::int32_t choice(std::string_view name) const {
        std::int32_t value = 0;
        detail::copy_little(reinterpret_cast<char*>(&value), find(name, true).first, sizeof value, 1);
        return value;
    }

    // The numbers of a continuous action.
    std::vector<float> numbers(std::string_view name) const {
        const auto [from, size] = find(name, false);
        std::vector<float> values(size);
        detail::copy_little(reinterpret_cast<char*>(values.data()), from, sizeof(float), size);
        return values;
    }

  private:
    static std::size_t bytes_of(const Contract::Action& part) { return part.is_discrete ? 4 : 4 * part.size; }

    std::pair<const char*, std::size_t> find(std::string_view name, bool is_discrete) const {
        const char* from = reply_.data();
        for (const Contract::Action& part : contract_.actions_) {
            if (part.name == name && part.is_discrete == is_discrete) return {from, part.size};
            from += bytes_of(part);
        }
        throw Error("bad_config", "the contract has no " + std::string(is_discrete ? "discrete" : "continuous") +
                                      " action '" + std::string(name) + "'");
    }

    const Contract& contract_;
    std::string reply_;
};

}  // namespace brayx
