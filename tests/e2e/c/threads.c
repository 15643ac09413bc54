/* Threads over one arena. MODE touch: 8 threads write and verify pages that lie side by side;
 * storm: threads come and go, each with a stack it fills and verifies, while two others keep the
 * arena moving; c11: the same with the threads of C11; same: 8 threads go over the same pages in
 * the same order, new ones at first, and each verifies and writes words of its own in each page. */
#include "common.h"

#include <threads.h>

#define MOST 8

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;
static pthread_mutex_t stripes[256];
static double end;
static atomic_int stop;

static void write_page(size_t page, uint32_t number) {
    version[page] = number;
    fill_page(arena + page * PAGE, key_of(given.seed, page, number));
}

/* Each thread writes the pages it owns, every MOST-th one, and reads its neighbours' under their
 * stripe's lock. */
static void *touch(void *argument) {
    size_t self = (size_t)argument;
    uint64_t random = mix(given.seed + self);
    uint32_t number = 1;
    size_t own = given.pages / MOST, rounds = 0;
    while (!atomic_load(&stop) && (rounds < own || now() < end)) {
        rounds++;
        size_t page = below(&random, own) * MOST + self;
        pthread_mutex_t *stripe = &stripes[page % 256];
        pthread_mutex_lock(stripe);
        check_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "own page");
        if (rounds % 3 == 0) write_page(page, ++number);
        pthread_mutex_unlock(stripe);
        page = below(&random, given.pages);
        stripe = &stripes[page % 256];
        pthread_mutex_lock(stripe);
        glance_page(arena + page * PAGE, key_of(given.seed, page, version[page]),
                    "another thread's page");
        pthread_mutex_unlock(stripe);
    }
    return NULL;
}

static void *short_lived(void *argument) {
    uint64_t seed = (uint64_t)(size_t)argument;
    unsigned char space[200 << 10];
    unsigned char *page = (unsigned char *)(((uintptr_t)space + PAGE - 1) & ~(PAGE - 1));
    for (size_t i = 0; i < 48; i++) fill_page(page + i * PAGE, key_of(seed, i, 1));
    size_t quiet = seed % given.pages / MOST * MOST;
    glance_page(arena + quiet * PAGE, key_of(given.seed, quiet, 1), "page that is never written");
    for (size_t i = 0; i < 48; i++) check_page(page + i * PAGE, key_of(seed, i, 1), "own stack");
    return NULL;
}

static int short_lived_c11(void *argument) {
    return short_lived(argument) != NULL;
}

/* In the storm, pages 0, 8, 16, ... stay as they are; the two workers own others. */
static void *worker(void *argument) {
    size_t self = (size_t)argument + 1;
    touch((void *)self);
    return NULL;
}

/* What a thread has written to a page, from the round that it is in. */
static uint64_t own_word(size_t self, size_t page, uint32_t round) {
    return round == 0 ? 0 : key_of(given.seed ^ (self + 1) << 40, page, round);
}

/* The words of a thread in a page: its first, and one of its last. */
static uint64_t *own_words(size_t self, size_t page) {
    return (uint64_t *)(arena + page * PAGE) + self * 8;
}

static pthread_barrier_t together;

/* A page that a thread brings in while another one brings it in, too, and that comes in twice or
 * without what was written to it, has lost words of another thread. */
static void *same(void *argument) {
    size_t self = (size_t)argument;
    uint64_t random = mix(given.seed);
    uint32_t *round = calloc(given.pages, sizeof *round);
    MUST(round != NULL);
    for (size_t turn = 0;; turn++) {
        if (turn % 256 == 0) pthread_barrier_wait(&together);
        /* The first ones in order: they are new, and grow in windows. */
        size_t page = turn < given.pages / 2 ? turn : below(&random, given.pages);
        uint64_t *own = own_words(self, page);
        for (size_t k = 0; k < 8; k += 7) {
            uint64_t expected = own_word(self, page, round[page]);
            if (own[k] != expected) mismatch(&own[k], expected, own[k], "own word");
        }
        round[page]++;
        own[0] = own[7] = own_word(self, page, round[page]);
        if (turn % 4096 == 4095) {
            /* All end in the same turn. */
            pthread_barrier_wait(&together);
            if (self == 0 && turn >= 2 * given.pages && now() >= end) atomic_store(&stop, 1);
            pthread_barrier_wait(&together);
            if (atomic_load(&stop)) break;
        }
    }
    for (size_t page = 0; page < given.pages; page++) {
        uint64_t expected = own_word(self, page, round[page]), *own = own_words(self, page);
        if (own[0] != expected) mismatch(own, expected, own[0], "own word at the end");
    }
    free(round);
    return NULL;
}

int main(int count, char **words) {
    given = parse(count, words, "touch");
    arena = map(given.pages * PAGE);
    if (strcmp(given.mode, "same") == 0) {
        pthread_t ids[MOST];
        MUST(pthread_barrier_init(&together, NULL, MOST) == 0);
        end = now() + given.seconds;
        for (size_t i = 0; i < MOST; i++)
            MUST(pthread_create(&ids[i], NULL, same, (void *)i) == 0);
        for (size_t i = 0; i < MOST; i++) MUST(pthread_join(ids[i], NULL) == 0);
        return ok("threads", given.mode);
    }
    version = calloc(given.pages, sizeof *version);
    MUST(version != NULL);
    for (size_t i = 0; i < 256; i++) pthread_mutex_init(&stripes[i], NULL);
    for (size_t page = 0; page < given.pages; page++) write_page(page, 1);
    end = now() + given.seconds;
    pthread_t ids[MOST];
    if (strcmp(given.mode, "touch") == 0) {
        for (size_t i = 0; i < MOST; i++)
            MUST(pthread_create(&ids[i], NULL, touch, (void *)i) == 0);
        for (size_t i = 0; i < MOST; i++) MUST(pthread_join(ids[i], NULL) == 0);
    } else {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 512 << 10);
        for (size_t i = 0; i < 2; i++) MUST(pthread_create(&ids[i], NULL, worker, (void *)i) == 0);
        uint64_t seed = mix(given.seed);
        int c11 = strcmp(given.mode, "c11") == 0;
        for (size_t wave = 0; wave < 20 || now() < end; wave++) {
            pthread_t wave_ids[16];
            thrd_t c11_ids[16];
            for (size_t i = 0; c11 && i < 16; i++)
                MUST(thrd_create(&c11_ids[i], short_lived_c11, (void *)(size_t)next(&seed)) ==
                     thrd_success);
            for (size_t i = 0; c11 && i < 16; i++) {
                int result;
                MUST(thrd_join(c11_ids[i], &result) == thrd_success && result == 0);
            }
            for (size_t i = 0; !c11 && i < 16; i++)
                MUST(pthread_create(&wave_ids[i], &attributes, short_lived,
                                    (void *)(size_t)next(&seed)) == 0);
            for (size_t i = 0; !c11 && i < 16; i++) MUST(pthread_join(wave_ids[i], NULL) == 0);
        }
        atomic_store(&stop, 1);
        for (size_t i = 0; i < 2; i++) MUST(pthread_join(ids[i], NULL) == 0);
    }
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "page at the end");
    return ok("threads", given.mode);
}
