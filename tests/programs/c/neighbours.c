/* Mappings side by side that never join, for each has another advice; the last one is smaller than what is worth managing. They are full before anything
 * is managed, so that none of them ever faults by itself: the look at the mappings alone can find them. */
#include "common.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PART = 256, PARTS = 16, PAGES = PART * PARTS + 2 };

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    static const int advices[] = {MADV_RANDOM, MADV_NOHUGEPAGE, MADV_SEQUENTIAL, MADV_DONTDUMP};
    /* Nothing may lie behind the last one that it could join. */
    unsigned char *base = map((PAGES + 1) * PAGE), *rest = map(given.pages * PAGE);
    MUST(mprotect(base + PAGES * PAGE, PAGE, PROT_NONE) == 0);
    for (size_t i = 0; i <= PARTS; i++) MUST(madvise(base + i * PART * PAGE, (i < PARTS ? PART : 2) * PAGE, advices[i % 4]) == 0);
    for (size_t page = 0; page < PAGES; page++) fill_page(base + page * PAGE, key_of(given.seed, page, 0));
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    for (size_t page = 0; page < given.pages; page++) fill_page(rest + page * PAGE, key_of(given.seed, page, 1));
    for (size_t rounds = 0; rounds < given.pages || now() < end; rounds++) {
        size_t page = below(&random, given.pages);
        check_page(rest + page * PAGE, key_of(given.seed, page, 1), "what came later");
    }
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded != NULL && strstr(preloaded, "swaptide") != NULL) {
        static unsigned char present[PAGES];
        MUST(mincore(base, PAGES * PAGE, present) == 0);
        size_t resident = 0;
        for (size_t page = 0; page < PAGES; page++) resident += present[page] & 1;
        if (resident > PAGES / 4) die("%zu of %d pages that nobody touched stayed in memory", resident, PAGES);
    }
    for (size_t page = 0; page < PAGES; page++) check_page(base + page * PAGE, key_of(given.seed, page, 0), "one of many mappings");
    return ok("neighbours", NULL);
}
