/* A program that loads no library.
 *
 * all      threads that fill and verify, memory that grows, moves and goes, a child that verifies
 *          what its parent has, and timers that interrupt all of it
 * daemon   starts a program whose child verifies what it had, while that ends at once (ends FD)
 * refused  a child that does not fit into memory is refused, and nothing is lost
 * execs    forks, and executes itself, four times; the last time by a second thread
 * children two children that execute nothing keep what they had and as much again, until most of it
 *          is out
 * signals  forks under a timer whose handler restarts nothing
 * at-once  a child that is forked before all else, and fills its memory by and by
 * stops    fills its memory; a thread that waits executes a program that stops itself, as soon as
 *          the first thread is stopped by another tracer than its parent
 */
#include "common.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

enum { THREADS = 4, ROUNDS = 3, WORDS_OF_PAGE = 16 };

static size_t pages_each;
static atomic_ulong ticks;

static void tick(int signal) {
    (void)signal;
    atomic_fetch_add(&ticks, 1);
}

static uint64_t word(uint64_t of, size_t page, size_t at, unsigned round) {
    return mix(of * 1000003 + page * WORDS_OF_PAGE + at + (uint64_t)round * 7);
}

static void write_pages(unsigned char *base, size_t count, uint64_t of, unsigned round) {
    for (size_t page = 0; page < count; page++)
        for (size_t at = 0; at < WORDS_OF_PAGE; at++)
            ((uint64_t *)(base + page * PAGE))[at] = word(of, page, at, round);
}

static void verify_pages(unsigned char *base, size_t count, uint64_t of, unsigned round,
                         const char *what) {
    for (size_t page = 0; page < count; page++)
        for (size_t at = 0; at < WORDS_OF_PAGE; at++)
            if (((uint64_t *)(base + page * PAGE))[at] != word(of, page, at, round))
                die("%s: page %zu of %zu, word %zu of round %u", what, page, count, at, round);
}

static void *fill(void *given) {
    uint64_t of = (uint64_t)(uintptr_t)given;
    unsigned char *base = map(pages_each * PAGE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        if (round > 0) verify_pages(base, pages_each, of, round - 1, "a thread's page");
        write_pages(base, pages_each, of, round);
    }
    /* To another place and back, half of it given up. */
    unsigned char *moved = mremap(base, pages_each * PAGE, 2 * pages_each * PAGE, MREMAP_MAYMOVE);
    MUST(moved != MAP_FAILED);
    MUST(madvise(moved, pages_each / 2 * PAGE, MADV_DONTNEED) == 0);
    for (size_t page = 0; page < pages_each / 2; page++)
        if (moved[page * PAGE] != 0) die("page %zu was given up and is not empty", page);
    for (size_t page = pages_each / 2; page < pages_each; page++)
        if (*(uint64_t *)(moved + page * PAGE) != word(of, page, 0, ROUNDS - 1))
            die("page %zu of what moved", page);
    MUST(munmap(moved, 2 * pages_each * PAGE) == 0);
    return NULL;
}

/* What brk(2) gives. */
static void grow_heap(size_t count) {
    unsigned char *start = sbrk(0);
    start += (PAGE - (uintptr_t)start % PAGE) % PAGE;
    if (brk(start + count * PAGE) != 0) return; /* musl's refuses */
    write_pages(start, count, 77, 0);
    verify_pages(start, count, 77, 0, "a page of the heap");
    MUST(brk(start) == 0);
}

static void fork_and_verify(size_t count) {
    unsigned char *base = map(count * PAGE);
    write_pages(base, count, 99, 1);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        verify_pages(base, count, 99, 1, "a page of a child");
        write_pages(base, count, 99, 2);
        verify_pages(base, count, 99, 2, "a page of a child, written");
        _exit(0);
    }
    write_pages(base, count / 2, 99, 3);
    verify_pages(base, count / 2, 99, 3, "a page of a parent, written");
    int status;
    while (waitpid(pid, &status, 0) != pid) MUST(errno == EINTR);
    if (status != 0) die("a child ended with status %x", (unsigned)status);
    MUST(munmap(base, count * PAGE) == 0);
}

static void fill_all(const struct arguments *given, unsigned char *base) {
    write_pages(base, given->pages, 55, 0);
    /* Long enough for management to begin, and for most of it to go out. */
    for (int i = 0; i < 20; i++) {
        usleep(10000);
        write_pages(base, given->pages / 8, 55, 0);
    }
}

/* Ends at once when it has forked; its child says that all was right. */
static void end_before_child(const struct arguments *given, int out) {
    unsigned char *base = map(given->pages * PAGE);
    fill_all(given, base);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid != 0) _exit(0);
    usleep(100000);
    verify_pages(base, given->pages, 55, 0, "a page of a child whose parent is gone");
    MUST(write(out, "OK", 2) == 2);
    _exit(0);
}

static int await_daemon(const struct arguments *given, char **words) {
    int ends[2];
    MUST(pipe(ends) == 0);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        char number[16];
        snprintf(number, sizeof number, "%d", ends[1]);
        execl(words[0], words[0], words[1], words[2], words[3], "ends", number, (char *)NULL);
        _exit(9);
    }
    close(ends[1]);
    char said[3] = "";
    MUST(read(ends[0], said, 2) == 2 && strcmp(said, "OK") == 0);
    int status;
    MUST(waitpid(pid, &status, 0) == pid && status == 0);
    return ok("foreign", given->mode);
}

static int fork_what_does_not_fit(const struct arguments *given) {
    unsigned char *base = map(given->pages * PAGE);
    fill_all(given, base);
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    if (pid > 0 || errno != ENOMEM) die("a fork gave %d, error %d", (int)pid, errno);
    verify_pages(base, given->pages, 55, 0, "a page after a fork was refused");
    return ok("foreign", given->mode);
}

static char **self;

static void *execute(void *generation) {
    char number[16];
    snprintf(number, sizeof number, "%d", (int)(intptr_t)generation);
    execl(self[0], self[0], self[1], self[2], self[3], "execs", number, (char *)NULL);
    die("exec: %s", strerror(errno));
}

/* Status of a child that verifies all; -1 if the fork was interrupted. */
static int fork_and_look(const struct arguments *given, unsigned char *base) {
    pid_t pid = fork();
    if (pid < 0) {
        if (errno == EINTR) return -1;
        die("fork: %s", strerror(errno));
    }
    if (pid == 0) {
        verify_pages(base, given->pages, 55, 0, "a page of a child");
        _exit(0);
    }
    int status;
    while (waitpid(pid, &status, 0) != pid) MUST(errno == EINTR);
    return status;
}

/* The same of a child that ends at once. */
static int fork_quickly(void) {
    pid_t pid = fork();
    if (pid < 0) return errno == EINTR ? -1 : 255;
    if (pid == 0) _exit(0);
    int status;
    while (waitpid(pid, &status, 0) != pid) MUST(errno == EINTR);
    return status;
}

static int execute_again(const struct arguments *given, char **words, int generation) {
    double began = now();
    int status = fork_quickly();
    unsigned char *base = map(given->pages * PAGE);
    fill_all(given, base);
    if (status == 0) status = fork_and_look(given, base);
    if (status != 0 || now() - began > 20)
        die("generation %d: status %x after %.1f s", generation, (unsigned)status, now() - began);
    if (generation == 4) return ok("foreign", given->mode);
    self = words;
    if (generation < 3) execute((void *)(intptr_t)(generation + 1));
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, execute, (void *)(intptr_t)4) == 0);
    for (;;) pause();
}

static int fork_under_signals(const struct arguments *given) {
    unsigned char *base = map(given->pages * PAGE);
    fill_all(given, base);
    struct sigaction action = {.sa_handler = tick};
    MUST(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval interval = {{0, 1000}, {0, 1000}};
    MUST(setitimer(ITIMER_REAL, &interval, NULL) == 0);
    int made = 0;
    for (int turn = 0; turn < 400; turn++) {
        int status = turn % 20 == 0 ? fork_and_look(given, base) : fork_quickly();
        if (status > 0) die("a child ended with status %x", (unsigned)status);
        made += status == 0;
    }
    if (made < 200) die("%d of 400 forks were made", made);
    return ok("foreign", given->mode);
}

static size_t resident_pages(void) {
    size_t resident = 0, shared = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    MUST(statm != NULL && fscanf(statm, "%*u %zu %zu", &resident, &shared) == 2);
    fclose(statm);
    return resident - shared;
}

static int keep_children(const struct arguments *given) {
    size_t half = given->pages / 2;
    unsigned char *base = map(half * PAGE);
    write_pages(base, half, 11, 0);
    pid_t children[2];
    for (int at = 0; at < 2; at++) {
        MUST((children[at] = fork()) >= 0);
        if (children[at] != 0) continue;
        unsigned char *own = map(half * PAGE);
        write_pages(own, half, 22 + (uint64_t)at, 0);
        double end = now() + 15;
        while (resident_pages() > half) {
            if (now() > end) die("a child keeps %zu pages in memory", resident_pages());
            usleep(20000);
        }
        verify_pages(base, half, 11, 0, "a page that a child has from its parent");
        verify_pages(own, half, 22 + (uint64_t)at, 0, "a page of a child's own");
        _exit(0);
    }
    for (int at = 0; at < 2; at++) {
        int status;
        MUST(waitpid(children[at], &status, 0) == children[at] && status == 0);
    }
    verify_pages(base, half, 11, 0, "a page of a parent");
    return ok("foreign", given->mode);
}

static int fork_at_once(const struct arguments *given) {
    size_t some = (1 << 20) / PAGE;
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        unsigned char *base = map(given->pages * PAGE);
        for (size_t page = 0; page + some <= given->pages; page += some) {
            write_pages(base + page * PAGE, some, page, 0);
            usleep(10000);
        }
        for (size_t page = 0; page + some <= given->pages; page += some)
            verify_pages(base + page * PAGE, some, page, 0, "a page of a child");
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    return ok("foreign", given->mode);
}

static const char *stops_status, *stops_program;

static void *execute_when_traced(void *unused) {
    (void)unused;
    for (;;) {
        char text[1024];
        int file = open(stops_status, O_RDONLY | O_CLOEXEC);
        ssize_t bytes = read(file, text, sizeof text - 1);
        close(file);
        text[bytes > 0 ? bytes : 0] = 0;
        const char *tracer = strstr(text, "TracerPid:");
        int number = tracer ? atoi(tracer + 10) : 0;
        if (number != 0 && number != getppid() && strstr(text, "State:\tt") != NULL) {
            execl(stops_program, stops_program, "1", "1", "1", "stopped", (char *)NULL);
            _exit(9);
        }
        usleep(100);
    }
}

static int stop_after_exec(const struct arguments *given, const char *program) {
    static char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/status", (int)getpid());
    stops_status = path;
    stops_program = program;
    pthread_t thread;
    MUST((errno = pthread_create(&thread, NULL, execute_when_traced, NULL)) == 0);
    unsigned char *base = map(given->pages * PAGE);
    size_t some = given->pages / 16;
    for (size_t page = 0; page < given->pages; page++) {
        if (page == some) usleep(400000);
        base[page * PAGE] = 1;
    }
    return ok("foreign", given->mode);
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "all");
    if (strcmp(given.mode, "stops") == 0) return stop_after_exec(&given, words[0]);
    if (strcmp(given.mode, "stopped") == 0) {
        MUST(write(1, "executed\n", 9) == 9 && raise(SIGSTOP) == 0);
        return ok("foreign", given.mode);
    }
    if (strcmp(given.mode, "at-once") == 0) return fork_at_once(&given);
    if (strcmp(given.mode, "execs") == 0)
        return execute_again(&given, words, count > 5 ? atoi(words[5]) : 0);
    if (strcmp(given.mode, "children") == 0) return keep_children(&given);
    if (strcmp(given.mode, "signals") == 0) return fork_under_signals(&given);
    if (strcmp(given.mode, "daemon") == 0) return await_daemon(&given, words);
    if (strcmp(given.mode, "ends") == 0) end_before_child(&given, atoi(words[5]));
    if (strcmp(given.mode, "refused") == 0) return fork_what_does_not_fit(&given);
    pages_each = given.pages / THREADS;
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    MUST(sigaction(SIGPROF, &action, NULL) == 0);
    struct itimerval interval = {{0, 2000}, {0, 2000}};
    MUST(setitimer(ITIMER_PROF, &interval, NULL) == 0);
    double end = now() + given.seconds;
    do {
        pthread_t threads[THREADS];
        for (uintptr_t of = 0; of < THREADS; of++)
            MUST((errno = pthread_create(&threads[of], NULL, fill, (void *)of)) == 0);
        for (size_t of = 0; of < THREADS; of++)
            MUST((errno = pthread_join(threads[of], NULL)) == 0);
    } while (now() < end);
    grow_heap(pages_each);
    fork_and_verify(pages_each / 2);
    if (atomic_load(&ticks) == 0) die("no timer's signal came");
    return ok("foreign", given.mode);
}
