/* Threads move their memory to and fro with mremap while others fork, through libc (MODE libc) or
 * past it (raw), or while none does (alone). A child finds each block at one of its places, or
 * nowhere for an instant that fork must not show, and everything in it; a page that is not what it
 * was is a loss. */
#include "common.h"
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { BLOCKS = 4, PLACES = 3, BLOCK_PAGES = 256, FORKERS = 2 };

static struct arguments given;
static double end;
static unsigned char *ballast;
static atomic_int stop;

/* A block is at one of its places. The last place is over mappings that are there already. */
static struct block {
    unsigned char *place[PLACES];
} blocks[BLOCKS];

static uint64_t key(size_t block, size_t page) {
    /* No page of zeros: lost ones are zeros. */
    return key_of(given.seed, block * BLOCK_PAGES + page, 1) | 0x200;
}

static int is_mapped(const unsigned char *at) {
    unsigned char one;
    return mincore((void *)at, PAGE, &one) == 0;
}

/* The page is what it must be, or is no thread's: then its first word is that of what stood in
 * the way. */
static int holds(size_t block, const unsigned char *at) {
    return *(const volatile uint64_t *)at == word_of(key(block, 0), 0);
}

static void reserve(unsigned char *at) {
    MUST(mmap(at, BLOCK_PAGES * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at);
    *(volatile uint64_t *)at = 1;
}

static void *mover(void *argument) {
    size_t self = (size_t)argument;
    struct block *block = &blocks[self];
    uint64_t random = mix(given.seed + 77 + self);
    int at = 0;
    while (!atomic_load(&stop)) {
        int to = (at + 1 + (int)below(&random, PLACES - 1)) % PLACES;
        if (to == 2 && below(&random, 2)) reserve(block->place[2]);
        MUST(mremap(block->place[at], BLOCK_PAGES * PAGE, BLOCK_PAGES * PAGE,
                    MREMAP_MAYMOVE | MREMAP_FIXED, block->place[to]) == block->place[to]);
        at = to;
        if (below(&random, 8) == 0) {
            size_t page = below(&random, BLOCK_PAGES);
            check_page(block->place[at] + page * PAGE, key(self, page),
                       "in the thread that moves it");
        }
        if (below(&random, 4) == 0) usleep((useconds_t)below(&random, 300));
    }
    for (size_t page = 0; page < BLOCK_PAGES; page++)
        check_page(block->place[at] + page * PAGE, key(self, page), "in the parent at the end");
    return NULL;
}

static void child(uint64_t random) {
    for (size_t self = 0; self < BLOCKS; self++) {
        const unsigned char *found = NULL;
        for (int at = 0; at < PLACES; at++) {
            const unsigned char *place = blocks[self].place[at];
            if (is_mapped(place) && holds(self, place)) {
                if (found != NULL) die("block %zu is in two places", self);
                found = place;
            }
        }
        if (found == NULL) {
            char seen[PLACES][24];
            for (int at = 0; at < PLACES; at++) {
                const unsigned char *place = blocks[self].place[at];
                if (is_mapped(place))
                    snprintf(seen[at], sizeof seen[at], "%llx",
                             (unsigned long long)*(const volatile uint64_t *)place);
                else
                    strcpy(seen[at], "unmapped");
            }
            die("block %zu is lost in a child: its places hold %s, %s, %s", self, seen[0], seen[1],
                seen[2]);
        }
        size_t from = below(&random, 8);
        for (size_t page = from; page < BLOCK_PAGES; page += 8)
            check_page(found + page * PAGE, key(self, page), "in a child");
    }
    for (size_t i = 0; i < 32; i++) {
        size_t page = below(&random, given.pages);
        check_page(ballast + page * PAGE, key_of(given.seed, page, 9), "ballast in a child");
    }
    _exit(0);
}

static pid_t raw_clone(void) {
#ifdef __x86_64__
    long task;
    register long last __asm__("r8") = 0;
    register long fourth __asm__("r10") = 0;
    __asm__ volatile("syscall"
                     : "=a"(task)
                     : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(fourth), "r"(last)
                     : "rcx", "r11", "memory");
    return (pid_t)task;
#else
    return (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
#endif
}

static atomic_ulong forked;

static void *forker(void *argument) {
    uint64_t random = mix(given.seed + 999 + (size_t)argument);
    while (!atomic_load(&stop)) {
        uint64_t own = next(&random);
        pid_t task = strcmp(given.mode, "raw") == 0 ? raw_clone() : fork();
        MUST(task >= 0);
        if (task == 0) child(own);
        int status;
        MUST(waitpid(task, &status, 0) == task);
        if (WIFSIGNALED(status)) die("a child was ended by signal %d", WTERMSIG(status));
        if (WEXITSTATUS(status) != 0) die("a child's exit status is %d", WEXITSTATUS(status));
        atomic_fetch_add(&forked, 1);
        /* Each of these children is given all it has: without a pause no other thread gets
         * anywhere. */
        if (strcmp(given.mode, "raw") == 0) usleep(100000);
    }
    return NULL;
}

int main(int count, char **words) {
    given = parse(count, words, "libc");
    end = now() + given.seconds;
    /* Places apart from everything else: the kernel puts nothing there of its own accord. */
    unsigned char *area = (unsigned char *)0x200000000000;
    for (size_t self = 0; self < BLOCKS; self++) {
        for (int at = 0; at < PLACES; at++)
            blocks[self].place[at] = area + (self * PLACES + (size_t)at) * 4 * BLOCK_PAGES * PAGE;
        reserve(blocks[self].place[0]);
        for (size_t page = 0; page < BLOCK_PAGES; page++)
            fill_page(blocks[self].place[0] + page * PAGE, key(self, page));
    }
    ballast = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(ballast + page * PAGE, key_of(given.seed, page, 9));
    pthread_t ids[BLOCKS + FORKERS];
    for (size_t i = 0; i < BLOCKS; i++) MUST(pthread_create(&ids[i], NULL, mover, (void *)i) == 0);
    size_t forkers = strcmp(given.mode, "alone") == 0 ? 0 : FORKERS;
    for (size_t i = 0; i < forkers; i++)
        MUST(pthread_create(&ids[BLOCKS + i], NULL, forker, (void *)i) == 0);
    uint64_t random = mix(given.seed + 5);
    while (now() < end) {
        size_t page = below(&random, given.pages);
        check_page(ballast + page * PAGE, key_of(given.seed, page, 9), "ballast");
    }
    atomic_store(&stop, 1);
    for (size_t i = 0; i < BLOCKS + forkers; i++) MUST(pthread_join(ids[i], NULL) == 0);
    fprintf(stderr, "%lu forks\n", atomic_load(&forked));
    return ok("forkmove", given.mode);
}
