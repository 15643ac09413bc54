/* A mapping of 1 TiB of which MB megabytes are touched, in single pages and small groups far from
 * each other. */
#include "common.h"

#define TOTAL_PAGES (1ull << 28)

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    unsigned char *arena = map(TOTAL_PAGES * PAGE);
    size_t groups = given.pages / 8;
    /* Group g lies in its own strip of the mapping; half of the groups are 1 page, half are 15: 8
     * on average. */
    uint64_t strip = TOTAL_PAGES / groups;
    uint32_t *version = calloc(groups, sizeof *version);
    MUST(version != NULL);
    double end = now() + given.seconds;
    uint64_t random = mix(given.seed);
    for (size_t rounds = 0; rounds < 2 * groups || now() < end; rounds++) {
        size_t group = rounds < groups ? rounds : below(&random, groups);
        uint64_t place = mix(given.seed + group);
        size_t pages = place & 1 ? 15 : 1, first = group * strip + place % (strip - 16);
        unsigned char *at = arena + first * PAGE;
        uint32_t old = version[group];
        for (size_t page = 0; page < pages; page++)
            check_page(at + page * PAGE, old ? key_of(given.seed, first + page, old) : 0,
                       "page of a sparse mapping");
        /* Next to a group lies nothing. */
        if (rounds % 64 == 0)
            check_page(at + pages * PAGE, 0, "page never written in a sparse mapping");
        unsigned choice = (unsigned)below(&random, 8);
        if (choice == 0 && rounds >= groups) {
            MUST(madvise(at, pages * PAGE, MADV_DONTNEED) == 0);
            version[group] = 0;
        } else if (choice < 4 || old == 0) {
            version[group]++;
            for (size_t page = 0; page < pages; page++)
                fill_page(at + page * PAGE, key_of(given.seed, first + page, version[group]));
        }
    }
    MUST(munmap(arena, TOTAL_PAGES * PAGE) == 0);
    return ok("sparse", NULL);
}
