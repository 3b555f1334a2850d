// Drives the C++ client for the tests in Python: carries out the commands on its input, and prints each result.
//
//   driver hmac                    "KEY MESSAGE" in hex            -> the code in hex
//   driver errors                  an error document in hex        -> "CODE MESSAGE DETAILS TICK", middle two in hex
//   driver sync URL [options]      "start|tick|stop|call BODY ..." -> "ok BODY" or "error CODE MESSAGE DETAILS"
//   driver async URL CONNECTIONS [options]   the same, one request each; "poll" -> "TAG ok BODY" ..., then "."
//   driver contract                "start", "tick", "stop", "reply BODY", "wrong NUMBER" -> "ok BODY" or "error ..."
//   driver crowd URL SESSIONS CONNECTIONS TICKS [options]   plays them all, prints what was right and wrong
//
// Bodies are in hex. An empty one is "-".
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "brayx.hpp"

namespace {

std::string unhex(const std::string& text) {
    std::string out;
    if (text == "-") return out;
    for (std::size_t at = 0; at + 1 < text.size(); at += 2) {
        out += static_cast<char>(std::stoi(text.substr(at, 2), nullptr, 16));
    }
    return out;
}

std::string hex(std::string_view bytes) {
    std::string out;
    for (const char byte : bytes) {
        out += "0123456789abcdef"[static_cast<unsigned char>(byte) >> 4];
        out += "0123456789abcdef"[static_cast<unsigned char>(byte) & 15];
    }
    return out.empty() ? "-" : out;
}

std::string shown(const brayx::Error& error) {
    return error.code() + " " + hex(error.what()) + " " + hex(error.details());
}

std::string shown(const brayx::Result& result) {
    return result ? "ok " + hex(result.body) : "error " + shown(*result.error);
}

brayx::Options options_of(const std::vector<std::string>& words, std::size_t at) {
    brayx::Options options;
    for (; at + 1 < words.size(); at += 2) {
        const std::string& name = words[at];
        const std::string& value = words[at + 1];
        if (name == "timeout_ms") options.timeout = std::chrono::milliseconds(std::stol(value));
        if (name == "reconnect_ms") options.reconnect = std::chrono::milliseconds(std::stol(value));
        if (name == "numbered") options.numbered = value == "1";
        if (name == "record") options.record = value == "1";
        if (name == "key") options.key = value;
        if (name == "secret") options.secret = value;
        if (name == "max_in_flight") options.max_in_flight = static_cast<std::size_t>(std::stol(value));
        if (name == "max_reply_bytes") options.max_reply_bytes = static_cast<std::size_t>(std::stol(value));
    }
    return options;
}

// Answers every line of the input; brayx errors that `answer` throws are answers too.
void each_line(const std::function<std::string(std::istringstream&)>& answer) {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string said;
        try {
            said = answer(words);
        } catch (const brayx::Error& error) {
            said = "error " + shown(error);
        }
        std::cout << said << std::endl;
    }
}

std::string word(std::istringstream& words) {
    std::string next;
    words >> next;
    return next;
}

void sync(const std::string& url, brayx::Options options) {
    brayx::Client client(url, options);
    each_line([&](std::istringstream& words) -> std::string {
        const std::string kind = word(words);
        if (kind == "state") {
            return std::string(client.running() ? "running " : "none ") + client.session() + " " +
                   std::to_string(client.next_tick());
        }
        if (kind == "close") {
            client.close();
            return "ok -";
        }
        const std::string body = unhex(word(words));
        if (kind == "start") return "ok " + hex(client.start(body, word(words)));
        if (kind == "tick") return "ok " + hex(client.tick(body));
        if (kind == "stop") return "ok " + hex(client.stop(body));
        return "ok " + hex(client.call(body));
    });
}

void async(const std::string& url, std::size_t connections, brayx::Options options) {
    brayx::AsyncClient client(url, options, connections);
    std::vector<std::string> fired;
    int tags = 0;
    each_line([&](std::istringstream& words) -> std::string {
        const std::string kind = word(words);
        if (kind == "poll") {
            const std::size_t count = client.poll(std::chrono::milliseconds(std::stol(word(words))));
            if (count != fired.size()) return "poll said " + std::to_string(count);
            std::string said;
            for (const std::string& each : fired) said += each + "\n";
            fired.clear();
            return said + ".";
        }
        if (kind == "state") {
            const std::string session = word(words);
            return std::string(client.running(session) ? "running " : "none ") +
                   std::to_string(client.next_tick(session)) + " " + std::to_string(client.in_flight());
        }
        const std::string session = kind == "call" ? "" : word(words);
        const std::string body = unhex(word(words));
        const std::string tag = std::to_string(tags);
        const brayx::Callback done = [&fired, tag](const brayx::Result& result) {
            fired.push_back(tag + " " + shown(result));
        };
        if (kind == "start") client.start(body, done, session);
        if (kind == "tick") client.tick(session, body, done);
        if (kind == "stop") client.stop(session, body, done);
        if (kind == "call") client.call(body, done);
        ++tags;
        if (!fired.empty()) return "fired outside of poll";
        return "sent " + tag;
    });
}

// The bodies of one contract with every kind of part; the test in Python reads them.
void contract() {
    struct Seen {
        float position, speed;
    };
    brayx::Contract game;
    game.behaviour = "a \"b\"";
    game.vector<Seen>("cart").vector("wide", 2, "float64").image("eyes", 1, 2, 3).entities("units", 3, 2);
    game.category("card", 52, 1).text("said", 8);
    game.discrete("go", 3, 5, true).continuous("steer", 2, -0.5f, 2).discrete("dash", 2, 0, true);
    game.reward("win", 1).reward("style", 0.1f);
    const std::vector<std::uint8_t> picture{1, 2, 3, 4, 5, 255};
    const std::vector<double> wide{0.1, -2};
    const std::vector<float> units{1, 2, 3, 4};
    const auto full = [&](brayx::Tick tick) {
        tick.add(Seen{0.5f, -1}).add(wide).add(picture).add(units);
        tick.add(std::int32_t{52}).add(std::string_view("n\xc3\xa9"));
        return tick;
    };
    each_line([&](std::istringstream& words) -> std::string {
        const std::string kind = word(words);
        const brayx::Tick empty(game, std::vector<float>{1, 0.5f});
        if (kind == "start") return "ok " + hex(game.start());
        if (kind == "rows") {
            brayx::Rows rows(game);
            rows.add(3, full(empty).terminated()).add(3, full(empty).mask({0, 1, 1, 1, 0}), 7);
            brayx::Tick other(game, std::vector<float>{2, 0});
            other.add(Seen{2, 3}).add(wide).add(picture).add(std::vector<float>{9, 8});
            return "ok " + hex(rows.add(8, other.add(std::int32_t{1}).add(std::string_view("")), 7).body());
        }
        if (kind == "start-rows") return "ok " + hex(game.start(true));
        if (kind == "row-replies") {
            std::string said;
            for (const brayx::Actions& row : brayx::Actions::of_rows(game, unhex(word(words)))) {
                said += std::to_string(row.choice("go")) + std::to_string(row.choice("dash")) + " ";
            }
            return "ok " + hex(said);
        }
        if (kind == "tick") return "ok " + hex(full(empty).mask({0, 1, 1, 1, 0}).body());
        if (kind == "cut") return "ok " + hex(full(empty).truncated().body());
        if (kind == "stop") return "ok " + hex(brayx::Tick(empty).terminated().body());
        if (kind == "reply") {
            const brayx::Actions actions(game, unhex(word(words)));
            const std::vector<float> steer = actions.numbers("steer");
            std::ostringstream said;
            said << actions.choice("go") << " " << steer[0] << " " << steer[1] << " " << actions.choice("dash");
            return "ok " + hex(said.str());
        }
        const std::string wrong = word(words);
        if (wrong == "check") game.check(unhex(word(words)));
        if (wrong == "rewards") brayx::Tick(game, 1);
        if (wrong == "count") brayx::Tick(empty).add({1, 2, 3});
        if (wrong == "dtype") brayx::Tick(empty).add(picture);
        if (wrong == "few") brayx::Tick(empty).add({1, 2}).body();
        if (wrong == "mask") full(empty).mask({1});
        if (wrong == "early") brayx::Tick(empty).mask({1, 1, 1, 1, 1});
        if (wrong == "many") full(empty).add(std::int32_t{1});
        if (wrong == "rows") {
            brayx::Tick(empty).add({1, 2}).add(wide).add(picture).add(std::vector<float>(8));
        }
        if (wrong == "row") brayx::Rows(game).add(1, empty);
        if (wrong == "row-reply") brayx::Actions::of_rows(game, std::string(17, '\0'));
        if (wrong == "name") brayx::Actions(game, std::string(16, '\0')).choice("steer");
        return "ok -";
    });
}

// A session that checks each reply against its request, and continues from its own callbacks.
struct Player {
    brayx::AsyncClient& client;
    std::string name;
    int ticks_left;
    std::map<std::string, int>& seen;
    std::size_t number = 0;

    std::string body() const { return name + "/" + std::to_string(number) + std::string(number % 7 * 500, '.'); }

    void begin() {
        client.start("", [this](const brayx::Result& result) { next(result, ""); }, name);
    }

    void next(const brayx::Result& result, const std::string& expected) {
        ++seen[!result ? result.error->code() : result.body == expected ? "right" : "wrong"];
        if (!result || !client.running(name)) return;
        if (ticks_left-- > 0) {
            ++number;
            const std::string sent = body();
            client.tick(name, sent, [this, sent](const brayx::Result& reply) { next(reply, sent); });
        } else {
            client.stop(name, "bye", [this](const brayx::Result& reply) { next(reply, "bye"); });
        }
    }
};

void crowd(const std::string& url, int sessions, std::size_t connections, int ticks, brayx::Options options) {
    brayx::AsyncClient client(url, options, connections);
    std::map<std::string, int> seen;
    std::vector<Player> players;
    for (int each = 0; each < sessions; ++each) {
        players.push_back({client, "crowd-" + std::to_string(each), ticks, seen});
    }
    for (Player& player : players) player.begin();
    std::cout << "playing" << std::endl;
    while (client.in_flight() > 0) client.poll(std::chrono::milliseconds(16));
    for (const auto& [what, count] : seen) std::cout << what << " " << count << "\n";
    std::cout << "." << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
    const std::vector<std::string> words(argv, argv + argc);
    const std::string mode = argc > 1 ? words[1] : "";
    try {
        if (mode == "hmac") {
            each_line([](std::istringstream& line) {
                const std::string secret = unhex(word(line));
                return brayx::detail::hmac_sha256_hex(secret, unhex(word(line)));
            });
        } else if (mode == "errors") {
            each_line([](std::istringstream& line) {
                const brayx::Error error = brayx::error_from_wire(unhex(word(line)));
                const auto tick = error.detail("tick");
                return shown(error) + " " + (tick ? std::to_string(*tick) : "none");
            });
        } else if (mode == "contract") {
            contract();
        } else if (mode == "sync" && argc > 2) {
            sync(words[2], options_of(words, 3));
        } else if (mode == "async" && argc > 3) {
            async(words[2], std::stoul(words[3]), options_of(words, 4));
        } else if (mode == "crowd" && argc > 5) {
            crowd(words[2], std::stoi(words[3]), std::stoul(words[4]), std::stoi(words[5]), options_of(words, 6));
        } else {
            return 2;
        }
    } catch (const brayx::Error& error) {
        std::cout << "error " << shown(error) << std::endl;
        return 1;
    }
    return 0;
}
