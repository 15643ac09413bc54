/* Mappings right behind libraries, as an interpreter has them that loads its modules one by one:
 * the kernel puts each library right below what was mapped before it, and joins the library's
 * zero-initialised data to it. They are no part of the library, and go out like others. */
#include "common.h"

#include <dlfcn.h>

/* A little less than the largest zero-initialised data that is taken for a library's; no multiple
 * of a huge page, or it would be aligned to one. */
enum { PART = 15 * 256 + 16, MOST = 16, ENOUGH = 4 };

/* Libraries that come with libc, with data of their own. */
static const char *const names[] = {"libresolv.so.2", "libthread_db.so.1",    "libnss_compat.so.2",
                                    "libnsl.so.1",    "libanl.so.1",          "libnss_hesiod.so.2",
                                    "libm.so.6",      "libBrokenLocale.so.1", "libmvec.so.1",
                                    "libgcc_s.so.1"};

/* True if a mapping that holds or ends before `address` follows a library's written data. */
static int follows_library(uintptr_t address) {
    FILE *maps = fopen("/proc/self/maps", "r");
    MUST(maps != NULL);
    char line[512];
    uintptr_t data_ends = 0;
    int follows = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end, inode;
        char access[5];
        if (sscanf(line, "%lx-%lx %4s %*s %*s %lu", &start, &end, access, &inode) != 4) continue;
        if (inode != 0 && access[1] == 'w') data_ends = end;
        if (inode == 0 && start == data_ends && start <= address && address < end) follows = 1;
    }
    fclose(maps);
    return follows;
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    unsigned char *parts[MOST];
    size_t found = 0, behind = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        parts[found++] = map(PART * PAGE);
        dlopen(names[i], RTLD_NOW);
    }
    for (size_t i = 0; i < found; i++) behind += follows_library((uintptr_t)parts[i]);
    if (behind < ENOUGH)
        die("only %zu of %zu mappings are right behind a library: this tests nothing", behind,
            found);
    for (size_t page = 0; page < found * PART; page++)
        fill_page(parts[page / PART] + page % PART * PAGE, key_of(given.seed, page, 0));
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    for (size_t rounds = 0; rounds < found * PART / 4 || now() < end; rounds++) {
        size_t page = below(&random, found * PART);
        check_page(parts[page / PART] + page % PART * PAGE, key_of(given.seed, page, 0),
                   "behind a library");
    }
    for (size_t page = 0; page < found * PART; page++)
        check_page(parts[page / PART] + page % PART * PAGE, key_of(given.seed, page, 0),
                   "behind a library, at the end");
    return ok("libraries", NULL);
}
