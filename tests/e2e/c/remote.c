/* Threads that each read pages of their own at random, in memory that for the most part lies on a
   server, and one that never reads any of it: it maps a few fresh pages, writes and unmaps them,
   again and again, and tells how long that took at most. With a mode, all is forked a few times,
   and some of it read by the child. The number of pages read, and the longest turn in milliseconds,
   stand before the last line. */
#include "common.h"
#include <sys/syscall.h>
#include <sys/wait.h>

enum { THREADS = 16, FRESH = 32 };

static struct arguments given;
static unsigned char *arena;
static size_t slice;
static double end;
static _Atomic uint64_t reads;
static _Atomic double longest;

static void *read_own(void *argument) {
    size_t first = (size_t)(uintptr_t)argument * slice;
    uint64_t state = mix(given.seed ^ first);
    while (now() < end) {
        size_t page = first + below(&state, slice);
        glance_page(arena + page * PAGE, mix(page ^ given.seed), "page of a thread's own");
        reads++;
    }
    return NULL;
}

static void *beat(void *unused) {
    while (now() < end) {
        double began = now();
        unsigned char *fresh = map(FRESH * PAGE);
        for (size_t page = 0; page < FRESH; page++) fill_page(fresh + page * PAGE, page | 1);
        MUST(munmap(fresh, FRESH * PAGE) == 0);
        double took = now() - began;
        if (took > longest) longest = took;
        usleep(2000);
    }
    return unused;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    slice = given.pages / THREADS;
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, mix(page ^ given.seed));
    printf("filled\n");
    fflush(stdout);
    pthread_t threads[THREADS + 1];
    end = now() + given.seconds;
    for (size_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], NULL, read_own, (void *)(uintptr_t)i) == 0);
    MUST(pthread_create(&threads[THREADS], NULL, beat, NULL) == 0);
    usleep((useconds_t)(given.seconds * 5e5));
    /* Past libc, the engine is not told before: the child gets everything at once, which takes
     * seconds. */
    int raw = given.mode && strcmp(given.mode, "raw") == 0;
    for (int turn = 0; turn < (given.mode ? raw ? 4 : 12 : 0); turn++) {
        pid_t child = raw ? (pid_t)syscall(SYS_fork) : fork();
        MUST(child >= 0);
        if (child == 0) {
            for (size_t page = (size_t)turn; page < given.pages; page += 977)
                check_page(arena + page * PAGE, mix(page ^ given.seed), "page in the child");
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    for (size_t i = 0; i <= THREADS; i++) MUST(pthread_join(threads[i], NULL) == 0);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, mix(page ^ given.seed), "page at the end");
    printf("%llu reads, longest turn %.0f ms\n", (unsigned long long)reads, longest * 1e3);
    return ok("remote", given.mode);
}
