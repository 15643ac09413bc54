/* Words that the kernel reads and writes by itself, in memory that is out at that moment.
 *
 *     futex MB SECONDS SEED MODE
 *
 * robust   mutexes that are robust, with owners that end in each way a thread can
 * pi       mutexes that inherit priorities, and the same operations by raw system calls
 * words    what a thread's end and its scheduling touch: words of raw clones, own rseq areas,
 *          own robust lists, a selector of system calls
 * churn    20,000 threads on stacks of their own: afterwards that memory can go out
 * files    a limit of 0, then 1, on open files
 * inode    writes to standard error, a file, what is out: it holds the file's inode lock meanwhile
 * bare     futex operations, and words of a thread, by a bare instruction: what happens is in
 *          docs/semantics.md */
#include "common.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/rseq.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *ballast;
static int managed;

static int present(const void *at) {
    static int file = -1;
    if (file < 0) MUST((file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) >= 0);
    uint64_t word = 0;
    MUST(pread(file, &word, 8, (off_t)((uintptr_t)at / PAGE * 8)) == 8);
    return (word >> 62 & 3) != 0;
}

static uint64_t key(size_t page) {
    return key_of(given.seed, page, 1) & ~0xf00ull; /* never a page of zeros */
}

static unsigned char *filled(size_t pages) {
    unsigned char *at = map(pages * PAGE);
    for (size_t page = 0; page < pages; page++) fill_page(at + page * PAGE, key(page) | 0x100);
    return at;
}

static void intact(const unsigned char *at, size_t pages) {
    for (size_t page = 0; page < pages; page++)
        check_page(at + page * PAGE, key(page) | 0x100, "page of the ballast");
}

/* Has a range taken out. True if all of it but what stays is out, by the page that is given. */
static int out(void *range, size_t pages, const void *witness) {
    for (int i = 0; i < 400; i++) {
        madvise(range, pages * PAGE, MADV_PAGEOUT);
        if (!present(witness)) return 1;
        if (!managed) return 0;
        usleep(5000);
    }
    die("page %zu of the range, which nothing keeps in memory, does not go out",
        (size_t)((unsigned char *)witness - (unsigned char *)range) / PAGE);
}

static void begin(void) {
    const char *preload = getenv("LD_PRELOAD");
    ballast = filled(given.pages);
    managed = preload != NULL && strstr(preload, "swaptide") != NULL;
    out(ballast, 16, ballast);
}

/* robust: the ways in which an owner ends. */
enum end { RETURN, EXIT, CANCELLED, RAW, ENDS };

struct owner {
    pthread_mutex_t **mutex;
    size_t count;
    enum end end;
    atomic_int holds, go;
};

static void await(atomic_int *word) {
    while (!*word) usleep(200);
}

static void *owner(void *given_owner) {
    struct owner *self = given_owner;
    for (size_t i = 0; i < self->count; i++)
        MUST((errno = pthread_mutex_lock(self->mutex[i])) == 0);
    self->holds = 1;
    while (!self->go) {
        struct timespec pause = {0, 200000};
        nanosleep(&pause, NULL); /* a place to be cancelled at */
    }
    if (self->end == EXIT) pthread_exit(NULL);
    if (self->end == RAW) syscall(SYS_exit, 0);
    return NULL;
}

static void make(pthread_mutex_t *mutex, int robust, int protocol) {
    pthread_mutexattr_t kind;
    MUST((errno = pthread_mutexattr_init(&kind)) == 0);
    if (robust) MUST((errno = pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST)) == 0);
    MUST((errno = pthread_mutexattr_setprotocol(&kind, protocol)) == 0);
    MUST((errno = pthread_mutex_init(mutex, &kind)) == 0);
    MUST((errno = pthread_mutexattr_destroy(&kind)) == 0);
}

enum { MUTEXES = 48 };

static void robust_round(enum end end, int protocol) {
    /* One in each third page, some across two. */
    size_t pages = 3 * MUTEXES + 1;
    unsigned char *area = filled(pages);
    pthread_mutex_t *mutex[MUTEXES];
    for (size_t i = 0; i < MUTEXES; i++) {
        mutex[i] =
            (pthread_mutex_t *)(area + (3 * i + 1) * PAGE - (i % 4 == 0 ? 16 : 0) + 64 * (i % 4));
        make(mutex[i], 1, protocol);
    }
    struct owner self = {mutex, MUTEXES, end, 0, 0};
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, owner, &self) == 0);
    await(&self.holds);
    out(area, pages, area + (3 * 7 + 2) * PAGE);
    out(ballast, given.pages, ballast);
    if (end == CANCELLED) MUST(pthread_cancel(thread) == 0);
    self.go = 1;
    if (end != RAW) MUST(pthread_join(thread, NULL) == 0);
    for (size_t i = 0; i < MUTEXES; i++) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 5;
        int result = pthread_mutex_timedlock(mutex[i], &until);
        if (result != EOWNERDEAD)
            die("end %d, protocol %d, mutex %zu: %s instead of EOWNERDEAD", end, protocol, i,
                strerror(result));
        MUST((errno = pthread_mutex_consistent(mutex[i])) == 0);
        MUST((errno = pthread_mutex_unlock(mutex[i])) == 0);
        MUST((errno = pthread_mutex_destroy(mutex[i])) == 0);
    }
    /* Nothing is held by what was destroyed. */
    for (size_t i = 0; managed && i < MUTEXES; i++)
        out((void *)((uintptr_t)mutex[i] & ~(PAGE - 1)), 1, mutex[i]);
    MUST(munmap(area, pages * PAGE) == 0);
}

static void robust(void) {
    double until = now() + given.seconds;
    do {
        for (enum end end = RETURN; end < ENDS; end++) {
            robust_round(end, PTHREAD_PRIO_NONE);
            robust_round(end, PTHREAD_PRIO_INHERIT);
        }
    } while (now() < until);
}

/* pi */
enum { LOCKERS = 3, LOCKS = 64 };
static pthread_mutex_t *locks[LOCKS];
static uint64_t *counter[LOCKS];
static double until;
static atomic_long total;

static void *locker(void *number) {
    uint64_t random = mix(given.seed ^ (uintptr_t)number);
    long mine = 0;
    while (now() < until) {
        for (int i = 0; i < 200; i++, mine++) {
            size_t which = below(&random, LOCKS);
            int result = pthread_mutex_lock(locks[which]);
            if (result != 0) die("pthread_mutex_lock: %s", strerror(result));
            ++*counter[which];
            if (i % 50 == 0) sched_yield();
            result = pthread_mutex_unlock(locks[which]);
            if (result != 0) die("pthread_mutex_unlock: %s", strerror(result));
        }
        size_t page = below(&random, given.pages);
        glance_page(ballast + page * PAGE, key(page) | 0x100, "page of the ballast");
    }
    total += mine;
    return NULL;
}

static long futex(uint32_t *word, int operation, uint32_t value, uintptr_t second, uint32_t *other,
                  uint32_t third) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, second, other, third);
}

static void *unlock_later(void *word) {
    usleep(20000);
    return (void *)(uintptr_t)(syscall(SYS_futex, word, FUTEX_UNLOCK_PI | FUTEX_PRIVATE_FLAG, 0,
                                       NULL, NULL, 0) == 0);
}

static void raw_operations(unsigned char *area) {
    uint32_t tid = (uint32_t)syscall(SYS_gettid), plain = 0;
    uint32_t *word = (uint32_t *)(area + PAGE + 64);
    /* Each time in another page, which has not been used so. */
    for (int turn = 0; turn < 8; turn++, word += 4 * PAGE / sizeof *word) {
        unsigned char *start = (unsigned char *)((uintptr_t)word & ~(PAGE - 1));
        *word = 5;
        out(start, 1, word);
        long result =
            futex(&plain, FUTEX_WAKE_OP, 1, 1, word, FUTEX_OP(FUTEX_OP_ADD, 2, FUTEX_OP_CMP_EQ, 5));
        if (result != 0 || *word != 7)
            die("FUTEX_WAKE_OP: %ld %s, the word is %u", result, strerror(errno), *word);
        *word = 0;
        static const int locking[] = {FUTEX_LOCK_PI, FUTEX_TRYLOCK_PI, FUTEX_LOCK_PI2};
        out(start, 1, start);
        result = futex(word, locking[turn % 3], 0, 0, NULL, 0);
        if (result != 0 && errno == ENOSYS) continue;
        if (result != 0 || *word != tid)
            die("operation %d: %ld %s, the word is %x", locking[turn % 3], result, strerror(errno),
                *word);
        out(area, 4, area + 3 * PAGE);
        result = futex(word, FUTEX_UNLOCK_PI, 0, 0, NULL, 0);
        if (result != 0 || *word != 0)
            die("FUTEX_UNLOCK_PI: %ld %s, the word is %x", result, strerror(errno), *word);
    }
    /* What is wrong stays wrong. */
    unsigned char *none = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(none != MAP_FAILED);
    MUST(futex((uint32_t *)none, FUTEX_LOCK_PI, 0, 0, NULL, 0) == -1 && errno == EFAULT);
    MUST(futex(&plain, FUTEX_WAKE_OP, 1, 1, (uint32_t *)none,
               FUTEX_OP(FUTEX_OP_SET, 1, FUTEX_OP_CMP_EQ, 0)) == -1 &&
         errno == EFAULT);
    MUST(mprotect(none, PAGE, PROT_READ) == 0);
    MUST(futex((uint32_t *)none, FUTEX_LOCK_PI, 0, 0, NULL, 0) == -1 && errno == EFAULT);
    MUST(munmap(none, PAGE) == 0);
    MUST(futex((uint32_t *)none, FUTEX_LOCK_PI, 0, 0, NULL, 0) == -1 && errno == EFAULT);
    MUST(futex((uint32_t *)(area + 2), FUTEX_LOCK_PI, 0, 0, NULL, 0) == -1 && errno == EINVAL);
}

/* Several threads take a PI lock that was never used, at once: none is told that the futex is no
 * PI one. */
enum { FRESH = 200, TAKERS = 4 };
static unsigned char *fresh;
static pthread_barrier_t start_line;
static void *taker(void *x) {
    for (size_t i = 0; i < FRESH; i++) {
        uint32_t *word = (uint32_t *)(fresh + i * PAGE + 64);
        pthread_barrier_wait(&start_line);
        if (futex(word, FUTEX_LOCK_PI, 0, 0, NULL, 0) != 0)
            die("FUTEX_LOCK_PI of fresh word %zu: %s", i, strerror(errno));
        if (futex(word, FUTEX_UNLOCK_PI, 0, 0, NULL, 0) != 0)
            die("FUTEX_UNLOCK_PI of fresh word %zu: %s", i, strerror(errno));
    }
    return x;
}

static void contended(void) {
    fresh = filled(FRESH);
    for (size_t i = 0; i < FRESH; i++) memset(fresh + i * PAGE + 64, 0, 4);
    MUST(pthread_barrier_init(&start_line, NULL, TAKERS) == 0);
    pthread_t thread[TAKERS];
    for (size_t i = 0; i < TAKERS; i++) MUST(pthread_create(&thread[i], NULL, taker, NULL) == 0);
    for (size_t i = 0; i < TAKERS; i++) MUST(pthread_join(thread[i], NULL) == 0);
    MUST(munmap(fresh, FRESH * PAGE) == 0);
}

static uint32_t *waits_on, *requeued_to;
static void *waits_requeue(void *x) {
    long result = syscall(SYS_futex, waits_on, FUTEX_WAIT_REQUEUE_PI | FUTEX_PRIVATE_FLAG, 0, NULL,
                          requeued_to, 0);
    if (result != 0) die("FUTEX_WAIT_REQUEUE_PI: %s", strerror(errno));
    MUST(syscall(SYS_futex, requeued_to, FUTEX_UNLOCK_PI | FUTEX_PRIVATE_FLAG, 0, NULL, NULL, 0) ==
         0);
    return x;
}

static void requeue(unsigned char *area) {
    waits_on = (uint32_t *)(area + 40 * PAGE);
    requeued_to = (uint32_t *)(area + 44 * PAGE);
    *waits_on = *requeued_to = 0;
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, waits_requeue, NULL) == 0);
    usleep(50000);
    out(area + 40 * PAGE, 8, area + 42 * PAGE);
    long result = 0;
    for (int i = 0; i < 100 && result == 0; i++) {
        result = futex(waits_on, FUTEX_CMP_REQUEUE_PI, 1, 0, requeued_to, 0);
        if (result < 0) die("FUTEX_CMP_REQUEUE_PI: %s", strerror(errno));
        if (result == 0) usleep(10000);
    }
    MUST(pthread_join(thread, NULL) == 0);
}

static void pi(void) {
    unsigned char *area = filled(4 * LOCKS);
    for (size_t i = 0; i < LOCKS; i++) {
        locks[i] = (pthread_mutex_t *)(area + 4 * i * PAGE + 128);
        counter[i] = (uint64_t *)(area + (4 * i + 2) * PAGE);
        *counter[i] = 0;
        make(locks[i], 0, PTHREAD_PRIO_INHERIT);
    }
    until = now() + given.seconds;
    pthread_t thread[LOCKERS];
    for (size_t i = 0; i < LOCKERS; i++)
        MUST(pthread_create(&thread[i], NULL, locker, (void *)i) == 0);
    while (now() < until) {
        madvise(area, 4 * LOCKS * PAGE, MADV_PAGEOUT);
        for (size_t i = 0; i < LOCKS; i++)
            if (!present(locks[i])) die("the page of a PI mutex is out");
        usleep(500);
    }
    uint64_t counted = 0;
    for (size_t i = 0; i < LOCKERS; i++) MUST(pthread_join(thread[i], NULL) == 0);
    for (size_t i = 0; i < LOCKS; i++) {
        counted += *counter[i];
        MUST((errno = pthread_mutex_destroy(locks[i])) == 0);
    }
    if (counted != (uint64_t)total)
        die("%lu times locked, %ld counted", (unsigned long)total, (long)counted);
    unsigned char *words = filled(64);
    raw_operations(words);
    requeue(words);
    contended();
    /* A waiter is woken through a word that is out meanwhile. */
    uint32_t *word = (uint32_t *)(words + 50 * PAGE);
    *word = 0;
    MUST(futex(word, FUTEX_LOCK_PI, 0, 0, NULL, 0) == 0);
    MUST(futex(word, FUTEX_UNLOCK_PI, 0, 0, NULL, 0) == 0);
    pthread_t other;
    MUST(pthread_create(&other, NULL, unlock_later, word) == 0);
    void *unlocked;
    MUST(pthread_join(other, &unlocked) == 0 && unlocked == NULL);
    /* 100,000 mutexes that come and go do not keep what they lay in. */
    size_t pages = 2000;
    unsigned char *many = filled(pages);
    for (size_t i = 0; i < 100000; i++) {
        pthread_mutex_t *mutex = (pthread_mutex_t *)(many + i % pages * PAGE + i / pages * 64);
        make(mutex, 0, PTHREAD_PRIO_INHERIT);
        MUST(pthread_mutex_destroy(mutex) == 0);
    }
    if (managed) out(many, pages, many + 1000 * PAGE);
    size_t there = 0;
    for (size_t page = 0; page < pages; page++) there += (size_t)present(many + page * PAGE);
    if (managed && there > pages / 10)
        die("%zu of %zu pages of mutexes that are gone stay", there, pages);
}

/* words */
static unsigned char *words_area;

static int raw_thread(void *argument) {
    (*(atomic_int *)argument)++;
    syscall(SYS_exit, 0);
    return 0;
}

static void await_clear(volatile uint32_t *word, const char *what) {
    double end = now() + 10;
    while (*word != 0) {
        if (now() > end) die("%s: the kernel has not cleared the word", what);
        struct timespec time = {0, 100000000};
        uint32_t seen = *word;
        if (seen) syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
    }
}

static void cleared_words(void) {
    enum {
        THREAD = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM
    };
    for (int turn = 0; turn < 6; turn++) {
        unsigned char *stack = filled(64);
        volatile uint32_t *word = (volatile uint32_t *)(words_area + (size_t)turn * 4 * PAGE + 8);
        atomic_int ran = 0;
        *word = 1;
        out((void *)((uintptr_t)word & ~(PAGE - 1)), 1, (void *)word);
        MUST(clone(raw_thread, stack + 64 * PAGE,
                   THREAD | CLONE_CHILD_CLEARTID | (turn % 2 ? CLONE_CHILD_SETTID : 0), &ran, NULL,
                   NULL, word) > 0);
        if (turn % 2 == 0) {
            await_clear(word, "CLONE_CHILD_CLEARTID");
        } else {
            while (!ran) usleep(100);
            await_clear(word, "CLONE_CHILD_SETTID and CLEARTID");
        }
        MUST(munmap(stack, 64 * PAGE) == 0);
    }
}

static void *with_tid_address(void *word) {
    syscall(SYS_set_tid_address, word);
    out(words_area + 40 * PAGE, 4, words_area + 42 * PAGE);
    syscall(SYS_exit, 0);
    return NULL;
}

/* An rseq area of the program's own needs a libc that has none: this thread gives libc's up. */
static void *with_rseq(void *x) {
    extern const ptrdiff_t __rseq_offset __attribute__((weak));
    unsigned char *area = words_area + 60 * PAGE + 64;
    char *own;
    __asm__("mov %%fs:0, %0" : "=r"(own));
    if (&__rseq_offset != NULL) syscall(SYS_rseq, own + __rseq_offset, 32, 1, 0x53053053);
    memset(area, 0, 32);
    if (syscall(SYS_rseq, area, 32, 0, 0x53053053) != 0) return x;
    double end = now() + 0.3;
    while (now() < end) {
        out(words_area + 56 * PAGE, 8, words_area + 58 * PAGE);
        for (int i = 0; i < 50; i++) sched_yield();
    }
    if (((volatile uint32_t *)area)[1] >= 1u << 20) die("the rseq area has no CPU");
    MUST(syscall(SYS_rseq, area, 32, 1, 0x53053053) == 0);
    return x;
}

/* A robust list of the program's own, in three pages that are out when its thread ends. */
struct robust_head {
    void *next;
    long offset;
    void *pending;
};

static uint32_t *list_word[3];

static void *with_list(void *how) {
    struct robust_head *head = (struct robust_head *)(words_area + 80 * PAGE);
    void **entry[3];
    for (size_t i = 0; i < 3; i++) {
        entry[i] = (void **)(words_area + (84 + 4 * i) * PAGE);
        list_word[i] = (uint32_t *)(entry[i] + 4);
        *list_word[i] = (uint32_t)syscall(SYS_gettid);
    }
    for (size_t i = 0; i < 3; i++) *entry[i] = i < 2 ? (void *)entry[i + 1] : (void *)head;
    *head = (struct robust_head){entry[0], 32, NULL};
    MUST(syscall(SYS_set_robust_list, head, sizeof *head) == 0);
    out(words_area + 76 * PAGE, 20, words_area + 78 * PAGE);
    enum end way = *(enum end *)how;
    if (way == RAW) syscall(SYS_exit, 0);
    if (way == EXIT) pthread_exit(NULL);
    if (way == CANCELLED) {
        MUST(pthread_cancel(pthread_self()) == 0);
        pthread_testcancel();
        die("a cancelled thread continues");
    }
    return NULL;
}

static void own_list(enum end way) {
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, with_list, &way) == 0);
    double end = now() + 10;
    if (way != RAW) MUST(pthread_join(thread, NULL) == 0);
    for (size_t i = 0; i < 3; i++) {
        while (list_word[i] == NULL || !(*(volatile uint32_t *)list_word[i] & FUTEX_OWNER_DIED)) {
            if (now() > end) die("own robust list, way %d: word %zu is not marked", way, i);
            usleep(1000);
        }
    }
}

static volatile sig_atomic_t dispatched;
static volatile char *selector;
static void on_dispatch(int number) {
    (void)number;
    *selector = 0; /* SYSCALL_DISPATCH_FILTER_ALLOW */
    dispatched++;
}

static void dispatch(void) {
    selector = (char *)words_area + 100 * PAGE;
    *selector = 0;
    struct sigaction action = {.sa_handler = on_dispatch};
    MUST(sigaction(SIGSYS, &action, NULL) == 0);
    if (prctl(59, 1, 0, 0, selector) != 0) return; /* PR_SET_SYSCALL_USER_DISPATCH */
    for (int i = 0; i < 20; i++) {
        out(words_area + 98 * PAGE, 4, words_area + 99 * PAGE);
        MUST(getppid() > 0);
    }
    dispatched = 0;
    *selector = 1;
    getppid();
    if (dispatched != 1) die("%d system calls were dispatched, expected 1", (int)dispatched);
    MUST(prctl(59, 0, 0, 0, 0) == 0);
}

static void words(void) {
    words_area = filled(128);
    double end = now() + given.seconds;
    do {
        pthread_t thread;
        cleared_words();
        volatile uint32_t *word = (volatile uint32_t *)(words_area + 40 * PAGE + 12);
        *word = 7;
        MUST(pthread_create(&thread, NULL, with_tid_address, (void *)word) == 0);
        await_clear(word, "set_tid_address");
        MUST(pthread_create(&thread, NULL, with_rseq, NULL) == 0);
        MUST(pthread_join(thread, NULL) == 0);
        for (enum end way = RETURN; way < ENDS; way++) {
            memset(list_word, 0, sizeof list_word);
            own_list(way);
        }
        dispatch();
        words_area = filled(128);
    } while (now() < end);
}

/* churn */
enum { CHURN = 20000, AT_A_TIME = 16, STACK = 9 };

static void *nothing(void *x) {
    return x;
}

static void churn(void) {
    size_t pages = (size_t)CHURN * STACK;
    unsigned char *stacks = map(pages * PAGE);
    pthread_attr_t kind;
    MUST(pthread_attr_init(&kind) == 0);
    for (size_t i = 0; i < CHURN; i += AT_A_TIME) {
        pthread_t thread[AT_A_TIME];
        for (size_t k = 0; k < AT_A_TIME; k++) {
            MUST(pthread_attr_setstack(&kind, stacks + (i + k) * STACK * PAGE, STACK * PAGE) == 0);
            MUST(pthread_create(&thread[k], &kind, nothing, NULL) == 0);
        }
        for (size_t k = 0; k < AT_A_TIME; k++) MUST(pthread_join(thread[k], NULL) == 0);
    }
    if (!managed) return;
    size_t there = 0;
    for (int i = 0; i < 40; i++) {
        madvise(stacks, pages * PAGE, MADV_PAGEOUT);
        there = 0;
        for (size_t page = 0; page < pages; page++) there += (size_t)present(stacks + page * PAGE);
        if (there < CHURN / 100) return;
        usleep(100000);
    }
    die("%zu pages of %d threads that are gone stay in memory", there, CHURN);
}

/* files */
static void *reader(void *from) {
    for (size_t page = (size_t)from; page < given.pages; page += 2)
        check_page(ballast + page * PAGE, key(page) | 0x100, "page of the ballast");
    return NULL;
}

static void files(void) {
    if (managed) usleep(200000);
    for (rlim_t most = 0; most < 2; most++) {
        struct rlimit limit = {most, 4096};
        MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
        pthread_t thread[2];
        for (size_t i = 0; i < 2; i++)
            MUST(pthread_create(&thread[i], NULL, reader, (void *)i) == 0);
        for (size_t i = 0; i < 2; i++) MUST(pthread_join(thread[i], NULL) == 0);
        /* Hints and large mappings ask the handler for something. */
        unsigned char *more = map(16 << 20);
        memset(more, 1, 16 << 20);
        madvise(ballast, given.pages * PAGE, MADV_WILLNEED);
        MUST(munmap(more, 16 << 20) == 0);
    }
}

/* inode */
static void *writer(void *from) {
    uint64_t random = mix(given.seed + (uintptr_t)from);
    for (;;)
        if (pwrite(STDERR_FILENO, ballast + below(&random, given.pages - 64) * PAGE, 64 * PAGE, 0) <
            0)
            return NULL;
}

static void inode(void) {
    pthread_t thread[2];
    for (size_t i = 0; i < 2; i++) MUST(pthread_create(&thread[i], NULL, writer, (void *)i) == 0);
    sleep(60);
}

/* bare */
static long bare_futex(uint32_t *word, int operation) {
    long result;
    register long none __asm__("r10") = 0;
    register long second __asm__("r8") = 0;
    register long third __asm__("r9") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_futex), "D"(word), "S"(operation), "d"(0), "r"(none), "r"(second),
                       "r"(third)
                     : "rcx", "r11", "memory");
    return result;
}

static long bare_call(long number, void *first, size_t second) {
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second)
                     : "rcx", "r11", "memory");
    return result;
}

enum { WORD, LIST = 16, ENTRIES = 20, ALL = 64 };

/* The word that the kernel clears, and a robust list, of which no hook has seen anything. */
static void *with_bare_words(void *given_area) {
    unsigned char *area = given_area;
    struct robust_head *head = (struct robust_head *)(area + LIST * PAGE);
    for (size_t i = 0; i < 3; i++) {
        void **entry = (void **)(area + (ENTRIES + 4 * i) * PAGE);
        *entry = i < 2 ? (void *)(area + (ENTRIES + 4 * i + 4) * PAGE) : (void *)head;
        list_word[i] = (uint32_t *)(entry + 4);
        *list_word[i] = (uint32_t)syscall(SYS_gettid);
    }
    *head = (struct robust_head){area + ENTRIES * PAGE, 32, NULL};
    *(uint32_t *)area = (uint32_t)syscall(SYS_gettid);
    MUST(bare_call(SYS_set_tid_address, area, 0) > 0);
    MUST(bare_call(SYS_set_robust_list, head, sizeof *head) == 0);
    atomic_store((atomic_int *)(area + ALL * PAGE), (int)syscall(SYS_gettid));
    while (atomic_load((atomic_int *)(area + ALL * PAGE) + 1) == 0) usleep(1000);
    bare_call(SYS_exit, NULL, 0);
    return NULL;
}

/* What a thread named past libc is not written as it ends. */
static void bare_words(void) {
    unsigned char *area = filled(ALL + 1);
    atomic_int *number = (atomic_int *)(area + ALL * PAGE), *go = number + 1;
    atomic_store(number, 0);
    atomic_store(go, 0);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, with_bare_words, area) == 0);
    while (atomic_load(number) == 0) usleep(1000);
    pid_t tid = atomic_load(number);
    /* One that is out does not tell of the others. */
    out(area, ALL, area);
    for (size_t i = 0; i < 3; i++) out(area, ALL, list_word[i]);
    out(area, ALL, area + LIST * PAGE);
    for (size_t i = 0; managed && i < 3; i++) MUST(!present(list_word[i]));
    MUST(!managed || !present(area + LIST * PAGE));
    atomic_store(go, 1);
    double end = now() + 10;
    while (syscall(SYS_tgkill, getpid(), tid, 0) == 0) {
        if (now() > end) die("a thread does not end");
        usleep(1000);
    }
    uint32_t left = managed ? (uint32_t)tid : 0;
    uint32_t marked = managed ? (uint32_t)tid : FUTEX_OWNER_DIED;
    if (*(volatile uint32_t *)area != left) die("the word is %x", *(uint32_t *)area);
    for (size_t i = 0; i < 3; i++)
        if ((*(volatile uint32_t *)list_word[i] & ~FUTEX_WAITERS) != marked)
            die("robust word %zu is %x", i, *list_word[i]);
}

static void bare(void) {
    bare_words();
    unsigned char *area = filled(64);
    uint32_t *word = (uint32_t *)(area + PAGE);
    *word = 0;
    out(area, 64, word);
    long result = bare_futex(word, FUTEX_LOCK_PI | FUTEX_PRIVATE_FLAG);
    printf("FUTEX_LOCK_PI by a bare instruction: %s\n",
           result == 0 ? "locked" : strerror((int)-result));
    MUST(result == (managed ? -EFAULT : 0));
    if (managed) {
        /* After any touch it is as it was. */
        MUST(*(volatile uint32_t *)word == 0);
        MUST(bare_futex(word, FUTEX_LOCK_PI | FUTEX_PRIVATE_FLAG) == 0);
    }
    MUST(bare_futex(word, FUTEX_UNLOCK_PI | FUTEX_PRIVATE_FLAG) == 0);
}

int main(int count, char **arguments) {
    given = parse(count, arguments, "robust");
    begin();
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {{"robust", robust}, {"pi", pi},       {"words", words}, {"churn", churn},
                 {"files", files},   {"inode", inode}, {"bare", bare}};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(given.mode, modes[i].name) == 0) modes[i].run();
    intact(ballast, given.pages);
    return ok("futex", given.mode);
}
