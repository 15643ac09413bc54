/* Memory that cannot go out, more than the budget, next to a little that is touched again and
 * again: the program goes on.
 */
#include "common.h"

#define HOT_BYTES (1ul << 20)
#define COLD_PAGES 2048ul
#define TOUCHES 2000000ul

int main(int count, char **words) {
    struct arguments given = parse(count, words, "locked");
    unsigned char *memory = map(given.pages * PAGE), *hot = map(HOT_BYTES);
    unsigned char *cold = map(COLD_PAGES * PAGE);
    for (size_t page = 0; page < COLD_PAGES; page++)
        fill_page(cold + page * PAGE, key_of(given.seed, page, 2));
    int is_locked = strcmp(given.mode, "locked") == 0;
    if (is_locked) MUST(mlock(memory, given.pages * PAGE) == 0);
    if (strcmp(given.mode, "unforked") == 0)
        MUST(madvise(memory, given.pages * PAGE, MADV_WIPEONFORK) == 0);
    int is_readonly = strcmp(given.mode, "readonly") == 0;
    memset(hot, 0, HOT_BYTES);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(memory + page * PAGE, key_of(given.seed, page, 1));
    if (is_readonly) MUST(mprotect(memory, given.pages * PAGE, PROT_READ) == 0);
    uint64_t state = given.seed;
    for (size_t touch = 0; touch < TOUCHES; touch++) {
        hot[below(&state, HOT_BYTES)]++;
        size_t page = below(&state, given.pages);
        if (touch % 64 == 0)
            glance_page(memory + page * PAGE, key_of(given.seed, page, 1), "in memory that stays");
    }
    size_t sum = 0;
    for (size_t at = 0; at < HOT_BYTES; at++) sum += hot[at];
    /* Each counter is a byte; none comes near its end. */
    if (sum != TOUCHES) die("%zu touches are counted of %zu", sum, TOUCHES);
    for (size_t page = 0; page < COLD_PAGES; page++)
        check_page(cold + page * PAGE, key_of(given.seed, page, 2), "in what went out");
    return ok("unmovable", given.mode);
}
