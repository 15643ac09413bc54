/* A thread with a cancellation pending calls functions that are no points of cancellation: they
 * come to their end, whatever swaptide does on the way.
 *
 *     cancelled MB SECONDS SEED MODE        MODE: fork, mmap, mremap */
#include "common.h"

#include <sys/wait.h>

static struct arguments given;
static unsigned char *arena;
static atomic_int is_ready, is_cancelled, has_returned;

static void move(unsigned char *from, unsigned char *to, size_t bytes) {
    MUST(mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
}

static void *thread(void *unused) {
    (void)unused;
    size_t bytes = given.pages / 4 * PAGE;
    atomic_store(&is_ready, 1);
    while (!atomic_load(&is_cancelled)) sched_yield();
    if (strcmp(given.mode, "fork") == 0) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        atomic_store(&has_returned, child > 0);
    } else if (strcmp(given.mode, "mmap") == 0) {
        /* One that counts as memory that is about to be filled. */
        void *at = mmap(NULL, 200ul << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                        0);
        atomic_store(&has_returned, at != MAP_FAILED);
    } else {
        unsigned char *to = map(bytes);
        move(arena, to, bytes);
        move(to, arena, bytes);
        atomic_store(&has_returned, 1);
    }
    return NULL;
}

int main(int count, char **words) {
    given = parse(count, words, "fork");
    pthread_t id;
    /* A large mapping is announced as long as nothing is managed: it must be the first one. */
    int before = strcmp(given.mode, "mmap") == 0;
    for (int turn = 0; turn < 2; turn++) {
        if (turn == before) {
            arena = map(given.pages * PAGE);
            for (size_t page = 0; page < given.pages; page++)
                fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
            usleep(300000);
        }
        if (turn == 1) break;
        MUST(pthread_create(&id, NULL, thread, NULL) == 0);
        while (!atomic_load(&is_ready)) sched_yield();
        MUST(pthread_cancel(id) == 0);
        atomic_store(&is_cancelled, 1);
        MUST(pthread_join(id, NULL) == 0);
    }
    if (!has_returned) die("%s did not return", given.mode);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) _exit(0);
    MUST(waitpid(child, NULL, 0) == child);
    return ok("cancelled", given.mode);
}
