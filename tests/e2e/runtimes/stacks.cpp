// Exceptions that unwind deep stacks which are out, in several threads, while other threads press
// on the memory.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static uint64_t mix(uint64_t v) {
    v += 0x9e3779b97f4a7c15ull;
    v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
    return v ^ (v >> 27);
}

struct Frame {
    volatile uint64_t words[120];
    uint64_t key;
    uint64_t *unwound;
    Frame(uint64_t key, uint64_t *unwound) : key(key), unwound(unwound) {
        for (int i = 0; i < 120; i++) words[i] = mix(key + i);
    }
    // Runs as the exception passes: the frame must be what it was.
    ~Frame() {
        for (int i = 0; i < 120; i++)
            if (words[i] != mix(key + i)) {
                printf("FAILED: a word of frame %llu\n", (unsigned long long)key);
                fflush(stdout);
                _Exit(3);
            }
        ++*unwound;
    }
};

static uint64_t descend(uint64_t key, int depth, size_t garbage, uint64_t *unwound) {
    Frame frame(key, unwound);
    if (depth == 0) {
        // The stack goes out meanwhile.
        std::vector<std::string> pressure;
        for (size_t i = 0; i < garbage; i++)
            pressure.push_back(std::to_string(mix(key + i)) + std::string(200, 'x'));
        throw std::runtime_error(pressure[garbage / 2]);
    }
    return descend(mix(key), depth - 1, garbage, unwound) + frame.words[7];
}

int main(int, char **words) {
    size_t garbage = strtoul(words[1], nullptr, 10);
    std::map<int, std::string> results;
    std::vector<std::string> said(4);
    std::vector<std::thread> threads;
    for (int worker = 0; worker < 4; worker++)
        threads.emplace_back([&said, worker, garbage] {
            uint64_t unwound = 0;
            std::string all;
            for (int turn = 0; turn < 3; turn++) {
                try {
                    descend(worker * 1000 + turn, 4000, garbage, &unwound);
                } catch (const std::runtime_error &error) {
                    all += std::string(error.what()).substr(0, 12) + " ";
                }
            }
            said[worker] = all + std::to_string(unwound);
        });
    for (auto &thread : threads) thread.join();
    for (auto &line : said) printf("%s\n", line.c_str());
}
