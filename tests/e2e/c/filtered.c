/* A thread under a filter of system calls of its own, which lets pass what the program itself calls
 * and nothing more: swaptide's hooks make none of theirs on it. Threads map, move, grow and give up
 * memory, with most of the program out; mode fork forks as well.
 *
 *     filtered MB SECONDS SEED MODE      MODE: kill, trap, errno (what the filter does with other
 *                                       calls), fork (as kill), strict, bare (as kill, with
 *                                       children past libc), race (other threads' attempts to set
 *                                       one fail meanwhile), hole (as kill, with nothing behind
 *                                       what is to grow) */
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *ballast;

static const int allowed[] = {SYS_read,
                              SYS_write,
                              SYS_exit,
                              SYS_exit_group,
                              SYS_futex,
                              SYS_mmap,
                              SYS_munmap,
                              SYS_mremap,
                              SYS_brk,
                              SYS_mprotect,
                              SYS_clone,
                              SYS_clone3,
                              SYS_set_robust_list,
                              SYS_rseq,
                              SYS_rt_sigprocmask,
                              SYS_rt_sigaction,
                              SYS_wait4,
                              SYS_newfstatat,
                              SYS_fstat,
                              SYS_getpid, /* of die() */
                              SYS_gettid,
                              SYS_sched_yield,
                              SYS_getrandom,
                              SYS_clock_gettime};

/* Of madvise only MADV_DONTNEED, MADV_FREE and MADV_WILLNEED pass. */
static void confine(unsigned action) {
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter code[COUNT + 8] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (int i = 0; i < COUNT; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)allowed[i],
                                                   (unsigned char)(COUNT + 5 - i), 0);
    struct sock_filter *rest = code + 1 + COUNT;
    rest[0] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 4);
    rest[1] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
                                           offsetof(struct seccomp_data, args[2]));
    rest[2] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_DONTNEED, 3, 0);
    rest[3] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_FREE, 2, 0);
    rest[4] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_WILLNEED, 1, 0);
    rest[5] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    rest[6] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = COUNT + 8, .filter = code};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* A thread holds this while it allocates, and the main thread while it forks past libc: such a
 * child gets libc's own locks as they are, and waits for ever in fork() for one that another thread
 * held, with swaptide or without. For the same reason no thread ends before the last of them. */
static pthread_mutex_t allocates = PTHREAD_MUTEX_INITIALIZER;
static atomic_int forks_past_libc;

static void *mover(void *number) {
    enum { PAGES = 512 };
    uint64_t random = mix(given.seed ^ (uintptr_t)number);
    for (uint64_t turn = 1; turn < 16; turn++) {
        unsigned char *area =
            mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(area != MAP_FAILED);
        uint64_t key = key_of(given.seed + (uintptr_t)number, turn, 3);
        for (size_t page = 0; page < PAGES; page += 3) fill_page(area + page * PAGE, key + page);
        area = mremap(area, PAGES * PAGE, (PAGES + 256) * PAGE, MREMAP_MAYMOVE);
        MUST(area != MAP_FAILED);
        MUST(madvise(area, PAGES * PAGE, MADV_WILLNEED) == 0);
        for (int i = 0; i < 300; i++) {
            size_t page = below(&random, given.pages);
            glance_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page of the ballast");
        }
        for (size_t page = 0; page < PAGES; page += 3)
            check_page(area + page * PAGE, key + page, "page of a mapping that has grown");
        MUST(pthread_mutex_lock(&allocates) == 0);
        unsigned char *block = malloc(200000);
        MUST(block != NULL);
        memset(block, (int)turn, 200000);
        block = realloc(block, 4000000);
        MUST(block != NULL && block[0] == (unsigned char)turn &&
             block[199999] == (unsigned char)turn);
        free(block);
        MUST(pthread_mutex_unlock(&allocates) == 0);
        MUST(madvise(area, PAGE, MADV_DONTNEED) == 0 && area[0] == 0);
        MUST(munmap(area, (PAGES + 256) * PAGE) == 0);
    }
    while (atomic_load(&forks_past_libc)) sched_yield();
    return NULL;
}

/* A fork past libc while there are threads: the child moves and grows memory, and forks. */
static void bare_child(void) {
    long pid;
    MUST(pthread_mutex_lock(&allocates) == 0);
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall"
                     : "=a"(pid)
                     : "a"(SYS_clone), "D"(17 /* SIGCHLD */), "S"(0), "d"(0), "r"(r10), "r"(r8)
                     : "rcx", "r11", "memory");
    MUST(pid >= 0);
    if (pid == 0) {
        enum { PAGES = 64 };
        for (int turn = 0; turn < 3; turn++) {
            unsigned char *area = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            MUST(area != MAP_FAILED);
            fill_page(area, key_of(given.seed, 1, 4));
            area = mremap(area, PAGES * PAGE, 1024 * PAGE, MREMAP_MAYMOVE);
            MUST(area != MAP_FAILED);
            check_page(area, key_of(given.seed, 1, 4), "page of a mapping of a child past libc");
        }
        for (size_t page = 0; page < given.pages; page++)
            check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page of such a child");
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) _exit(0);
        int status;
        MUST(waitpid(child, &status, 0) == child && status == 0);
        _exit(0);
    }
    MUST(pthread_mutex_unlock(&allocates) == 0);
    double end = now() + 30;
    int status = 0;
    pid_t ended;
    while ((ended = waitpid((pid_t)pid, &status, WNOHANG)) == 0 && now() < end) sched_yield();
    if (ended == pid && status == 0) return;
    /* No call but those that pass. */
    printf("FAILED: a child past libc %s (%#x)\n", ended ? "ended" : "does not end", status);
    fflush(stdout);
    _exit(3);
}

static unsigned char *map_at(unsigned char *at, size_t pages) {
    unsigned char *got =
        mmap(at, pages * PAGE, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != at) die("%p is not free: %s", (void *)at, strerror(errno));
    return got;
}

/* A range that ends where nothing is mapped, or has a hole, does not grow, and nothing is mapped
 * there afterwards. The program lies at a fixed address: nearly all addresses are free above this
 * one. */
static void hole(void) {
    enum { PAGES = 64 };
    unsigned char *at = map_at((unsigned char *)(64ul << 30), PAGES), *behind = NULL;
    for (size_t page = 0; page < PAGES; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, 6));
    for (int round = 0; round < 2; round++) {
        for (int flags = 0; flags <= MREMAP_MAYMOVE; flags += MREMAP_MAYMOVE) {
            void *grown = mremap(at, 3 * PAGES * PAGE, 8 * PAGES * PAGE, flags);
            if (grown != MAP_FAILED || errno != EFAULT)
                die("round %d: the answer is %p, %s", round, grown, strerror(errno));
            for (size_t page = 0; page < PAGES; page++)
                check_page(at + page * PAGE, key_of(given.seed, page, 6), "page before a hole");
        }
        if (round == 1) fill_page(behind, key_of(given.seed, 0, 7));
        MUST(munmap(map_at(at + PAGES * PAGE, PAGES), PAGES * PAGE) == 0);
        MUST(munmap(map_at(at + (1ul << 40), 1), PAGE) == 0);
        if (round == 0) behind = map_at(at + 2 * PAGES * PAGE, PAGES);
    }
}

static atomic_int is_over;

/* Fails to set a filter, again and again. */
static void *attempts(void *unused) {
    struct sock_fprog empty = {.len = 0};
    while (!atomic_load(&is_over))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &empty) == -1);
    return unused;
}

static void wait_until(double when) {
    while (now() < when) continue;
}

static void *maps_confined(void *unused) {
    confine(SECCOMP_RET_KILL_PROCESS);
    wait_until(now() + 0.001);
    atomic_store(&is_over, 1);
    wait_until(now() + 0.001);
    for (int turn = 0; turn < 20; turn++) {
        unsigned char *area = map(512 * PAGE);
        MUST(madvise(area, 512 * PAGE, MADV_WILLNEED) == 0);
        fill_page(area, key_of(given.seed, (uint64_t)turn, 5));
        MUST(munmap(area, 512 * PAGE) == 0);
    }
    return unused;
}

static void race(void) {
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            pthread_t one, other;
            MUST(pthread_create(&one, NULL, attempts, NULL) == 0);
            wait_until(now() + 0.0005);
            MUST(pthread_create(&other, NULL, maps_confined, NULL) == 0);
            MUST(pthread_join(other, NULL) == 0 && pthread_join(one, NULL) == 0);
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child);
        if (status != 0) die("round %d: a child ended with status %x", round, status);
    }
}

int main(int count, char **words) {
    given = parse(count, words, "kill");
    ballast = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, 1));
    usleep(300000);
    /* Nothing but a question: no filter is set. */
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL) == -1 && errno == EFAULT);
    if (strcmp(given.mode, "strict") == 0) {
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0);
        for (size_t page = 0; page < given.pages; page++)
            check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page at the end");
        static const char said[] = "OK filtered strict\n";
        if (write(STDOUT_FILENO, said, sizeof said - 1) < 0) syscall(SYS_exit, 4);
        syscall(SYS_exit, 0);
    }
    if (strcmp(given.mode, "race") == 0) {
        race();
        for (size_t page = 0; page < given.pages; page++)
            check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page at the end");
        return ok("filtered", given.mode);
    }
    confine(strcmp(given.mode, "trap") == 0    ? SECCOMP_RET_TRAP
            : strcmp(given.mode, "errno") == 0 ? SECCOMP_RET_ERRNO | EPERM
                                               : SECCOMP_RET_KILL_PROCESS);
    if (strcmp(given.mode, "hole") == 0) hole();
    pthread_t thread[3];
    atomic_store(&forks_past_libc, strcmp(given.mode, "bare") == 0);
    for (size_t i = 0; i < 3; i++) MUST(pthread_create(&thread[i], NULL, mover, (void *)i) == 0);
    for (int i = 0; strcmp(given.mode, "bare") == 0 && i < 3; i++) bare_child();
    atomic_store(&forks_past_libc, 0);
    for (size_t i = 0; i < 3; i++) MUST(pthread_join(thread[i], NULL) == 0);
    for (int i = 0; strcmp(given.mode, "fork") == 0 && i < 3; i++) {
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            for (size_t page = 0; page < given.pages; page++)
                check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page of a child");
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child && status == 0);
    }
    for (size_t page = 0; page < given.pages; page++)
        check_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page at the end");
    return ok("filtered", given.mode);
}
