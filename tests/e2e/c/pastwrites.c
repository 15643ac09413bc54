/* Shared memory that the kernel writes to without its pager: by process_vm_writev, whose source is
 * out, and when a thread ends.
 */
#include "common.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#define MOST 16ul

static struct arguments given;
static unsigned char *shared;

static void *share(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(at != MAP_FAILED);
    return at;
}

static void writes(void) {
    unsigned char *source = map(given.pages * PAGE);
    uint32_t *version = calloc(given.pages, sizeof(uint32_t));
    MUST(version != NULL);
    uint64_t state = given.seed;
    double began = now();
    for (size_t page = 0; page < given.pages; page++)
        fill_page(shared + page * PAGE, key_of(given.seed, page, 0));
    do {
        size_t length = 1 + below(&state, MOST), to = below(&state, given.pages - length);
        unsigned char *from = source + below(&state, given.pages - length) * PAGE;
        for (size_t k = 0; k < length; k++)
            fill_page(from + k * PAGE, key_of(given.seed, to + k, ++version[to + k]));
        madvise(from, length * PAGE, MADV_PAGEOUT);
        for (int k = 0; k < 64; k++) {
            size_t page = below(&state, given.pages);
            if (page < to || page >= to + length)
                glance_page(shared + page * PAGE, key_of(given.seed, page, version[page]), "read");
        }
        struct iovec local = {from, length * PAGE}, remote = {shared + to * PAGE, length * PAGE};
        ssize_t done = process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
        if (done != (ssize_t)(length * PAGE)) die("%zd bytes were written", done);
        for (size_t k = 0; k < length; k++)
            check_page(shared + (to + k) * PAGE, key_of(given.seed, to + k, version[to + k]),
                       "just written");
    } while (now() - began < given.seconds);
    for (size_t page = 0; page < given.pages; page++)
        check_page(shared + page * PAGE, key_of(given.seed, page, version[page]), "at the end");
}

static int ends[2];

static int thread(void *nothing) {
    char byte;
    (void)nothing;
    if (read(ends[0], &byte, 1) != 1) return 1;
    syscall(SYS_exit, 0);
    return 0;
}

static void words_at_end(void) {
    const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
                      CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    const size_t stack_bytes = 64 << 10;
    unsigned char *words = share(8 << 20);
    memset(words, 1, 8 << 20);
    MUST(pipe(ends) == 0);
    for (size_t round = 0; round < 5; round++) {
        volatile int *word = (volatile int *)(words + (round << 20) + 7 * PAGE);
        unsigned char *stack = malloc(stack_bytes);
        MUST(stack != NULL);
        *word = 12345;
        MUST(clone(thread, stack + stack_bytes, flags, NULL, NULL, NULL, (void *)word) > 0);
        for (int pass = 0; pass < 2; pass++)
            for (size_t page = 0; page < given.pages; page++)
                fill_page(shared + page * PAGE, key_of(given.seed, page, round));
        MUST(write(ends[1], "x", 1) == 1);
        for (int turn = 0; *word != 0; turn++) {
            if (turn == 500) die("the word of round %zu was not cleared", round);
            usleep(10000);
        }
    }
}

int main(int count, char **words) {
    given = parse(count, words, "writev");
    shared = share(given.pages * PAGE);
    if (strcmp(given.mode, "writev") == 0)
        writes();
    else
        words_at_end();
    return ok("pastwrites", given.mode);
}
