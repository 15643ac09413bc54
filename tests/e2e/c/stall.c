/* Programs that make almost no progress for lack of memory, and some that do make progress.
 *
 * MODE  same    touches pages at random, each of one repeated word
 *       noise   the same, pages that do not compress
 *       work    the same, and computes for most of the time
 *       hot     touches a third of its pages at random, SECONDS thousand times
 */
#include "common.h"

static uint64_t word_at(uint64_t seed, size_t page, size_t at, int same) {
    return mix(seed + page * WORDS + (same ? 0 : at));
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "same");
    int same = strcmp(given.mode, "noise") != 0;
    int works = strcmp(given.mode, "work") == 0, hot = strcmp(given.mode, "hot") == 0;
    uint64_t *memory = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        for (size_t at = 0; at < WORDS; at++)
            memory[page * WORDS + at] = word_at(given.seed, page, at, same);
    uint64_t random = mix(given.seed ^ 1);
    volatile uint64_t sum = 0;
    double end = now() + given.seconds;
    size_t touches = hot ? (size_t)given.seconds * 1000 : SIZE_MAX;
    size_t among = hot ? given.pages / 3 : given.pages;
    for (size_t touch = 0; touch < touches; touch++) {
        if (!hot && touch % 16 == 0 && now() >= end) break;
        size_t page = below(&random, among), at = below(&random, WORDS);
        uint64_t *word = &memory[page * WORDS + at];
        uint64_t expected = word_at(given.seed, page, at, same);
        if (*word != expected) mismatch(word, expected, *word, "page touched at random");
        double until = works ? now() + 300e-6 : 0;
        while (works && now() < until) sum += mix(sum);
    }
    return ok("stall", given.mode);
}
