/* Two processes read what they have again and again, and then use a part of it while they grow:
 * copies of what is back in memory must not keep swap space full that has room for all the data.
 *
 * MB is what each has, beyond the 5 that it grows by. */
#include "common.h"
#include <sys/wait.h>

enum { GROWTH = 5 << 8, HOT = 12 << 8, STEP = 64, CYCLES = 1 };

static struct arguments given;

/* A page that does not compress. */
static uint64_t key(size_t page) {
    return key_of(given.seed, page, 1) | 0xf00;
}

static void work(void) {
    unsigned char *old = map(given.pages * PAGE), *grown = map(GROWTH * PAGE);
    for (size_t page = 0; page < given.pages; page++) fill_page(old + page * PAGE, key(page));
    for (int cycle = 0; cycle < CYCLES; cycle++)
        for (size_t page = 0; page < given.pages; page++)
            glance_page(old + page * PAGE, key(page), "read again");
    for (size_t at = 0; at < GROWTH; at++) {
        fill_page(grown + at * PAGE, key(given.pages + at));
        if (at % STEP != 0) continue;
        for (size_t page = given.pages - HOT; page < given.pages; page++)
            glance_page(old + page * PAGE, key(page), "hot");
        usleep(2000);
    }
    for (size_t at = 0; at < GROWTH; at++)
        check_page(grown + at * PAGE, key(given.pages + at), "grown");
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    pid_t other = fork();
    MUST(other >= 0);
    work();
    if (other == 0) _exit(0);
    int status;
    MUST(waitpid(other, &status, 0) == other && status == 0);
    return ok("kept", NULL);
}
