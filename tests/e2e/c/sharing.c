/* Shared memory and what is done next to it.
 *
 * MODE: none      forks by a process that has unmapped its shared memory, or keeps it from its
 *                 children, and maps some again
 *       closed    forks where a child can open no descriptor
 *       unmaps    a thread unmaps shared memory while another forks and a third grows some
 *       advised   pages given up by process_madvise; pages mapped elsewhere by remap_file_pages
 *       stacks    threads whose stacks lie in shared memory that others push out
 *       mutexes   mutexes of several processes there that inherit priorities */
#include "common.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *shared;
static volatile int over;

static void *share(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(at != MAP_FAILED);
    return at;
}

static void fill(unsigned char *at, size_t pages, uint64_t version) {
    for (size_t page = 0; page < pages; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, version));
}

static void check(const unsigned char *at, size_t pages, uint64_t version) {
    for (size_t page = 0; page < pages; page++)
        check_page(at + page * PAGE, key_of(given.seed, page, version), "shared memory");
}

/* A child that does not end by itself in ten seconds is one too many. */
static int status_of(pid_t child) {
    int status = 0;
    double began = now();
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (now() - began > 10) {
            kill(child, SIGKILL);
            die("a child hangs");
        }
        usleep(300);
    }
    return status;
}

static void fork_one(unsigned char *at, size_t pages) {
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        if (at) check(at, pages, 1);
        _exit(0);
    }
    int status = status_of(child);
    if (status != 0) die("a child ended with status %#x", status);
}

static void none(void) {
    for (int turn = 0; turn < 4; turn++) {
        unsigned char *at = share(given.pages * PAGE);
        fill(at, given.pages, 1);
        fork_one(at, given.pages);
        if (turn % 2 == 0) {
            MUST(munmap(at, given.pages * PAGE) == 0);
            fork_one(NULL, 0);
        } else {
            MUST(madvise(at, given.pages * PAGE, MADV_DONTFORK) == 0);
            fork_one(NULL, 0);
            check(at, given.pages, 1);
            MUST(munmap(at, given.pages * PAGE) == 0);
        }
        /* What such a child maps itself is swapped like any other. */
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            at = share(given.pages * PAGE);
            fill(at, given.pages, 1);
            fork_one(at, given.pages);
            _exit(0);
        }
        if (status_of(child) != 0) die("a child with memory of its own failed");
    }
}

static void closed(void) {
    shared = share(given.pages * PAGE);
    fill(shared, given.pages, 1);
    struct rlimit none = {0, 0};
    MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
    for (int turn = 0; turn < 3; turn++) fork_one(shared, given.pages);
    check(shared, given.pages, 1);
}

static size_t resident(unsigned char *at, size_t pages) {
    unsigned char seen[1024];
    size_t sum = 0;
    MUST(pages <= sizeof seen && mincore(at, pages * PAGE, seen) == 0);
    for (size_t page = 0; page < pages; page++) sum += seen[page] & 1;
    return sum;
}

#define PIECE (1024 * PAGE)
static unsigned char *volatile piece;
static volatile long delay_us;
static volatile int phase;

static void *unmaps(void *nothing) {
    while (!over) {
        while (phase != 1 && !over) continue;
        if (over) break;
        double until = now() + (double)delay_us / 1e6;
        while (now() < until) continue;
        MUST(munmap(piece, PIECE) == 0);
        phase = 2;
    }
    return nothing;
}

static void *grows(void *nothing) {
    unsigned char *at = share(PIECE);
    at = mremap(at, PIECE, PIECE / 4, 0);
    while (!over) {
        MUST(mremap(at, PIECE / 4, PIECE / 2, 0) == at);
        MUST(mremap(at, PIECE / 2, PIECE / 4, 0) == at);
        usleep(1000);
    }
    return nothing;
}

static void while_unmapped(void) {
    size_t kept = 512;
    shared = share(given.pages * PAGE);
    fill(shared, given.pages, 1);
    MUST(munmap(shared + kept * PAGE, (given.pages - kept) * PAGE) == 0);
    pthread_t threads[2];
    MUST(pthread_create(&threads[0], NULL, unmaps, NULL) == 0);
    MUST(pthread_create(&threads[1], NULL, grows, NULL) == 0);
    uint64_t state = given.seed;
    double began = now();
    do {
        unsigned char *at = share(PIECE);
        fill(at, PIECE / PAGE, 1);
        madvise(at, PIECE / 2, MADV_PAGEOUT);
        double asked = now();
        while (resident(at, PIECE / PAGE / 2) > 64 && now() - asked < 0.2) usleep(500);
        piece = at;
        delay_us = (long)below(&state, 600);
        phase = 1;
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            char line[512], name[32];
            int has = 0;
            snprintf(name, sizeof name, "%lx-", (unsigned long)at);
            FILE *maps = fopen("/proc/self/maps", "r");
            MUST(maps != NULL);
            while (fgets(line, sizeof line, maps))
                has |= strncmp(line, name, strlen(name)) == 0 && strstr(line, " rw-s") != NULL;
            fclose(maps);
            if (has) check(at, PIECE / PAGE, 1);
            _exit(0);
        }
        int status = status_of(child);
        if (status != 0) die("a child ended with status %#x", status);
        while (phase != 2) continue;
        phase = 0;
    } while (now() - began < given.seconds);
    over = 1;
    for (int i = 0; i < 2; i++) MUST(pthread_join(threads[i], NULL) == 0);
    check(shared, kept, 1);
}

static void advised(void) {
    shared = share(given.pages * PAGE);
    fill(shared, given.pages, 1);
    size_t half = given.pages / 2;
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    MUST(self >= 0);
    struct iovec parts[2] = {{shared, half / 2 * PAGE},
                             {shared + half / 2 * PAGE, (half - half / 2) * PAGE}};
    ssize_t done = process_madvise(self, parts, 2, MADV_REMOVE, 0);
    /* An older kernel has no such advice for processes. */
    if (done >= 0) {
        MUST(done == (ssize_t)(half * PAGE));
        for (size_t page = 0; page < half; page++)
            check_page(shared + page * PAGE, 0, "a page that was given up");
        fill(shared, half, 1);
    }
    check(shared, given.pages, 1);
    /* The second half in the place of the first. Where it is not refused it is there. */
    if (remap_file_pages(shared, half * PAGE, 0, half, 0) == 0) {
        for (size_t page = 0; page < half; page++)
            check_page(shared + page * PAGE, key_of(given.seed, half + page, 1), "a page again");
    } else {
        MUST(errno == EINVAL);
        check(shared, half, 1);
    }
    check_page(shared + half * PAGE, key_of(given.seed, half, 1), "a page of the second half");
}

#define STACK (64 * PAGE)

static void *ends(void *turns) {
    volatile unsigned char bytes[2000];
    memset((void *)bytes, 1, sizeof bytes);
    for (volatile uintptr_t turn = 0; turn < (uintptr_t)turns; turn++) continue;
    return NULL;
}

static pid_t pusher(unsigned char *at, size_t bytes) {
    pid_t child = fork();
    MUST(child >= 0);
    while (child == 0) {
        madvise(at, bytes, MADV_PAGEOUT);
        usleep(200);
        if (getppid() == 1) _exit(0);
    }
    return child;
}

static void stacks(void) {
    enum { AT_ONCE = 8 };
    shared = share(given.pages * PAGE + AT_ONCE * STACK);
    fill(shared, given.pages, 1);
    unsigned char *stack = shared + given.pages * PAGE;
    pid_t pushes = pusher(stack, AT_ONCE * STACK);
    uint64_t state = given.seed;
    double began = now();
    for (size_t count = 0; now() - began < given.seconds; count++) {
        pthread_attr_t attr;
        pthread_t thread;
        MUST(pthread_attr_init(&attr) == 0);
        MUST(pthread_attr_setstack(&attr, stack + count % AT_ONCE * STACK, STACK) == 0);
        MUST(pthread_create(&thread, &attr, ends, (void *)below(&state, 200000)) == 0);
        struct timespec latest;
        clock_gettime(CLOCK_REALTIME, &latest);
        latest.tv_sec += 10;
        int joined = pthread_timedjoin_np(thread, NULL, &latest);
        if (joined != 0) {
            kill(pushes, SIGKILL);
            die("a thread is not joined: %s", strerror(joined));
        }
    }
    MUST(kill(pushes, SIGKILL) == 0 && waitpid(pushes, NULL, 0) == pushes);
    check(shared, given.pages, 1);
}

struct cell {
    pthread_mutex_t mutex;
    volatile uint64_t count;
};

static void mutexes(void) {
    enum { CELLS = 16, WORKERS = 2, DISTANCE = 16 };
    shared = share((given.pages + CELLS * DISTANCE) * PAGE);
    uint64_t *counted = share(256 * PAGE);
    unsigned char *place = shared + given.pages * PAGE;
    struct cell *cells[CELLS];
    pthread_mutexattr_t attr;
    MUST(pthread_mutexattr_init(&attr) == 0);
    MUST(pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED) == 0);
    MUST(pthread_mutexattr_setprotocol(&attr, PTHREAD_PRIO_INHERIT) == 0);
    for (size_t i = 0; i < CELLS; i++) {
        cells[i] = (void *)(place + i * DISTANCE * PAGE);
        MUST(pthread_mutex_init(&cells[i]->mutex, &attr) == 0);
    }
    fill(shared, given.pages, 1);
    pid_t workers[WORKERS];
    double began = now();
    for (size_t k = 0; k < WORKERS; k++) {
        workers[k] = fork();
        MUST(workers[k] >= 0);
        if (workers[k] != 0) continue;
        uint64_t state = given.seed + k, count = 0;
        for (; now() - began < given.seconds; count++) {
            struct cell *cell = cells[count % 4 ? 0 : below(&state, CELLS)];
            MUST(pthread_mutex_lock(&cell->mutex) == 0);
            uint64_t seen = cell->count;
            if (next(&state) % 64 == 0) sched_yield();
            cell->count = seen + 1;
            MUST(pthread_mutex_unlock(&cell->mutex) == 0);
        }
        counted[k] = count;
        _exit(0);
    }
    pid_t pushes = pusher(place, CELLS * DISTANCE * PAGE);
    uint64_t sum = 0, all = 0;
    for (size_t k = 0; k < WORKERS; k++) {
        int status;
        MUST(waitpid(workers[k], &status, 0) == workers[k]);
        if (status != 0) die("a worker ended with status %#x", status);
        all += counted[k];
    }
    MUST(kill(pushes, SIGKILL) == 0 && waitpid(pushes, NULL, 0) == pushes);
    for (size_t i = 0; i < CELLS; i++) sum += cells[i]->count;
    if (sum != all) die("%lu of %lu are counted", (unsigned long)sum, (unsigned long)all);
    check(shared, given.pages, 1);
}

int main(int count, char **words) {
    given = parse(count, words, "none");
    const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {{"none", none},       {"closed", closed}, {"unmaps", while_unmapped},
                 {"advised", advised}, {"stacks", stacks}, {"mutexes", mutexes}};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(given.mode, modes[i].name) != 0) continue;
        modes[i].run();
        return ok("sharing", given.mode);
    }
    die("no mode %s", given.mode);
}
