/* What a program has from the process that executes it.
 *
 *     inherits MB SECONDS SEED MODE [PROGRAM ...]
 *
 * gives     executes PROGRAM with closed streams, ignored and blocked signals, timers, and an
 *           environment that getenv, the loader and a shell would each read in another way
 * shows     prints what it has of all that
 * alarms    executes PROGRAM with a timer of a second
 * waits     ends with status 1 after 10 s
 * parent    starts PROGRAM, and prints whether a signal of it comes
 * child     sends that signal to its parent, and prints what an orphan has for its parent
 */
#include "common.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>

extern char **environ;
static const int timers[] = {ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF};
static volatile sig_atomic_t has_come;

static void handler(int number) {
    has_come = number;
}

static void set_timer(int which, time_t seconds) {
    struct itimerval timer = {.it_value.tv_sec = seconds, .it_interval.tv_sec = seconds * 2};
    MUST(setitimer(which, &timer, NULL) == 0);
}

static int gives(char **program) {
    size_t count = 0;
    while (environ[count]) count++;
    char **all = calloc(count + 10, sizeof *all), **next = all, *own;
    MUST(all && asprintf(&own, "LISTEN_PID=%d", getpid()) > 0);
    char *odd[] = {"Z=1", "A=first", "NO_EQUALS", "A=second", own, "WATCHDOG_PID=1", "B="};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) *next++ = odd[i];
    for (size_t i = 0; i < count; i++) *next++ = environ[i];
    *next = "LISTEN_PIDFDID=3";
    for (size_t i = 0; i < 3; i++) set_timer(timers[i], 10000 * (time_t)(i + 1));
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR2);
    MUST(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
    MUST(signal(SIGPIPE, SIG_IGN) != SIG_ERR && signal(SIGHUP, SIG_IGN) != SIG_ERR);
    MUST(signal(SIGCHLD, SIG_IGN) != SIG_ERR);
    MUST(dup2(STDOUT_FILENO, 5) == 5);
    close(STDIN_FILENO);
    close(STDERR_FILENO);
    execve(program[0], program, all);
    die("%s: %s", program[0], strerror(errno));
}

static int shows(void) {
    for (int fd = 0; fd < 8; fd++) printf("%d %s\n", fd, fcntl(fd, F_GETFD) < 0 ? "-" : "open");
    for (size_t i = 0; i < 3; i++) {
        struct itimerval left;
        MUST(getitimer(timers[i], &left) == 0);
        time_t given = 10000 * (time_t)(i + 1);
        int runs = left.it_value.tv_sec <= given && left.it_value.tv_sec > given - 5000;
        printf("timer %zu: %s, then every %ld s\n", i, runs ? "runs" : "does not",
               (long)left.it_interval.tv_sec);
    }
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    MUST(status);
    while (fgets(line, sizeof line, status))
        if (strncmp(line, "SigBlk", 6) == 0 || strncmp(line, "SigIgn", 6) == 0)
            printf("%s", line);
    char *listen = getenv("LISTEN_PID"), *first = getenv("A");
    MUST(listen && first);
    printf("getenv %s\n", first);
    for (char **entry = environ; *entry; entry++) {
        if (strncmp(*entry, "LD_PRELOAD=", 11) == 0 || strncmp(*entry, "SWAPTIDE", 8) == 0)
            continue;
        if (*entry + strlen("LISTEN_PID=") == listen && atoi(listen) == getpid())
            printf("LISTEN_PID of this process\n");
        else
            printf("%s\n", *entry);
    }
    return ok("inherits", "shows");
}

static int parent(char **program) {
    MUST(signal(SIGUSR1, handler) != SIG_ERR);
    pid_t child = fork();
    if (child == 0) {
        execv(program[0], program);
        _exit(9);
    }
    int status;
    while (waitpid(child, &status, 0) < 0) MUST(errno == EINTR);
    printf("status %d, %s\n", status, has_come ? "the signal came" : "no signal came");
    return ok("inherits", "parent");
}

static int child(void) {
    int ends[2], is_same = 0;
    pid_t before = getppid();
    MUST(pipe(ends) == 0 && kill(before, SIGUSR1) == 0);
    if (fork() == 0) {
        pid_t middle = getpid();
        if (fork() == 0) {
            while (getppid() == middle) usleep(1000);
            is_same = getppid() == before;
            MUST(write(ends[1], &is_same, sizeof is_same) == sizeof is_same);
        }
        _exit(0);
    }
    MUST(wait(NULL) > 0 && read(ends[0], &is_same, sizeof is_same) == sizeof is_same);
    printf("an orphan is a child of %s\n", is_same ? "the program's parent" : "another process");
    return ok("inherits", "child");
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "shows");
    char **program = words + 5;
    if (strcmp(given.mode, "gives") == 0) return gives(program);
    if (strcmp(given.mode, "parent") == 0) return parent(program);
    if (strcmp(given.mode, "child") == 0) return child();
    if (strcmp(given.mode, "shows") == 0) return shows();
    if (strcmp(given.mode, "alarms") == 0) {
        set_timer(ITIMER_REAL, 1);
        execv(program[0], program);
        die("%s: %s", program[0], strerror(errno));
    }
    for (int i = 0; i < 100; i++) usleep(100000);
    return 1;
}
