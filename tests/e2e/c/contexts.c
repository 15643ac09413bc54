/* Threads of user space: contexts with stacks of their own that yield to each other. MODE one:
 * one thread runs them all in turn; moved: four threads take them from one queue, so that a context
 * continues on whichever thread is free. All stacks are together larger than the budget, and every
 * context checks its whole stack whenever it has the processor again. */
#include "common.h"

#include <ucontext.h>

#define STACK (128ul << 10)
#define HELD 24
#define THREADS 4

static struct arguments given;
static double end;

struct context {
    ucontext_t here, *scheduler;
    uint64_t seed;
    int ended;
};

static struct context *contexts;
static size_t count, queued, taken, living;
static struct context **queue;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

/* Not inlined, and by a pointer: the thread may be another one after a switch. */
__attribute__((noinline)) static void yield(struct context *self) {
    MUST(swapcontext(&self->here, self->scheduler) == 0);
}

/* Yields in the depth of a recursion, too. */
static void deeper(struct context *self, int depth, uint64_t round) {
    uint64_t words[256];
    for (size_t i = 0; i < 256; i++) words[i] = mix(self->seed + round + i + (uint64_t)depth);
    if (depth)
        deeper(self, depth - 1, round);
    else
        yield(self);
    for (size_t i = 0; i < 256; i++) {
        uint64_t expected = mix(self->seed + round + i + (uint64_t)depth);
        if (words[i] != expected) mismatch(&words[i], expected, words[i], "a frame of a stack");
    }
}

static void body(unsigned low, unsigned high) {
    struct context *self = (struct context *)((uintptr_t)high << 32 | low);
    unsigned char space[(HELD + 1) * PAGE];
    unsigned char *page = (unsigned char *)(((uintptr_t)space + PAGE - 1) & ~(PAGE - 1));
    for (uint64_t round = 1; round < 4 || now() < end; round++) {
        for (size_t i = 0; i < HELD; i++) fill_page(page + i * PAGE, key_of(self->seed, i, round));
        if (round & 1)
            yield(self);
        else
            deeper(self, 4, round);
        for (size_t i = 0; i < HELD; i++)
            check_page(page + i * PAGE, key_of(self->seed, i, round), "a context's stack");
    }
    self->ended = 1;
    yield(self);
    die("a context that ended was continued");
}

/* Takes contexts that wait, runs each until it yields, and puts it back. */
static void *schedule(void *x) {
    ucontext_t scheduler;
    MUST(pthread_mutex_lock(&lock) == 0);
    while (living) {
        if (taken == queued) {
            MUST(pthread_cond_wait(&changed, &lock) == 0);
            continue;
        }
        struct context *next = queue[taken++ % count];
        MUST(pthread_mutex_unlock(&lock) == 0);
        next->scheduler = &scheduler;
        MUST(swapcontext(&scheduler, &next->here) == 0);
        MUST(pthread_mutex_lock(&lock) == 0);
        if (next->ended)
            living--;
        else
            queue[queued++ % count] = next;
        MUST(pthread_cond_broadcast(&changed) == 0);
    }
    MUST(pthread_mutex_unlock(&lock) == 0);
    return x;
}

int main(int words_count, char **words) {
    given = parse(words_count, words, "one");
    end = now() + given.seconds;
    count = living = (given.megabytes << 20) / STACK;
    contexts = calloc(count, sizeof *contexts);
    queue = calloc(count, sizeof *queue);
    MUST(contexts && queue);
    unsigned char *stacks = map(count * STACK);
    for (size_t i = 0; i < count; i++) {
        struct context *it = &contexts[i];
        it->seed = mix(given.seed + i);
        MUST(getcontext(&it->here) == 0);
        it->here.uc_stack.ss_sp = stacks + i * STACK;
        it->here.uc_stack.ss_size = STACK;
        makecontext(&it->here, (void (*)(void))body, 2, (unsigned)(uintptr_t)it,
                    (unsigned)((uintptr_t)it >> 32));
        queue[queued++] = it;
    }
    pthread_t ids[THREADS];
    size_t threads = strcmp(given.mode, "one") ? THREADS : 1;
    for (size_t i = 0; i < threads; i++) MUST(pthread_create(&ids[i], NULL, schedule, NULL) == 0);
    for (size_t i = 0; i < threads; i++) MUST(pthread_join(ids[i], NULL) == 0);
    if (taken < 3 * count) die("only %zu turns of %zu contexts", taken, count);
    return ok("contexts", given.mode);
}
