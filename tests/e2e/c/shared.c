/* Memory that processes map shared, larger than the budget. Every worker has a word of its own in
 * each page and knows what it wrote last; the rest of a page follows from its number. Each MODE is
 * one way in which processes come, go and change their mappings meanwhile. */
#include "common.h"
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define WORKERS 8

extern char **environ;

static struct arguments given;
static volatile uint64_t *region;
static uint32_t *wrote; /* by this process's worker, for each page */
static double end;
static int meeting_pages; /* the first page of each tenth holds something else */

static volatile uint64_t *word(size_t page, size_t at) {
    return region + page * WORDS + at;
}

static uint64_t own(size_t page, unsigned worker, uint32_t number) {
    return (uint64_t)page << 40 | (uint64_t)worker << 36 | number;
}

static void fill(void) {
    for (size_t page = 0; page < given.pages; page++) {
        uint64_t key = key_of(given.seed, page, 1);
        for (size_t at = WORKERS; at < WORDS; at++) *word(page, at) = word_of(key, at);
        for (unsigned worker = 0; worker < WORKERS; worker++)
            *word(page, worker) = own(page, worker, 0);
    }
}

static void check(size_t page) {
    if (meeting_pages && page % (given.pages / 10) == 0) return;
    uint64_t key = key_of(given.seed, page, 1);
    for (size_t at = WORKERS; at < WORDS; at++) {
        uint64_t expected = word_of(key, at), found = *word(page, at);
        if (found != expected)
            mismatch((const void *)word(page, at), expected, found, "what is never written to");
    }
}

static void check_all(void) {
    for (size_t page = 0; page < given.pages; page++) check(page);
}

static void step(unsigned worker, uint64_t *random) {
    size_t page = below(random, given.pages);
    uint64_t expected = own(page, worker, wrote[page]), found = *word(page, worker);
    if (found != expected)
        mismatch((const void *)word(page, worker), expected, found, "a write is lost");
    switch (below(random, 8)) {
    case 0: check(page); break;
    case 1:
    case 2: break;
    default: *word(page, worker) = own(page, worker, ++wrote[page]);
    }
}

static void check_own(unsigned worker) {
    for (size_t page = 0; page < given.pages; page++) {
        uint64_t expected = own(page, worker, wrote[page]), found = *word(page, worker);
        if (found != expected)
            mismatch((const void *)word(page, worker), expected, found, "in the end");
    }
}

/* What others wrote as this worker: never less than what is known. */
static void learn_own(unsigned worker) {
    for (size_t page = 0; page < given.pages; page++) {
        uint64_t found = *word(page, worker);
        if (found >> 36 != own(page, worker, 0) >> 36 || (uint32_t)found < wrote[page])
            mismatch((const void *)word(page, worker), own(page, worker, wrote[page]), found,
                     "a write of another process is lost");
        wrote[page] = (uint32_t)found;
    }
}

static void steps(unsigned worker, uint64_t *random, int count) {
    while (count-- > 0) step(worker, random);
}

static void await(pid_t child, const char *what) {
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status != 0)
        die("%s: a child ended with %s %d", what, WIFSIGNALED(status) ? "signal" : "status",
            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static pid_t worker_process(unsigned worker, void (*body)(unsigned, uint64_t *)) {
    fflush(stdout);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        uint64_t random = given.seed * 1000 + worker;
        body(worker, &random);
        check_own(worker);
        _exit(0);
    }
    return child;
}

static void until_end(unsigned worker, uint64_t *random) {
    while (now() < end) steps(worker, random, 64);
}

static void hammer(void) {
    pid_t children[4];
    for (unsigned worker = 0; worker < 4; worker++)
        children[worker] = worker_process(worker, until_end);
    for (unsigned worker = 0; worker < 4; worker++) await(children[worker], "hammer");
}

static void link_of_chain(unsigned worker, uint64_t *random, int depth) {
    steps(worker, random, 200);
    if (depth == 0) return;
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        link_of_chain(worker, random, depth - 1);
        check_own(worker);
        _exit(0);
    }
    await(child, "a chain of forks");
    learn_own(worker);
}

static void chain_until_end(unsigned worker, uint64_t *random) {
    while (now() < end) link_of_chain(worker, random, 4);
}

static void chains(void) {
    pid_t children[3];
    for (unsigned worker = 0; worker < 3; worker++)
        children[worker] = worker_process(worker, chain_until_end);
    for (unsigned worker = 0; worker < 3; worker++) await(children[worker], "chains");
}

static void for_ever(unsigned worker, uint64_t *random) {
    learn_own(worker);
    for (;;) step(worker, random);
}

static void killed(void) {
    pid_t children[4];
    uint64_t random = given.seed;
    for (unsigned worker = 0; worker < 4; worker++)
        children[worker] = worker_process(worker, for_ever);
    while (now() < end) {
        usleep(10000 + (useconds_t)below(&random, 80000));
        unsigned worker = (unsigned)below(&random, 4);
        int status;
        MUST(waitpid(children[worker], &status, WNOHANG) == 0);
        kill(children[worker], SIGKILL);
        MUST(waitpid(children[worker], &status, 0) == children[worker]);
        children[worker] = worker_process(worker, for_ever);
    }
    for (unsigned worker = 0; worker < 4; worker++) {
        kill(children[worker], SIGKILL);
        MUST(waitpid(children[worker], NULL, 0) == children[worker]);
    }
}

/* Everything that moves, drops or doubles a mapping of shared memory. The other worker's pages are
 * the same ones. */
static void changes_until_end(unsigned worker, uint64_t *random) {
    char *start = (char *)region;
    size_t bytes = given.pages * PAGE;
    char *const places[] = {start, start + 2 * bytes};
    int at_home = 1, may_move = 1;
    while (now() < end) {
        size_t first = below(random, given.pages - 64), len = (1 + below(random, 63)) * PAGE;
        char *at = start + first * PAGE;
        switch (below(random, 6)) {
        case 0: MUST(madvise(at, len, MADV_DONTNEED) == 0); break;
        case 1:
            MUST(mprotect(at, len, PROT_READ) == 0);
            (void)*word(first, worker);
            MUST(mprotect(at, len, PROT_READ | PROT_WRITE) == 0);
            break;
        case 2: {
            /* The tail goes, and the mapping grows over it again. */
            MUST(mremap(start, bytes, bytes / 2, 0) == start);
            size_t half = given.pages / 2;
            for (int i = 0; i < 20; i++) {
                size_t page = below(random, half);
                MUST(*word(page, worker) == own(page, worker, wrote[page]));
            }
            MUST(mremap(start, bytes / 2, bytes, 0) == start);
            for (size_t page = half; page < half + 16; page++)
                *word(page, worker) = own(page, worker, ++wrote[page]);
            break;
        }
        case 3: {
            /* The whole mapping moves to and fro. No other mapping may take the place that it
             * leaves; if one was faster it moves no more. */
            if (!may_move) break;
            void *moved = mremap((void *)region, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                                 places[at_home]);
            MUST(moved == places[at_home]);
            may_move = mmap(start, bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1,
                            0) == start;
            at_home = !at_home;
            region = moved;
            start = moved;
            break;
        }
        case 4: {
            /* A second mapping of the same memory: old length 0 doubles it. */
            uint64_t *twin = mremap(at, 0, len, MREMAP_MAYMOVE);
            MUST(twin != MAP_FAILED);
            for (size_t page = first; page < first + len / PAGE; page++) {
                volatile uint64_t *there = twin + (page - first) * WORDS + worker;
                if (*there != own(page, worker, wrote[page]))
                    mismatch((const void *)there, own(page, worker, wrote[page]), *there,
                             "by another address");
                *there = own(page, worker, ++wrote[page]);
                MUST(*word(page, worker) == own(page, worker, wrote[page]));
            }
            MUST(munmap(twin, len) == 0);
            break;
        }
        default: break;
        }
        steps(worker, random, 100);
    }
}

static void changes(void) {
    /* Room to move to and fro. */
    size_t bytes = given.pages * PAGE;
    void *place =
        mmap(NULL, 4 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(place != MAP_FAILED);
    region = mremap((void *)region, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    MUST((void *)region == place);
    pid_t children[3];
    for (unsigned worker = 0; worker < 2; worker++)
        children[worker] = worker_process(worker, changes_until_end);
    children[2] = worker_process(2, until_end);
    for (unsigned i = 0; i < 3; i++) await(children[i], "changes");
    /* Given up for good: zeros for all. */
    check_all();
    size_t from = given.pages / 4, to = given.pages / 2;
    MUST(madvise((char *)region + from * PAGE, (to - from) * PAGE, MADV_REMOVE) == 0);
    for (size_t page = from; page < to; page++) MUST(*word(page, 100) == 0 && *word(page, 3) == 0);
    fill();
}

struct meeting {
    pthread_mutex_t mutex;
    pthread_cond_t turn;
    sem_t done;
    uint64_t count;
};

static struct meeting *meeting(size_t page) {
    return (struct meeting *)word(page, WORKERS);
}

/* Locks and semaphores that lie in the memory, and system calls on it. */
static void meet(unsigned worker, uint64_t *random) {
    int file = open("shared.data", O_RDWR | O_CREAT, 0600);
    MUST(file >= 0);
    for (uint64_t round = 0; round < 300; round++) {
        struct meeting *at = meeting(round % 10 * (given.pages / 10));
        MUST(pthread_mutex_lock(&at->mutex) == 0);
        while (at->count % 2 != worker) MUST(pthread_cond_wait(&at->turn, &at->mutex) == 0);
        at->count++;
        MUST(pthread_cond_broadcast(&at->turn) == 0);
        MUST(pthread_mutex_unlock(&at->mutex) == 0);
        MUST(sem_post(&at->done) == 0);
        /* A page goes to a file by the kernel's hands, and comes back over its own words. */
        size_t page = 1 + below(random, given.pages - 1);
        if (page % (given.pages / 10) == 0) continue;
        off_t place = (off_t)(worker * WORDS * 8);
        MUST(pwrite(file, (const void *)(word(page, WORKERS)), PAGE - WORKERS * 8, place) ==
             (ssize_t)(PAGE - WORKERS * 8));
        MUST(pread(file, (void *)(word(page, WORKERS)), PAGE - WORKERS * 8, place) ==
             (ssize_t)(PAGE - WORKERS * 8));
        check(page);
        steps(worker, random, 30);
    }
    close(file);
}

static void meetings(void) {
    meeting_pages = 1;
    for (size_t i = 0; i < 10; i++) {
        struct meeting *at = meeting(i * (given.pages / 10));
        pthread_mutexattr_t mutex;
        pthread_condattr_t turn;
        memset(at, 0, sizeof *at);
        pthread_mutexattr_init(&mutex);
        pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
        pthread_condattr_init(&turn);
        pthread_condattr_setpshared(&turn, PTHREAD_PROCESS_SHARED);
        MUST(pthread_mutex_init(&at->mutex, &mutex) == 0 &&
             pthread_cond_init(&at->turn, &turn) == 0 && sem_init(&at->done, 1, 0) == 0);
    }
    pid_t children[2];
    for (unsigned worker = 0; worker < 2; worker++) {
        fflush(stdout);
        children[worker] = fork();
        MUST(children[worker] >= 0);
        if (children[worker] == 0) {
            uint64_t random = given.seed * 1000 + worker;
            meet(worker, &random);
            _exit(0);
        }
    }
    for (unsigned i = 0; i < 2; i++) await(children[i], "meetings");
    for (size_t i = 0; i < 10; i++) {
        struct meeting *at = meeting(i * (given.pages / 10));
        int posts;
        MUST(sem_getvalue(&at->done, &posts) == 0);
        if (at->count != 60 || posts != 60)
            die("a meeting was held %d times, and left %d times", (int)at->count, posts);
    }
    meeting_pages = 0;
    fill();
}

static void starts_until_end(unsigned worker, uint64_t *random) {
    while (now() < end) {
        char *const argv[] = {"true", NULL};
        pid_t child;
        switch (below(random, 3)) {
        case 0: MUST(posix_spawnp(&child, "true", NULL, NULL, argv, environ) == 0); break;
        case 1:
            child = vfork();
            if (child == 0) {
                execvp("true", argv);
                _exit(127);
            }
            break;
        default:
            child = fork();
            if (child == 0) {
                step(worker, random);
                execvp("true", argv);
                _exit(127);
            }
        }
        MUST(child > 0);
        await(child, "a program that was started");
        learn_own(worker);
        steps(worker, random, 100);
    }
}

static void starts(void) {
    pid_t children[3];
    for (unsigned worker = 0; worker < 2; worker++)
        children[worker] = worker_process(worker, starts_until_end);
    children[2] = worker_process(2, until_end);
    for (unsigned i = 0; i < 3; i++) await(children[i], "starts");
}

/* A child past libc. */
static void raw(void) {
    pid_t other = worker_process(1, until_end);
    uint64_t random = given.seed;
    steps(0, &random, 2000);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    MUST(child >= 0);
    if (child == 0) {
        usleep(1500000);
        steps(0, &random, 5000);
        check_own(0);
        _exit(0);
    }
    await(child, "a raw clone");
    await(other, "its neighbour");
}

/* Shared and private memory want the same room. */
static void both(void) {
    size_t pages = given.pages / 2;
    unsigned char *private = map(pages * PAGE);
    for (size_t page = 0; page < pages; page++)
        fill_page(private + page * PAGE, key_of(given.seed, page, 2));
    pid_t other = worker_process(1, until_end);
    uint64_t random = given.seed;
    while (now() < end) {
        steps(0, &random, 64);
        for (int i = 0; i < 64; i++) {
            size_t page = below(&random, pages);
            glance_page(private + page * PAGE, key_of(given.seed, page, 2), "private memory");
        }
    }
    await(other, "the other worker");
    check_own(0);
    for (size_t page = 0; page < pages; page++)
        check_page(private + page * PAGE, key_of(given.seed, page, 2), "private memory in the end");
}

/* Pages are given up without end, and another thread writes to one as soon as it has seen that it
 * is gone: what it wrote stays. */
static size_t given_up;
static volatile uint64_t begun, written;

static void *write_behind(void *nothing) {
    for (uint64_t seen = 0;;) {
        while (begun == seen) {}
        seen = begun;
        if (seen == UINT64_MAX) return nothing;
        while (*word(given_up, 0) != 0) {}
        *word(given_up, 0) = seen << 8;
        written = seen;
    }
}

static void removes(void) {
    pthread_t thread;
    uint64_t random = given.seed;
    given_up = given.pages / 8;
    MUST(pthread_create(&thread, NULL, write_behind, NULL) == 0);
    for (uint64_t number = 1; now() < end; number++) {
        *word(given_up, 0) = 77;
        *word(given_up, 9) = 78;
        begun = number;
        MUST(madvise((void *)word(given_up, 0), PAGE, MADV_REMOVE) == 0);
        while (written != number) {}
        uint64_t found = *word(given_up, 0);
        if (found != number << 8)
            mismatch((const void *)word(given_up, 0), number << 8, found,
                     "a write after MADV_REMOVE is lost");
        if (*word(given_up, 9) != 0)
            mismatch((const void *)word(given_up, 9), 0, *word(given_up, 9), "given up");
        /* What is out is given up, too. */
        size_t page = given_up + 1 + below(&random, given.pages / 2);
        MUST(madvise((void *)word(page, 0), 3 * PAGE, MADV_REMOVE) == 0);
        for (size_t at = 0; at < 3 * WORDS; at++)
            if (*word(page, at) != 0)
                mismatch((const void *)word(page, at), 0, *word(page, at), "given up");
        for (size_t at = 0; at < 3 * WORDS; at++)
            *word(page, at) = at % WORDS < WORKERS
                                  ? own(page + at / WORDS, (unsigned)(at % WORDS), 0)
                                  : word_of(key_of(given.seed, page + at / WORDS, 1), at % WORDS);
    }
    begun = UINT64_MAX;
    pthread_join(thread, NULL);
    for (size_t at = 0; at < WORDS; at++)
        *word(given_up, at) = word_of(key_of(given.seed, given_up, 1), at);
    /* As without swaptide: locked memory is refused, and so is what is not mapped. */
    void *last = (void *)word(given.pages - 1, 0);
    MUST(mlock(last, PAGE) == 0);
    MUST(madvise(last, PAGE, MADV_REMOVE) == -1 && errno == EINVAL);
    MUST(munlock(last, PAGE) == 0);
    MUST(madvise((char *)last + 1, PAGE, MADV_REMOVE) == -1 && errno == EINVAL);
}

/* A process is stopped at any moment of a call that grows its mapping: others continue. */
static void stopped(void) {
    volatile uint64_t *walked =
        mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(walked != MAP_FAILED);
    pid_t walker = fork();
    MUST(walker >= 0);
    if (walker == 0)
        for (;;)
            for (size_t page = 0; page < given.pages; page++, ++*walked)
                *word(page, 0) += 1ull << 40;
    size_t whole = given.pages * PAGE, part = whole / 4 * 3;
    pid_t mover = fork();
    MUST(mover >= 0);
    if (mover == 0) {
        char *at = (char *)region;
        for (;;) {
            at = mremap(at, whole, part, MREMAP_MAYMOVE);
            MUST(at != MAP_FAILED);
            at = mremap(at, part, whole, MREMAP_MAYMOVE);
            MUST(at != MAP_FAILED);
        }
    }
    uint64_t random = given.seed;
    while (now() < end) {
        usleep((useconds_t)(20000 + below(&random, 20000)));
        MUST(kill(mover, SIGSTOP) == 0);
        double late = now() + 10;
        /* Further than what is in memory: more must come in. */
        for (uint64_t before = *walked; *walked < before + given.pages;) {
            if (now() > late) {
                kill(mover, SIGKILL);
                kill(walker, SIGKILL);
                die("one process is stopped, and another one does not continue");
            }
            usleep(1000);
        }
        MUST(kill(mover, SIGCONT) == 0);
    }
    kill(mover, SIGKILL);
    kill(walker, SIGKILL);
    MUST(waitpid(mover, NULL, 0) == mover && waitpid(walker, NULL, 0) == walker);
}

/* Wanted is more than the budget has. */
static void wanted(void) {
    uint64_t random = given.seed;
    while (now() < end) {
        MUST(madvise((void *)region, given.pages * PAGE, MADV_WILLNEED) == 0);
        steps(0, &random, 20000);
    }
    check_own(0);
}

/* Children map shared memory of their own at once, before anything goes out. */
enum { MAPPERS = 16, OWN_PAGES = 256 };
static pid_t mappers[MAPPERS];

static void start_mappers(void) {
    /* The process is known by now. */
    usleep(300000);
    for (size_t i = 0; i < MAPPERS; i++) {
        MUST((mappers[i] = fork()) >= 0);
        if (mappers[i] != 0) continue;
        unsigned char *at = mmap(NULL, OWN_PAGES * PAGE, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        MUST(at != MAP_FAILED);
        for (size_t page = 0; page < OWN_PAGES; page++)
            fill_page(at + page * PAGE, key_of(given.seed, page, 2));
        for (;;) {
            usleep(200000);
            for (size_t page = 0; page < OWN_PAGES; page++)
                check_page(at + page * PAGE, key_of(given.seed, page, 2), "a child's own");
        }
    }
    usleep(300000);
}

static void maps(void) {
    uint64_t random = given.seed;
    while (now() < end) steps(0, &random, 2000);
    check_own(0);
    for (size_t i = 0; i < MAPPERS; i++) {
        MUST(waitpid(mappers[i], NULL, WNOHANG) == 0);
        MUST(kill(mappers[i], SIGKILL) == 0 && waitpid(mappers[i], NULL, 0) == mappers[i]);
    }
}

int main(int count, char **words) {
    given = parse(count, words, "hammer");
    region =
        mmap(NULL, given.pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(region != MAP_FAILED);
    wrote = calloc(given.pages, sizeof *wrote);
    MUST(wrote != NULL);
    if (strcmp(given.mode, "maps") == 0) start_mappers();
    fill();
    end = now() + given.seconds;
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {
        {"hammer", hammer},     {"chains", chains}, {"killed", killed}, {"changes", changes},
        {"meetings", meetings}, {"starts", starts}, {"raw", raw},       {"both", both},
        {"removes", removes},   {"stopped", stopped}, {"wanted", wanted}, {"maps", maps},
    };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(modes[i].name, given.mode) == 0) {
            modes[i].run();
            check_all();
            return ok("shared", given.mode);
        }
    }
    die("no such mode: %s", given.mode);
}
