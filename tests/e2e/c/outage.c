/* Servers of swap areas stop answering: what else waits for them?
 *
 * Fills its memory, says "filled", and waits until the file READY of the working directory is
 * there. Then, for the given time, a second thread or several work on that memory, while the first
 * one gives up and writes a little of its own, which is in memory: its longest turn is printed.
 *
 * readers   threads read pages here and there
 * gives     a thread gives up half of the memory, in two steps
 * grows     a thread fills as much memory again
 * hints     a thread gives up the second half and says that it will need the first; the first
 *           one gives up nothing
 */
#include "common.h"

#define READERS 24
#define OWN_PAGES 16

static unsigned char *memory;
static size_t length;
static uint64_t seed;
static atomic_int is_hinted;

static void fill(unsigned char *from, size_t bytes, uint64_t state) {
    uint64_t *words = (uint64_t *)from;
    for (size_t at = 0; at < bytes / 8; at++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words[at] = state;
    }
}

static void *reads(void *number) {
    uint32_t state = (uint32_t)(uintptr_t)number * 7919 + 1;
    for (;;) {
        state = state * 1664525 + 1013904223;
        (void)*(volatile unsigned char *)(memory + (state >> 8) % (length / PAGE) * PAGE);
        usleep(2000);
    }
    return NULL;
}

static void *gives(void *unused) {
    (void)unused;
    for (int step = 0; step < 2; step++) {
        double since = now();
        MUST(madvise(memory + step * (length / 4), length / 4, MADV_DONTNEED) == 0);
        printf("gave up a quarter in %d ms\n", (int)((now() - since) * 1000));
        usleep(1500000);
    }
    return NULL;
}

static void *grows(void *unused) {
    (void)unused;
    unsigned char *more =
        mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(more != MAP_FAILED);
    for (size_t at = 0; at < length; at += PAGE) {
        fill(more + at, PAGE, seed + at);
        if (at % (64 * PAGE) == 0) usleep(1000);
    }
    return NULL;
}

static void *hints(void *unused) {
    (void)unused;
    MUST(madvise(memory + length / 2, length / 2, MADV_DONTNEED) == 0);
    sleep(1);
    double since = now();
    MUST(madvise(memory, length / 2, MADV_WILLNEED) == 0);
    printf("the hint took %d ms\n", (int)((now() - since) * 1000));
    /* A server is waited for once, a minute long. */
    MUST(now() - since < 90);
    atomic_store(&is_hinted, 1);
    return NULL;
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "readers");
    void *(*work)(void *) = strcmp(given.mode, "readers") == 0 ? reads
                            : strcmp(given.mode, "gives") == 0 ? gives
                            : strcmp(given.mode, "hints") == 0 ? hints
                                                               : grows;
    length = given.pages * PAGE;
    seed = given.seed * 2 + 1;
    memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *own = mmap(NULL, OWN_PAGES * PAGE, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(memory != MAP_FAILED && own != MAP_FAILED);
    fill(memory, length, seed);
    memset(own, 1, OWN_PAGES * PAGE);
    sleep(1);
    printf("filled\n");
    fflush(stdout);
    for (double end = now() + 60; access("READY", F_OK) != 0; usleep(20000))
        if (now() > end) die("it was not told to continue");
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 16);
    for (uintptr_t number = 0; number < (work == reads ? READERS : 1); number++) {
        pthread_t thread;
        MUST(pthread_create(&thread, &attributes, work, (void *)number) == 0);
    }
    double began = now(), longest = 0;
    long turns = 0;
    while (now() - began < given.seconds) {
        double since = now();
        /* Next to a hint nothing changes: while a change is unread no page is given up. */
        if (work != hints) MUST(madvise(own, OWN_PAGES * PAGE, MADV_DONTNEED) == 0);
        for (size_t at = 0; at < OWN_PAGES; at++) own[at * PAGE] = 1;
        if (now() - since > longest) longest = now() - since;
        turns++;
        usleep(20000);
    }
    if (work == hints && !atomic_load(&is_hinted)) die("the hint has not ended");
    printf("%ld turns, longest turn %d ms\n", turns, (int)(longest * 1000));
    printf("OK outage %s\n", given.mode);
    fflush(stdout);
    _exit(0);
}
