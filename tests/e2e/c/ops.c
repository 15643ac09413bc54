/* Random munmap, mmap, mremap, madvise, mprotect and mlock over an arena, and a model of what
 * each page must hold. MODE single or threads (4 arenas at once, in one address space). */
#include "common.h"

enum state {
    GONE,
    HELD,
    LAZY
}; /* LAZY: after MADV_FREE, the old content or zeros until it is written again */

struct arena {
    unsigned char *base;
    size_t pages;
    uint8_t *state;
    uint32_t *version; /* 0: zeros */
    uint64_t seed, random;
    double end;
    size_t rounds;
};

/* With one thread a hole stays a hole, and what maps later may land in it. With several, another
 * thread's mapping would land there and be mapped over: the hole is reserved, and until it is,
 * nothing else maps. */
static int many;
static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t all_started;

static void reserve_hole(unsigned char *at, size_t bytes) {
    if (many)
        MUST(mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                  0) == at);
}

static uint64_t key(struct arena *arena, size_t version) {
    return version ? key_of(arena->seed, 0, version) : 0;
}

/* Versions are unique over the arena, so a page can move and its key needs no address. */
static void write_page(struct arena *arena, size_t page, uint32_t *serial) {
    arena->version[page] = ++*serial;
    arena->state[page] = HELD;
    fill_page(arena->base + page * PAGE, key(arena, *serial));
}

static void verify_page(struct arena *arena, size_t page, const char *what) {
    const unsigned char *at = arena->base + page * PAGE;
    if (arena->state[page] == GONE) return;
    if (arena->state[page] == LAZY) {
        uint64_t first = ((const volatile uint64_t *)at)[WORDS - 1];
        check_page(at, first == 0 ? 0 : key(arena, arena->version[page]), "page after MADV_FREE");
        return;
    }
    check_page(at, key(arena, arena->version[page]), what);
}

static void set(struct arena *arena, size_t from, size_t count, enum state state) {
    for (size_t page = from; page < from + count; page++) {
        arena->state[page] = (uint8_t)state;
        arena->version[page] = 0;
    }
}

/* True if all of the range is mapped. */
static int mapped(struct arena *arena, size_t from, size_t count) {
    for (size_t page = from; page < from + count; page++)
        if (arena->state[page] == GONE) return 0;
    return 1;
}

static void map_fixed(struct arena *arena, size_t from, size_t count) {
    unsigned char *at = arena->base + from * PAGE;
    MUST(mmap(at, count * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at);
    set(arena, from, count, HELD);
}

/* A mapping of its own that grows, moves and shrinks by mremap. */
static void grow_and_shrink(struct arena *arena, uint32_t *serial) {
    size_t pages = 1 + below(&arena->random, 128), more = pages + 1 + below(&arena->random, 128);
    pthread_mutex_lock(&mapping);
    unsigned char *at = map(pages * PAGE);
    pthread_mutex_unlock(&mapping);
    uint32_t first = *serial + 1;
    for (size_t page = 0; page < pages; page++) fill_page(at + page * PAGE, key(arena, ++*serial));
    pthread_mutex_lock(&mapping);
    at = mremap(at, pages * PAGE, more * PAGE, MREMAP_MAYMOVE);
    pthread_mutex_unlock(&mapping);
    MUST(at != MAP_FAILED);
    for (size_t page = 0; page < more; page++)
        check_page(at + page * PAGE, page < pages ? key(arena, first + page) : 0,
                   "page after mremap grew it");
    at = mremap(at, more * PAGE, PAGE, 0);
    MUST(at != MAP_FAILED);
    check_page(at, key(arena, first), "page after mremap shrank it");
    MUST(munmap(at, PAGE) == 0);
}

static void move_range(struct arena *arena, size_t from, size_t count) {
    size_t to = below(&arena->random, arena->pages - count);
    if (to < from + count && from < to + count) return;
    unsigned char *source = arena->base + from * PAGE, *target = arena->base + to * PAGE;
    pthread_mutex_lock(&mapping);
    /* mremap takes one mapping at a time: a range that spans several may be refused, and then
     * nothing has moved. */
    if (mremap(source, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) ==
        MAP_FAILED) {
        MUST(errno == EFAULT || errno == EINVAL);
        /* The target has been unmapped all the same on some kernels: map both afresh. */
        map_fixed(arena, to, count);
        map_fixed(arena, from, count);
        pthread_mutex_unlock(&mapping);
        return;
    }
    reserve_hole(source, count * PAGE);
    pthread_mutex_unlock(&mapping);
    memcpy(arena->state + to, arena->state + from, count);
    memcpy(arena->version + to, arena->version + from, count * sizeof *arena->version);
    set(arena, from, count, GONE);
    for (size_t page = to; page < to + count; page += 1 + count / 4)
        verify_page(arena, page, "page after mremap moved it");
}

static void protect(struct arena *arena, size_t from, size_t count) {
    unsigned char *at = arena->base + from * PAGE;
    int read_only = below(&arena->random, 2) == 0;
    MUST(mprotect(at, count * PAGE, read_only ? PROT_READ : PROT_NONE) == 0);
    if (read_only) verify_page(arena, from, "page while read-only");
    MUST(mprotect(at, count * PAGE, PROT_READ | PROT_WRITE) == 0);
    verify_page(arena, from + count - 1, "page after mprotect");
}

static void lock(struct arena *arena, size_t from, size_t count) {
    unsigned char *at = arena->base + from * PAGE;
    if (count > 64) count = 64;
    if (mlock(at, count * PAGE) != 0) {
        MUST(errno == ENOMEM || errno == EPERM || errno == EAGAIN);
        return;
    }
    for (size_t page = from; page < from + count; page++)
        verify_page(arena, page, "page while locked");
    MUST(munlock(at, count * PAGE) == 0);
}

static void *work(void *given) {
    struct arena *arena = given;
    uint32_t serial = 0;
    pthread_barrier_wait(&all_started);
    for (size_t page = 0; page < arena->pages; page++) write_page(arena, page, &serial);
    while (arena->rounds < 200 || now() < arena->end) {
        arena->rounds++;
        size_t count = 1 + below(&arena->random, below(&arena->random, 8) ? 64 : 1024);
        size_t from = below(&arena->random, arena->pages - count);
        unsigned char *at = arena->base + from * PAGE;
        unsigned choice = (unsigned)below(&arena->random, 24);
        if (choice == 0) {
            pthread_mutex_lock(&mapping);
            MUST(munmap(at, count * PAGE) == 0);
            reserve_hole(at, count * PAGE);
            pthread_mutex_unlock(&mapping);
            set(arena, from, count, GONE);
            continue;
        }
        if (choice == 1) {
            map_fixed(arena, from, count);
            continue;
        }
        if (choice == 2) {
            grow_and_shrink(arena, &serial);
            continue;
        }
        if (!mapped(arena, from, count)) {
            /* Holes are mapped again and written, or the arena would slowly empty itself. */
            if (choice < 14)
                for (size_t page = from; page < from + count; page++)
                    if (arena->state[page] == GONE) {
                        map_fixed(arena, page, 1);
                        write_page(arena, page, &serial);
                    }
            continue;
        }
        if (choice < 9) {
            for (size_t page = from; page < from + count; page++) verify_page(arena, page, "page");
        } else if (choice < 15) {
            for (size_t page = from; page < from + count; page++) write_page(arena, page, &serial);
        } else if (choice < 17) {
            MUST(madvise(at, count * PAGE, MADV_DONTNEED) == 0);
            set(arena, from, count, HELD);
        } else if (choice < 18) {
            MUST(madvise(at, count * PAGE, MADV_FREE) == 0);
            for (size_t page = from; page < from + count; page++) arena->state[page] = LAZY;
        } else if (choice < 20) {
            move_range(arena, from, count);
        } else if (choice < 22) {
            protect(arena, from, count);
        } else {
            lock(arena, from, count);
        }
    }
    for (size_t page = 0; page < arena->pages; page++) verify_page(arena, page, "page at the end");
    return NULL;
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "single");
    int threads = strcmp(given.mode, "threads") == 0 ? 4 : 1;
    struct arena arenas[4] = {0};
    many = threads > 1;
    MUST(pthread_barrier_init(&all_started, NULL, (unsigned)threads) == 0);
    pthread_t ids[4];
    size_t rounds = 0;
    for (int i = 0; i < threads; i++) {
        struct arena *arena = &arenas[i];
        arena->pages = given.pages / threads;
        arena->base = map(arena->pages * PAGE);
        arena->state = calloc(arena->pages, 1);
        arena->version = calloc(arena->pages, sizeof *arena->version);
        MUST(arena->state && arena->version);
        arena->seed = mix(given.seed + i);
        arena->random = mix(arena->seed);
        arena->end = now() + given.seconds;
        MUST(pthread_create(&ids[i], NULL, work, arena) == 0);
    }
    for (int i = 0; i < threads; i++) {
        MUST(pthread_join(ids[i], NULL) == 0);
        rounds += arenas[i].rounds;
    }
    fprintf(stderr, "%zu operations\n", rounds);
    return ok("ops", given.mode);
}
