/* Memory that cannot go out is larger than the budget, and threads use a little that can.
 *
 * It is writable and executable, so it is not managed. An instruction that accesses several pages
 * needs them all in memory at the same time: each thread copies words that cross pages to others
 * that do, in an order that no readahead serves.
 */
#include "common.h"

#define THREADS 2
#define PAIRS 64
#define ROUNDS 12

struct worker {
    pthread_t thread;
    unsigned char *memory;
    uint64_t seed;
    uint64_t sum;
};

/* Copies one word. Each operand crosses two pages. */
static void copy_word(void *to, const void *from) {
#ifdef __x86_64__
    __asm__ volatile("movsq" : "+D"(to), "+S"(from) : : "memory");
#else
    memcpy(to, from, 8);
#endif
}

static void *work(void *given) {
    struct worker *worker = given;
    uint64_t state = worker->seed;
    uint64_t expected[PAIRS];
    /* The page after the last one is there, too. */
    for (size_t pair = 0; pair < PAIRS; pair++) {
        expected[pair] = mix(worker->seed + pair);
        memcpy(worker->memory + (2 * pair + 1) * PAGE - 3, &expected[pair], 8);
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (size_t turn = 0; turn < PAIRS; turn++) {
            size_t from = below(&state, PAIRS), to = below(&state, PAIRS);
            copy_word(worker->memory + (2 * to + 1) * PAGE - 3,
                      worker->memory + (2 * from + 1) * PAGE - 3);
            expected[to] = expected[from];
            worker->sum += expected[to];
        }
        for (size_t pair = 0; pair < PAIRS; pair++) {
            uint64_t found;
            memcpy(&found, worker->memory + (2 * pair + 1) * PAGE - 3, 8);
            if (found != expected[pair])
                mismatch(worker->memory + (2 * pair + 1) * PAGE - 3, expected[pair], found, "word");
        }
    }
    return NULL;
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "");
    size_t size = given.pages * PAGE;
    unsigned char *stays =
        mmap(NULL, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(stays != MAP_FAILED);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(stays + page * PAGE, key_of(given.seed, page, 1));

    /* The engine measures what is not managed and takes out all that it can. */
    usleep(200000);
    static struct worker workers[THREADS];
    for (int i = 0; i < THREADS; i++) {
        workers[i].seed = given.seed + 1000 * (uint64_t)i;
        workers[i].memory = mmap(NULL, (2 * PAIRS + 1) * PAGE, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(workers[i].memory != MAP_FAILED);
        MUST(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        MUST(pthread_join(workers[i].thread, NULL) == 0);
        printf("sum %016llx\n", (unsigned long long)workers[i].sum);
    }
    for (size_t page = 0; page < given.pages; page++)
        check_page(stays + page * PAGE, key_of(given.seed, page, 1), "memory that stays");
    printf("OK thrashing\n");
    return 0;
}
