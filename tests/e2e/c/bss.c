/* A static array of 300 MiB: memory of the program's own file mapping's tail, which no call
 * mapped. */
#include "common.h"

#define MOST (300ul << 20)

static unsigned char array[MOST] __attribute__((aligned(4096)));
static uint8_t version[MOST / PAGE];

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    if (given.pages > MOST / PAGE) given.pages = MOST / PAGE;
    uint64_t random = mix(given.seed);
    for (size_t page = 0; page < given.pages; page += 7)
        check_page(array + page * PAGE, 0, "static array before it was written");
    for (size_t page = 0; page < given.pages; page++)
        fill_page(array + page * PAGE, key_of(given.seed, page, 0));
    double end = now() + given.seconds;
    for (size_t rounds = 0; rounds < given.pages / 4 || now() < end; rounds++) {
        size_t page = below(&random, given.pages);
        check_page(array + page * PAGE, key_of(given.seed, page, version[page]), "static array");
        if (rounds % 4 == 0)
            fill_page(array + page * PAGE, key_of(given.seed, page, ++version[page]));
    }
    for (size_t page = 0; page < given.pages; page++)
        check_page(array + page * PAGE, key_of(given.seed, page, version[page]),
                   "static array at the end");
    return ok("bss", NULL);
}
