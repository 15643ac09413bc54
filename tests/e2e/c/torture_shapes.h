/* Actions of the torture program that change memory without a word to a userfaultfd: guard pages,
 * lazy freeing with writes at once, locks, System V segments over an area. Each leaves the area as
 * the model says. Included by torture.c, whose functions it uses. */
#ifndef SWAPTIDE_TORTURE_SHAPES_H
#define SWAPTIDE_TORTURE_SHAPES_H

#include <setjmp.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/syscall.h>

enum { GUARD_INSTALL = 102, GUARD_REMOVE = 103 };

static _Thread_local sigjmp_buf guard_back;
static _Thread_local volatile int guard_expected;

static void on_guard(int number) {
    if (!guard_expected) {
        signal(number, SIG_DFL);
        return;
    }
    siglongjmp(guard_back, 1);
}

/* A touch of a guard must be a SIGSEGV. */
static int guard_holds(volatile unsigned char *at) {
    guard_expected = 1;
    int held = sigsetjmp(guard_back, 1);
    if (!held) *at = 1;
    guard_expected = 0;
    return held;
}

/* madvise through libc, or as an instruction of its own. */
static int shape_advise(struct thread *self, void *at, size_t len, int advice) {
    if (below(&self->random, 2)) return madvise(at, len, advice);
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_madvise), "D"(at), "S"(len), "d"(advice)
                     : "rcx", "r11", "memory");
    return result == 0 ? 0 : -1;
}

/* Guards for a while, with what is around them touched. What was there is gone. */
static void guard(struct thread *self, struct area *area) {
    static _Atomic int is_ready;
    if (!atomic_exchange(&is_ready, 1)) {
        struct sigaction action = {.sa_handler = on_guard, .sa_flags = SA_NODEFER};
        MUST(sigaction(SIGSEGV, &action, NULL) == 0);
    }
    size_t from, count = some_run(self, area, &from, 24);
    unsigned char *at = at_page(area, from);
    /* Taken away past libc, contents that were out could be the old ones: so they are in memory
     * before, or it is through libc. */
    if (madvise(at, count * PAGE, GUARD_INSTALL) != 0) return;
    note(self, area, "guards", from, count);
    emptied(area, from, count);
    MUST(shape_advise(self, at, count * PAGE, GUARD_INSTALL) == 0);
    size_t first = from < 20 ? 0 : from - 20,
           last = from + count + 20 < area->pages ? from + count + 20 : area->pages;
    for (size_t page = first; page < last; page++) {
        if (page >= from && page < from + count) continue;
        if (below(&self->random, 3) == 0)
            write_page(self, area, page);
        else
            verify_page(self, area, page, "page next to a guard");
    }
    if (below(&self->random, 4) == 0)
        (void)madvise(at_page(area, first), (last - first) * PAGE, MADV_WILLNEED);
    for (size_t page = 0; page < count; page++)
        if (!guard_holds(at + page * PAGE))
            die("the guard at %p, page %zu, is gone", (void *)(at + page * PAGE), from + page);
    MUST(shape_advise(self, at, count * PAGE, GUARD_REMOVE) == 0);
    verify(self, area, from, count, "page that was a guard");
}

/* Given up lazily and written at once, as an allocator does. */
static void free_and_write(struct thread *self, struct area *area) {
    size_t from, count = some_run(self, area, &from, 0);
    note(self, area, "MADV_FREE and written", from, count);
    MUST(shape_advise(self, at_page(area, from), count * PAGE, MADV_FREE) == 0);
    for (size_t page = from; page < from + count; page++) write_page(self, area, page);
    verify(self, area, from, count, "page that was freed lazily and written");
}

/* Locked for a while. */
static void lock(struct thread *self, struct area *area) {
    size_t from, count = some_run(self, area, &from, 64);
    unsigned char *at = at_page(area, from);
    if (syscall(SYS_mlock2, at, count * PAGE, below(&self->random, 2)) != 0) return;
    note(self, area, "locked", from, count);
    verify(self, area, from, count, "page of locked memory");
    for (size_t page = from; page < from + count; page += 3) write_page(self, area, page);
    MUST(munlock(at, count * PAGE) == 0);
}

/* A segment over a part, and private memory in its place again. */
static void segment(struct thread *self, struct area *area) {
    size_t from, count = some_run(self, area, &from, 128);
    unsigned char *at = at_page(area, from);
    int id = shmget(IPC_PRIVATE, count * PAGE, IPC_CREAT | 0600);
    if (id < 0) return;
    /* The bare instruction sends no event. What the table knows of the mapping under it stays until
     * something of that is chosen to go out, and comes back where the area grows meanwhile
     * (docs/semantics.md). */
    long where = (long)shmat(id, at, SHM_REMAP);
    MUST(shmctl(id, IPC_RMID, NULL) == 0);
    MUST(where == (long)at);
    note(self, area, "shmat", from, count);
    for (size_t page = 0; page < count; page++)
        fill_page(at + page * PAGE, key_of(self->seed, page, 77));
    for (size_t page = 0; page < count; page++)
        check_page(at + page * PAGE, key_of(self->seed, page, 77), "page of a segment");
    MUST(mmap(at, count * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at);
    emptied(area, from, count);
    for (size_t page = from; page < from + count; page += 2) write_page(self, area, page);
    verify(self, area, from, count, "page where a segment was");
}

static void change_shape(struct thread *self, struct area *area) {
    switch (below(&self->random, 4)) {
    case 0: guard(self, area); break;
    case 1: free_and_write(self, area); break;
    case 2: lock(self, area); break;
    default: segment(self, area);
    }
}
#endif
