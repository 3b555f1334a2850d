// A gamecore in C++: CartPole, played against a brayx actor that speaks the gym profile of docs/protocol.md; or, with
// --contract, against any job by contract, such as game.yaml.
//
//     g++ -std=c++17 -O2 -I clients/cpp clients/cpp/examples/cartpole.cpp -o cartpole
//     ./cartpole tcp://127.0.0.1:8101 --games 10 --seed 0
//     ./cartpole tcp://127.0.0.1:8101 --games 1000 --contract
//
// Prints one line per game: its number, its return, how it ended. The physics are the equations of Barto, Sutton and
// Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems" (1983), without friction,
// with the constants that Gymnasium's CartPole-v1 has too.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>

#include "brayx.hpp"

namespace {

constexpr double kGravity = 9.8;
constexpr double kCartMass = 1.0, kPoleMass = 0.1;
constexpr double kHalfPole = 0.5;  // metres from the joint to the pole's centre of mass
constexpr double kForce = 10.0;    // newtons, to either side
constexpr double kStep_s = 0.02;
constexpr double kMaxPosition = 2.4;                      // metres from the middle
constexpr double kMaxAngle = 12.0 * 3.14159265358979323846 / 180.0;  // radians from upright
constexpr int kMaxTicks = 500;

class CartPole {
  public:
    explicit CartPole(std::uint64_t seed) {
        std::mt19937_64 random(seed);
        std::uniform_real_distribution<double> small(-0.05, 0.05);
        for (double* value : {&position_, &speed_, &angle_, &turning_}) *value = small(random);
    }

    // Pushes the cart to the left (0) or right (1) for one step of time.
    void push(int action) {
        const double force = action == 1 ? kForce : -kForce;
        const double mass = kCartMass + kPoleMass;
        const double sine = std::sin(angle_), cosine = std::cos(angle_);
        // What the cart's acceleration would be, did the pole not pull on it.
        const double pushed = (force + kPoleMass * kHalfPole * turning_ * turning_ * sine) / mass;
        const double angular = (kGravity * sine - cosine * pushed) /
                               (kHalfPole * (4.0 / 3.0 - kPoleMass * cosine * cosine / mass));
        const double linear = pushed - kPoleMass * kHalfPole * angular * cosine / mass;
        position_ += kStep_s * speed_;
        speed_ += kStep_s * linear;
        angle_ += kStep_s * turning_;
        turning_ += kStep_s * angular;
        ++ticks_;
    }

    bool terminated() const { return std::abs(position_) > kMaxPosition || std::abs(angle_) > kMaxAngle; }
    bool truncated() const { return !terminated() && ticks_ >= kMaxTicks; }
    int ticks() const { return ticks_; }
    float reward() const { return ticks_ > 0 ? 1.0f : 0.0f; }

    // What the agent sees, for a contract.
    struct Seen {
        float position, speed, angle, turning;
    };
    Seen seen() const {
        return {static_cast<float>(position_), static_cast<float>(speed_), static_cast<float>(angle_),
                static_cast<float>(turning_)};
    }

    // {"obs": [...], "reward": r}; with how the game ended, for a stop.
    std::string message(bool last) const {
        char text[256];
        std::snprintf(text, sizeof text, "{\"obs\":[%.9g,%.9g,%.9g,%.9g],\"reward\":%.1f", position_, speed_, angle_,
                      turning_, static_cast<double>(reward()));
        std::string said = text;
        if (last) {
            said += std::string(",\"terminated\":") + (terminated() ? "true" : "false");
            said += std::string(",\"truncated\":") + (truncated() ? "true" : "false");
        }
        return said + "}";
    }

  private:
    double position_ = 0, speed_ = 0, angle_ = 0, turning_ = 0;
    int ticks_ = 0;
};

int action_in(const std::string& reply) {
    const auto raw = brayx::json::member(reply, "action");
    const auto action = raw ? brayx::json::integer(*raw) : std::nullopt;
    if (!action || *action < 0 || *action > 1) {
        throw brayx::Error("transport_error", "the actor's reply is no {\"action\": 0 or 1}: " + reply.substr(0, 200));
    }
    return static_cast<int>(*action);
}

void play_by_contract(brayx::Client& client, CartPole& cartpole) {
    brayx::Contract contract;
    contract.vector<CartPole::Seen>("obs").discrete("push", 2);
    contract.check(client.start(contract.start()));
    while (!cartpole.terminated() && !cartpole.truncated()) {
        brayx::Tick tick(contract, cartpole.reward());
        cartpole.push(brayx::Actions(contract, client.tick(tick.add(cartpole.seen()).body())).choice("push"));
    }
    brayx::Tick last(contract, cartpole.reward());
    last.add(cartpole.seen());
    client.stop((cartpole.terminated() ? last.terminated() : last.truncated()).body());
}

void play_by_profile(brayx::Client& client, CartPole& cartpole, std::uint64_t seed) {
    client.start("{\"env_id\":\"CartPole-v1\",\"seed\":" + std::to_string(seed) + "}");
    while (!cartpole.terminated() && !cartpole.truncated()) {
        cartpole.push(action_in(client.tick(cartpole.message(false))));
    }
    client.stop(cartpole.message(true));
}

void play(brayx::Client& client, long game, std::uint64_t seed, bool by_contract) {
    CartPole cartpole(seed);
    if (by_contract) {
        play_by_contract(client, cartpole);
    } else {
        play_by_profile(client, cartpole, seed);
    }
    const char* const how = cartpole.terminated() ? "terminated" : "truncated";
    std::printf("game %ld: return %d, %s\n", game, cartpole.ticks(), how);
    std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    std::string url;
    long games = 10, seed = 0;
    bool by_contract = false;
    for (int at = 1; at < argc; ++at) {
        const std::string_view word = argv[at];
        if (word == "--games" && at + 1 < argc) {
            games = std::atol(argv[++at]);
        } else if (word == "--seed" && at + 1 < argc) {
            seed = std::atol(argv[++at]);
        } else if (word == "--contract") {
            by_contract = true;
        } else if (url.empty() && word.substr(0, 1) != "-") {
            url = word;
        } else {
            std::fprintf(stderr, "usage: cartpole tcp://host:port [--games N] [--seed S] [--contract]\n");
            return 2;
        }
    }
    try {
        brayx::Options options;
        options.reconnect = std::chrono::seconds(10);
        if (by_contract) options.timeout = std::chrono::minutes(5);  // a training may hold a start until its model acts
        brayx::Client client(url, options);
        for (long game = 0; game < games; ++game) {
            play(client, game, static_cast<std::uint64_t>(seed + game), by_contract);
        }
    } catch (const brayx::Error& error) {
        std::fprintf(stderr, "cartpole: %s: %s\n", error.code().c_str(), error.what());
        return 1;
    }
    return 0;
}
