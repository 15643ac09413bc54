/* A child past libc forks past libc at once, while threads of the parent write to all of its
 * memory: child and grandchild have what was there when the first of them was forked.
 */
#include "common.h"

#include <sys/syscall.h>
#include <sys/wait.h>

#define WRITERS 4

static struct arguments given;
static unsigned char *memory;
static atomic_int is_over;

/* The first word of a page tells of its version: a write of it alone is whole or not there. */
static uint64_t word(size_t page, int version) {
    return key_of(given.seed, page, (uint64_t)version) | 1;
}

static _Atomic uint64_t *at(size_t page) { return (_Atomic uint64_t *)(memory + page * PAGE); }

static void *writes(void *number) {
    uint64_t state = given.seed * 31 + (uintptr_t)number;
    while (!atomic_load(&is_over)) {
        size_t page = below(&state, given.pages);
        uint64_t found = atomic_load(at(page));
        if (found != word(page, 1) && found != word(page, 2))
            mismatch(at(page), word(page, 1), found, "in the parent");
        atomic_store(at(page), word(page, 2));
    }
    return NULL;
}

static void check_all(const char *where) {
    for (size_t page = 0; page < given.pages; page++)
        if (atomic_load(at(page)) != word(page, 1))
            mismatch(at(page), word(page, 1), atomic_load(at(page)), where);
}

static void await(pid_t child, const char *what) {
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status != 0) die("the %s ended with status %#x", what, status);
}

static pid_t bare_fork(void) {
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    MUST(child >= 0);
    return child;
}

int main(int count, char **words) {
    given = parse(count, words, "raw");
    memory = map(given.pages * PAGE);
    double began = now();
    do {
        for (size_t page = 0; page < given.pages; page++) atomic_store(at(page), word(page, 1));
        atomic_store(&is_over, 0);
        pid_t child = bare_fork();
        if (child == 0) {
            pid_t grandchild = bare_fork();
            if (grandchild == 0) {
                check_all("in the grandchild");
                _exit(0);
            }
            check_all("in the child");
            await(grandchild, "grandchild");
            _exit(0);
        }
        pthread_t threads[WRITERS];
        for (uintptr_t number = 0; number < WRITERS; number++)
            MUST(pthread_create(&threads[number], NULL, writes, (void *)number) == 0);
        await(child, "child");
        atomic_store(&is_over, 1);
        for (int number = 0; number < WRITERS; number++) pthread_join(threads[number], NULL);
    } while (now() - began < given.seconds);
    return ok("forktwice", given.mode);
}
