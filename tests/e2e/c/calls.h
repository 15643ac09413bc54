/* The frame of the programs calls_*.c: system calls with their memory out, or going out or coming
 * in during the call.
 *
 * A test is a function that asks for all the memory its system calls use by `buffer` or `text`,
 * fills it, calls `out` and makes the calls. What it says by `say` is printed. The output must be
 * the one of a run without swaptide, and the same in each repetition. Every object lies over the
 * end of a page where its size allows it, so that half of it may be there and half of it out. The
 * rest of its pages has a pattern, which nothing may change.
 *
 * MODE out: `out` takes all objects of the test out and looks by mincore whether they are. MODE
 * moving: a second thread takes them out in a loop during the whole test, and the calls bring them
 * in.
 */
#ifndef SWAPTIDE_TEST_CALLS_H
#define SWAPTIDE_TEST_CALLS_H

#include "common.h"
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define PATTERN 0xa5
#define MOST_PIECES 96
#define ARENA_PAGES 2048ul

/* Objects and the pages they lie on. */
static struct piece {
    unsigned char *page, *at;
    size_t pages, size;
} pieces[MOST_PIECES];
static atomic_size_t piece_count;

static struct arguments given;
static unsigned char *arena;
static size_t arena_next;
static int is_moving, is_managed;
static atomic_int mover_may_run;
static atomic_ulong progress;
static const char *test_name;
static char said[4096], said_before[4096];
static size_t said_length;
static size_t pages_asked_out, pages_out, test_pages_asked, test_pages_out;

/* Adds to what the test prints. */
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    va_list list;
    va_start(list, format);
    int length = vsnprintf(said + said_length, sizeof said - said_length, format, list);
    va_end(list);
    MUST(length >= 0 && said_length + (size_t)length < sizeof said);
    said_length += (size_t)length;
}

/* Prints the answer of one call: its result, or its error. */
static long answer(const char *what, long result) {
    if (result == -1)
        say(" %s=%s", what, strerrorname_np(errno));
    else
        say(" %s=%ld", what, result);
    return result;
}

/* For results that differ from run to run: numbers of processes, descriptors, times. */
static long works(const char *what, long result) {
    if (result == -1)
        say(" %s=%s", what, strerrorname_np(errno));
    else
        say(" %s=ok", what);
    return result;
}

/* An object of `size` bytes on pages of its own, all zeros, aligned to `align` (a power of two). */
static void *buffer_aligned(size_t size, size_t align) {
    size_t before = size >= 2 * align ? size / 2 : size;
    if (before > PAGE / 2) before = PAGE / 2;
    before = (before + align - 1) & ~(align - 1);
    if (align >= PAGE) before = PAGE;
    size_t pages = (PAGE - before + size + PAGE - 1) / PAGE;
    size_t number = atomic_load(&piece_count);
    MUST(number < MOST_PIECES && arena_next + pages <= ARENA_PAGES);
    struct piece *piece = &pieces[number];
    piece->page = arena + arena_next * PAGE;
    piece->at = piece->page + PAGE - before;
    piece->pages = pages;
    piece->size = size;
    /* One page between two objects is never used. */
    arena_next += pages + 1;
    memset(piece->page, PATTERN, pages * PAGE);
    memset(piece->at, 0, size);
    atomic_store(&piece_count, number + 1);
    return piece->at;
}

static void *buffer(size_t size) {
    return buffer_aligned(size, 16);
}

/* A copy of `value` on a page of its own. */
static char *text(const char *value) {
    size_t size = strlen(value) + 1;
    char *at = buffer_aligned(size, 1);
    memcpy(at, value, size);
    return at;
}

/* Fills an object with numbered bytes that follow from `salt`. */
static void fill(void *at, size_t size, uint64_t salt) {
    unsigned char *byte = at;
    for (size_t i = 0; i < size; i++) byte[i] = (unsigned char)mix(salt + i / 8) ^ (unsigned char)i;
}

static int is_filled(const void *at, size_t size, uint64_t salt) {
    const unsigned char *byte = at;
    for (size_t i = 0; i < size; i++)
        if (byte[i] != ((unsigned char)mix(salt + i / 8) ^ (unsigned char)i)) return 0;
    return 1;
}

static void take_out_all(void) {
    size_t count = atomic_load(&piece_count);
    for (size_t i = 0; i < count; i++)
        madvise(pieces[i].page, pieces[i].pages * PAGE, MADV_PAGEOUT);
}

/* How many pages of the test's objects are in memory. */
static size_t pages_in(size_t *all) {
    unsigned char there[ARENA_PAGES];
    size_t in = 0;
    *all = 0;
    for (size_t i = 0; i < atomic_load(&piece_count); i++) {
        MUST(mincore(pieces[i].page, pieces[i].pages * PAGE, there) == 0);
        for (size_t page = 0; page < pieces[i].pages; page++) in += there[page] & 1;
        *all += pieces[i].pages;
    }
    return in;
}

/* Everything the test uses goes out now. In MODE moving the other thread sees to it. */
static void out(void) {
    if (is_moving || !is_managed) return;
    size_t all = 0, in = 0;
    for (int turn = 0; turn < 40; turn++) {
        take_out_all();
        in = pages_in(&all);
        if (in == 0) break;
        usleep(500);
    }
    if (getenv("CALLS_VERBOSE")) fprintf(stderr, "%s: %zu of %zu in\n", test_name, in, all);
    pages_asked_out += all, test_pages_asked += all;
    pages_out += all - in, test_pages_out += all - in;
}

/* Nothing but the objects has changed. */
static void check_pattern(void) {
    for (size_t i = 0; i < atomic_load(&piece_count); i++) {
        struct piece *piece = &pieces[i];
        for (unsigned char *at = piece->page; at < piece->page + piece->pages * PAGE; at++) {
            if (at == piece->at) at += piece->size;
            if (at >= piece->page + piece->pages * PAGE) break;
            if (*at != PATTERN)
                die("%s: byte %zu next to object %zu is %02x", test_name,
                    (size_t)(at - piece->page), i, *at);
        }
    }
}

/* Runs `body` in a child and says how that ended. */
#define IN_CHILD(body)                                                                             \
    do {                                                                                           \
        fflush(stdout);                                                                            \
        pid_t child_ = fork();                                                                     \
        MUST(child_ >= 0);                                                                         \
        if (child_ == 0) {                                                                         \
            body;                                                                                  \
            _exit(0);                                                                              \
        }                                                                                          \
        int status_ = 0;                                                                           \
        MUST(waitpid(child_, &status_, 0) == child_);                                              \
        say(" child=%s%d", WIFSIGNALED(status_) ? "signal " : "",                                  \
            WIFSIGNALED(status_) ? WTERMSIG(status_) : WEXITSTATUS(status_));                      \
    } while (0)

static void *mover(void *unused) {
    (void)unused;
    for (;;) {
        if (!atomic_load(&mover_may_run)) {
            usleep(200);
            continue;
        }
        take_out_all();
    }
    return NULL;
}

static void *watch(void *unused) {
    (void)unused;
    unsigned long last = 0;
    for (int still = 0; still < 300; still++) {
        usleep(100000);
        unsigned long now_at = atomic_load(&progress);
        if (now_at != last) still = 0;
        last = now_at;
    }
    die("%s: no progress for 30 s", test_name);
}

struct test {
    const char *name;
    void (*run)(void);
};
#define TEST(name) static void test_##name(void)
#define T(name) {#name, test_##name}

static int run_tests(int count, char **words, const char *name, const struct test *tests,
                     size_t tests_count) {
    given = parse(count, words, "out");
    is_moving = strcmp(given.mode, "moving") == 0;
    const char *preload = getenv("LD_PRELOAD");
    is_managed = preload != NULL && strstr(preload, "swaptide") != NULL;
    const char *only = count > 5 ? words[5] : NULL;
    /* More than the budget, so that ordinary eviction is at work too. */
    unsigned char *ballast = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, 1));
    pthread_t thread;
    /* Signals to the process are the first thread's. */
    sigset_t all, before;
    sigfillset(&all);
    MUST(pthread_sigmask(SIG_SETMASK, &all, &before) == 0);
    MUST(pthread_create(&thread, NULL, watch, NULL) == 0);
    if (is_moving) MUST(pthread_create(&thread, NULL, mover, NULL) == 0);
    MUST(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    int turns = is_moving ? 12 : 2;
    double time_of_one = given.seconds / (double)tests_count;
    for (size_t i = 0; i < tests_count; i++) {
        if (only != NULL && strstr(only, tests[i].name) == NULL) continue;
        test_name = tests[i].name;
        test_pages_asked = test_pages_out = 0;
        double began = now();
        for (int turn = 0; turn < 2 || (turn < turns && now() - began < time_of_one); turn++) {
            /* On a mapping of its own: pages that a forked child has had go out under pressure
             * alone. */
            arena = map(ARENA_PAGES * PAGE);
            arena_next = 0;
            said_length = 0;
            said[0] = 0;
            atomic_store(&mover_may_run, is_moving);
            tests[i].run();
            atomic_store(&mover_may_run, 0);
            check_pattern();
            atomic_store(&piece_count, 0);
            MUST(munmap(arena, ARENA_PAGES * PAGE) == 0);
            if (turn > 0 && strcmp(said, said_before) != 0)
                die("%s, turn %d:%s\n  before:%s", test_name, turn, said, said_before);
            memcpy(said_before, said, said_length + 1);
            atomic_fetch_add(&progress, 1);
        }
        if (test_pages_asked > 0 && test_pages_out == 0)
            die("%s: nothing of it was out", test_name);
        printf("%s:%s\n", test_name, said);
        fflush(stdout);
    }
    for (size_t page = 0; page < given.pages; page += 16)
        check_page(ballast + page * PAGE, key_of(given.seed, page, 1),
                   "memory that no system call had");
    if (is_managed && !is_moving)
        fprintf(stderr, "%zu of %zu pages were out\n", pages_out, pages_asked_out);
    return ok(name, given.mode);
}
#endif
