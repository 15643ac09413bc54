/* Memory that is there all at once, before anything has looked: one large mapping, filled by three
 * threads or by the kernel. MODE reserve (MAP_NORESERVE), plain, populate (MAP_POPULATE), advise
 * (MADV_POPULATE_WRITE), or forks: another thread forks past libc meanwhile, and each of its
 * children forks by libc and has a child that maps memory, which takes none of them long. */
#include "common.h"

#include <sys/syscall.h>
#include <sys/wait.h>

#define THREADS 3

static struct arguments given;
static unsigned char *arena;

static void *fill(void *argument) {
    size_t self = (size_t)argument;
    for (size_t page = self * given.pages / THREADS; page < (self + 1) * given.pages / THREADS;
         page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    return NULL;
}

static pid_t fork_past_libc(void) {
    long pid;
    __asm__ volatile("syscall" : "=a"(pid) : "a"(SYS_fork) : "rcx", "r11", "memory");
    return (pid_t)pid;
}

/* In the child of a child: more memory than the budget, which is managed there. */
static void grow(void) {
    size_t pages = 48 << 8;
    unsigned char *at = map(pages * PAGE);
    for (size_t page = 0; page < pages; page++) fill_page(at + page * PAGE, key_of(7, page, 1));
    for (size_t page = 0; page < pages; page++)
        check_page(at + page * PAGE, key_of(7, page, 1), "page of a child's child");
    _exit(0);
}

/* The same: mappings of memory to write to, as fast as ever. */
static void map_some(void) {
    double began = now();
    for (int i = 0; i < 60; i++) {
        unsigned char *at = map(16 * PAGE);
        at[0] = 1;
        MUST(munmap(at, 16 * PAGE) == 0);
    }
    _exit(now() - began < 2 ? 0 : 4);
}

static atomic_int over;
static size_t forks;

static void fork_twice(void (*work)(void)) {
    pid_t pid = fork_past_libc();
    MUST(pid >= 0);
    if (pid == 0) {
        alarm(60);
        pid_t child = fork();
        if (child == 0) work();
        int status = 5 << 8;
        if (child > 0) waitpid(child, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 6);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (status != 0) die("a child of fork %zu past libc ended with %#x", forks, status);
    forks++;
}

static void *forking(void *argument) {
    while (!atomic_load(&over)) fork_twice(map_some);
    fork_twice(grow);
    return argument;
}

int main(int count, char **words) {
    given = parse(count, words, "plain");
    size_t bytes = given.pages * PAGE;
    int with_forks = strcmp(given.mode, "forks") == 0;
    pthread_t forker;
    if (with_forks) {
        MUST(pthread_create(&forker, NULL, forking, NULL) == 0);
        usleep(20000);
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (strcmp(given.mode, "reserve") == 0) flags |= MAP_NORESERVE;
    if (strcmp(given.mode, "populate") == 0) flags |= MAP_POPULATE;
    arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    MUST(arena != MAP_FAILED);
    if (strcmp(given.mode, "advise") == 0)
        MUST(madvise(arena, bytes, 23 /* MADV_POPULATE_WRITE */) == 0);
    if (with_forks) {
        /* It has begun by now, or never will: with more to copy, forks are slow. */
        atomic_store(&over, 1);
        MUST(pthread_join(forker, NULL) == 0);
        MUST(forks > 0);
    }
    pthread_t ids[THREADS];
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_create(&ids[i], NULL, fill, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_join(ids[i], NULL) == 0);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
    return ok("begins", given.mode);
}
