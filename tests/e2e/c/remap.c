/* mremap over mappings that the program sees as one: a part is old and may be managed, a part is
 * new. Whatever happens without swaptide must happen with it, and the contents move along. */
#include "common.h"

/* Kinds of calls. */
enum { KINDS = 8 };

static struct arguments given;

/* A free place for `pages`, with as many free ones behind it. */
static unsigned char *place(size_t pages) {
    unsigned char *at = map(2 * pages * PAGE);
    MUST(munmap(at, 2 * pages * PAGE) == 0);
    return at;
}

static void extend(unsigned char *at, size_t from, size_t to) {
    MUST(mmap(at + from * PAGE, (to - from) * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
}

static void write_pages(unsigned char *at, size_t from, size_t to, uint32_t version) {
    for (size_t page = from; page < to; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, version));
}

static void check_pages(unsigned char *at, size_t from, size_t to, uint32_t version,
                        const char *what) {
    for (size_t page = from; page < to; page++)
        check_page(at + page * PAGE, key_of(given.seed, page, version), what);
}

static void zeros(unsigned char *at, size_t from, size_t to, const char *what) {
    for (size_t page = from; page < to; page++) check_page(at + page * PAGE, 0, what);
}

/* Memory that is in the way of everything else: its owner keeps using it, so that the other pages
 * go out. */
static void press(unsigned char *ballast) {
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed + 1, page, 1));
}

/* Whether this kernel moves mappings of several kinds in one call (Linux 6.17). */
static int moves_several(void) {
    unsigned char *at = map(2 * PAGE), *to = place(2);
    MUST(mprotect(at, PAGE, PROT_READ) == 0);
    return mremap(at, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    int several = moves_several();
    double end = now() + given.seconds;
    unsigned char *ballast = map(given.pages * PAGE);
    size_t pages = 2048, grown = pages + 512, more = grown + 256;
    size_t refused = 0;
    for (uint32_t round = 1; round < KINDS || now() < end; round++) {
        unsigned char *at = place(2 * more);
        extend(at, 0, pages);
        write_pages(at, 0, pages, round);
        press(ballast);
        /* The new part joins the old one; it may or may not have been touched. */
        extend(at, pages, grown);
        if (round & 1) write_pages(at, pages, grown, round);
        unsigned char *moved = at;
        unsigned kind = round % KINDS;
        int leaves = kind == 5 || kind == 6;
        switch (kind) {
        case 0: /* grows where it is */ moved = mremap(at, grown * PAGE, more * PAGE, 0); break;
        case 1: /* moves to a place of the program's choice */
            moved = place(more);
            moved = mremap(at, grown * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved);
            break;
        case 2: /* cannot grow where it is */
            extend(at, grown, grown + 16);
            MUST(mprotect(at + grown * PAGE, 16 * PAGE, PROT_READ) == 0);
            moved = mremap(at, grown * PAGE, more * PAGE, MREMAP_MAYMOVE);
            break;
        case 3: /* shrinks and moves */
            moved = place(more);
            moved =
                mremap(at, grown * PAGE, (pages + 3) * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved);
            break;
        case 4: /* what comes first is new: the kernel may move that and then refuse the rest */
            extend(at, 0, 16);
            write_pages(at, 0, 16, round);
            /* Over itself it is refused, and nothing is given up. */
            for (size_t by = 1; by < grown; by += grown / 3)
                if (mremap(at, grown * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
                           at + by * PAGE) != MAP_FAILED ||
                    errno != EINVAL)
                    die("round %u: mremap over itself by %zu pages was not refused", round, by);
            moved = place(more);
            moved = mremap(at, grown * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved);
            break;
        case 5: /* the same, and the old place stays mapped */
            extend(at, 0, 16);
            write_pages(at, 0, 16, round);
            moved = mremap(at, grown * PAGE, grown * PAGE,
                           MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, place(more));
            break;
        case 6: /* to a place of the kernel's choice */
            moved = mremap(at, grown * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
            break;
        case 7: /* mappings of two kinds, of which the first is new */
            extend(at, 0, 16);
            write_pages(at, 0, 16, round);
            MUST(!several || mprotect(at, 16 * PAGE, PROT_READ) == 0);
            moved = mremap(at, grown * PAGE, grown * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
                           place(more));
            if (moved != MAP_FAILED) MUST(mprotect(moved, 16 * PAGE, PROT_READ | PROT_WRITE) == 0);
            break;
        }
        if (moved == MAP_FAILED)
            die("round %u: mremap: %s, and without swaptide it works", round, strerror(errno));
        size_t now_has = kind == 3 ? pages + 3 : kind == 1 || kind >= 4 ? grown : more;
        size_t old_has = now_has < grown ? now_has : grown;
        check_pages(moved, 0, pages, round, "old page after mremap");
        if (round & 1)
            check_pages(moved, pages, old_has, round, "new page after mremap");
        else
            zeros(moved, pages, old_has, "untouched page after mremap");
        zeros(moved, old_has, now_has, "page that mremap added");
        write_pages(moved, 0, now_has, round + 1000);
        press(ballast);
        check_pages(moved, 0, now_has, round + 1000, "page written after mremap");
        if (leaves) {
            zeros(at, 0, grown, "page that a move has left");
        } else if (moved != at) {
            /* Nothing may be left at the old place. */
            unsigned char one;
            if (mincore(at, PAGE, &one) == 0 || errno != ENOMEM)
                die("round %u: the old place is still mapped", round);
        }
        /* What no single mapping can do stays refused: memory of two kinds. */
        MUST(mprotect(moved, 16 * PAGE, PROT_READ) == 0);
        if (mremap(moved, now_has * PAGE, now_has * 2 * PAGE, 0) == MAP_FAILED) refused++;
        MUST(munmap(moved, now_has * PAGE) == 0);
        munmap(at, (grown + 16) * PAGE);
    }
    /* realloc of a large block calls mremap inside libc. */
    size_t size = 1 << 20;
    unsigned char *block = malloc(size);
    MUST(block != NULL);
    memset(block, 0x5a, size);
    while (size < given.megabytes << 20) {
        press(ballast);
        size_t larger = size * 3 / 2;
        MUST((block = realloc(block, larger)) != NULL);
        for (size_t i = 0; i < size; i += 509) MUST(block[i] == 0x5a);
        memset(block + size, 0x5a, larger - size);
        size = larger;
    }
    fprintf(stderr, "%zu refused\n", refused);
    return ok("remap", NULL);
}
