/* A program of OpenMP: loops with static and dynamic schedules, reductions, critical sections,
 * nested tasks and thread-private data, over an arena larger than the budget. */
#include "common.h"

#include <omp.h>

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;

static uint64_t private_sum;
#pragma omp threadprivate(private_sum)

/* Checks and writes again the pages of a range, which tasks halve among themselves. */
static void halves(size_t from, size_t to) {
    if (to - from <= 64) {
        for (size_t page = from; page < to; page++) {
            check_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "in a task");
            fill_page(arena + page * PAGE, key_of(given.seed, page, ++version[page]));
        }
        return;
    }
    size_t middle = from + (to - from) / 2;
#pragma omp task
    halves(from, middle);
#pragma omp task
    halves(middle, to);
#pragma omp taskwait
}

static uint64_t word_at(size_t page) {
    return *(const volatile uint64_t *)(arena + page * PAGE + page % WORDS * 8);
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    version = calloc(given.pages, sizeof *version);
    MUST(version);
    omp_set_dynamic(0);
    omp_set_num_threads(6);
    double end = now() + given.seconds;
    do {
#pragma omp parallel for schedule(static, 16)
        for (size_t page = 0; page < given.pages; page++)
            fill_page(arena + page * PAGE, key_of(given.seed, page, ++version[page]));
        uint64_t expected = 0, sum = 0, critical = 0, copied = 0;
        for (size_t page = 0; page < given.pages; page++)
            expected += word_of(key_of(given.seed, page, version[page]), page % WORDS);
#pragma omp parallel for schedule(dynamic, 8) reduction(+ : sum)
        for (size_t page = 0; page < given.pages; page++) sum += word_at(page);
#pragma omp parallel
        {
            private_sum = 0;
#pragma omp for schedule(guided)
            for (size_t page = 0; page < given.pages; page++) private_sum += word_at(page);
#pragma omp critical
            critical += private_sum;
#pragma omp barrier
#pragma omp atomic
            copied += private_sum;
        }
        if (sum != expected || critical != expected || copied != expected)
            die("sums %llx, %llx, %llx instead of %llx", (unsigned long long)sum,
                (unsigned long long)critical, (unsigned long long)copied,
                (unsigned long long)expected);
#pragma omp parallel
#pragma omp single
        halves(0, given.pages);
#pragma omp parallel for schedule(runtime)
        for (size_t page = 0; page < given.pages; page++)
            check_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "at the end");
    } while (now() < end);
    return ok("openmp", NULL);
}
