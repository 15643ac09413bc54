/* A thread whose stack is MB megabytes, used down to its last frame by a recursion that verifies on
 * the way back. */
#include "common.h"

#define FRAME (60ul << 10)

static struct arguments given;

static void __attribute__((noinline)) descend(size_t depth, uint64_t round) {
    unsigned char frame[FRAME];
    uint64_t key = key_of(given.seed, depth, round);
    volatile uint64_t *words = (volatile uint64_t *)frame;
    for (size_t at = 0; at < FRAME / 8; at++) words[at] = word_of(key + (at / WORDS << 16), at);
    if (depth > 0) descend(depth - 1, round);
    for (size_t at = 0; at < FRAME / 8; at++) {
        uint64_t expected = word_of(key + (at / WORDS << 16), at);
        if (words[at] != expected)
            mismatch((const void *)(words + at), expected, words[at], "stack");
    }
}

static void *work(void *unused) {
    double end = now() + given.seconds;
    size_t depth = (given.megabytes << 20) / (FRAME + 256) - 4;
    for (uint64_t round = 1; round < 3 || now() < end; round++) descend(depth, round);
    return unused;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    pthread_attr_t attributes;
    pthread_t id;
    pthread_attr_init(&attributes);
    MUST(pthread_attr_setstacksize(&attributes, given.megabytes << 20) == 0);
    MUST(pthread_create(&id, &attributes, work, NULL) == 0);
    MUST(pthread_join(id, NULL) == 0);
    return ok("stack", NULL);
}
