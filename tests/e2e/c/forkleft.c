/* What MREMAP_DONTUNMAP leaves mapped comes along at a fork, also where the program has given
 * advice about forks for something else.
 */
#include "common.h"

#include <sys/wait.h>

#define PAGES 256ul
#define ROUNDS 4

static struct arguments given;

static void check_left(const unsigned char *left, const unsigned char *moved, uint64_t version) {
    for (size_t page = 0; page < PAGES; page++) {
        uint64_t key = page % 2 == 0 ? key_of(given.seed, page, version + 1) : 0;
        check_page(left + page * PAGE, key, "in what was left");
        check_page(moved + page * PAGE, key_of(given.seed, page, version), "in what was moved");
    }
}

int main(int count, char **words) {
    given = parse(count, words, "wipe");
    unsigned char *ballast = map(given.pages * PAGE), *apart = map(PAGE);
    int advice = strcmp(given.mode, "wipe") == 0 ? MADV_WIPEONFORK : MADV_DONTFORK;
    MUST(madvise(apart, PAGE, advice) == 0);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t version = 3 * round + 1;
        unsigned char *left = map(PAGES * PAGE);
        for (size_t page = 0; page < PAGES; page++)
            fill_page(left + page * PAGE, key_of(given.seed, page, version));
        for (size_t page = 0; page < given.pages; page++)
            fill_page(ballast + page * PAGE, key_of(given.seed, page, version));
        unsigned char *moved =
            mremap(left, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        MUST(moved != MAP_FAILED);
        for (size_t page = 0; page < PAGES; page += 2)
            fill_page(left + page * PAGE, key_of(given.seed, page, version + 1));
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            check_left(left, moved, version);
            _exit(0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child);
        if (status != 0) die("the child ended with status %#x", status);
        check_left(left, moved, version);
        MUST(munmap(left, PAGES * PAGE) == 0 && munmap(moved, PAGES * PAGE) == 0);
    }
    return ok("forkleft", given.mode);
}
