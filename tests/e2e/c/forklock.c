/* Forks while other threads hold what the fork waits for, and children that do much before
 * swaptide's own child handler runs.
 *
 * The handlers here are registered before those of swaptide, as those of a library are whose
 * constructor runs first. So `prepare` runs when the engine is prepared for the fork, and `child`
 * before the child has an engine. */
#include "common.h"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

static struct arguments given;
static unsigned char *arena, *given_up, *unmapped, *excluded;
#define SMALL (64 * PAGE)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static atomic_int word, over;
static atomic_long forks, turns;
static int in_handlers, spins, naps, changes, stopped;
/* The prepare handler waits: a number of microseconds, or until another thread has forked. */
static int dawdles, awaits_bare;
static atomic_int in_prepare, bare_forked;

static void take(void) {
    if (!spins && !naps) {
        pthread_mutex_lock(&mutex);
        return;
    }
    while (atomic_exchange(&word, 1)) {
        struct timespec nap = {0, 200000};
        if (naps)
            nanosleep(&nap, NULL);
        else
            sched_yield();
    }
}

static void give(void) {
    if (spins || naps)
        atomic_store(&word, 0);
    else
        pthread_mutex_unlock(&mutex);
}

static void zeros(const unsigned char *at, const char *what) {
    for (size_t page = 0; page < SMALL / PAGE; page++) check_page(at + page * PAGE, 0, what);
}

static void check_all(const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), what);
}

/* A block of memory at one of two places, and a thread that works on it while the engine is
 * prepared for a fork and the forking thread is busy. */
enum { BLOCK = 256 };
static unsigned char *block, *places[2];
static atomic_int go, gone, done;

static void prepare(void) {
    in_prepare = 1;
    if (dawdles) usleep((useconds_t)dawdles);
    while (awaits_bare && !bare_forked) usleep(100);
    if (in_handlers) take();
    if (!block) return;
    go = 1;
    double until = now() + 0.004;
    while (now() < until && !gone) {}
    /* Time to be inside of the last call. */
    until = now() + 0.002;
    while (now() < until) {}
}

static void parent(void) {
    if (in_handlers) give();
}

/* Before the child has said that it is there: gives pages up, maps others in the place of some, and
 * reads all of it. */
static void child(void) {
    if (in_handlers) give();
    if (!changes) return;
    madvise(given_up, SMALL, MADV_DONTNEED);
    munmap(unmapped, SMALL);
    void *again = mmap(unmapped, SMALL, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (again != unmapped) _exit(4);
    for (size_t page = 0; page < SMALL / PAGE; page += 2)
        if (*(volatile uint64_t *)(given_up + page * PAGE) != 0 ||
            *(volatile uint64_t *)(unmapped + page * PAGE) != 0)
            _exit(5);
    for (size_t page = 0; page < given.pages; page += 37)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "in a child handler");
}

static void early(void) {
    pthread_atfork(prepare, parent, child);
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = early;

static void fill_all(void) {
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
}

static void fill_small(void) {
    for (size_t page = 0; page < SMALL / PAGE; page++) {
        fill_page(given_up + page * PAGE, key_of(given.seed, page, 7));
        fill_page(unmapped + page * PAGE, key_of(given.seed, page, 8));
    }
}

/* What the other thread does with the lock held. */
static void work(uint64_t *state) {
    if (!strcmp(given.mode, "moves") || !strcmp(given.mode, "moves-spins")) {
        unsigned char *at =
            mmap(NULL, 4 * SMALL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(at != MAP_FAILED);
        fill_page(at, key_of(given.seed, 1, 2));
        unsigned char *moved = mremap(at, 4 * SMALL, 64 * SMALL, MREMAP_MAYMOVE);
        MUST(moved != MAP_FAILED);
        check_page(moved, key_of(given.seed, 1, 2), "a moved page");
        munmap(moved, 64 * SMALL);
    } else if (!strcmp(given.mode, "excludes")) {
        madvise(excluded, SMALL, MADV_WIPEONFORK);
    } else if (!strcmp(given.mode, "maps")) {
        void *at = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at != MAP_FAILED) munmap(at, 2 << 20);
    }
    for (int i = 0; i < 8; i++) {
        size_t page = below(state, given.pages);
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "with the lock held");
    }
}

static void *other(void *x) {
    uint64_t state = given.seed + 99;
    while (!over) {
        take();
        work(&state);
        give();
        turns++;
        usleep(50);
    }
    return x;
}

/* It holds no lock: the thread that does may release it while this one is served. */
static void *third(void *x) {
    uint64_t state = given.seed + 5;
    for (; !over; usleep(300)) {
        size_t page = below(&state, given.pages);
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "by a third thread");
    }
    return x;
}

static void *watch(void *x) {
    long before = -1;
    for (int idle = 0; !over; usleep(250000)) {
        idle = forks == before ? idle + 1 : 0;
        before = forks;
        if (idle == 80) {
            static const char said[] = "FAILED: no fork has come to its end for 20 s\n";
            if (write(1, said, sizeof said - 1) < 0) {}
            syscall(SYS_exit_group, 3);
        }
    }
    return x;
}

static void one_fork(const char *what, int full) {
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        if (changes) {
            zeros(given_up, "given up in the child");
            zeros(unmapped, "mapped again in the child");
        }
        if (full) check_all("in the child");
        for (size_t page = forks % 61; page < given.pages; page += 61)
            check_page(arena + page * PAGE, key_of(given.seed, page, 1), "in the child");
        _exit(0);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (!strcmp(given.mode, "moves-spins") && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT)
        stopped++;
    else if (status != 0)
        die("%s: a child ended with %#x", what, status);
    forks++;
}

/* Allocations of all sizes, each with contents of its own, by several threads; the main thread
 * forks. */
#define BLOCKS 64
static void allocate(uint64_t seed, int rounds) {
    uint64_t state = seed;
    uint64_t *block[BLOCKS] = {0};
    size_t len[BLOCKS] = {0};
    for (int i = 0; rounds ? i < rounds : !over; i++) {
        int at = (int)below(&state, BLOCKS);
        if (block[at]) {
            for (size_t k = 0; k < len[at]; k += 64)
                if (block[at][k] != mix(seed + (uint64_t)at + k))
                    die("a block of an allocator has a wrong word");
        }
        size_t to = 1 + below(&state, below(&state, 40) == 0 ? 200000 : 2000);
        if (below(&state, 3) == 0) {
            free(block[at]);
            block[at] = NULL;
            continue;
        }
        size_t kept = block[at] && len[at] < to ? len[at] : block[at] ? to : 0;
        block[at] = realloc(block[at], to * 8);
        MUST(block[at]);
        for (size_t k = 0; k < kept; k += 64)
            if (block[at][k] != mix(seed + (uint64_t)at + k)) die("realloc has lost a word");
        for (size_t k = 0; k < to; k += 64) block[at][k] = mix(seed + (uint64_t)at + k);
        len[at] = to;
        turns++;
    }
    for (int at = 0; at < BLOCKS; at++) free(block[at]);
}

static void *allocator(void *x) {
    allocate((uint64_t)(uintptr_t)x, 0);
    return NULL;
}

static void allocators(void) {
    pthread_t thread[4];
    for (uintptr_t i = 0; i < 4; i++)
        MUST(!pthread_create(&thread[i], NULL, allocator, (void *)(given.seed + i)));
    double end = now() + given.seconds;
    while (now() < end || forks < 3) {
        pid_t pid = fork();
        MUST(pid >= 0);
        if (pid == 0) {
            allocate(given.seed + 77, 400);
            for (size_t page = forks % 61; page < given.pages; page += 61)
                check_page(arena + page * PAGE, key_of(given.seed, page, 1), "in the child");
            _exit(0);
        }
        int status;
        MUST(waitpid(pid, &status, 0) == pid);
        if (status != 0) die("a child ended with %#x", status);
        forks++;
    }
    over = 1;
    for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
}

/* Reads pages that are out, without a pause. */
static void *reader(void *x) {
    uint64_t state = given.seed + (uintptr_t)x;
    while (!over) {
        size_t page = below(&state, given.pages);
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "during a fork");
        turns++;
    }
    return NULL;
}

/* Forks that take long, for there are many mappings, while threads bring pages in. */
static void long_forks(void) {
    enum { MAPPINGS = 40000 };
    unsigned char *area =
        mmap(NULL, MAPPINGS * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(area != MAP_FAILED);
    for (size_t page = 0; page < MAPPINGS; page += 2)
        MUST(mprotect(area + page * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0);
    pthread_t thread[2];
    for (uintptr_t i = 0; i < 2; i++) MUST(!pthread_create(&thread[i], NULL, reader, (void *)i));
    double end = now() + given.seconds;
    while (now() < end || forks < 3) one_fork("with readers", 0);
    over = 1;
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
}

/* Advises the block, and moves it: both while the fork is under way. */
static void *advises(void *x) {
    static const int advice[] = {MADV_SEQUENTIAL, MADV_NORMAL, MADV_RANDOM};
    for (int round = 0; !over; round++) {
        while (!go && !over) {}
        if (over) break;
        go = 0;
        unsigned char *to = block == places[0] ? places[1] : places[0];
        MUST(madvise(block, BLOCK / 2 * PAGE, advice[round % 3]) == 0);
        MUST(madvise(block + BLOCK / 4 * PAGE, BLOCK / 4 * PAGE, advice[(round + 1) % 3]) == 0);
        MUST(madvise(block, BLOCK * PAGE, advice[round % 2]) == 0);
        gone = 1;
        MUST(mremap(block, BLOCK * PAGE, BLOCK * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
        block = to;
        turns++;
        done = 1;
    }
    return x;
}

/* Lets children have memory that they were not to have: while the fork is under way. */
static void *lets_fork(void *x) {
    while (!over) {
        while (!go && !over) {}
        if (over) break;
        go = 0;
        MUST(madvise(block, BLOCK * PAGE, MADV_DOFORK) == 0);
        gone = 1;
        turns++;
        done = 1;
    }
    return x;
}

static void check_block(const unsigned char *at) {
    for (size_t page = 0; page < BLOCK; page++)
        check_page(at + page * PAGE, key_of(given.seed, page, 5), "page of the block");
}

/* Whether a mapping begins there: what a child does not have may be a hole for others. */
static int is_mapped(const unsigned char *at) {
    char line[512];
    unsigned long start;
    int found = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    MUST(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%lx-", &start) == 1) found |= start == (uintptr_t)at;
    fclose(file);
    return found;
}

/* fork(2) past libc and its handlers. */
static pid_t bare_fork(void) {
    long pid;
    __asm__ volatile("syscall" : "=a"(pid) : "a"(SYS_fork) : "rcx", "r11", "memory");
    return (pid_t)pid;
}

/* A system call past libc and its hooks. */
static long bare_call(long number, long a, long b, const void *c) {
    long word;
    register long d __asm__("r10") = 0;
    register long e __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(word)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(d), "r"(e)
                     : "rcx", "r11", "memory");
    return word;
}

/* Waits until the main thread's fork is in its handlers, and does what must wait for that fork, or
 * fail. */
static void await_handlers(void) {
    while (!in_prepare) usleep(100);
    usleep(20000);
}

/* A filter that permits everything, or all but processes. */
static struct sock_filter permit[] = {
    BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
};

/* Forks past libc's handlers with the lock held that a fork handler waits for; if `confined`, under
 * a filter that it has set for itself meanwhile. */
static void *fork_locked(int confined) {
    pthread_mutex_lock(&mutex);
    go = 1;
    await_handlers();
    if (confined) {
        struct sock_fprog all = {.len = 1, .filter = &permit[2]};
        MUST(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        MUST(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &all));
        printf("forks\n");
        fflush(stdout);
    }
    pid_t pid = (pid_t)syscall(SYS_fork);
    int failed = errno;
    if (pid == 0) {
        check_all("in the child of the other thread");
        _exit(0);
    }
    pthread_mutex_unlock(&mutex);
    int status = 0;
    MUST(pid > 0 || failed == EAGAIN);
    if (pid > 0) MUST(waitpid(pid, &status, 0) == pid && status == 0);
    turns += pid > 0;
    return NULL;
}

static void *forks_locked(void *x) {
    (void)x;
    return fork_locked(0);
}

static void *forks_confined(void *x) {
    (void)x;
    return fork_locked(1);
}

/* Sets a filter for all threads with the lock held that a fork handler waits for. */
static void *filters_locked(void *x) {
    struct sock_fprog all = {.len = 1, .filter = &permit[2]};
    MUST(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    pthread_mutex_lock(&mutex);
    go = 1;
    await_handlers();
    long set = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &all);
    pthread_mutex_unlock(&mutex);
    /* The thread that could not be put under it is the one that forks. */
    MUST(set == 0 || set == getpid());
    while (!done) usleep(100);
    MUST(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &all));
    return x;
}

/* Keeps memory apart from children while another thread is in a fork that takes long. */
static void *wipes(void *x) {
    while (!over) {
        while (!in_prepare && !over) usleep(100);
        in_prepare = 0;
        if (madvise(excluded, SMALL, MADV_WIPEONFORK)) die("MADV_WIPEONFORK: %s", strerror(errno));
        turns++;
    }
    return x;
}

/* Forks past libc while another thread's fork is in its handlers. */
static void *forks_bare(void *x) {
    while (!in_prepare) usleep(100);
    pid_t pid = bare_fork();
    if (pid == 0) {
        for (size_t page = 0; page < given.pages; page++)
            for (size_t word = 0; word < WORDS; word += 64)
                if (((volatile uint64_t *)(arena + page * PAGE))[word] !=
                    word_of(key_of(given.seed, page, 1), word))
                    _exit(6);
        _exit(0);
    }
    MUST(pid > 0);
    bare_forked = 1;
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (status != 0) die("a child past libc ended with %#x", status);
    return x;
}

/* Forks, which a filter of this thread alone has fail. */
static void *forks_in_vain(void *x) {
    struct sock_fprog mine = {.len = 4, .filter = permit};
    MUST(!bare_call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, NULL));
    MUST(!bare_call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &mine));
    double began = now();
    pid_t pid = fork();
    MUST(pid < 0 && errno == EAGAIN);
    double took = now() - began;
    if (took > 5) die("a fork that failed took %.1f s", took);
    forks++;
    return x;
}

static void fail_forks(void) {
    awaits_bare = 1;
    for (int round = 0; round < 3; round++) {
        in_prepare = bare_forked = 0;
        pthread_t thread[2];
        MUST(!pthread_create(&thread[0], NULL, forks_bare, NULL));
        MUST(!pthread_create(&thread[1], NULL, forks_in_vain, NULL));
        for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    }
    awaits_bare = 0;
}

static void wait_in_handlers(void *(*other_thread)(void *)) {
    pthread_t thread;
    in_handlers = 1;
    MUST(!pthread_create(&thread, NULL, other_thread, NULL));
    while (!go) usleep(100);
    one_fork("while another thread holds the lock", 0);
    in_handlers = 0;
    done = 1;
    pthread_join(thread, NULL);
}

static void wipe_during_forks(void) {
    pthread_t thread;
    dawdles = 600000;
    MUST(!pthread_create(&thread, NULL, wipes, NULL));
    for (int i = 0; i < 4; i++) one_fork("while memory is kept apart", 0);
    dawdles = 0;
    over = 1;
    pthread_join(thread, NULL);
    MUST(turns >= 4);
}

static void block_forks(int lets, int bare) {
    unsigned char *area = map(8 * BLOCK * PAGE);
    MUST(munmap(area, 8 * BLOCK * PAGE) == 0);
    for (int i = 0; i < 2; i++) places[i] = area + (size_t)(1 + 3 * i) * BLOCK * PAGE;
    unsigned char *at = mmap(places[0], BLOCK * PAGE, PROT_READ | PROT_WRITE,
                             MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(at == places[0]);
    for (size_t page = 0; page < BLOCK; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, 5));
    pthread_t thread;
    MUST(!pthread_create(&thread, NULL, lets ? lets_fork : advises, NULL));
    double end = now() + given.seconds;
    while (now() < end || forks < 3) {
        check_block(at);
        if (lets && !bare) MUST(madvise(at, BLOCK * PAGE, MADV_DONTFORK) == 0);
        /* Out with it. */
        unsigned char seen[1] = {1};
        for (int i = 0; i < 10 && seen[0] & 1; i++) {
            MUST(madvise(at, BLOCK * PAGE, MADV_PAGEOUT) == 0);
            usleep(1000);
            MUST(mincore(at + (BLOCK - 1) * PAGE, PAGE, seen) == 0);
        }
        gone = done = 0;
        block = at;
        if (bare) prepare();
        /* A child past libc has its stack, and little else. */
        uint64_t seed = given.seed;
        pid_t pid = bare ? bare_fork() : fork();
        MUST(pid >= 0);
        if (pid == 0 && bare) {
            for (size_t page = 0; page < BLOCK; page++)
                for (size_t word = 0; word < WORDS; word++)
                    if (((volatile uint64_t *)(at + page * PAGE))[word] !=
                        word_of(key_of(seed, page, 5), word))
                        _exit(6);
            _exit(0);
        }
        if (pid == 0) {
            if ( !is_mapped(places[0]) && !is_mapped(places[1])) _exit(lets ? 0 : 4);
            check_block(is_mapped(places[0]) ? places[0] : places[1]);
            _exit(0);
        }
        int status;
        MUST(waitpid(pid, &status, 0) == pid);
        /* A child past libc may find nothing. */
        if (!(bare && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) && status)
            die("a child ended with %#x", status);
        while (!done) usleep(100);
        at = block;
        block = NULL;
        forks++;
    }
    over = 1;
    pthread_join(thread, NULL);
    check_block(at);
}

static void lower(rlim_t files) {
    struct rlimit limit;
    MUST(!getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = files;
    MUST(!setrlimit(RLIMIT_NOFILE, &limit));
}

static void handled(int signal) {
    (void)signal;
}

int main(int count, char **words) {
    given = parse(count, words, "maps");
    spins = !strcmp(given.mode, "spins") || !strcmp(given.mode, "moves-spins");
    naps = !strcmp(given.mode, "naps");
    arena = map(given.pages * PAGE);
    given_up = map(SMALL);
    unmapped = map(SMALL);
    excluded = map(SMALL);
    fill_small();
    fill_all();
    check_all("before");
    pthread_t threads[3];
    /* With one thread no other takes a signal. */
    int is_alone = !strcmp(given.mode, "once") || !strcmp(given.mode, "handles");
    if (!is_alone) pthread_create(&threads[1], NULL, watch, NULL);
    if (!strcmp(given.mode, "changes")) {
        double end = now() + given.seconds;
        while (now() < end || forks < 3) {
            fill_small();
            check_all("before a fork");
            changes = 1;
            one_fork("with changes", forks % 4 == 0);
            changes = 0;
        }
    } else if (!strcmp(given.mode, "allocators")) {
        allocators();
    } else if (!strcmp(given.mode, "advises")) {
        block_forks(0, 0);
    } else if (!strcmp(given.mode, "lets")) {
        block_forks(1, 0);
    } else if (!strcmp(given.mode, "lets-bare")) {
        block_forks(1, 1);
    } else if (!strcmp(given.mode, "long")) {
        long_forks();
    } else if (!strcmp(given.mode, "forks-locked")) {
        wait_in_handlers(forks_locked);
        /* With no other fork under way it may be made. */
        in_prepare = 1;
        long before = turns;
        forks_locked(NULL);
        MUST(turns == before + 1);
    } else if (!strcmp(given.mode, "forks-confined")) {
        wait_in_handlers(forks_confined);
    } else if (!strcmp(given.mode, "filters-locked")) {
        wait_in_handlers(filters_locked);
    } else if (!strcmp(given.mode, "wipes")) {
        wipe_during_forks();
    } else if (!strcmp(given.mode, "fails")) {
        fail_forks();
    } else if (!strcmp(given.mode, "files")) {
        /* The event of a fork needs a descriptor; here are fewer than the engine has open. */
        lower(4);
        for (int i = 0; i < 3; i++) one_fork("with few descriptors", 1);
    } else if (!strcmp(given.mode, "full")) {
        /* No descriptor is free in the program's own table. */
        lower(64);
        while (dup(0) >= 0) {}
        for (int i = 0; i < 3; i++) one_fork("with a full table", 1);
    } else if (is_alone) {
        if (given.mode[0] == 'h') {
            struct sigaction action = {.sa_handler = handled};
            sigaction(SIGTERM, &action, NULL);
        }
        printf("forks\n");
        fflush(stdout);
        pid_t pid = fork();
        MUST(pid >= 0);
        if (pid == 0) {
            check_all("in the child");
            _exit(0);
        }
        int status;
        check_all("in the parent, meanwhile");
        MUST(waitpid(pid, &status, 0) == pid);
        printf("child %d\n", status);
    } else {
        in_handlers = 1;
        pthread_create(&threads[0], NULL, other, NULL);
        pthread_create(&threads[2], NULL, third, NULL);
        double end = now() + given.seconds;
        while (now() < end || forks < 3) {
            one_fork("with a lock", 0);
            usleep(1000);
        }
        over = 1;
        pthread_join(threads[0], NULL);
        pthread_join(threads[2], NULL);
        MUST(turns > 0);
    }
    over = 1;
    check_all("after");
    fprintf(stderr, "%ld forks, %ld turns, %d stopped\n", (long)forks, (long)turns, stopped);
    return ok("forklock", given.mode);
}
