/* Mappings side by side that never join, for each has another advice; the last one is smaller than
 * what is worth managing, and a child finds zeros there. They are full before anything is managed,
 * so that none of them ever faults by itself: the look at the mappings alone can find them. */
#include "common.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { PART = 256, PARTS = 16, WIPED = PART * PARTS, PAGES = WIPED + 2 };

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    static const int advices[] = {MADV_RANDOM, MADV_NOHUGEPAGE, MADV_SEQUENTIAL, MADV_DONTDUMP};
    const char *preloaded = getenv("LD_PRELOAD");
    /* Nothing may lie behind the last one that it could join. */
    unsigned char *base = map((PAGES + 1) * PAGE), *rest = map(given.pages * PAGE);
    MUST(mprotect(base + PAGES * PAGE, PAGE, PROT_NONE) == 0);
    for (size_t i = 0; i < PARTS; i++)
        MUST(madvise(base + i * PART * PAGE, PART * PAGE, advices[i % 4]) == 0);
    MUST(madvise(base + WIPED * PAGE, 2 * PAGE, MADV_WIPEONFORK) == 0);
    for (size_t page = 0; page < PAGES; page++)
        fill_page(base + page * PAGE, key_of(given.seed, page, 0));
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    for (size_t page = 0; page < given.pages; page++)
        fill_page(rest + page * PAGE, key_of(given.seed, page, 1));
    for (size_t turn = 0; turn < 2; turn++) {
        for (size_t rounds = 0; rounds < given.pages || now() < end; rounds++) {
            size_t page = below(&random, given.pages);
            check_page(rest + page * PAGE, key_of(given.seed, page, 1), "what came later");
        }
        if (turn > 0) break;
        if (preloaded != NULL && strstr(preloaded, "swaptide") != NULL) {
            static unsigned char present[PAGES];
            MUST(mincore(base, PAGES * PAGE, present) == 0);
            size_t resident = 0;
            for (size_t page = 0; page < PAGES; page++) resident += present[page] & 1;
            if (resident > PAGES / 4)
                die("%zu of %d untouched pages stayed in memory", resident, PAGES);
        }
        /* Missing now; and then there is time for it to go out. */
        MUST(madvise(base + WIPED * PAGE, 2 * PAGE, MADV_DONTNEED) == 0);
        for (size_t page = WIPED; page < PAGES; page++)
            fill_page(base + page * PAGE, key_of(given.seed, page, 0));
    }
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        for (size_t page = WIPED; page < PAGES; page++)
            check_page(base + page * PAGE, 0, "what a child does not inherit");
        for (size_t page = 0; page < WIPED; page++)
            check_page(base + page * PAGE, key_of(given.seed, page, 0), "inherited");
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status != 0) die("the child ended with %#x", status);
    for (size_t page = 0; page < PAGES; page++)
        check_page(base + page * PAGE, key_of(given.seed, page, 0), "one of many mappings");
    return ok("neighbours", NULL);
}
