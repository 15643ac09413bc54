/* An arena that asks for huge pages: filled, verified, parts of its huge pages given back,
 * protected and moved. */
#include "common.h"

#define HUGE (2ul << 20)
#define PER_HUGE (HUGE / PAGE)

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;

static uint64_t key(size_t page) {
    return version[page] ? key_of(given.seed, page, version[page]) : 0;
}

static void check(size_t from, size_t count, const char *what) {
    for (size_t page = from; page < from + count; page++)
        check_page(arena + page * PAGE, key(page), what);
}

static void write_range(size_t from, size_t count) {
    for (size_t page = from; page < from + count; page++) {
        version[page]++;
        fill_page(arena + page * PAGE, key(page));
    }
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    given.pages &= ~(PER_HUGE - 1);
    unsigned char *raw = map(given.pages * PAGE + HUGE);
    arena = (unsigned char *)(((uintptr_t)raw + HUGE - 1) & ~(HUGE - 1));
    version = calloc(given.pages, sizeof *version);
    MUST(version != NULL);
    MUST(madvise(arena, given.pages * PAGE, MADV_HUGEPAGE) == 0 || errno == EINVAL);
    write_range(0, given.pages);
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    for (size_t rounds = 0; rounds < 100 || now() < end; rounds++) {
        size_t huge = below(&random, given.pages / PER_HUGE) * PER_HUGE;
        size_t length = 1 + below(&random, PER_HUGE / 4),
               from = huge + below(&random, PER_HUGE - length);
        switch (below(&random, 8)) {
        case 0: /* part of a huge page given back */
            MUST(madvise(arena + from * PAGE, length * PAGE, MADV_DONTNEED) == 0);
            memset(version + from, 0, length * sizeof *version);
            break;
        case 1: /* all of it */
            MUST(madvise(arena + huge * PAGE, HUGE, MADV_DONTNEED) == 0);
            memset(version + huge, 0, PER_HUGE * sizeof *version);
            break;
        case 2: /* a protection that splits it */
            MUST(mprotect(arena + from * PAGE, length * PAGE, PROT_READ) == 0);
            check(from, length, "read-only part of a huge page");
            MUST(mprotect(arena + from * PAGE, length * PAGE, PROT_READ | PROT_WRITE) == 0);
            break;
        case 3: /* no more huge pages here, and again */
            MUST(madvise(arena + huge * PAGE, HUGE, MADV_NOHUGEPAGE) == 0 || errno == EINVAL);
            check(from, length, "huge page after MADV_NOHUGEPAGE");
            MUST(madvise(arena + huge * PAGE, HUGE, MADV_HUGEPAGE) == 0 || errno == EINVAL);
            break;
        case 4:
        case 5: write_range(from, length); break;
        default: check(huge, PER_HUGE, "huge page");
        }
    }
    check(0, given.pages, "huge page at the end");
    return ok("hugepages", NULL);
}
