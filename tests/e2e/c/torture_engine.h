/* The torture program as a part of another program, to which an engine is linked: without main, and
 * with the calls that an engine has to be told of made by that program
 * (crates/swaptide-engine/tests/torture). Included by torture.c before anything else. */
#ifndef SWAPTIDE_TORTURE_ENGINE_H
#define SWAPTIDE_TORTURE_ENGINE_H

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* Each answers as the system call does: an address or zero, or an error number below zero. */
struct torture_calls {
    long (*map)(size_t at, size_t bytes, int flags);
    long (*unmap)(size_t at, size_t bytes);
    long (*remap)(size_t at, size_t bytes, size_t now, int flags, size_t to);
    long (*advise)(size_t at, size_t bytes, int advice);
    long (*protect)(size_t at, size_t bytes, int protection);
    long (*fork)(int quiet);
    /* Waits for the end of a child, and gives its status. */
    long (*wait)(int pid);
    __attribute__((noreturn)) void (*exit)(int status);
    int always_quiet;
};

static struct torture_calls calls;

static inline long answer(long result) {
    if (result >= 0) return result;
    errno = (int)-result;
    return -1;
}

static inline void *engine_mremap(void *at, size_t bytes, size_t now, int flags, void *to) {
    return (void *)answer(calls.remap((size_t)at, bytes, now, flags, (size_t)to));
}

static inline pid_t engine_wait(pid_t pid, int *status) {
    *status = (int)calls.wait(pid);
    return pid;
}

#define mmap(at, bytes, protection, flags, file, offset)                                           \
    ((void *)answer(calls.map((size_t)(at), bytes, flags)))
#define munmap(at, bytes) answer(calls.unmap((size_t)(at), bytes))
#define mremap(at, bytes, now, flags, ...)                                                         \
    engine_mremap(at, bytes, now, flags, ENGINE_TARGET(__VA_ARGS__))
#define ENGINE_TARGET(...) ENGINE_FIRST(__VA_ARGS__ __VA_OPT__(, ) NULL)
#define ENGINE_FIRST(first, ...) first
#define madvise(at, bytes, advice) answer(calls.advise((size_t)(at), bytes, advice))
#define mprotect(at, bytes, protection) answer(calls.protect((size_t)(at), bytes, protection))
#define fork() ((pid_t)answer(calls.fork(quiet)))
#define waitpid(pid, status, options) engine_wait(pid, status)
#define _exit(status) calls.exit(status)
#define ALWAYS_QUIET calls.always_quiet
/* Under a sanitizer there are few steps. */
#define FORKS 15

#endif
