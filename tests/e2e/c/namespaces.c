/* A process of one thread enters a namespace for which it must be the only one: MODE unshare or
 * raw, before memory is managed (small) or with much of it out. Then it verifies everything, in a
 * forked child too, and executes a program that does so in its turn. */
#include "common.h"
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static struct arguments given;
static unsigned char *memory;

static void fill(uint64_t version) {
    memory = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(memory + page * PAGE, key_of(given.seed, page, version));
}

static void verify(uint64_t version, const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(memory + page * PAGE, key_of(given.seed, page, version), what);
}

int main(int count, char **words) {
    given = parse(count, words, "unshare");
    if (strcmp(given.mode, "executed") == 0) {
        fill(2);
        verify(2, "what was executed there");
        return ok("namespaces", given.mode);
    }
    fill(1);
    double end = now() + given.seconds;
    while (now() < end) verify(1, "before");
    long result = strcmp(given.mode, "raw") == 0 ? syscall(SYS_unshare, CLONE_NEWUSER)
                                                 : unshare(CLONE_NEWUSER);
    MUST(result == 0);
    verify(1, "after");
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        verify(1, "in a child");
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    char mode[] = "executed";
    char *next[] = {words[0], words[1], words[2], words[3], mode, NULL};
    execv("/proc/self/exe", next);
    die("execv: %s", strerror(errno));
}
