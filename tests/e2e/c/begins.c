/* Memory that is there all at once, before anything has looked: one large mapping, filled by three
 * threads or by the kernel. MODE reserve (MAP_NORESERVE), plain, populate (MAP_POPULATE) or advise
 * (MADV_POPULATE_WRITE). */
#include "common.h"

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

int main(int count, char **words) {
    given = parse(count, words, "plain");
    size_t bytes = given.pages * PAGE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (strcmp(given.mode, "reserve") == 0) flags |= MAP_NORESERVE;
    if (strcmp(given.mode, "populate") == 0) flags |= MAP_POPULATE;
    arena = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    MUST(arena != MAP_FAILED);
    if (strcmp(given.mode, "advise") == 0)
        MUST(madvise(arena, bytes, 23 /* MADV_POPULATE_WRITE */) == 0);
    pthread_t ids[THREADS];
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_create(&ids[i], NULL, fill, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_join(ids[i], NULL) == 0);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
    return ok("begins", given.mode);
}
