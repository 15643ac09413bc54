/* What every program here shares: arguments, a seeded generator, page contents that can be
 * recomputed and so verified.
 *
 * Each program is called MB SECONDS SEED [MODE], works on about MB megabytes for about SECONDS,
 * verifies everything it reads back, and ends with a line that begins with OK. A wrong word ends it
 * with status 3 and says where it was.
 *
 * A page's content follows from a 64-bit key alone. Keys choose among contents that compress
 * differently, as real heaps do: all zero, one word repeated, about 4 to 1, and random.
 */
#ifndef SWAPTIDE_TEST_COMMON_H
#define SWAPTIDE_TEST_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define WORDS (PAGE / sizeof(uint64_t))

struct arguments {
    size_t megabytes, pages;
    double seconds;
    uint64_t seed;
    const char *mode;
};

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("FAILED pid %d: ", (int)getpid());
    vprintf(format, list);
    printf("\n");
    fflush(stdout);
    va_end(list);
    _exit(3);
}

__attribute__((noreturn)) static inline void mismatch(const void *address, uint64_t expected,
                                                      uint64_t found, const char *what) {
    die("%s: at %p expected %016llx, found %016llx", what, address, (unsigned long long)expected,
        (unsigned long long)found);
}

/* For calls that must not fail. */
#define MUST(call)                                                                                 \
    do {                                                                                           \
        if (!(call)) die("%s:%d: %s: %s", __FILE__, __LINE__, #call, strerror(errno));             \
    } while (0)

static inline struct arguments parse(int count, char **words, const char *mode) {
    if (count < 4) {
        fprintf(stderr, "usage: %s MB SECONDS SEED [MODE]\n", words[0]);
        exit(2);
    }
    struct arguments given = {
        .megabytes = strtoul(words[1], NULL, 10),
        .seconds = strtod(words[2], NULL),
        .seed = strtoull(words[3], NULL, 10),
        .mode = count > 4 ? words[4] : mode,
    };
    given.pages = given.megabytes << 8;
    return given;
}

static inline double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static inline uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

static inline uint64_t next(uint64_t *state) {
    return mix((*state)++);
}

static inline uint64_t below(uint64_t *state, uint64_t limit) {
    return next(state) % limit;
}

/* The key of a page: which one it is and which time it was written. Never 0; version 0 means a page
 * that was never written. */
static inline uint64_t key_of(uint64_t seed, uint64_t page, uint64_t version) {
    return mix(mix(seed ^ page << 1) ^ version) | 1;
}

/* The word at index `at` of a page written with `key`. Key 0 stands for a page of zeros. */
static inline uint64_t word_of(uint64_t key, size_t at) {
    unsigned kind = (unsigned)(key >> 8) & 15;
    if (kind == 0 || key == 0) return 0;
    if (kind == 1) return key;
    if (kind < 12) return (at & 3) == 0 ? mix(key + at) & 0xffffff : key;
    return mix(key + at);
}

static inline void fill_page(void *page, uint64_t key) {
    volatile uint64_t *word = page;
    for (size_t at = 0; at < WORDS; at++) word[at] = word_of(key, at);
}

static inline void check_page(const void *page, uint64_t key, const char *what) {
    const volatile uint64_t *word = page;
    for (size_t at = 0; at < WORDS; at++) {
        uint64_t expected = word_of(key, at), found = word[at];
        if (found != expected) mismatch((const void *)(word + at), expected, found, what);
    }
}

/* Looks at three words only: for programs whose subject is many touches. */
static inline void glance_page(const void *page, uint64_t key, const char *what) {
    static const size_t places[] = {0, 257, WORDS - 1};
    const volatile uint64_t *word = page;
    for (size_t i = 0; i < 3; i++) {
        uint64_t expected = word_of(key, places[i]), found = word[places[i]];
        if (found != expected) mismatch((const void *)(word + places[i]), expected, found, what);
    }
}

static inline void *map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(at != MAP_FAILED);
    return at;
}

/* The last line. */
static inline int ok(const char *name, const char *mode) {
    printf(mode ? "OK %s %s\n" : "OK %s\n", name, mode);
    fflush(stdout);
    return 0;
}
#endif
