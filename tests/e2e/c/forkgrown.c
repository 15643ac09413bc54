/* A child past libc unmaps a mapping, has its neighbour grow over that place, and forks past libc:
 * there the grandchild has zeros, not what was unmapped.
 */
#include "common.h"

#include <sys/syscall.h>
#include <sys/wait.h>

#define NEIGHBOUR 64ul
#define HOLE 16ul
#define GONE 480ul
#define ROUNDS 5

static struct arguments given;

static pid_t bare_fork(void) {
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    MUST(child >= 0);
    return child;
}

static void await(pid_t child, const char *what) {
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status != 0) die("the %s ended with status %#x", what, status);
}

static void grandchild(const unsigned char *at, size_t hole, uint64_t version) {
    for (size_t page = 0; page < NEIGHBOUR; page++)
        check_page(at + page * PAGE, key_of(given.seed, page, version), "in the neighbour");
    for (size_t page = NEIGHBOUR; page < NEIGHBOUR + hole + GONE; page++)
        check_page(at + page * PAGE, 0, "where something was unmapped");
    _exit(0);
}

static void turn(unsigned char *ballast, size_t hole, uint64_t version) {
    size_t all = NEIGHBOUR + hole + GONE;
    unsigned char *at = map(all * PAGE), *place = at + NEIGHBOUR * PAGE;
    unsigned char *gone = place + hole * PAGE;
    if (hole > 0) MUST(munmap(place, hole * PAGE) == 0);
    /* Of its own, or the kernel would have one mapping for both. */
    MUST(mmap(gone, GONE * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
              -1, 0) == gone);
    for (size_t page = 0; page < NEIGHBOUR; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, version));
    for (size_t page = 0; page < GONE; page++)
        memset(gone + page * PAGE, 0xee, PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, version + 1));
    pid_t child = bare_fork();
    if (child == 0) {
        MUST(syscall(SYS_munmap, place, (hole + GONE) * PAGE) == 0);
        MUST(syscall(SYS_mremap, at, NEIGHBOUR * PAGE, all * PAGE, 0) == (long)at);
        pid_t last = bare_fork();
        if (last == 0) grandchild(at, hole, version);
        await(last, "grandchild");
        _exit(0);
    }
    await(child, "child");
    MUST(munmap(at, all * PAGE) == 0);
}

int main(int count, char **words) {
    given = parse(count, words, "raw");
    unsigned char *ballast = map(given.pages * PAGE);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        turn(ballast, 0, 4 * round + 1);
        turn(ballast, HOLE, 4 * round + 3);
    }
    return ok("forkgrown", given.mode);
}
