/* Answers requests, each after a pause of a millisecond. Says how long the median and the slowest
 * of a hundred took, from the third second on.
 *
 * MODE  query     a request reads 256 pages at random
 *       touch     32, of each three words
 */
#include "common.h"

enum { MAX_REQUESTS = 1 << 20 };

static uint32_t took_ns[MAX_REQUESTS];

static int compared(const void *one, const void *other) {
    uint32_t first = *(const uint32_t *)one, second = *(const uint32_t *)other;
    return (first > second) - (first < second);
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "query");
    char *memory = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(memory + page * PAGE, key_of(given.seed, page, 1));
    int touches = strcmp(given.mode, "touch") == 0;
    uint64_t random = mix(given.seed);
    double begin = now() + 3, end = begin + given.seconds;
    size_t requests = 0;
    while (now() < end && requests < MAX_REQUESTS) {
        double at = now();
        for (int left = touches ? 32 : 256; left > 0; left--) {
            size_t page = below(&random, given.pages);
            uint64_t key = key_of(given.seed, page, 1);
            (touches ? glance_page : check_page)(memory + page * PAGE, key, "a request");
        }
        double took = now() - at;
        if (at >= begin) took_ns[requests++] = took < 4 ? (uint32_t)(took * 1e9) : UINT32_MAX;
        usleep(1000);
    }
    if (requests < 100) die("%zu requests only", requests);
    qsort(took_ns, requests, sizeof *took_ns, compared);
    printf("median %u ns, p99 %u ns, %zu requests\n", took_ns[requests / 2],
           took_ns[requests / 100 * 99], requests);
    return ok("responds", given.mode);
}
