/* Threads whose blocks grow and move: the kernel gives one thread the place that another one has
 * just left, before that one has said so. Whatever the order in which the news come, every block
 * keeps its contents.
 *
 * MODE mremap: by the program's own calls; MODE realloc: by libc's. */
#include "common.h"
#include <malloc.h>

enum { THREADS = 6, LARGEST = 640 };

static struct arguments given;
static double end;

/* Blocks of realloc begin behind its own words: pages are counted from the block's own start. */
static unsigned char *make(size_t pages) {
    if (strcmp(given.mode, "mremap") == 0) return map(pages * PAGE);
    unsigned char *block = malloc(pages * PAGE);
    MUST(block != NULL);
    return block;
}

static unsigned char *grow(unsigned char *block, size_t pages, size_t grown) {
    if (strcmp(given.mode, "mremap") == 0) {
        block = mremap(block, pages * PAGE, grown * PAGE, MREMAP_MAYMOVE);
        MUST(block != MAP_FAILED);
    } else {
        block = realloc(block, grown * PAGE);
        MUST(block != NULL);
    }
    return block;
}

static void drop(unsigned char *block, size_t pages) {
    if (strcmp(given.mode, "mremap") == 0)
        MUST(munmap(block, pages * PAGE) == 0);
    else
        free(block);
}

static void *grower(void *argument) {
    size_t own = (size_t)argument;
    uint64_t state = given.seed * 1000 + own, rounds = 0;
    while (now() < end) {
        uint64_t key = given.seed + (own << 40) + (++rounds << 10);
        size_t pages = 64;
        unsigned char *block = make(pages);
        for (size_t page = 0; page < pages; page++) fill_page(block + page * PAGE, mix(key + page));
        while (pages < LARGEST) {
            state = mix(state);
            size_t grown = pages + 1 + state % 96;
            block = grow(block, pages, grown);
            for (size_t page = pages; page < grown; page++)
                fill_page(block + page * PAGE, mix(key + page));
            pages = grown;
            size_t page = mix(state) % pages;
            check_page(block + page * PAGE, mix(key + page), "while it grows");
        }
        for (size_t page = 0; page < pages; page++)
            check_page(block + page * PAGE, mix(key + page), "grown");
        drop(block, pages);
    }
    return NULL;
}

int main(int count, char **words) {
    given = parse(count, words, "mremap");
    /* Every block in a mapping of its own, however large. */
    MUST(mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1);
    end = now() + given.seconds;
    /* In the way of everything else, so that blocks go out while they grow. */
    unsigned char *ballast = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, 1));
    pthread_t threads[THREADS];
    for (size_t k = 0; k < THREADS; k++)
        MUST(pthread_create(&threads[k], NULL, grower, (void *)k) == 0);
    while (now() < end) {
        for (size_t page = 0; page < given.pages; page++)
            check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "ballast");
    }
    for (size_t k = 0; k < THREADS; k++) MUST(pthread_join(threads[k], NULL) == 0);
    return ok("regrow", given.mode);
}
