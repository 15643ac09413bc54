/* What is at the edge of what a process may have or do, each with memory that must be right.
 *
 *     vmas      10,000 mappings, every second one with another protection, opened and closed, moved
 *               and filled
 *     threads   500 threads that fill, leave and read what is theirs
 *     uring     io_uring reads into, and writes from, buffers that go out meanwhile: plain ones and
 *               registered ones
 *     limits    RLIMIT_AS, RLIMIT_DATA, RLIMIT_STACK, RLIMIT_MEMLOCK, RLIMIT_NOFILE lowered while
 *               memory is out
 *     limited   RLIMIT_AS and RLIMIT_DATA lowered before the first page has come back
 *     nothp     without huge pages, and again with them
 *     abort     ends by SIGABRT with most of it out: a core dump must not hang */
#include "common.h"
#include "ring.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static struct arguments given;
static unsigned char *arena;

static void fill_all(uint64_t version) {
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, version));
}

static void check_all(uint64_t version, const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, version), what);
}

static void vmas(void) {
    enum { COUNT = 10000, EACH = 2 };
    static unsigned char *at[COUNT];
    static uint64_t version[COUNT];
    unsigned char *place = map((size_t)COUNT * EACH * 2 * PAGE);
    for (size_t i = 0; i < COUNT; i++) {
        /* A hole behind each: no two are one mapping for the kernel. */
        at[i] = place + i * EACH * 2 * PAGE;
        MUST(munmap(at[i] + EACH * PAGE, EACH * PAGE) == 0);
        for (size_t k = 0; k < EACH; k++)
            fill_page(at[i] + k * PAGE, key_of(given.seed, i * EACH + k, 0));
    }
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    while (now() < end)
        for (size_t turn = 0; turn < 500; turn++) {
            size_t i = below(&random, COUNT);
            for (size_t k = 0; k < EACH; k++)
                check_page(at[i] + k * PAGE, key_of(given.seed, i * EACH + k, version[i]),
                           "page of a small mapping");
            switch (below(&random, 4)) {
            case 0:
                MUST(mprotect(at[i], PAGE, PROT_NONE) == 0);
                MUST(mprotect(at[i], PAGE, PROT_READ | PROT_WRITE) == 0);
                break;
            case 1:
                MUST(mmap(at[i], EACH * PAGE, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at[i]);
                for (size_t k = 0; k < EACH; k++)
                    check_page(at[i] + k * PAGE, 0, "page of a new mapping");
                /* fallthrough */
            case 2:
                version[i]++;
                for (size_t k = 0; k < EACH; k++)
                    fill_page(at[i] + k * PAGE, key_of(given.seed, i * EACH + k, version[i]));
                break;
            default:
                glance_page(arena + (i % given.pages) * PAGE,
                            key_of(given.seed, i % given.pages, 1), "page next to the mappings");
            }
        }
    for (size_t i = 0; i < COUNT; i++)
        for (size_t k = 0; k < EACH; k++)
            check_page(at[i] + k * PAGE, key_of(given.seed, i * EACH + k, version[i]),
                       "page of a small mapping at the end");
}

static void *own_part(void *argument) {
    enum { THREADS = 500 };
    size_t self = (size_t)argument, pages = given.pages / THREADS;
    unsigned char *from = arena + self * pages * PAGE;
    uint64_t version = 2;
    for (double end = now() + given.seconds; now() < end; version++) {
        for (size_t k = 0; k < pages; k++)
            fill_page(from + k * PAGE, key_of(given.seed, self * pages + k, version));
        usleep(20000 + 1000 * (unsigned)(self % 50));
        for (size_t k = 0; k < pages; k++)
            check_page(from + k * PAGE, key_of(given.seed, self * pages + k, version),
                       "page of one of 500 threads");
    }
    return NULL;
}

static void threads(void) {
    enum { THREADS = 500 };
    static pthread_t ids[THREADS];
    pthread_attr_t attributes;
    MUST(pthread_attr_init(&attributes) == 0 &&
         pthread_attr_setstacksize(&attributes, 64 << 10) == 0);
    for (size_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&ids[i], &attributes, own_part, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) MUST(pthread_join(ids[i], NULL) == 0);
}

static void uring(void) {
    enum { FIXED = 64, BUFFER = 16 };
    struct ring ring;
    if (!ring_make(&ring)) {
        fprintf(stderr, "io_uring is not to be had here\n");
        return;
    }
    char name[] = "strain-XXXXXX";
    int fd = mkstemp(name);
    MUST(fd >= 0 && unlink(name) == 0);
    unsigned char *page = map(PAGE);
    for (size_t i = 0; i < 4096; i++) {
        fill_page(page, key_of(given.seed + 7, i, 1));
        MUST(pwrite(fd, page, PAGE, (off_t)(i * PAGE)) == (ssize_t)PAGE);
    }
    /* Registered buffers are pinned: they cannot go out, but they lie among what does. */
    struct iovec fixed[FIXED];
    for (size_t i = 0; i < FIXED; i++) fixed[i] = (struct iovec){arena + (i * 16) * PAGE, PAGE};
    int registered =
        syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, fixed, FIXED) == 0;
    static uint64_t in_file[1 << 20];
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    while (now() < end)
        for (size_t turn = 0; turn < 50; turn++) {
            size_t at = below(&random, 4096), to = 1024 + below(&random, given.pages - 1024);
            if (turn % 3 == 0 && registered) {
                size_t i = below(&random, FIXED);
                MUST(ring_do(&ring, IORING_OP_READ_FIXED, fd, fixed[i].iov_base, PAGE, at * PAGE,
                             (int)i, 0) == (int)PAGE);
                check_page(fixed[i].iov_base, key_of(given.seed + 7, at, 1), "a registered buffer");
                fill_page(fixed[i].iov_base, key_of(given.seed, i * 16, 1));
            } else if (turn % 3 == 1) {
                MUST(ring_do(&ring, IORING_OP_READ, fd, arena + to * PAGE, PAGE, at * PAGE, -1,
                             0) == (int)PAGE);
                in_file[to] = at + 1;
            } else {
                /* From a buffer that may be out. */
                MUST(ring_do(&ring, IORING_OP_WRITE, fd, arena + to * PAGE, PAGE,
                             (4096 + turn) * PAGE, -1, 0) == (int)PAGE);
                MUST(pread(fd, page, PAGE, (off_t)((4096 + turn) * PAGE)) == (ssize_t)PAGE);
                check_page(page,
                           in_file[to] ? key_of(given.seed + 7, in_file[to] - 1, 1)
                                       : key_of(given.seed, to, 1),
                           "what was written from a buffer");
            }
        }
    for (size_t i = 0; i < given.pages; i++)
        check_page(arena + i * PAGE,
                   in_file[i] ? key_of(given.seed + 7, in_file[i] - 1, 1)
                              : key_of(given.seed, i, 1),
                   "page at the end");
    close(ring.fd);
}

static void limits(void) {
    struct {
        int what;
        rlim_t to;
    } lower[] = {{RLIMIT_MEMLOCK, 0},
                 {RLIMIT_STACK, 1 << 20},
                 {RLIMIT_NOFILE, 16},
                 {RLIMIT_DATA, given.megabytes << 20},
                 {RLIMIT_AS, (given.megabytes + 64) << 20}};
    for (size_t i = 0; i < sizeof lower / sizeof *lower; i++) {
        struct rlimit limit;
        MUST(getrlimit((__rlimit_resource_t)lower[i].what, &limit) == 0);
        limit.rlim_cur = lower[i].to;
        MUST(setrlimit((__rlimit_resource_t)lower[i].what, &limit) == 0);
        check_all(1 + i, "page under a lower limit");
        fill_all(2 + i);
    }
    check_all(1 + sizeof lower / sizeof *lower, "page under all limits");
}

static void limited(void) {
    struct rlimit limit;
    MUST(getrlimit(RLIMIT_DATA, &limit) == 0);
    limit.rlim_cur = (rlim_t)(given.megabytes + 64) << 20;
    MUST(setrlimit(RLIMIT_DATA, &limit) == 0);
    MUST(getrlimit(RLIMIT_AS, &limit) == 0);
    limit.rlim_cur = (rlim_t)(given.megabytes + 64) << 20;
    MUST(setrlimit(RLIMIT_AS, &limit) == 0);
    for (uint64_t turn = 0; turn < 3; turn++) {
        check_all(1 + turn, "page under a limit from the beginning");
        fill_all(2 + turn);
    }
    check_all(4, "page at the end");
}

static void nothp(void) {
    for (uint64_t turn = 0; turn < 4; turn++) {
        MUST(prctl(PR_SET_THP_DISABLE, turn % 2 == 0, 0, 0, 0) == 0);
        madvise(arena, given.pages * PAGE, turn % 2 == 0 ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
        check_all(1 + turn, "page with other huge pages");
        fill_all(2 + turn);
    }
    check_all(5, "page at the end");
}

int main(int count, char **words) {
    given = parse(count, words, "vmas");
    arena = map(given.pages * PAGE);
    fill_all(1);
    if (strcmp(given.mode, "vmas") == 0)
        vmas();
    else if (strcmp(given.mode, "threads") == 0)
        threads();
    else if (strcmp(given.mode, "uring") == 0)
        uring();
    else if (strcmp(given.mode, "limits") == 0)
        limits();
    else if (strcmp(given.mode, "limited") == 0)
        limited();
    else if (strcmp(given.mode, "nothp") == 0)
        nothp();
    else if (strcmp(given.mode, "abort") == 0)
        abort();
    else
        return 2;
    return ok("strain", given.mode);
}
