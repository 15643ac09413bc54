/* Forks while threads use numbers of descriptors as if they were their own, forks within fork
 * handlers, a process that shares the memory from before there was much of it, and a raw fork after
 * the first thread has ended. The handlers are registered before any library's constructor runs, so
 * theirs is the inner side, as it is of those of a library. */
#include "common.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *arena;
static atomic_int over;
static atomic_long went, turns;

static void check_some(size_t step, const char *what) {
    for (size_t page = 0; page < given.pages; page += step)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), what);
}

static void await(pid_t child, int status, const char *what) {
    int found;
    if (child <= 0 || waitpid(child, &found, 0) != child)
        die("%s: no child: %s", what, strerror(errno));
    if (found != status << 8) die("%s: wait status %#x", what, (unsigned)found);
}

static void one_fork(const char *what) {
    pid_t child = fork();
    if (child == 0) {
        check_some(7, what);
        _exit(0);
    }
    await(child, 0, what);
}

/* Writes to the standard streams, which are closed. */
static void *log_lines(void *nothing) {
    static const char line[] = "a line of a log\n";
    while (!over) {
        for (int fd = 0; fd < 3; fd++)
            if (write(fd, line, sizeof line) > 0) went++;
        turns++;
    }
    return nothing;
}

/* A number that is the program's own to be used. */
enum { FIXED = 3 };

static void *use_fixed(void *nothing) {
    int zeros = open("/dev/zero", O_RDWR);
    MUST(zeros >= 0 && (zeros = fcntl(zeros, F_DUPFD, 60)) >= 60);
    close(FIXED);
    while (!over) {
        MUST((turns % 2 ? dup2(zeros, FIXED) : dup3(zeros, FIXED, O_CLOEXEC)) == FIXED);
        char bytes[16];
        for (int i = 0; i < 50; i++) MUST(read(FIXED, bytes, sizeof bytes) == sizeof bytes);
        MUST(close(FIXED) == 0);
        turns++;
        usleep(100);
    }
    return nothing;
}

/* Forks while another thread does that. */
static void alongside(void *(*other)(void *)) {
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, other, NULL) == 0);
    double end = now() + given.seconds;
    for (int count = 0; count < 10 || (now() < end && count < 400); count++)
        one_fork("while a thread has descriptors of its own");
    over = 1;
    pthread_join(thread, NULL);
    MUST(turns > 0);
}

/* Where a fork handler forks, and how deep it is. */
static enum { NOWHERE, PREPARE, PARENT, CHILD, EXECUTES } where;
static __thread int depth;
static atomic_int inner;

static sigset_t mask_of(void) {
    sigset_t mask;
    MUST(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
    return mask;
}

static void fork_within(void) {
    if (depth++ == 0) {
        pid_t child = fork();
        if (child == 0) {
            check_some(5, "in the child of a handler");
            sigset_t mask = mask_of();
            if (where != CHILD && sigismember(&mask, SIGUSR1)) _exit(9);
            /* As a process of its own: it grows, and forks. */
            for (size_t page = 0; page < given.pages; page += 2)
                fill_page(arena + page * PAGE, key_of(given.seed, page, 2));
            pid_t next = fork();
            if (next == 0) {
                for (size_t page = 0; page < given.pages; page += 6)
                    check_page(arena + page * PAGE, key_of(given.seed, page, 2), "its child");
                _exit(0);
            }
            await(next, 0, "the child of a handler's child");
            if (where == EXECUTES) {
                execl("/bin/true", "true", (char *)NULL);
                _exit(8);
            }
            _exit(0);
        }
        await(child, 0, "the child of a handler");
        inner++;
    }
    depth--;
}

static void prepare(void) {
    if (where == PREPARE || where == EXECUTES) fork_within();
}
static void parent(void) {
    if (where == PARENT) fork_within();
}
static void child(void) {
    if (where == CHILD) fork_within();
}
static void early(void) {
    pthread_atfork(prepare, parent, child);
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = early;

/* Another thread's forks wait for those, and have the same handlers. */
static void *fork_too(void *nothing) {
    while (!over) {
        one_fork("a fork of another thread");
        turns++;
        usleep(1000);
    }
    return nothing;
}

static void within(int place, int count) {
    where = place;
    for (int i = 0; i < count; i++) {
        one_fork("a fork whose handler forks");
        sigset_t mask = mask_of();
        if (sigismember(&mask, SIGUSR1)) die("signals stay blocked");
    }
    where = NOWHERE;
    MUST(place == CHILD || inner >= count);
    inner = 0;
    one_fork("after forks whose handlers fork");
}

static void fill_all(void) {
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
}

static int ends[2];

/* Reads all of it after the process that filled it has ended. */
static int outlive(void *maker) {
    while (getppid() == (pid_t)(intptr_t)maker) usleep(1000);
    check_some(1, "in a process that shares the memory of one that has ended");
    return write(ends[1], "k", 1) == 1 ? 0 : 4;
}

/* Begun while there is next to nothing in the memory that is shared. */
static void shared_early(void) {
    MUST(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        unsigned char *stack = map(1 << 20);
        MUST(clone(outlive, stack + (1 << 20), CLONE_VM | CLONE_FS | CLONE_FILES | SIGCHLD,
                   (void *)(intptr_t)getpid()) > 0);
        usleep(300000);
        arena = map(given.pages * PAGE);
        fill_all();
        usleep(3000000);
        check_some(1, "in the process that made it");
        _exit(0);
    }
    close(ends[1]);
    await(child, 0, "the process that made it");
    char word;
    if (read(ends[0], &word, 1) != 1) die("the other process ended before it had read its memory");
}

static void *fork_late(void *nothing) {
    usleep(500000);
    /* The fields of clone3(2): the fifth is the signal at the child's end. */
    uint64_t fields[11] = {[4] = SIGCHLD};
    for (int i = 0; i < 3; i++) {
        pid_t child = (pid_t)syscall(SYS_clone3, fields, sizeof fields);
        if (child == 0) {
            check_some(1, "in a child by clone3");
            syscall(SYS_exit_group, 0);
        }
        await(child, 0, "a child by clone3");
    }
    check_some(1, "after");
    exit(ok("forkends", given.mode));
    return nothing;
}

int main(int count, char **words) {
    given = parse(count, words, "closed");
    int unmanaged = !strcmp(given.mode, "within-unmanaged");
    if (unmanaged) given.pages = 16;
    if (!strcmp(given.mode, "shared-early")) {
        shared_early();
        return ok("forkends", given.mode);
    }
    arena = map(given.pages * PAGE);
    fill_all();
    check_some(1, "before");
    if (!strcmp(given.mode, "closed")) {
        int out = fcntl(1, F_DUPFD, 50);
        for (int fd = 0; fd < 3; fd++) close(fd);
        alongside(log_lines);
        MUST(dup2(out, 0) == 0 && dup2(out, 1) == 1 && dup2(out, 2) == 2);
        if (went) die("%ld writes to closed descriptors went somewhere", (long)went);
    } else if (!strcmp(given.mode, "fixed")) {
        alongside(use_fixed);
    } else if (!strcmp(given.mode, "leaderless")) {
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, fork_late, NULL) == 0);
        pthread_exit(NULL);
    } else {
        static const int places[] = {PREPARE, PARENT, CHILD, EXECUTES};
        for (int i = 0; i < 4; i++) within(places[i], unmanaged ? 20 : 1);
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, fork_too, NULL) == 0);
        within(PREPARE, 1);
        within(PARENT, 1);
        over = 1;
        pthread_join(thread, NULL);
        MUST(turns > 0);
    }
    check_some(1, "after");
    return ok("forkends", given.mode);
}
