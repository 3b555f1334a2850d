// g++ -std=c++17 -O2 -Iinclude game.cpp -o game && ./game tcp://127.0.0.1:8101 1000
#include <brayx.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

struct Walk {  // what the agent sees
    float place, goal;
};

int main(int argc, char** argv) {
    const char* const url = argc > 1 ? argv[1] : "tcp://127.0.0.1:8101";
    const long games = argc > 2 ? std::atol(argv[2]) : 1000;
    brayx::Contract contract;
    contract.vector<Walk>("walk").discrete("move", 2);
    brayx::Options options;
    options.timeout = std::chrono::minutes(5);  // a training answers the first start when its model acts
    std::mt19937 random(std::random_device{}());
    std::uniform_real_distribution<float> somewhere(-1, 1);
    double sum = 0;
    try {
        brayx::Client client(url, options);
        for (long game = 1; game <= games; ++game) {
            contract.check(client.start(contract.start()));
            Walk walk{somewhere(random), somewhere(random)};
            float reward = 0;
            for (int ticks = 0; reward < 1 && ticks < 40; ++ticks) {
                const std::string reply = client.tick(brayx::Tick(contract, reward).add(walk).body());
                walk.place += brayx::Actions(contract, reply).choice("move") == 1 ? 0.1f : -0.1f;
                reward = std::abs(walk.place - walk.goal) < 0.1f ? 1.0f : -0.02f;
                sum += reward;
            }
            brayx::Tick last(contract, reward);
            last.add(walk);
            client.stop((reward == 1 ? last.terminated() : last.truncated()).body());
            if (game % 100 != 0 && game != games) continue;
            std::printf("%ld games, mean reward %.2f\n", game, sum / ((game - 1) % 100 + 1));
            std::fflush(stdout);
            sum = 0;
        }
    } catch (const brayx::Error& error) {
        std::fprintf(stderr, "%s: %s\n", error.code().c_str(), error.what());
        return 1;
    }
}
