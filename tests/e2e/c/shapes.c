/* Calls that change what memory is without a word to a userfaultfd. MODE says which. A mode that
 * ends in -bare makes the call as an instruction of its own, past libc and any hook in front
 * of it; one that ends in -syscall through libc's syscall(). */
#include "common.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

enum { GUARD_INSTALL = 102, GUARD_REMOVE = 103, LEN = 4 << 20 };
#define PAGES (LEN / PAGE)

static enum { LIBC, SYSCALL, BARE, PROCESS } way;
static struct arguments given;
static unsigned char *ballast;
static int managed;

static long bare(long number, long a, long b, long c, long d, long e) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

/* A call in the way that the mode names, where libc has no function of its own to call. */
static long call(long number, long a, long b, long c) {
    return way == BARE ? bare(number, a, b, c, 0, 0) : syscall(number, a, b, c, 0, 0);
}

static int advise(void *at, size_t len, int advice) {
    if (way == PROCESS) {
        struct iovec range = {at, len};
        int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
        MUST(self >= 0);
        ssize_t done = process_madvise(self, &range, 1, advice, 0);
        int why = errno;
        close(self);
        errno = why;
        return done == (ssize_t)len ? 0 : -1;
    }
    return way == LIBC ? madvise(at, len, advice)
                       : (int)call(SYS_madvise, (long)at, (long)len, advice);
}

/* The kernel's word for a page: is something there? */
static int is_there(const void *at) {
    static int fd = -1;
    uint64_t word = 0;
    if (fd < 0) MUST((fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) >= 0);
    MUST(pread(fd, &word, 8, (off_t)((uintptr_t)at / PAGE * 8)) == 8);
    return (word >> 62 & 3) != 0;
}

static size_t there(const unsigned char *at, size_t pages) {
    size_t count = 0;
    for (size_t page = 0; page < pages; page++) count += (size_t)is_there(at + page * PAGE);
    return count;
}

/* Does the mapping carry a userfaultfd? */
static int is_armed(const void *at) {
    char line[512];
    unsigned long start, end;
    int in = 0, armed = 0;
    FILE *file = fopen("/proc/self/smaps", "r");
    MUST(file != NULL);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
            in = start <= (uintptr_t)at && (uintptr_t)at < end;
        if (in && strncmp(line, "VmFlags:", 8) == 0 && strstr(line, " um")) armed = 1;
    }
    fclose(file);
    return armed;
}

static void wait_until_armed(const void *at) {
    for (int i = 0; managed && i < 300 && !is_armed(at); i++) usleep(10000);
    if (managed) MUST(is_armed(at));
}

static void fill(unsigned char *at, size_t pages, uint64_t version) {
    for (size_t page = 0; page < pages; page++)
        fill_page(at + page * PAGE, key_of(given.seed, page, version));
}

static void check(const unsigned char *at, size_t from, size_t pages, uint64_t version,
                  const char *what) {
    for (size_t page = from; page < from + pages; page++)
        check_page(at + page * PAGE, key_of(given.seed, page, version), what);
}

static void check_zero(const unsigned char *at, size_t from, size_t pages, const char *what) {
    for (size_t page = from; page < from + pages; page++) check_page(at + page * PAGE, 0, what);
}

/* Past the budget, so that this process is managed. */
static void engage(void) {
    size_t pages = given.megabytes << 8;
    ballast = map(pages * PAGE);
    fill(ballast, pages, 7);
    for (int i = 0; i < 100 && !managed; i++) {
        managed = is_armed(ballast);
        if (!managed) usleep(10000);
    }
    if (getenv("SWAPTIDE_SOCKET") || getenv("LD_PRELOAD")) MUST(managed);
}

/* Has a range taken out, where there is an engine. Gives the pages that stay. */
static size_t out(unsigned char *at, size_t pages) {
    size_t stay = pages;
    for (int i = 0; managed && i < 60 && stay > 0; i++) {
        madvise(at, pages * PAGE, MADV_PAGEOUT);
        stay = there(at, pages);
        if (stay) usleep(5000);
    }
    return managed ? stay : 0;
}

/* Filled, and all of it out. */
static unsigned char *area(uint64_t version) {
    unsigned char *at = map(LEN);
    fill(at, PAGES, version);
    wait_until_armed(at);
    MUST(out(at, PAGES) == 0);
    return at;
}

static sigjmp_buf back;

static void on_fault(int number) {
    (void)number;
    siglongjmp(back, 1);
}

/* Does a touch end with a signal? */
static int faults(volatile unsigned char *at, int number) {
    struct sigaction action = {.sa_handler = on_fault}, old;
    MUST(sigaction(number, &action, &old) == 0);
    int faulted = sigsetjmp(back, 1);
    if (!faulted) *at = 1;
    MUST(sigaction(number, &old, NULL) == 0);
    return faulted;
}

/* Asked past libc: from a guard through libc on, all guards are looked for. */
static int has_guards(void) {
    unsigned char *at = map(PAGE);
    int has = bare(SYS_madvise, (long)at, PAGE, GUARD_INSTALL, 0, 0) == 0;
    munmap(at, PAGE);
    return has;
}

/* What a guard discards is gone. Installed and taken away past libc, nothing tells: the contents
 * may be those from before, and no others. */
static void guard_zero(void) {
    unsigned char *at = area(3);
    MUST(advise(at, 8 * PAGE, GUARD_INSTALL) == 0 &&
         advise(at + 32 * PAGE, PAGE, GUARD_INSTALL) == 0);
    MUST(advise(at, 8 * PAGE, GUARD_REMOVE) == 0 &&
         advise(at + 32 * PAGE, PAGE, GUARD_REMOVE) == 0);
    for (size_t page = 0; page < 8; page++) {
        uint64_t key = key_of(given.seed, page, 3);
        int is_old = way == BARE && *(volatile uint64_t *)(at + page * PAGE + 8) == word_of(key, 1);
        check_page(at + page * PAGE, is_old ? key : 0, "page behind a guard that was taken away");
    }
    if (way != BARE) check_zero(at, 32, 1, "page behind another guard that was taken away");
    check(at, 8, 24, 3, "page next to guards");
    check(at, 33, PAGES - 33, 3, "page behind guards");
    /* What is written there is kept like any other. */
    fill(at, 8, 4);
    out(at, PAGES);
    check(at, 0, 8, 4, "page that was a guard");
    /* A guard over pages that are there: a move out meets it. */
    MUST(advise(at, 8 * PAGE, GUARD_INSTALL) == 0);
    out(at, PAGES);
    for (size_t page = 0; page < 8; page++) MUST(faults(at + page * PAGE, SIGSEGV));
    MUST(advise(at, 8 * PAGE, GUARD_REMOVE) == 0);
    if (way == BARE) return;
    check_zero(at, 0, 8, "page behind a guard over pages that were there");
    /* A call that fails part way has put guards over what lies before, and discarded that. */
    for (int locked = 0; locked < 2; locked++) {
        unsigned char *part = area(5 + locked), *amid = part + LEN / 2;
        MUST((locked ? mlock(amid, PAGE) : munmap(amid, PAGE)) == 0);
        MUST(advise(part, LEN, GUARD_INSTALL) != 0);
        MUST(advise(part, LEN / 2, GUARD_REMOVE) == 0);
        check_zero(part, 0, PAGES / 2, "page behind a guard of a call that failed");
        if (locked) check(part, PAGES / 2, PAGES / 2, 5 + locked, "page behind a locked one");
    }
}

/* A guard among pages that are out: what is read around it comes in, and the guard stays. */
static void guard_walk(void) {
    unsigned char *at = area(3);
    for (size_t page = 8; page < PAGES; page += 61)
        MUST(advise(at + page * PAGE, PAGE, GUARD_INSTALL) == 0);
    for (int round = 0; round < 3; round++) {
        for (size_t page = 0; page < PAGES; page++) {
            if (page >= 8 && (page - 8) % 61 == 0) continue;
            check(at, page, 1, 3, "page next to a guard");
        }
        if (round == 1) madvise(at, LEN, MADV_WILLNEED);
        for (size_t page = 8; page < PAGES; page += 61)
            if (!faults(at + page * PAGE, SIGSEGV))
                die("guard %zu is gone in round %d", page, round);
        out(at, PAGES);
    }
    for (size_t page = 8; page < PAGES; page += 61) {
        MUST(advise(at + page * PAGE, PAGE, GUARD_REMOVE) == 0);
        check_zero(at, page, 1, "page that was a guard");
    }
}

/* Memory is read in the same order without locality again and again, with a guard over that page
 * of each `apart` that is out and comes first in it: what the order foretells comes in before a
 * thread waits for it.
 * `may_go`: a guard may have been filled over, with what its page held and nothing else. */
static void guard_foretold(size_t apart, int may_go) {
    size_t pages = given.megabytes << 8, guards = 0, gone = 0;
    size_t *order = malloc(pages * sizeof *order);
    char *is_guard = calloc(pages, 1), *has_one = calloc(pages / apart + 1, 1);
    uint64_t state = given.seed * 2 + 1;
    for (size_t i = 0; i < pages; i++) order[i] = i;
    for (size_t i = pages - 1; i > 0; i--) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        size_t other = (size_t)(state >> 33) % (i + 1), page = order[i];
        order[i] = order[other];
        order[other] = page;
    }
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < pages; i++) check(ballast, order[i], 1, 7, "page of the order");
    for (size_t i = 16; i < pages; i++) {
        size_t page = order[i];
        if (has_one[page / apart] || is_there(ballast + page * PAGE)) continue;
        MUST(advise(ballast + page * PAGE, PAGE, GUARD_INSTALL) == 0);
        has_one[page / apart] = is_guard[page] = 1;
        guards++;
    }
    if (managed) MUST(guards > 0);
    for (size_t i = 0; i < pages; i++)
        if (!is_guard[order[i]]) check(ballast, order[i], 1, 7, "page of the order, with guards");
    for (size_t page = 0; page < pages; page++) {
        if (!is_guard[page] || faults(ballast + page * PAGE, SIGSEGV)) continue;
        gone++;
        ballast[page * PAGE] = (unsigned char)word_of(key_of(given.seed, page, 7), 0);
        check(ballast, page, 1, 7, "page that came over a guard");
    }
    if (gone > 0 && !may_go) die("%zu of %zu guards are gone", gone, guards);
    free(order);
    free(is_guard);
    free(has_one);
}

/* One in every 2 MiB: the first look meets one, and every page is looked at from then on. */
static void guard_each(void) { guard_foretold(512, 0); }

/* The first guard of the process, and its only one. */
static void guard_one(void) { guard_foretold((size_t)given.megabytes << 8, 1); }

/* The same behind one that was there before management began. */
static void guard_early(void) { guard_foretold((size_t)given.megabytes << 8, 0); }

/* Fresh memory that is written up to a guard, from each distance. */
static void guard_grow(void) {
    unsigned char *at = map(LEN);
    wait_until_armed(at);
    for (size_t page = 0; page + 16 < PAGES; page += 16) {
        MUST(advise(at + (page + 5) * PAGE, PAGE, GUARD_INSTALL) == 0);
        at[(page + 3) * PAGE] = 1;
        at[(page + 4) * PAGE] = 1;
        if (!faults(at + (page + 5) * PAGE, SIGSEGV)) die("a guard behind two pages is gone");
    }
    MUST(munmap(at, LEN) == 0);
    at = map(LEN);
    wait_until_armed(at);
    for (size_t page = 0, before = 1; page + 32 < PAGES; page += 32, before = before % 12 + 1) {
        unsigned char *guard = at + (page + before) * PAGE;
        MUST(advise(guard, PAGE, GUARD_INSTALL) == 0);
        for (size_t i = 0; i < before; i++)
            fill_page(at + (page + i) * PAGE, key_of(given.seed, page + i, 5));
        if (!faults(guard, SIGSEGV)) die("a guard behind %zu pages is gone", before);
        for (size_t i = before + 1; i < 20; i++)
            fill_page(at + (page + i) * PAGE, key_of(given.seed, page + i, 5));
        if (!faults(guard, SIGSEGV)) die("a guard behind %zu pages is gone, later", before);
        for (size_t i = 0; i < 20; i++)
            if (i != before) check(at, page + i, 1, 5, "page near a guard");
    }
}

/* A segment of System V shared memory over managed memory, and private memory in its place
 * afterwards. */
static void *attach(int id, void *at, int flags) {
    if (way == LIBC) return shmat(id, at, flags);
    return (void *)call(SYS_shmat, id, (long)at, flags);
}

static void shm(void) {
    for (int round = 0; round < 4; round++) {
        unsigned char *at = map(LEN);
        fill(at, PAGES, 5);
        wait_until_armed(at);
        if (round & 1) MUST(out(at, PAGES) == 0);
        size_t from = round < 2 ? 0 : 16, pages = round < 2 ? PAGES : 512;
        int id = shmget(IPC_PRIVATE, pages * PAGE - 100, IPC_CREAT | 0600);
        MUST(id >= 0);
        /* Refused, it changes nothing. */
        MUST(attach(id + 1000000, at, SHM_REMAP) == (void *)-1);
        MUST(attach(id, at + 1, SHM_REMAP) == (void *)-1 && errno == EINVAL);
        check(at, PAGES - 8, 8, 5, "page of a mapping that no segment was put over");
        unsigned char *part = at + from * PAGE;
        MUST(attach(id, part + (round == 3 ? 100 : 0),
                    round == 3 ? SHM_REMAP | SHM_RND : SHM_REMAP) == part);
        struct shmid_ds about;
        MUST(shmctl(id, IPC_STAT, &about) == 0 && about.shm_nattch == 1);
        MUST(shmctl(id, IPC_RMID, NULL) == 0);
        check_zero(part, 0, 4, "page of the segment");
        fill(part, pages - 1, 8);
        check(at, 0, from, 5, "page before the segment");
        check(at, from + pages, PAGES - from - pages, 5, "page behind the segment");
        check(part, 0, pages - 1, 8, "page of the segment");
        MUST(shmdt(part) == 0);
        unsigned char *again = mmap(part, pages * PAGE, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        MUST(again == part);
        check_zero(again, 0, pages, "page of a new mapping");
        fill(again, pages, 6);
        for (int i = 0; i < 3; i++) {
            madvise(again, pages * PAGE, MADV_PAGEOUT);
            check(ballast, 0, given.megabytes << 7, 7, "page of the ballast");
            check(again, 0, pages, 6, "page of a new mapping where a segment was");
        }
        check(at, 0, from, 5, "page before the segment, later");
        check(at, from + pages, PAGES - from - pages, 5, "page behind the segment, later");
        /* It is managed like any other in the end. */
        MUST(munmap(at, LEN) == 0);
    }
}

/* Freed lazily, and used again: it goes out like any other memory. Past libc it stays. */
static void lazy(void) {
    const uint64_t ROUNDS = way == BARE ? 3 : 16;
    unsigned char *arena[16];
    for (uint64_t round = 0; round < ROUNDS; round++) {
        arena[round] = map(LEN);
        fill(arena[round], PAGES, round);
        MUST(advise(arena[round], LEN, MADV_FREE) == 0);
        /* The old content or zeros, and no other. */
        for (size_t page = 0; page < PAGES; page += 37) {
            uint64_t key = key_of(given.seed, page, round),
                     found = *(volatile uint64_t *)(arena[round] + page * PAGE + 8);
            check_page(arena[round] + page * PAGE, found == word_of(key, 1) ? key : 0,
                       "page that was freed lazily");
        }
        fill(arena[round], PAGES, round + 100);
    }
    for (int i = 0; i < 2; i++) check(ballast, 0, given.megabytes << 6, 7, "page of the ballast");
    size_t stay = 0;
    for (uint64_t round = 0; round < ROUNDS - 2; round++) stay += out(arena[round], PAGES);
    if (way == BARE) {
        if (managed && stay < PAGES / 2) die("only %zu pages stay", stay);
    } else if (stay > PAGES / 8)
        die("%zu pages that were freed lazily and used again never go out", stay);
    for (uint64_t round = 0; round < ROUNDS; round++)
        check(arena[round], 0, PAGES, round + 100, "page that was freed lazily and used again");
}

/* Locked past libc, memory goes out nevertheless, and what is out is found again. */
static void lockall_bare(void) {
    unsigned char *at = area(9);
    /* Not filled at once, or swaptide's own reservations were as well. */
    MUST(call(SYS_mlockall, MCL_CURRENT | MCL_FUTURE | 4 /* ONFAULT */, 0, 0) == 0);
    check(at, 0, PAGES, 9, "page of memory that was locked while it was out");
    MUST(there(at, PAGES) == PAGES);
    size_t stay = PAGES;
    for (int i = 0; managed && i < 10 && stay == PAGES; i++) {
        check(ballast, 0, given.megabytes << 8, 7, "page of the ballast, locked past libc");
        stay = there(at, PAGES);
    }
    if (managed && stay == PAGES) die("all of it stays");
    check(at, 0, PAGES, 9, "page of memory that was locked past libc");
    MUST(munlockall() == 0);
}

/* All memory locked: it stays, and so do its contents. */
static void lockall(void) {
    if (way == BARE) return lockall_bare();
    unsigned char *at = area(9);
    MUST((way == LIBC ? mlockall(MCL_CURRENT | MCL_FUTURE)
                      : (int)call(SYS_mlockall, MCL_CURRENT | MCL_FUTURE, 0, 0)) == 0);
    check(at, 0, PAGES, 9, "page of memory that was locked while it was out");
    /* What comes in now is locked, too: nothing may go out for it. */
    check(ballast, 0, 12 << 8, 7, "page of the ballast, which is locked");
    MUST(there(at, PAGES) == PAGES);
    unsigned char *later = map(LEN);
    fill(later, PAGES, 10);
    check(ballast, 12 << 8, 4 << 8, 7, "page of the ballast, which is locked");
    MUST(there(at, PAGES) == PAGES && there(later, PAGES) == PAGES);
    check(at, 0, PAGES, 9, "page of locked memory");
    check(later, 0, PAGES, 10, "page of memory that was mapped locked");
    MUST(munlockall() == 0);
    MUST(out(at, PAGES) == 0);
    check(at, 0, PAGES, 9, "page that was locked");
}

/* Locked before anything is managed. */
static void lockall_first(void) {
    MUST(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    unsigned char *at = map(LEN);
    fill(at, PAGES, 9);
    engage();
    out(at, PAGES);
    size_t stay = there(at, PAGES);
    if (stay < PAGES) die("%zu pages of locked memory went out", PAGES - stay);
    check(at, 0, PAGES, 9, "page of locked memory");
}

/* Single ranges that are locked, by each call. */
static void locked(void) {
    unsigned char *at = area(9);
    MUST(syscall(SYS_mlock2, at, 16 * PAGE, 1 /* ONFAULT */) == 0);
    MUST(syscall(SYS_mlock, at + 32 * PAGE, 16 * PAGE) == 0);
    MUST(mlock(at + 64 * PAGE, 16 * PAGE) == 0);
    check(at, 0, PAGES, 9, "page of a locked range");
    out(at, PAGES);
    for (size_t first = 0; first <= 64; first += 32) MUST(there(at + first * PAGE, 16) == 16);
    check(at, 0, PAGES, 9, "page of a locked range, later");
}

/* Memory that a child finds empty, named so again and again and in many places: everything else
 * goes out as before. */
static void wipe(void) {
    unsigned char *state = map(PAGE * 2), *many = map(1200 * PAGE);
    for (int i = 0; i < 3000; i++) MUST(advise(state, PAGE, MADV_WIPEONFORK) == 0);
    for (size_t page = 0; page < 1200; page += 3) {
        MUST(advise(many + page * PAGE, PAGE, MADV_WIPEONFORK) == 0);
        many[page * PAGE] = 1;
    }
    state[0] = 1;
    unsigned char *at = area(9);
    check(at, 0, PAGES, 9, "page next to memory that children find empty");
    /* What was out before is brought in, and is the child's as zeros. */
    unsigned char *secret = area(11);
    MUST(advise(secret, 64 * PAGE, MADV_WIPEONFORK) == 0);
    if (way != BARE) check(secret, 0, 64, 11, "page that a child finds empty");
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0 && way == BARE) {
        /* What was out is found: its parent's contents or zeros, and no others. */
        size_t found = 0;
        for (size_t page = 0; page < 64; page++) {
            uint64_t key = key_of(given.seed, page, 11);
            int is_old = *(volatile uint64_t *)(secret + page * PAGE + 8) == word_of(key, 1);
            check_page(secret + page * PAGE, is_old ? key : 0, "page of the parent's, in a child");
            found += is_old && word_of(key, 1) != 0;
        }
        if (!managed != !found) die("%zu pages of the parent's in a child", found);
        check(secret, 64, PAGES - 64, 11, "page in a child");
        _exit(0);
    }
    if (child == 0) {
        check_zero(secret, 0, 64, "page in a child that is to find zeros");
        check(secret, 64, PAGES - 64, 11, "page in a child");
        MUST(state[0] == 0 && many[3 * PAGE] == 0);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    check(secret, 0, PAGES, 11, "page after the fork");
}

/* mremap in the way that the mode names. */
static unsigned char *move(unsigned char *at, size_t len, size_t new_len, int flags, void *to) {
    void *moved;
    if (way == LIBC)
        moved = mremap(at, len, new_len, flags, to);
    else if (way == BARE)
        moved = (void *)bare(SYS_mremap, (long)at, (long)len, (long)new_len, flags, (long)to);
    else
        moved = (void *)syscall(SYS_mremap, at, len, new_len, flags, to);
    MUST(moved != MAP_FAILED);
    return moved;
}

static void *idle(void *x) {
    for (;;) pause();
    return x;
}

/* A child finds nothing of a range; what it writes there is not its own child's either. */
static void no_child_has(unsigned char *at, size_t pages, int absent, const char *what) {
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        if (absent) {
            /* What else was mapped there since is not the parent's. */
            unsigned char seen[1];
            if (mincore(at + PAGE, PAGE, seen) == 0 &&
                (is_armed(at + PAGE) ||
                 *(uint64_t *)(at + PAGE + 8) == word_of(key_of(given.seed, 1, 20), 1)))
                _exit(4);
            _exit(0);
        }
        check_zero(at, 0, pages, what);
        fill(at, pages, 21);
        /* Time for the child's engine to look. */
        for (int i = 0; i < 40; i++) {
            ballast[i * PAGE] += 0;
            usleep(5000);
        }
        pid_t grandchild = fork();
        MUST(grandchild >= 0);
        if (grandchild == 0) {
            check_zero(at, 0, pages, what);
            _exit(0);
        }
        int status;
        MUST(waitpid(grandchild, &status, 0) == grandchild);
        if (status != 0) die("%s: in a child of a child", what);
        check(at, 0, pages, 21, what);
        _exit(0);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status != 0) die("%s: status %x", what, status);
}

/* Memory that a child is not to have is moved, and grown in place and by moving it; and a look for
 * new memory comes in between. No child has anything of it afterwards. Nor does a later one, when
 * the memory at the old place is another's. */
static void moves_apart(int advice, int absent) {
    enum { SECRET = 512 };
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, idle, NULL) == 0);
    for (int round = 0; round < 2; round++) {
        unsigned char *room = map(20 * SECRET * PAGE);
        MUST(munmap(room, 20 * SECRET * PAGE) == 0);
        /* Another one each time: what was named stays out of management. */
        room += 10 * SECRET * PAGE * round;
        unsigned char *place = room + 2 * SECRET * PAGE;
        const int fixed = MAP_FIXED_NOREPLACE | MAP_PRIVATE | MAP_ANONYMOUS;
        unsigned char *at = mmap(place, SECRET * PAGE, PROT_READ | PROT_WRITE, fixed, -1, 0);
        MUST(at == place);
        size_t pages = SECRET;
        fill(at, pages, 20);
        if (round == 1) wait_until_armed(at);
        MUST(madvise(at, pages * PAGE, advice) == 0);
        for (int step = 0; step < 4; step++) {
            size_t more = step == 1 || step == 2 ? SECRET / 2 : 0;
            /* The second step grows it where it is, the third finds its way barred. */
            unsigned char *bar = NULL;
            if (step == 2) bar = mmap(at + pages * PAGE, PAGE, PROT_NONE, fixed, -1, 0);
            MUST(step != 2 || bar == at + pages * PAGE);
            unsigned char *to = step == 0 ? room + 5 * SECRET * PAGE : step == 3 ? place : NULL;
            if (step == 3 && at < to + pages * PAGE && to < at + pages * PAGE)
                to = room + 5 * SECRET * PAGE;
            int flags = to ? MREMAP_MAYMOVE | MREMAP_FIXED : step == 1 ? 0 : MREMAP_MAYMOVE;
            unsigned char *old = at;
            at = move(at, pages * PAGE, (pages + more) * PAGE, flags, to);
            MUST((step == 1) == (at == old));
            fill(at + pages * PAGE, more, 22);
            if (bar) MUST(munmap(bar, PAGE) == 0);
            /* New memory of the program's: the engine looks. */
            unsigned char *others = malloc(3 << 20);
            memset(others, 1, 3 << 20);
            usleep(200000);
            pages += more;
            no_child_has(at, pages, absent, "memory that was moved and a child is not to have");
            free(others);
            check(at, 0, SECRET, 20, "memory that was moved, in its own process");
        }
        MUST(munmap(at, pages * PAGE) == 0);
    }
    check(ballast, 0, given.megabytes << 8, 7, "page of the ballast");
}

static void wipe_moved(void) {
    moves_apart(MADV_WIPEONFORK, 0);
}

static void dont_moved(void) {
    moves_apart(MADV_DONTFORK, 1);
}

/* A userfaultfd of the program's own over memory that is managed. */
struct pager {
    int fd;
    unsigned char *base;
    _Atomic size_t served;
};

static void *page_in(void *given_pager) {
    struct pager *pager = given_pager;
    unsigned char *page = map(PAGE);
    for (;;) {
        struct uffd_msg message;
        if (read(pager->fd, &message, sizeof message) != sizeof message ||
            message.event != UFFD_EVENT_PAGEFAULT)
            return NULL;
        size_t at = ((uintptr_t)message.arg.pagefault.address - (uintptr_t)pager->base) / PAGE;
        fill_page(page, key_of(given.seed, at, 20));
        struct uffdio_copy copy = {
            .dst = (uintptr_t)pager->base + at * PAGE, .src = (uintptr_t)page, .len = PAGE};
        /* Before the copy, which wakes the thread that looks at the count. */
        atomic_fetch_add(&pager->served, 1);
        MUST(ioctl(pager->fd, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
    }
}

static int control(int fd, unsigned long request, void *argument) {
    return way == LIBC ? ioctl(fd, request, argument)
                       : (int)call(SYS_ioctl, fd, (long)request, (long)argument);
}

/* Past libc the kernel refuses what is managed, or out. What was there stays. */
static void own_pager_bare(void) {
    unsigned char *at = area(12), *own = map(PAGE * 16);
    MUST(bare(SYS_madvise, (long)own, PAGE * 16, MADV_NOHUGEPAGE, 0, 0) == 0);
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API, .features = 1 << 16 /* MOVE */};
    MUST(fd >= 0 && ioctl(fd, UFFDIO_API, &api) == 0);
    /* Too small to be managed. */
    struct uffdio_register range = {.range = {(uintptr_t)own, PAGE * 8},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    MUST(ioctl(fd, UFFDIO_REGISTER, &range) == 0);
    struct {
        uint64_t dst, src, len, mode;
        int64_t moved;
    } move = {(uintptr_t)own, (uintptr_t)at, 8 * PAGE, 0, 0};
    int answer = control(fd, _IOWR(0xaa, 5, move), &move), why = errno;
    if (managed) MUST(answer == -1 && why == ENOENT);
    if (!managed) MUST(answer == 0);
    check(managed ? at : own, 0, 8, 12, "page that was to be moved away");
    range.range = (struct uffdio_range){(uintptr_t)at, LEN / 2};
    answer = control(fd, UFFDIO_REGISTER, &range), why = errno;
    if (managed) MUST(answer == -1 && why == EBUSY);
    if (!managed) MUST(answer == 0);
    close(fd);
    check(at, 8, PAGES - 8, 12, "page of memory that the program was not to page itself");
}

static void own_pager(void) {
    if (way == BARE) return own_pager_bare();
    unsigned char *at = area(12), *source = area(13);
    struct pager pager = {.fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC), .base = at};
    struct uffdio_api api = {.api = UFFD_API, .features = 1 << 16 /* MOVE */};
    MUST(pager.fd >= 0 && ioctl(pager.fd, UFFDIO_API, &api) == 0);
    struct uffdio_register range = {.range = {(uintptr_t)at, LEN / 2},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    MUST(control(pager.fd, UFFDIO_REGISTER, &range) == 0);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, page_in, &pager) == 0);
    check(at, 0, PAGES, 12, "page of memory that the program pages itself");
    MUST(atomic_load(&pager.served) == 0);
    MUST(madvise(at, LEN / 4, MADV_DONTNEED) == 0);
    check(ballast, 0, given.megabytes << 7, 7, "page of the ballast");
    check(at, 0, PAGES / 4, 20, "page that the program brings in itself");
    MUST(atomic_load(&pager.served) == PAGES / 4);
    check(at, PAGES / 4, PAGES * 3 / 4, 12, "page that the program has, and its neighbours");
    /* Moved in from memory that is out. */
    MUST(madvise(at, 64 * PAGE, MADV_DONTNEED) == 0);
    struct {
        uint64_t dst, src, len, mode;
        int64_t moved;
    } move = {(uintptr_t)at, (uintptr_t)source, 64 * PAGE, 0, 0};
    MUST(control(pager.fd, _IOWR(0xaa, 5, move), &move) == 0);
    check(at, 0, 64, 13, "page that the program has moved in");
    check_zero(source, 0, 64, "page that was moved away");
    check(source, 64, PAGES - 64, 13, "page next to those that were moved away");
    fill(source, 64, 14);
    out(source, PAGES);
    check(source, 0, 64, 14, "page that was written where one was moved away");
    /* Given back, it is managed again. */
    struct uffdio_range whole = range.range;
    MUST(ioctl(pager.fd, UFFDIO_UNREGISTER, &whole) == 0);
    fill(at, PAGES, 15);
    wait_until_armed(at);
    MUST(out(at, PAGES / 2) == 0);
    check(at, 0, PAGES, 15, "page that the program paged itself once");
}

/* Each of the other ways to change memory: what it holds stays. `optional`: a kernel or a CPU may
 * be without it. */
static void keeps(const char *what, int result, unsigned char *at, size_t pages, uint64_t version,
                  int optional) {
    if (result != 0 && !optional) die("%s: %s", what, strerror(errno));
    check(at, 0, pages, version, what);
    out(at, pages);
    check(at, 0, pages, version, what);
}

static void others(void) {
    unsigned char *at = area(30);
    static const struct {
        int advice;
        const char *name;
    } advices[] = {
        {MADV_MERGEABLE, "MADV_MERGEABLE"},
        {MADV_COLD, "MADV_COLD"},
        {MADV_PAGEOUT, "MADV_PAGEOUT"},
        {22, "MADV_POPULATE_READ"},
        {23, "MADV_POPULATE_WRITE"},
        {25, "MADV_COLLAPSE"},
        {14, "MADV_HUGEPAGE"},
        {25, "MADV_COLLAPSE, where huge pages are welcome"},
        {MADV_UNMERGEABLE, "MADV_UNMERGEABLE"},
        {16, "MADV_DONTDUMP"},
        {3, "MADV_WILLNEED"},
        {9, "MADV_REMOVE"},
    };
    for (size_t i = 0; i < sizeof advices / sizeof *advices; i++) {
        int result = bare(SYS_madvise, (long)at, 1 << 20, advices[i].advice, 0, 0) == -1 ? -1 : 0;
        if (advices[i].advice == 9) MUST(result == -1 && errno == EINVAL);
        keeps(advices[i].name, result, at, 256, 30, 1);
    }
    uint64_t nodes = 1;
    keeps(
        "mbind",
        (int)syscall(SYS_mbind, at + 16 * PAGE, 64 * PAGE, 2 /* BIND */, &nodes, 64, 2 /* MOVE */),
        at, 256, 30, 1);
    void *page[4];
    int node[4] = {0}, status[4];
    for (size_t i = 0; i < 4; i++) page[i] = at + (300 + i) * PAGE;
    keeps("move_pages", (int)syscall(SYS_move_pages, 0, 4, page, node, status, 2) < 0 ? -1 : 0, at,
          512, 30, 1);
    keeps("set_mempolicy", (int)syscall(SYS_set_mempolicy, 0, NULL, 0), at, 256, 30, 1);
    keeps("PR_SET_VMA", prctl(0x53564d41, 0, at + 8 * PAGE, 8 * PAGE, "named"), at, 256, 30, 1);
    int clear = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
    keeps("soft dirty", clear >= 0 && write(clear, "4", 1) == 1 ? 0 : -1, at, 256, 30, 1);
    int key = (int)syscall(SYS_pkey_alloc, 0, 0);
    if (key >= 0)
        keeps("pkey_mprotect",
              (int)syscall(SYS_pkey_mprotect, at, 64 * PAGE, PROT_READ | PROT_WRITE, key), at, 256,
              30, 0);
    /* The old place reads as zeros, and is memory like any other. */
    unsigned char *moved =
        mremap(at, 64 * PAGE, 64 * PAGE, MREMAP_MAYMOVE | 4 /* DONTUNMAP */, NULL);
    if (moved != MAP_FAILED) {
        keeps("MREMAP_DONTUNMAP", 0, moved, 64, 30, 0);
        check_zero(at, 0, 64, "page that MREMAP_DONTUNMAP has left");
        fill(at, 64, 31);
        keeps("MREMAP_DONTUNMAP, the old place", 0, at, 64, 31, 0);
        keeps("MREMAP_DONTUNMAP, later", 0, moved, 64, 30, 0);
    }
    unsigned char *down =
        mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0);
    MUST(down != MAP_FAILED);
    fill(down, PAGES, 32);
    keeps("MAP_GROWSDOWN", 0, down, PAGES, 32, 0);
    unsigned char *drop =
        mmap(NULL, LEN, PROT_READ | PROT_WRITE, 8 /* DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
    if (drop != MAP_FAILED) {
        fill(drop, PAGES, 33);
        madvise(drop, LEN, MADV_PAGEOUT);
        check(ballast, 0, given.megabytes << 6, 7, "page of the ballast");
        for (size_t i = 0; i < PAGES; i++) {
            uint64_t mine = key_of(given.seed, i, 33);
            int is_kept = *(volatile uint64_t *)(drop + i * PAGE + 8) == word_of(mine, 1);
            check_page(drop + i * PAGE, is_kept ? mine : 0, "page of droppable memory");
        }
    }
    int hidden = (int)syscall(447 /* memfd_secret */, O_CLOEXEC);
    if (hidden >= 0 && ftruncate(hidden, 64 * PAGE) == 0) {
        unsigned char *secret =
            mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, hidden, 0);
        if (secret != MAP_FAILED) {
            fill(secret, 64, 34);
            madvise(secret, 64 * PAGE, MADV_PAGEOUT);
            check(secret, 0, 64, 34, "page of secret memory");
        }
    }
    unsigned char *sealed = area(35);
    if (syscall(462 /* mseal */, sealed, LEN, 0) == 0) {
        keeps("mseal", 0, sealed, PAGES, 35, 0);
        MUST(munmap(sealed, LEN) == -1 && errno == EPERM);
        fill(sealed, PAGES, 36);
        keeps("mseal, written", 0, sealed, PAGES, 36, 0);
    }
    prctl(65 /* PR_SET_MDWE */, 1, 0, 0, 0);
    unsigned char *after = area(37);
    keeps("PR_SET_MDWE", 0, after, PAGES, 37, 0);
    check(ballast, 0, given.megabytes << 8, 7, "page of the ballast");
}

int main(int count, char **words) {
    given = parse(count, words, "others");
    static const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {
        {"guard-zero", guard_zero},
        {"guard-walk", guard_walk},
        {"guard-grow", guard_grow},
        {"guard-each", guard_each},
        {"guard-one", guard_one},
        {"guard-early", guard_early},
        {"shmat", shm},
        {"free", lazy},
        {"lockall", lockall},
        {"locked", locked},
        {"wipe", wipe},
        {"wipe-moved", wipe_moved},
        {"dont-moved", dont_moved},
        {"own-pager", own_pager},
        {"others", others},
    };
    char name[64];
    snprintf(name, sizeof name, "%s", given.mode);
    static const struct {
        const char *end;
        int way;
    } ways[] = {{"-bare", BARE}, {"-syscall", SYSCALL}, {"-process", PROCESS}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        size_t length = strlen(name), end = strlen(ways[i].end);
        if (length > end && strcmp(name + length - end, ways[i].end) == 0) {
            name[length - end] = 0;
            way = ways[i].way;
            break;
        }
    }
    if (strcmp(name, "lockall-first") == 0) {
        lockall_first();
        return ok("shapes", given.mode);
    }
    if (strcmp(name, "guard-early") == 0 && has_guards()) {
        unsigned char *early = map(LEN);
        MUST(advise(early + LEN / 2, PAGE, GUARD_INSTALL) == 0);
        fill(early, PAGES / 4, 2);
    }
    engage();
    if (strncmp(name, "guard", 5) == 0 && !has_guards()) return ok("shapes", given.mode);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(name, modes[i].name) != 0) continue;
        modes[i].run();
        return ok("shapes", given.mode);
    }
    die("no mode %s", given.mode);
}
