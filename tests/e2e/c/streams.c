/* A program whose threads write their memory to stdout without pause, most of it out: the reader of
 * there sees whether each page came out whole. Each write has one page, and a pipe takes that whole
 * or not at all. A page is one word that is never 0, repeated.
 *
 *     streams MB SECONDS SEED [MODE]     ends after SECONDS, without a last line
 *
 * leader    the first thread ends */
#include "common.h"

#define THREADS 3

static struct arguments given;
static unsigned char *arena;

static void *stream(void *argument) {
    uint64_t random = mix(given.seed + (uintptr_t)argument);
    for (;;) {
        size_t page = below(&random, given.pages);
        ssize_t wrote = write(1, arena + page * PAGE, PAGE);
        MUST(wrote == (ssize_t)PAGE);
    }
    return NULL;
}

static void *end(void *unused) {
    usleep((useconds_t)(given.seconds * 1e6));
    /* While they write. */
    _exit(0);
    return unused;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++) {
        uint64_t *word = (uint64_t *)(arena + page * PAGE);
        for (size_t at = 0; at < WORDS; at++) word[at] = key_of(given.seed, page, 1);
    }
    pthread_t ids[THREADS], last;
    MUST(pthread_create(&last, NULL, end, NULL) == 0);
    for (size_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&ids[i], NULL, stream, (void *)i) == 0);
    if (given.mode) pthread_exit(NULL);
    end(NULL);
}
