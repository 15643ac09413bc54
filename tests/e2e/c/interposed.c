/* A program with functions of its own under names of libc's, as wrappers of sockets, profilers and
 * sanitizers have them. Each counts in a table by address, which is memory that may be out. So none
 * may run on a thread that is not the program's: that thread would wait for itself.
 *
 *     interposed MB SECONDS SEED [MODE]     MODE: functions */
#include "common.h"

#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define TABLE (32ul << 20)
/* Their loops must not become calls of themselves. */
#define PLAIN __attribute__((optimize("no-tree-loop-distribute-patterns"), noinline))

static volatile unsigned char *table;
static pid_t own_thread;
static atomic_int elsewhere;

/* In a forked child, which counts nothing, the table is not there. */
static void note(uintptr_t at) {
    if (!table) return;
    if (syscall(SYS_gettid) != own_thread) atomic_fetch_add(&elsewhere, 1);
    for (size_t i = 0; i < 16; i++) table[(mix(at + i) & (TABLE - 1))]++;
}

PLAIN void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
    note((uintptr_t)to);
    for (size_t i = 0; i < bytes; i++) ((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
    return to;
}

PLAIN void *memmove(void *to, const void *from, size_t bytes) {
    unsigned char *target = to;
    const unsigned char *source = from;
    note((uintptr_t)to);
    if (target < source)
        for (size_t i = 0; i < bytes; i++) target[i] = source[i];
    else
        while (bytes-- > 0) target[bytes] = source[bytes];
    return to;
}

PLAIN void *memset(void *to, int byte, size_t bytes) {
    note((uintptr_t)to);
    for (size_t i = 0; i < bytes; i++) ((unsigned char *)to)[i] = (unsigned char)byte;
    return to;
}

PLAIN int memcmp(const void *one, const void *other, size_t bytes) {
    const unsigned char *a = one, *b = other;
    note((uintptr_t)one);
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i]) return a[i] - b[i];
    return 0;
}

PLAIN int bcmp(const void *one, const void *other, size_t bytes) {
    return memcmp(one, other, bytes);
}

PLAIN size_t strlen(const char *text) {
    size_t bytes = 0;
    note((uintptr_t)text);
    while (text[bytes]) bytes++;
    return bytes;
}

int close(int fd) {
    note((uintptr_t)fd);
    return (int)syscall(SYS_close, fd);
}

ssize_t read(int fd, void *to, size_t bytes) {
    note((uintptr_t)fd);
    return syscall(SYS_read, fd, to, bytes);
}

ssize_t write(int fd, const void *from, size_t bytes) {
    note((uintptr_t)fd);
    return syscall(SYS_write, fd, from, bytes);
}

ssize_t writev(int fd, const struct iovec *vectors, int count) {
    note((uintptr_t)fd);
    return syscall(SYS_writev, fd, vectors, count);
}

int munmap(void *at, size_t bytes) {
    note((uintptr_t)at);
    return (int)syscall(SYS_munmap, at, bytes);
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, "functions");
    own_thread = (pid_t)syscall(SYS_gettid);
    unsigned char *arena = map(given.pages * PAGE);
    table = map(TABLE);
    for (size_t i = 0; i < TABLE; i += PAGE) table[i] = 1;
    for (int round = 0; round < 3; round++) {
        for (size_t page = 0; page < given.pages; page++) {
            if (round > 0) check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
            fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
        }
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            own_thread = (pid_t)syscall(SYS_gettid);
            for (size_t page = 0; page < given.pages; page++)
                check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page of a child");
            _exit(elsewhere != 0);
        }
        int status;
        MUST(waitpid(child, &status, 0) == child);
        if (status != 0) die("a child ended with status %x", status);
    }
    if (elsewhere) die("%d calls on a thread that is not the program's", elsewhere);
    return ok("interposed", given.mode);
}
