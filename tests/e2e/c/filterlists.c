/* A program under a filter that programs really set (filters/): fills memory, sets the filter,
 * then makes, moves, changes and gives up memory by what the filter lets pass, with most of the
 * program out. The filter is a file of struct sock_filter, made by filtercode.py.
 *
 *     filterlists MB SECONDS SEED LIST HOW FILE
 *
 * LIST: openssh, chromium, systemd, docker. HOW:
 *     own       for the thread that sets it, which makes others where the list lets it
 *     all       for all threads at once (TSYNC), two of which are reading
 *     fork      as own; then forks, or is refused
 *     child     in a child, with limits of 0 on file size and processes and of 1 on open files, as
 *               sshd does it
 *     exec      as own, and executes itself again under it
 *     denied    as own; then makes a call that is not on the list */
#include "common.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>

/* What a value "pid" of a list has become (filtercode.py). */
#define PID 0x70696421u

static const struct list {
    const char *name;
    bool threads, forks, execs, traps;
    /* Of what madvise gives for MADV_WILLNEED. */
    int advice;
} lists[] =
    {
        {"openssh", false, false, false, false, 0},
        {"chromium", true, false, false, true, EPERM},
        {"systemd", true, true, true, false, 0},
        {"docker", true, true, true, false, 0},
    },
  *list;

static struct arguments given;
static unsigned char *ballast;
static atomic_int traps;
static atomic_bool trap_expected, over;

static const char *is(const char *how, const char *wanted) {
    return strcmp(how, wanted) == 0 ? how : NULL;
}

/* A call that the filter answers with SIGSYS. fstat, which libc makes of fstatat, is made here. */
static void trapped(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    (void)number;
    if (info->si_syscall == SYS_newfstatat) {
        long result = syscall(SYS_fstat, registers[REG_RDI], registers[REG_RSI]);
        registers[REG_RAX] = result == 0 ? 0 : -errno;
        return;
    }
    if (!trap_expected) die("call %d was trapped", info->si_syscall);
    atomic_fetch_add(&traps, 1);
    registers[REG_RAX] = -ENOSYS;
}

static struct sock_filter code[4096];
static struct sock_fprog program = {0, code};

static void load(const char *path) {
    int file = open(path, O_RDONLY);
    MUST(file >= 0);
    ssize_t bytes = read(file, code, sizeof code);
    MUST(bytes > 0 && bytes % (ssize_t)sizeof *code == 0);
    close(file);
    program.len = (unsigned short)((size_t)bytes / sizeof *code);
}

static void confine(bool all) {
    for (unsigned i = 0; i < program.len; i++)
        if (code[i].code == (BPF_JMP | BPF_JEQ | BPF_K) && code[i].k == PID)
            code[i].k = (unsigned)getpid();
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (list->traps) MUST(sigaction(SIGSYS, &action, NULL) == 0);
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (all)
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) ==
             0);
    else
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void check_ballast(const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(ballast + page * PAGE, key_of(given.seed, page, 1), what);
}

static void *watch(void *number) {
    uint64_t random = mix(given.seed ^ ~(uintptr_t)number);
    while (!over) {
        size_t page = below(&random, given.pages);
        glance_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page that is read");
    }
    return NULL;
}

/* A mapping that the kernel would join with its neighbour, which is managed by now: both grow as
 * one. */
static void grow_two(uint64_t seed) {
    enum { HALF = 64, GROWN = 200 };
    unsigned char *area = map(2 * HALF * PAGE);
    for (size_t page = 0; page < 2 * HALF; page++) fill_page(area + page * PAGE, seed + page);
    usleep(100000);
    void *again = mmap(area, HALF * PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    MUST(again == area);
    for (size_t page = 0; page < HALF; page++) fill_page(area + page * PAGE, seed + page);
    area = mremap(area, 2 * HALF * PAGE, GROWN * PAGE, MREMAP_MAYMOVE);
    MUST(area != MAP_FAILED);
    for (size_t page = 0; page < 2 * HALF; page++)
        check_page(area + page * PAGE, seed + page, "page of two mappings that have grown");
    for (size_t page = 2 * HALF; page < GROWN; page++) MUST(area[page * PAGE] == 0);
    MUST(munmap(area, GROWN * PAGE) == 0);
}

static void *move(void *number) {
    enum { PAGES = 512, MORE = 256 };
    uint64_t random = mix(given.seed ^ (uintptr_t)number);
    grow_two(key_of(given.seed, (uintptr_t)number, 5));
    for (uint64_t turn = 1; turn < 16; turn++) {
        unsigned char *area = map(PAGES * PAGE);
        uint64_t key = key_of(given.seed + (uintptr_t)number, turn, 3);
        for (size_t page = 0; page < PAGES; page += 3) fill_page(area + page * PAGE, key + page);
        area = mremap(area, PAGES * PAGE, (PAGES + MORE) * PAGE, MREMAP_MAYMOVE);
        MUST(area != MAP_FAILED);
        int result = madvise(area, PAGES * PAGE, MADV_WILLNEED) == 0 ? 0 : errno;
        if (result != list->advice) die("MADV_WILLNEED gives %d", result);
        for (int i = 0; i < 300; i++) {
            size_t page = below(&random, given.pages);
            glance_page(ballast + page * PAGE, key_of(given.seed, page, 1), "page of the ballast");
        }
        for (size_t page = 0; page < PAGES; page += 3)
            check_page(area + page * PAGE, key + page, "page of a mapping that has grown");
        MUST(mprotect(area, PAGES * PAGE, PROT_READ) == 0);
        for (size_t page = 0; page < PAGES; page += 3)
            glance_page(area + page * PAGE, key + page, "page that is protected");
        MUST(mprotect(area, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0);
        unsigned char *block = malloc(200000);
        MUST(block != NULL);
        memset(block, (int)turn, 200000);
        block = realloc(block, 4000000);
        const unsigned char filled = (unsigned char)turn;
        MUST(block != NULL && block[0] == filled && block[199999] == filled);
        free(block);
        MUST(madvise(area, PAGE, MADV_DONTNEED) == 0 && area[0] == 0);
        MUST(madvise(area + PAGE, PAGE, MADV_FREE) == 0);
        fill_page(area + PAGE, key);
        check_page(area + PAGE, key, "page written after it was free");
        MUST(munmap(area, (PAGES + MORE) * PAGE) == 0);
    }
    return NULL;
}

static void work(void) {
    enum { THREADS = 3 };
    pthread_t thread[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        if (list->threads)
            MUST(pthread_create(&thread[i], NULL, move, (void *)i) == 0);
        else
            move((void *)i);
    }
    for (size_t i = 0; list->threads && i < THREADS; i++) MUST(pthread_join(thread[i], NULL) == 0);
}

static void forks(void) {
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (child == 0) {
            check_ballast("page of a child");
            _exit(0);
        }
        if (!list->forks) {
            if (child != -1 || errno != EPERM)
                die("fork gives %d, %s", (int)child, strerror(errno));
            continue;
        }
        int status;
        MUST(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    }
}

static int last(const char *how) {
    check_ballast("page at the end");
    printf("OK filterlists %s %s\n", list->name, how);
    fflush(stdout);
    return 0;
}

static int in_child(const char *how) {
    int pipes[2];
    MUST(pipe(pipes) == 0);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        const struct rlimit none = {0, 0}, one = {1, 1};
        MUST(dup2(pipes[1], STDOUT_FILENO) >= 0);
        MUST(setrlimit(RLIMIT_FSIZE, &none) == 0 && setrlimit(RLIMIT_NPROC, &none) == 0);
        MUST(setrlimit(RLIMIT_NOFILE, &one) == 0);
        confine(false);
        work();
        _exit(last(how));
    }
    close(pipes[1]);
    char text[4096];
    ssize_t bytes;
    while ((bytes = read(pipes[0], text, sizeof text)) > 0)
        MUST(write(STDOUT_FILENO, text, (size_t)bytes) == bytes);
    int status;
    MUST(waitpid(child, &status, 0) == child);
    check_ballast("page of the parent");
    return status == 0 ? 0 : 4;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    MUST(count == 7);
    const char *how = words[5];
    load(words[6]);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (is(given.mode, lists[i].name)) list = &lists[i];
    MUST(list != NULL);
    ballast = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, 1));
    usleep(300000);
    if (is(how, "child")) return in_child(how);

    pthread_t watcher[2];
    const size_t watchers = is(how, "all") ? 2 : 0;
    for (size_t i = 0; i < watchers; i++)
        MUST(pthread_create(&watcher[i], NULL, watch, (void *)i) == 0);
    if (!is(how, "inside")) confine(watchers != 0);
    if (is(how, "exec")) {
        words[5] = "inside";
        execv(words[0], words);
        die("execv: %s", strerror(errno));
    }
    work();
    over = true;
    for (size_t i = 0; i < watchers; i++) MUST(pthread_join(watcher[i], NULL) == 0);
    if (is(how, "fork")) forks();
    if (is(how, "denied")) {
        check_ballast("page before the call");
        printf("makes a call that is not on the list\n");
        fflush(stdout);
        trap_expected = true;
        long result = syscall(SYS_swapon, NULL, 0);
        printf("goes on: %ld, %s, %d trapped\n", result, strerror(errno), traps);
    }
    return last(how);
}
