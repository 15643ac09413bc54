/* What musl's allocator needs of musl's libc, so that it can be a library for programs of glibc.
 * Linked with the allocator's own objects from musl's archive. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* Without an entry for random bytes the allocator takes an address for its secret. */
static size_t auxiliary[2];

/* The beginning of musl's state: its allocator reads whether to lock, and the auxiliary vector. */
HIDDEN struct {
    char can_do_threads, threaded, secure;
    volatile signed char need_locks;
    int threads_minus_1;
    size_t *auxv;
    size_t rest[32];
} __libc = {1, 1, 0, 1, 1, auxiliary, {0}};

HIDDEN void *__mmap(void *at, size_t bytes, int protection, int flags, int file, off_t offset) {
    return mmap(at, bytes, protection, flags, file, offset);
}

HIDDEN void *__mremap(void *at, size_t bytes, size_t new_bytes, int flags) {
    return mremap(at, bytes, new_bytes, flags);
}

HIDDEN int __madvise(void *at, size_t bytes, int advice) {
    return madvise(at, bytes, advice);
}

HIDDEN int *___errno_location(void) {
    return &errno;
}

/* musl's fork holds the allocator's lock from the last handler to the first. */
HIDDEN void __malloc_atfork(int who);

static void before(void) {
    __malloc_atfork(-1);
}

static void in_parent(void) {
    __malloc_atfork(0);
}

static void in_child(void) {
    __malloc_atfork(1);
}

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(before, in_parent, in_child);
}
