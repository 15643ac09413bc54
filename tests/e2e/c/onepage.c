/* 64 threads touch one swapped page at the same moment, page after page: every one of them must see
 * its content. */
#include "common.h"

#define THREADS 64

static struct arguments given;
static unsigned char *arena;
static pthread_barrier_t barrier;
static size_t target;
static atomic_int done;

static void *touch(void *argument) {
    size_t self = (size_t)argument;
    for (;;) {
        pthread_barrier_wait(&barrier);
        if (atomic_load(&done)) return NULL;
        volatile uint64_t *words = (volatile uint64_t *)(arena + target * PAGE);
        uint64_t key = key_of(given.seed, target, 1);
        /* A quarter of the threads write: each puts back a word that is its own. */
        if (self % 4 == 0) words[self] = word_of(key, self);
        for (size_t at = self; at < WORDS; at += THREADS)
            if (words[at] != word_of(key, at))
                mismatch((const void *)(words + at), word_of(key, at), words[at],
                         "page under many threads");
        pthread_barrier_wait(&barrier);
    }
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    MUST(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    pthread_t ids[THREADS];
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_create(&ids[i], NULL, touch, (void *)i) == 0);
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    size_t rounds = 0;
    for (; rounds < 500 || now() < end; rounds++) {
        /* Some pages at random, some neighbours in turn: both ways in which readahead and folios
         * meet such a page. */
        target = rounds % 3 ? below(&random, given.pages) : (target + 1) % given.pages;
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
    }
    atomic_store(&done, 1);
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_join(ids[i], NULL) == 0);
    fprintf(stderr, "%zu pages\n", rounds);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page at the end");
    return ok("onepage", NULL);
}
