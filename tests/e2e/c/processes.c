/* Processes that come, go and change in the ways that libc's fork does not see or that leave a
 * child with less than its parent had. In every one of them all data must be there, whether
 * swaptide manages the process or not. */
#include "common.h"
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *arena;
static double end;

static void fill(size_t from, size_t to, size_t step, uint32_t version) {
    for (size_t page = from; page < to; page += step)
        fill_page(arena + page * PAGE, key_of(given.seed, page, version));
}

static void check(size_t from, size_t to, size_t step, uint32_t version, const char *what) {
    for (size_t page = from; page < to; page += step)
        check_page(arena + page * PAGE, key_of(given.seed, page, version), what);
}

/* Every page, then a half is written and every page read again. */
static void work(const char *what) {
    check(0, given.pages, 1, 1, what);
    fill(0, given.pages, 2, 2);
    check(0, given.pages, 2, 2, what);
    check(1, given.pages, 2, 1, what);
}

static void await(pid_t child, int status, const char *what) {
    int found;
    MUST(child > 0 && waitpid(child, &found, __WALL) == child);
    if (WIFSIGNALED(found)) die("%s: ended by signal %d", what, WTERMSIG(found));
    if (WEXITSTATUS(found) != status)
        die("%s: exit status %d instead of %d", what, WEXITSTATUS(found), status);
}

static void forked(const char *what) {
    pid_t child = fork();
    if (child == 0) {
        work(what);
        pid_t grandchild = fork();
        if (grandchild == 0) {
            check(0, given.pages, 2, 2, "in the child of that child");
            _exit(0);
        }
        await(grandchild, 0, "the child of that child");
        check(0, given.pages, 2, 2, "in the child after its own");
        _exit(0);
    }
    await(child, 0, what);
}

/* Without the rights it had when its memory was swapped. */
static void dropped(void) {
    if (geteuid() != 0) return;
    for (int round = 0; round < 2; round++) {
        pid_t child = fork();
        if (child == 0) {
            if (round == 1) fill(0, given.pages, 1, 1);
            MUST(setgroups(0, NULL) == 0 && setgid(65534) == 0 && setuid(65534) == 0);
            forked("in the child of a process that dropped its rights");
            fill(0, given.pages, 1, 1);
            forked("in the second child of a process that dropped its rights");
            _exit(0);
        }
        await(child, 0, "dropped");
    }
    check(0, given.pages, 1, 1, "in the parent of the one that dropped its rights");
}

/* The first thread ends before the process does; raw ends of threads, which libc does not see. */
static void *late(void *argument) {
    /* A name like those of the kernel's own threads makes it none of them. */
    MUST(prctl(PR_SET_NAME, "iou-late") == 0);
    usleep(300000);
    work("in the last thread");
    if (argument) syscall(SYS_exit, 3);
    return NULL;
}

static int late_task(void *argument) {
    (void)argument;
    usleep(100000);
    check(0, given.pages, 1, 1, "in the last task");
    syscall(SYS_exit, 6);
    return 0;
}

static void leader(void) {
    for (int way = 0; way < 6; way++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_t thread;
            check(0, given.pages, 3, 1, "before the first thread ends");
            switch (way) {
            case 0: syscall(SYS_exit, 41); break;
            case 1: pthread_exit(NULL); break;
            case 2:
                MUST(pthread_create(&thread, NULL, late, NULL) == 0);
                pthread_exit(NULL);
                break;
            case 3:
                MUST(pthread_create(&thread, NULL, late, (void *)1) == 0);
                syscall(SYS_exit, 43);
                break;
            case 4: {
                unsigned char *stack = map(1 << 20);
                MUST(clone(late_task, stack + (1 << 20),
                           CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD,
                           NULL) > 0);
                syscall(SYS_exit, 44);
                break;
            }
            case 5: /* not by way of libc */
#ifdef __x86_64__
                __asm__ volatile("syscall" : : "a"(60), "D"(45) : "rcx", "r11", "memory");
#endif
                syscall(SYS_exit, 45);
            }
        }
        /* Of several threads the last one counts. */
        static const int statuses[] = {41, 0, 0, 3, 6, 45};
        char what[64];
        snprintf(what, sizeof what, "way %d of ending", way);
        await(child, statuses[way], what);
    }
    /* And the command itself. */
    printf("OK processes leader\n");
    fflush(stdout);
    syscall(SYS_exit, 7);
}

/* Namespaces of their own, for this process or a child. */
static void namespaces(void) {
    if (geteuid() != 0) return;
    static const int kinds[] = {CLONE_NEWNET,
                                CLONE_NEWNS,
                                CLONE_NEWPID,
                                CLONE_NEWUTS | CLONE_NEWIPC,
                                CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWPID,
                                CLONE_FILES | CLONE_FS};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        pid_t child = fork();
        if (child == 0) {
            check(0, given.pages, 5, 1, "before unshare");
            MUST(unshare(kinds[i]) == 0);
            forked("in the child of a process that left a namespace");
            /* The first child was the init process of its namespace, which is over with it. */
            if (!(kinds[i] & CLONE_NEWPID)) forked("in its second child");
            work("in a process that left a namespace");
            _exit(0);
        }
        char what[64];
        snprintf(what, sizeof what, "namespaces %#x", (unsigned)kinds[i]);
        await(child, 0, what);
        pid_t task =
            (pid_t)syscall(SYS_clone, (kinds[i] & ~(CLONE_FILES | CLONE_FS)) | SIGCHLD, 0, 0, 0, 0);
        if (task == 0) {
            forked("in the child of a child that was made with namespaces of its own");
            work("in a child that was made with namespaces of its own");
            _exit(0);
        }
        await(task, 0, what);
    }
    char empty[] = "empty-XXXXXX";
    MUST(mkdtemp(empty));
    pid_t child = fork();
    if (child == 0) {
        /* Nothing of /proc is to be seen from here. */
        MUST(chdir(empty) == 0 && chroot(".") == 0);
        forked("in the child of a process with another root");
        fill(0, given.pages, 1, 1);
        forked("in the second child of a process with another root");
        _exit(0);
    }
    await(child, 0, "chroot");
    MUST(rmdir(empty) == 0);
    check(0, given.pages, 1, 1, "in the parent of many namespaces");
}

static int shares_memory(void *argument) {
    usleep(300000);
    check(0, given.pages, 1, 1, "in a process that shares the memory of one that has ended");
    int fd = *(int *)argument;
    return write(fd, "k", 1) == 1 ? 0 : 4;
}

/* A process that shares this one's memory, and may live longer. */
static void shared(void) {
    for (int way = 0; way < 3; way++) {
        int ends[2];
        MUST(pipe(ends) == 0);
        pid_t child = fork();
        if (child == 0) {
            fill(0, given.pages, 1, 1);
            unsigned char *stack = map(1 << 20);
            if (way < 2)
                MUST(clone(shares_memory, stack + (1 << 20),
                           CLONE_VM | (way ? CLONE_FILES | CLONE_FS : 0) | SIGCHLD, &ends[1]) > 0);
            else {
                pid_t task =
                    (pid_t)syscall(SYS_clone, CLONE_FILES | CLONE_FS | SIGCHLD, 0, 0, 0, 0);
                if (task == 0) _exit(shares_memory(&ends[1]));
                MUST(task > 0);
            }
            check(0, given.pages, 3, 1, "with a process that shares the memory");
            _exit(0);
        }
        close(ends[1]);
        await(child, 0, "shared");
        char word;
        if (read(ends[0], &word, 1) != 1)
            die("way %d: the other process ended before it had verified its memory", way);
        close(ends[0]);
    }
}

/* More children at a time than swaptide has places for. */
static void crowd(void) {
    enum { CHILDREN = 48 };
    static pid_t children[CHILDREN];
    int start[2];
    MUST(pipe(start) == 0);
    for (int i = 0; i < CHILDREN; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            char word;
            close(start[1]);
            check((size_t)i % given.pages, given.pages, 97, 1, "in one of a crowd");
            if (read(start[0], &word, 1) != 0) _exit(5);
            check((size_t)i % given.pages, given.pages, 61, 1, "in one of a crowd that waited");
            fill((size_t)i % given.pages, given.pages, 61, 9);
            check((size_t)i % given.pages, given.pages, 61, 9, "in one of a crowd that wrote");
            _exit(0);
        }
        MUST(children[i] > 0);
    }
    close(start[1]);
    for (int i = 0; i < CHILDREN; i++) await(children[i], 0, "crowd");
    check(0, given.pages, 1, 1, "in the parent of a crowd");
}

static sigjmp_buf back;
static volatile sig_atomic_t alarms;
static unsigned char *apart;

/* Asks for something, forks, and sometimes never returns. */
static void on_alarm(int number) {
    (void)number;
    int count = ++alarms;
    unsigned char *at = apart + (size_t)(count % 40) * 64 * PAGE;
    madvise(at, 64 * PAGE, count & 1 ? MADV_COLD : MADV_DONTFORK);
    if (count % 4 == 0) {
        pid_t child = fork();
        if (child == 0) {
            for (size_t page = (size_t)count % 64; page < given.pages; page += 64)
                check_page(arena + page * PAGE, key_of(given.seed, page, 1),
                           "in a child that a signal handler made");
            _exit(0);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            die("the child of a signal handler: wait status %#x", (unsigned)status);
    }
    if (count % 3 == 0) siglongjmp(back, 1);
}

/* Signals in the middle of everything that talks to swaptide. */
static void interrupted(void) {
    apart = map(40 * 64 * PAGE);
    for (size_t page = 0; page < 40 * 64; page++)
        fill_page(apart + page * PAGE, key_of(given.seed + 5, page, 1));
    struct sigaction action = {.sa_handler = on_alarm};
    MUST(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval each = {{0, 3000}, {0, 3000}}, never = {{0, 0}, {0, 0}};
    MUST(setitimer(ITIMER_REAL, &each, NULL) == 0);
    volatile size_t page = 0;
    sigsetjmp(back, 1);
    while (now() < end || alarms < 60) {
        page = (page + 16) % (given.pages - 16);
        madvise(arena + page * PAGE, 16 * PAGE, page & 16 ? MADV_COLD : MADV_WILLNEED);
        glance_page(arena + page * PAGE, key_of(given.seed, page, 1), "page between signals");
    }
    MUST(setitimer(ITIMER_REAL, &never, NULL) == 0);
    check(0, given.pages, 1, 1, "page after many signals");
    for (page = 0; page < 40 * 64; page++)
        check_page(apart + page * PAGE, key_of(given.seed + 5, page, 1), "page apart");
}

static atomic_int stop;

/* libc's fork without handlers, since 2.34. */
extern pid_t _Fork(void) __attribute__((weak));

static pid_t raw_clone(void) {
    return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}
static pid_t plain_fork(void) {
    return _Fork ? _Fork() : fork();
}

static const struct way {
    pid_t (*make)(void);
    const char *what;
} through_libc = {fork, "a fork of another thread"}, past_libc = {raw_clone, "a raw clone"},
  without_handlers = {plain_fork, "a fork without handlers"};

static void *forks_on(void *argument) {
    const struct way *way = argument;
    size_t first = way == &through_libc ? 0 : 1;
    while (!atomic_load(&stop)) {
        pid_t child = way->make();
        if (child == 0) {
            for (size_t page = first; page < given.pages; page += 16)
                check_page(arena + page * PAGE, key_of(given.seed, page, 1), way->what);
            _exit(0);
        }
        await(child, 0, way->what);
    }
    return NULL;
}

/* Two threads fork, one of them in another way, while the first thread does nothing but fault. */
static void both_fork(const struct way *other) {
    pthread_t ids[2];
    for (size_t i = 0; i < 2; i++)
        MUST(pthread_create(&ids[i], NULL, forks_on, (void *)(i ? other : &through_libc)) == 0);
    do check(0, given.pages, 1, 1, "while others fork");
    while (now() < end);
    atomic_store(&stop, 1);
    for (size_t i = 0; i < 2; i++) MUST(pthread_join(ids[i], NULL) == 0);
}

static void clones(void) {
    both_fork(&past_libc);
}
static void plain(void) {
    both_fork(&without_handlers);
}

int main(int count, char **words) {
    given = parse(count, words, "clones");
    arena = map(given.pages * PAGE);
    fill(0, given.pages, 1, 1);
    end = now() + given.seconds;
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {
        {"dropped", dropped}, {"leader", leader}, {"namespaces", namespaces},
        {"shared", shared},   {"crowd", crowd},   {"interrupted", interrupted},
        {"clones", clones},   {"plain", plain},
    };
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(given.mode, modes[i].name) == 0) {
            modes[i].run();
            return ok("processes", given.mode);
        }
    fprintf(stderr, "processes: unknown mode %s\n", given.mode);
    return 2;
}
