/* What madvise promises, on memory larger than the budget: advice that must not change data, advice
 * that must drop it, and what a child may and may not see. */
#include "common.h"
#include <sys/wait.h>

#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;
static uint64_t state;

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

/* True if the kernel knows this advice. */
static int advise(size_t from, size_t count, int advice) {
    if (madvise(arena + from * PAGE, count * PAGE, advice) == 0) return 1;
    MUST(errno == EINVAL);
    return 0;
}

static void keeps(size_t from, size_t count, int advice, const char *what) {
    if (!advise(from, count, advice)) die("%s: the kernel does not know it", what);
    check(from, count, what);
}

/* After MADV_FREE a page is what it was or zeros, as a whole; once written again it keeps what was
 * written. */
static void frees(size_t from, size_t count) {
    if (!advise(from, count, MADV_FREE)) return;
    for (size_t page = from; page < from + count; page++) {
        if (page % 2) {
            write_range(page, 1);
            continue;
        }
        volatile uint64_t *at = (volatile uint64_t *)(arena + page * PAGE);
        check_page((const void *)at, at[WORDS - 1] == 0 ? 0 : key(page), "page after MADV_FREE");
    }
    for (int i = 0; i < 64; i++) check(below(&state, given.pages / 4), 1, "page");
    for (size_t page = from | 1; page < from + count; page += 2)
        check(page, 1, "page written after MADV_FREE");
    write_range(from, count);
}

/* MADV_WIPEONFORK: the child sees zeros, the parent its data. */
static void wipes_on_fork(size_t from, size_t count) {
    if (!advise(from, count, MADV_WIPEONFORK)) return;
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        for (size_t page = from; page < from + count; page++)
            check_page(arena + page * PAGE, 0, "wiped page in the child");
        check(0, 64, "other page in the child");
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check(from, count, "page in the parent of a child that has it wiped");
    MUST(advise(from, count, MADV_KEEPONFORK));
}

/* MADV_DONTFORK: the range is not there in the child; the parent's stays. */
static void does_not_fork(size_t from, size_t count) {
    MUST(advise(from, count, MADV_DONTFORK));
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        unsigned char resident;
        if (mincore(arena + from * PAGE, PAGE, &resident) == 0 || errno != ENOMEM)
            die("MADV_DONTFORK: the range is there in the child");
        check(0, 64, "other page in the child");
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check(from, count, "page in the parent of a child that has it not");
    MUST(advise(from, count, MADV_DOFORK));
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    version = calloc(given.pages, sizeof *version);
    MUST(version != NULL);
    write_range(0, given.pages);
    uint64_t random = mix(given.seed);
    state = mix(random);
    double end = now() + given.seconds;
    for (size_t rounds = 0; rounds < 60 || now() < end; rounds++) {
        /* The first quarter is never given away: it is what the children look at. */
        size_t length = 1 + below(&random, 512),
               from = given.pages / 4 + below(&random, given.pages * 3 / 4 - length);
        switch (rounds % 15) {
        case 0: keeps(from, length, MADV_SEQUENTIAL, "page after MADV_SEQUENTIAL"); break;
        case 1: keeps(from, length, MADV_RANDOM, "page after MADV_RANDOM"); break;
        case 2: keeps(from, length, MADV_NORMAL, "page after MADV_NORMAL"); break;
        case 3: keeps(from, length, MADV_WILLNEED, "page after MADV_WILLNEED"); break;
        case 4: keeps(from, length, MADV_COLD, "page after MADV_COLD"); break;
        case 5: keeps(from, length, MADV_PAGEOUT, "page after MADV_PAGEOUT"); break;
        case 6: keeps(from, length, MADV_POPULATE_READ, "page after MADV_POPULATE_READ"); break;
        case 7: keeps(from, length, MADV_POPULATE_WRITE, "page after MADV_POPULATE_WRITE"); break;
        case 8: keeps(from, length, MADV_DONTDUMP, "page after MADV_DONTDUMP"); break;
        case 9:
            MUST(advise(from, length, MADV_DONTNEED));
            memset(version + from, 0, length * sizeof *version);
            check(from, length, "page after MADV_DONTNEED");
            break;
        case 10: frees(from, length); break;
        case 11: wipes_on_fork(from, length); break;
        case 12: does_not_fork(from, length); break;
        case 13: write_range(from, length); break;
        default: check(from, length, "page");
        }
    }
    check(0, given.pages, "page at the end");
    return ok("advice", NULL);
}
