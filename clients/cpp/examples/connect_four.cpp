// A game of two seats in C++: connect four, each of whose seats is a session of a brayx actor.
//
//     g++ -std=c++17 -O2 -I clients/cpp clients/cpp/examples/connect_four.cpp -o connect_four
//     ./connect_four tcp://127.0.0.1:8101 --games 10
//
// The sessions of a game have the ids GAME-agent-red and GAME-agent-yellow, so that the service knows that they belong
// together. Seats tick in turn; who begins alternates. Bodies are those of pipelines/templates/league/four_game.py:
//
//     start  {"against":""}
//     tick   {"board":[42 numbers, row by row from the top: 0 empty, 1 mine, -1 theirs],"legal":[7 bools],"reward":0.0}
//     reply  {"move":column}
//     stop   {"board":[...],"legal":[...],"reward":1.0,"result":"win"}
//
// Prints one line per game: its number, and who won.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "brayx.hpp"

namespace {

constexpr int kWidth = 7, kHeight = 6;
constexpr int kRed = 1, kYellow = -1;

const char* name_of(int seat) { return seat == kRed ? "red" : "yellow"; }

class ConnectFour {
  public:
    explicit ConnectFour(int first) : turn_(first) {}

    int turn() const { return turn_; }
    int winner() const { return winner_; }
    bool over() const { return winner_ != 0 || stones_ == kWidth * kHeight; }
    bool legal(std::int64_t column) const {
        return column >= 0 && column < kWidth && board_[static_cast<std::size_t>(column)] == 0;
    }

    // Drops a stone of the seat on turn into a legal column.
    void move(int column) {
        int row = kHeight - 1;
        while (at(row, column) != 0) --row;
        board_[static_cast<std::size_t>(row * kWidth + column)] = turn_;
        ++stones_;
        for (const auto& [down, right] : {Way{0, 1}, Way{1, 0}, Way{1, 1}, Way{1, -1}}) {
            if (1 + run(row, column, down, right) + run(row, column, -down, -right) >= 4) winner_ = turn_;
        }
        turn_ = -turn_;
    }

    // The body of a tick of `seat`, or of its stop.
    std::string message(int seat, bool last) const {
        std::string text = "{\"board\":[";
        for (const int stone : board_) text += std::to_string(seat * stone) + ",";
        text.back() = ']';
        text += ",\"legal\":[";
        for (int column = 0; column < kWidth; ++column) text += legal(column) ? "true," : "false,";
        text.back() = ']';
        const int reward = last ? winner_ * seat : 0;
        text += ",\"reward\":" + std::to_string(reward) + ".0";
        if (last) text += std::string(",\"result\":\"") + (reward > 0 ? "win" : reward < 0 ? "loss" : "draw") + "\"";
        return text + "}";
    }

  private:
    struct Way {
        int down, right;
    };

    int at(int row, int column) const {
        const bool inside = row >= 0 && row < kHeight && column >= 0 && column < kWidth;
        return inside ? board_[static_cast<std::size_t>(row * kWidth + column)] : 0;
    }

    // Stones of the seat on turn next to a cell, in one direction.
    int run(int row, int column, int down, int right) const {
        int length = 0;
        while (at(row + (length + 1) * down, column + (length + 1) * right) == turn_) ++length;
        return length;
    }

    std::array<int, kWidth * kHeight> board_{};
    int turn_;
    int stones_ = 0, winner_ = 0;
};

// A game's id: another for each game, of this process and of others.
std::string new_game() {
    static std::random_device random;
    char text[33];
    std::snprintf(text, sizeof text, "%08x%08x%08x%08x", random(), random(), random(), random());
    return text;
}

int column_in(const std::string& reply, const ConnectFour& game) {
    const auto raw = brayx::json::member(reply, "move");
    const auto column = raw ? brayx::json::integer(*raw) : std::nullopt;
    if (!column || !game.legal(*column)) {
        throw brayx::Error("transport_error", std::string("the reply to ") + name_of(game.turn()) +
                                                  " is no {\"move\": legal column}: " + reply.substr(0, 200));
    }
    return static_cast<int>(*column);
}

void play(brayx::Client& red, brayx::Client& yellow, long number) {
    ConnectFour game(number % 2 == 0 ? kRed : kYellow);
    const auto client_of = [&](int seat) -> brayx::Client& { return seat == kRed ? red : yellow; };
    const std::string id = new_game();
    try {
        for (const int seat : {kRed, kYellow}) {
            client_of(seat).start("{\"against\":\"\"}", id + "-agent-" + name_of(seat));
        }
        while (!game.over()) {
            const int seat = game.turn();
            game.move(column_in(client_of(seat).tick(game.message(seat, false)), game));
        }
    } catch (const brayx::Error&) {
        for (const int seat : {kRed, kYellow}) {
            try {
                // Without a body: the game did not end by its rules.
                if (client_of(seat).running()) client_of(seat).stop();
            } catch (const brayx::Error&) {
                // The first error is the one to report.
            }
        }
        throw;
    }
    for (const int seat : {kRed, kYellow}) client_of(seat).stop(game.message(seat, true));
    std::printf("game %ld: %s\n", number, game.winner() == 0     ? "draw"
                                          : game.winner() == kRed ? "red wins"
                                                                  : "yellow wins");
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    std::string url;
    long games = 10;
    for (int at = 1; at < argc; ++at) {
        const std::string_view word = argv[at];
        if (word == "--games" && at + 1 < argc) {
            games = std::atol(argv[++at]);
        } else if (url.empty() && word.substr(0, 1) != "-") {
            url = word;
        } else {
            std::fprintf(stderr, "usage: connect_four tcp://host:port [--games N]\n");
            return 2;
        }
    }
    try {
        brayx::Options options;
        options.reconnect = std::chrono::seconds(10);
        brayx::Client red(url, options), yellow(url, options);
        for (long game = 0; game < games; ++game) play(red, yellow, game);
    } catch (const brayx::Error& error) {
        std::fprintf(stderr, "connect_four: %s: %s\n", error.code().c_str(), error.what());
        return 1;
    }
    return 0;
}
