/* Memory that was read before it is written: the kernel answers the reads with its page of zeros,
   and the writes without a fault that swaptide would see if it left those pages where they are. Two
   of three pages are written, upwards and at full speed; the third must stay zeros. */
#include "common.h"

static int is_written(size_t page) {
    return page % 3 != 2;
}

static void check_zeros(const unsigned char *at, const char *what) {
    const uint64_t *words = (const uint64_t *)at;
    for (size_t word = 0; word < WORDS; word++)
        if (words[word]) mismatch(words + word, 0, words[word], what);
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    for (uint64_t turn = 0; turn < 3; turn++) {
        unsigned char *arena = map(given.pages * PAGE);
        for (size_t page = 0; page < given.pages; page++)
            check_zeros(arena + page * PAGE, "page that was never written");
        for (size_t page = 0; page < given.pages; page++)
            if (is_written(page)) fill_page(arena + page * PAGE, key_of(given.seed, page, turn));
        for (size_t page = 0; page < given.pages; page++) {
            if (is_written(page))
                check_page(arena + page * PAGE, key_of(given.seed, page, turn),
                           "page that was written after it was read");
            else
                check_zeros(arena + page * PAGE, "page that was only read");
        }
        MUST(munmap(arena, given.pages * PAGE) == 0);
    }
    return ok("zeros", NULL);
}
