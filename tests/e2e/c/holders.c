/* holders MB SECONDS SEED MODE: a forked child has what its parent had, whatever the supervisor can
 * see of it. The parent rewrites all of its own twice, so that extents which no process is taken
 * to hold are written again; then the child verifies.
 *
 * crowd    there are too many processes for the supervisor to have a descriptor for the child
 * number   the child has the number of one that has just ended, of which the supervisor has not
 *          heard yet (root)
 */
#include "common.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

static char *memory;
static size_t pages;

static uint64_t key(size_t page, uint64_t version) {
    return mix(page * 1000003 + version) | 3;
}

static void fill(uint64_t version) {
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = (uint64_t *)(memory + page * PAGE), next = key(page, version);
        for (size_t i = 0; i < WORDS; i++) words[i] = next = mix(next);
    }
}

static void verify(uint64_t version, const char *who) {
    for (size_t page = 0; page < pages; page++) {
        uint64_t *words = (uint64_t *)(memory + page * PAGE), next = key(page, version);
        for (size_t i = 0; i < WORDS; i++)
            if (words[i] != (next = mix(next))) mismatch(words + i, next, words[i], who);
    }
}

/* A program outside of the run's memory. */
static pid_t started(const char *const *words) {
    pid_t pid = vfork();
    if (pid == 0) {
        execv(words[0], (char *const *)words);
        _exit(127);
    }
    MUST(pid > 0);
    return pid;
}

/* The child waits until the parent has rewritten everything. */
static void inherit(pid_t child, int go, uint64_t version) {
    for (int i = 1; i <= 2; i++) fill(version + i);
    sleep(1);
    MUST(write(go, "x", 1) == 1);
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status) die("the child ended with %x", status);
    verify(version + 2, "the parent's own");
}

static pid_t holder(int go[2], uint64_t version) {
    MUST(pipe2(go, O_CLOEXEC) == 0);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        char byte;
        MUST(read(go[0], &byte, 1) == 1);
        verify(version, "what the child inherited");
        _exit(0);
    }
    return child;
}

static void crowd(int count) {
    pid_t sleepers[256];
    const char *const words[] = {"/usr/bin/env", "-i", "/bin/sleep", "100", NULL};
    for (int i = 0; i < count; i++) sleepers[i] = started(words);
    sleep(1);
    int go[2];
    pid_t child = holder(go, 0);
    inherit(child, go[1], 0);
    for (int i = 0; i < count; i++) kill(sleepers[i], SIGKILL);
}

static void number(void) {
    int last = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC), met = 0;
    MUST(last >= 0);
    for (int round = 0; round < 6 && !met; round++) {
        int first[2];
        MUST(pipe2(first, O_CLOEXEC) == 0);
        pid_t gone = fork();
        if (gone == 0) {
            char byte;
            MUST(read(first[0], &byte, 1) == 1);
            _exit(0);
        }
        usleep(300000);
        /* The supervisor is late, as on a busy machine. */
        char script[64];
        snprintf(script, sizeof script, "sleep 1; kill -CONT %d", (int)getppid());
        const char *const words[] = {"/usr/bin/env", "-i", "/bin/sh", "-c", script, NULL};
        started(words);
        usleep(200000);
        kill(getppid(), SIGSTOP);
        MUST(write(first[1], "x", 1) == 1 && waitpid(gone, NULL, 0) == gone);
        char text[16];
        int length = snprintf(text, sizeof text, "%d", (int)gone - 1), go[2];
        MUST(pwrite(last, text, length, 0) == length);
        pid_t child = holder(go, 3 * round);
        met = child == gone;
        usleep(300000);
        inherit(child, go[1], 3 * round);
        fill(3 * (round + 1));
    }
    if (!met) die("no child had the number of one that had ended");
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "crowd");
    setvbuf(stdout, NULL, _IOLBF, 0);
    pages = given.pages;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(memory != MAP_FAILED);
    fill(0);
    sleep(1);
    if (!strcmp(given.mode, "number"))
        number();
    else
        crowd(40);
    printf("OK holders %s\n", given.mode);
    return 0;
}
