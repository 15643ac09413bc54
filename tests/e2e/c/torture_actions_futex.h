/* Actions of the torture program in which the kernel writes words by itself: see futex.c. Included
 * by torture.c. */
#include <linux/futex.h>
#include <sys/syscall.h>

enum { LOCKS = 8, LOCK_PAGES = 32 };

/* Mutexes of a thread's own, in memory that goes out between two uses. */
static struct locks {
    unsigned char *memory;
    pthread_mutex_t *robust[LOCKS], *inherits;
    uint64_t guarded;
} thread_locks[THREADS];

static void make_locks(struct locks *locks, uint64_t *random) {
    locks->memory = map(LOCK_PAGES * PAGE);
    pthread_mutexattr_t kind;
    MUST((errno = pthread_mutexattr_init(&kind)) == 0);
    MUST((errno = pthread_mutexattr_setprotocol(&kind, PTHREAD_PRIO_INHERIT)) == 0);
    locks->inherits = (pthread_mutex_t *)(locks->memory + 31 * PAGE + 80);
    MUST((errno = pthread_mutex_init(locks->inherits, &kind)) == 0);
    MUST((errno = pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST)) == 0);
    for (size_t i = 0; i < LOCKS; i++) {
        int protocol = i % 2 ? PTHREAD_PRIO_NONE : PTHREAD_PRIO_INHERIT;
        MUST((errno = pthread_mutexattr_setprotocol(&kind, protocol)) == 0);
        locks->robust[i] =
            (pthread_mutex_t *)(locks->memory + 3 * i * PAGE + below(random, 90) * 40);
        MUST((errno = pthread_mutex_init(locks->robust[i], &kind)) == 0);
    }
    MUST((errno = pthread_mutexattr_destroy(&kind)) == 0);
}

static void destroy_locks(struct locks *locks) {
    for (size_t i = 0; i < LOCKS; i++) MUST((errno = pthread_mutex_destroy(locks->robust[i])) == 0);
    MUST((errno = pthread_mutex_destroy(locks->inherits)) == 0);
    MUST(munmap(locks->memory, LOCK_PAGES * PAGE) == 0);
    locks->memory = NULL;
}

/* Takes all robust mutexes and ends with them. */
static void *die_with_locks(void *given) {
    struct locks *locks = given;
    for (size_t i = 0; i < LOCKS; i++) MUST((errno = pthread_mutex_lock(locks->robust[i])) == 0);
    (void)madvise(locks->memory, LOCK_PAGES * PAGE, MADV_PAGEOUT);
    return NULL;
}

static void robust_locks(struct thread *self) {
    struct locks *locks = &thread_locks[self->number];
    if (locks->memory == NULL) make_locks(locks, &self->random);
    pthread_t owner;
    MUST(pthread_create(&owner, NULL, die_with_locks, locks) == 0);
    MUST(pthread_join(owner, NULL) == 0);
    for (size_t i = 0; i < LOCKS; i++) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 20;
        int result = pthread_mutex_timedlock(locks->robust[i], &until);
        if (result != EOWNERDEAD)
            die("thread %zu, robust mutex %zu of a dead owner: %s", self->number, i,
                strerror(result));
        MUST((errno = pthread_mutex_consistent(locks->robust[i])) == 0);
        MUST((errno = pthread_mutex_unlock(locks->robust[i])) == 0);
    }
    if (below(&self->random, 4) == 0) destroy_locks(locks);
}

static void *with_priority(void *given) {
    struct locks *locks = given;
    for (int i = 0; i < 200; i++) {
        MUST((errno = pthread_mutex_lock(locks->inherits)) == 0);
        locks->guarded++;
        if (i % 20 == 0) (void)madvise(locks->memory, LOCK_PAGES * PAGE, MADV_PAGEOUT);
        MUST((errno = pthread_mutex_unlock(locks->inherits)) == 0);
    }
    return NULL;
}

static void priority_locks(struct thread *self) {
    struct locks *locks = &thread_locks[self->number];
    if (locks->memory == NULL) make_locks(locks, &self->random);
    uint64_t before = locks->guarded;
    pthread_t other;
    MUST(pthread_create(&other, NULL, with_priority, locks) == 0);
    with_priority(locks);
    MUST(pthread_join(other, NULL) == 0);
    if (locks->guarded != before + 400)
        die("a PI mutex was held by two: %zu turns of 400", (size_t)(locks->guarded - before));
}

/* The kernel sets the lower half of a word of a page, wherever the page is. */
static void wake_op(struct thread *self, struct area *area) {
    size_t number = below(&self->random, area->pages);
    struct page *page = &area->page[number];
    if (page->state == LAZY) return;
    if (page->at == WORDS) {
        page->at = (uint16_t)below(&self->random, WORDS);
        page->word = word_of(page->key, page->at);
    }
    uint32_t value = (uint32_t)below(&self->random, 2048), unused = 0;
    uint32_t *word = (uint32_t *)(area->base + number * PAGE + page->at * sizeof(uint64_t));
    note(self, area, "FUTEX_WAKE_OP", number, 1);
    long woken = syscall(SYS_futex, &unused, FUTEX_WAKE_OP | FUTEX_PRIVATE_FLAG, 1, 1, word,
                         FUTEX_OP(FUTEX_OP_SET, value, FUTEX_OP_CMP_EQ, 0));
    if (woken != 0) die("FUTEX_WAKE_OP: %ld %s", woken, strerror(errno));
    page->word = (page->word & ~0xffffffffull) | value;
}

static void by_futex(struct thread *self, struct area *area) {
    switch (working == 1 ? 0 : below(&self->random, 16)) {
    case 1: robust_locks(self); break;
    case 2: priority_locks(self); break;
    default:
        for (size_t i = 0; i < 32; i++) wake_op(self, area);
    }
}
