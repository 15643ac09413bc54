/* Programs that load no library and end, or execute another one, from a second thread, within
 * milliseconds of their start: while the agent is put into them. The first one starts them. */
#include "common.h"

#include <fcntl.h>
#include <sys/wait.h>

enum { RUNS = 60, LONGEST_USECS = 5000, KINDS = 3 };

static const char *own;
static unsigned kind, usecs;

/* Ends with what it was told, by itself or by the program that it executes. */
static void *end(void *given) {
    (void)given;
    usleep(usecs);
    char status[16];
    snprintf(status, sizeof status, "%u", usecs % 100);
    if (kind != 0) execl(own, own, "status", status, (char *)NULL);
    _exit((int)(usecs % 100));
}

static int begin(void) {
    pthread_t second;
    MUST(pthread_create(&second, NULL, end, NULL) == 0);
    /* Descriptors come and go: their numbers are this thread's alone. */
    for (;;) {
        int first = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (kind == 2) close(first);
    }
}

static int run(unsigned which, unsigned long delay) {
    char kind_word[16], delay_word[24];
    snprintf(kind_word, sizeof kind_word, "%u", which);
    snprintf(delay_word, sizeof delay_word, "%lu", delay);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        execl(own, own, "begin", kind_word, delay_word, (char *)NULL);
        _exit(127);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != (int)(delay % 100))
        die("kind %u, %lu us: status %x", which, delay, (unsigned)status);
    return 0;
}

int main(int count, char **words) {
    own = words[0];
    if (count == 3 && strcmp(words[1], "status") == 0) return atoi(words[2]);
    if (count == 4 && strcmp(words[1], "begin") == 0) {
        kind = (unsigned)atoi(words[2]);
        usecs = (unsigned)atoi(words[3]);
        return begin();
    }
    uint64_t seed = strtoull(words[1], NULL, 0);
    for (unsigned i = 0; i < RUNS * KINDS; i++) run(i % KINDS, mix(seed + i) % LONGEST_USECS);
    puts("OK foreign_ends");
    return 0;
}
