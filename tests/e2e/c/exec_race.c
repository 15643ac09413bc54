/* Threads run while one of them executes this program again, and again; a signal that is sent
 * meanwhile arrives, and in the end nothing traces the process.
 *
 * exec_race GENERATIONS THREADS first|other SEED
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char **words;
static volatile sig_atomic_t arrived;

static void note(int number) {
    (void)number;
    arrived = 1;
}

static void *run(void *unused) {
    (void)unused;
    volatile char *pages = malloc(1 << 18);
    for (;;) {
        for (int at = 0; at < 1 << 18; at += 4096) {
            pages[at]++;
        }
    }
}

static uint64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void *execute(void *unused) {
    (void)unused;
    char left[16];
    uint64_t seed = strtoull(words[4], NULL, 10) + strtoull(words[1], NULL, 10);
    /* From none to some milliseconds: before, while and after the threads are stopped. */
    uint64_t end = now_us() + (seed * 0x9e3779b97f4a7c15u >> 32) % 12000;
    while (now_us() < end) {
    }
    snprintf(left, sizeof left, "%d", atoi(words[1]) - 1);
    char *again[] = {words[0], left, words[2], words[3], words[4], NULL};
    execv("/proc/self/exe", again);
    perror("execv");
    _exit(9);
}

static int tracer(void) {
    char line[256];
    int found = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) {
        sscanf(line, "TracerPid: %d", &found);
    }
    if (status) {
        fclose(status);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count != 5) {
        return 2;
    }
    words = arguments;
    signal(SIGUSR1, note);
    if (atoi(words[1]) == 0) {
        usleep(700000);
        if (tracer() != 0) {
            printf("FAILED: it is traced by %d\n", tracer());
            return 3;
        }
        printf("OK exec_race\n");
        return 0;
    }
    pthread_t thread;
    for (int made = 0; made < atoi(words[2]); made++) {
        pthread_create(&thread, NULL, run, NULL);
    }
    kill(getpid(), SIGUSR1);
    uint64_t end = now_us() + 5000000;
    while (!arrived) {
        if (now_us() > end) {
            printf("FAILED: a signal is lost with %s left\n", words[1]);
            fflush(stdout);
            _exit(3);
        }
        usleep(10);
    }
    if (!strcmp(words[3], "first")) {
        execute(NULL);
    }
    pthread_create(&thread, NULL, execute, NULL);
    for (;;) {
        pause();
    }
}
