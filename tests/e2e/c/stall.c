/* Programs that make almost no progress for lack of memory, and some that do make progress.
 *
 * MODE  same    touches pages at random, each of one repeated word
 *       noise   the same, pages that do not compress
 *       work    the same, and computes for most of the time
 *       rests   thirty threads do the same, each of which sleeps after each page
 *       hot     touches a third of its pages at random, SECONDS thousand times
 */
#include "common.h"
#include <pthread.h>

enum { THREADS = 30, REST_US = 1000 };

static uint64_t word_at(uint64_t seed, size_t page, size_t at, int same) {
    return mix(seed + page * WORDS + (same ? 0 : at));
}

static struct arguments given;
static uint64_t *memory;
static double end;

static void *touch_and_rest(void *number) {
    uint64_t random = mix(given.seed ^ (2 + (uintptr_t)number));
    while (now() < end) {
        size_t page = below(&random, given.pages), at = below(&random, WORDS);
        uint64_t *word = &memory[page * WORDS + at];
        uint64_t expected = word_at(given.seed, page, at, 1);
        if (*word != expected) mismatch(word, expected, *word, "page touched by a thread");
        usleep(REST_US);
    }
    return NULL;
}

static int rest(void) {
    pthread_t threads[THREADS];
    for (uintptr_t at = 0; at < THREADS; at++)
        if (pthread_create(&threads[at], NULL, touch_and_rest, (void *)at)) die("a thread");
    for (size_t at = 0; at < THREADS; at++) pthread_join(threads[at], NULL);
    return ok("stall", given.mode);
}

int main(int count, char **words) {
    given = parse(count, words, "same");
    int same = strcmp(given.mode, "noise") != 0;
    int works = strcmp(given.mode, "work") == 0, hot = strcmp(given.mode, "hot") == 0;
    memory = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        for (size_t at = 0; at < WORDS; at++)
            memory[page * WORDS + at] = word_at(given.seed, page, at, same);
    uint64_t random = mix(given.seed ^ 1);
    volatile uint64_t sum = 0;
    end = now() + given.seconds;
    if (strcmp(given.mode, "rests") == 0) return rest();
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
