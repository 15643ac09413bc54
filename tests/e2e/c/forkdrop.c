/* The parent gives pages up (`MADV_DONTNEED`) as soon as its fork has returned, while others change
 * mappings without pause. The child has what was there at the fork, and so has a child that it
 * makes and does the same to. Past libc (MODE raw), or through it (libc). */
#include "common.h"
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { CHURNERS = 3, CHURNED_PAGES = 4 };

static struct arguments given;
static unsigned char *area;
static atomic_int stop;

static uint64_t key(size_t page, uint64_t version) {
    /* No page of zeros: lost ones are zeros. */
    return key_of(given.seed, page, version) | 0x200;
}

static void *churner(void *argument) {
    unsigned char *own = map(CHURNED_PAGES * PAGE);
    (void)argument;
    while (!atomic_load(&stop)) {
        *(volatile unsigned char *)own = 1;
        MUST(syscall(SYS_madvise, own, CHURNED_PAGES * PAGE, MADV_DONTNEED) == 0);
    }
    return NULL;
}

/* A fork and what follows it in the parent at once. */
static pid_t fork_and_drop(void) {
    int is_raw = strcmp(given.mode, "raw") == 0;
    pid_t pid = is_raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
    MUST(pid >= 0);
    if (pid != 0) MUST(syscall(SYS_madvise, area, given.pages * PAGE, MADV_DONTNEED) == 0);
    return pid;
}

static void await(pid_t pid) {
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (status != 0) die("a child ended with status %x", (unsigned)status);
}

static void check_all(uint64_t version, const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(area + page * PAGE, key(page, version), what);
}

static void check_dropped(const char *what) {
    for (size_t page = 0; page < given.pages; page += 7)
        check_page(area + page * PAGE, 0, what);
}

int main(int count, char **words) {
    given = parse(count, words, "raw");
    double end = now() + given.seconds;
    area = map(given.pages * PAGE);
    pthread_t ids[CHURNERS];
    for (size_t i = 0; i < CHURNERS; i++)
        MUST(pthread_create(&ids[i], NULL, churner, NULL) == 0);
    unsigned long forks = 0;
    for (uint64_t version = 1; now() < end; version++) {
        for (size_t page = 0; page < given.pages; page++)
            fill_page(area + page * PAGE, key(page, version));
        pid_t pid = fork_and_drop();
        if (pid == 0) {
            pid_t below = fork_and_drop();
            if (below == 0) {
                check_all(version, "in a child's child");
                _exit(0);
            }
            check_dropped("in a child that gave it up");
            await(below);
            _exit(0);
        }
        check_dropped("in the parent that gave it up");
        await(pid);
        forks += 2;
    }
    atomic_store(&stop, 1);
    for (size_t i = 0; i < CHURNERS; i++) MUST(pthread_join(ids[i], NULL) == 0);
    fprintf(stderr, "%lu forks\n", forks);
    return ok("forkdrop", given.mode);
}
