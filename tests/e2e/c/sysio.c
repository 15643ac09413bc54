/* System calls on swapped memory: the kernel reads and writes the program's buffers, so its faults
 * are faults too. Rounds of read, write, pread, readv, writev, pipes, sockets, futexes, getdents,
 * O_DIRECT and a private file mapping. */
#include "common.h"
#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;
static uint64_t state;

static uint64_t key(size_t page) {
    return key_of(given.seed, page, version[page]);
}

static void check(size_t from, size_t count, const char *what) {
    for (size_t page = from; page < from + count; page++)
        check_page(arena + page * PAGE, key(page), what);
}

/* Somewhere cold: a range chosen at random in an arena larger than the budget. */
static size_t somewhere(size_t count) {
    return below(&state, given.pages - count);
}

static size_t apart(size_t from, size_t count) {
    size_t to;
    do to = somewhere(count);
    while (to < from + count && from < to + count);
    return to;
}

/* After a system call copied `count` pages from one place to another: both must hold the first
 * one's content. The second is then written again, so that every page has a content of its own. */
static void copied(size_t from, size_t to, size_t count, const char *what) {
    check(from, count, what);
    for (size_t i = 0; i < count; i++) {
        check_page(arena + (to + i) * PAGE, key(from + i), what);
        version[to + i]++;
        fill_page(arena + (to + i) * PAGE, key(to + i));
    }
}

static void through_file(int fd, const char *what) {
    size_t count = 1 + below(&state, 64), from = somewhere(count), to = apart(from, count),
           bytes = count * PAGE;
    MUST(pwrite(fd, arena + from * PAGE, bytes, 0) == (ssize_t)bytes);
    MUST(pread(fd, arena + to * PAGE, bytes, 0) == (ssize_t)bytes);
    copied(from, to, count, what);
}

static void through_vectors(int fd) {
    struct iovec out[16], in[16];
    size_t from[16], to[16];
    /* Sixteen pages far apart, in strips so that none is met twice. */
    size_t strip = given.pages / 32;
    for (size_t i = 0; i < 16; i++) {
        from[i] = 2 * i * strip + below(&state, strip);
        to[i] = (2 * i + 1) * strip + below(&state, strip);
        out[i] = (struct iovec){arena + from[i] * PAGE, PAGE};
        in[i] = (struct iovec){arena + to[i] * PAGE, PAGE};
    }
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    MUST(writev(fd, out, 16) == (ssize_t)(16 * PAGE));
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    MUST(readv(fd, in, 16) == (ssize_t)(16 * PAGE));
    for (size_t i = 0; i < 16; i++) copied(from[i], to[i], 1, "readv and writev");
}

struct sending {
    int fd;
    size_t from, count;
};

static void *send_all(void *argument) {
    struct sending *self = argument;
    size_t done = 0, bytes = self->count * PAGE;
    while (done < bytes) {
        ssize_t wrote = write(self->fd, arena + self->from * PAGE + done, bytes - done);
        MUST(wrote > 0);
        done += (size_t)wrote;
    }
    return NULL;
}

static void through_descriptors(int in, int out, const char *what) {
    size_t count = 1 + below(&state, 128), from = somewhere(count), to = apart(from, count),
           done = 0;
    struct sending sending = {out, from, count};
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, send_all, &sending) == 0);
    while (done < count * PAGE) {
        ssize_t got = read(in, arena + to * PAGE + done, count * PAGE - done);
        MUST(got > 0);
        done += (size_t)got;
    }
    MUST(pthread_join(thread, NULL) == 0);
    copied(from, to, count, what);
}

static void futex(atomic_uint *word, int operation, unsigned value) {
    long result = syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
    MUST(result >= 0 || errno == EAGAIN || errno == EINTR);
}

/* The partner of a game of table tennis over futex words that lie in swapped pages. */
static void *return_ball(void *argument) {
    atomic_uint *word = argument;
    for (unsigned turn = 1; turn < 64; turn += 2) {
        while (atomic_load(word) != turn) futex(word, FUTEX_WAIT, turn - 1);
        atomic_store(word, turn + 1);
        futex(word, FUTEX_WAKE, 1);
    }
    return NULL;
}

static void through_futexes(void) {
    size_t page = somewhere(1);
    atomic_uint *word = (atomic_uint *)(arena + page * PAGE + 64);
    check(page, 1, "page before it becomes a futex");
    atomic_store(word, 0);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, return_ball, word) == 0);
    for (unsigned turn = 0; turn < 64; turn += 2) {
        atomic_store(word, turn + 1);
        futex(word, FUTEX_WAKE, 1);
        while (atomic_load(word) != turn + 2) futex(word, FUTEX_WAIT, turn + 1);
    }
    MUST(pthread_join(thread, NULL) == 0);
    fill_page(arena + page * PAGE, key(page));
}

static void small_results(const char *directory) {
    size_t page = somewhere(4);
    unsigned char *at = arena + page * PAGE;
    struct stat *status = (struct stat *)(at + 128);
    char *cwd = (char *)(at + PAGE + 512);
    strcpy((char *)at + 2 * PAGE, directory);
    MUST(stat((char *)at + 2 * PAGE, status) == 0 && S_ISDIR(status->st_mode));
    MUST(getcwd(cwd, PAGE) == cwd && cwd[0] == '/');
    int fd = open((char *)at + 2 * PAGE, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MUST(fd >= 0);
    MUST(syscall(SYS_getdents64, fd, at + 3 * PAGE, PAGE) > 0);
    close(fd);
    for (size_t i = 0; i < 4; i++) fill_page(at + i * PAGE, key(page + i));
}

/* Copies of file pages that were written are private memory like any other. */
static void private_file(int fd) {
    size_t count = 16, from = somewhere(count);
    MUST(pwrite(fd, arena + from * PAGE, count * PAGE, 0) == (ssize_t)(count * PAGE));
    unsigned char *at = mmap(NULL, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    MUST(at != MAP_FAILED);
    for (size_t i = 0; i < count; i += 2) fill_page(at + i * PAGE, key_of(given.seed, i, 99));
    for (int i = 0; i < 64; i++) check(somewhere(1), 1, "page");
    for (size_t i = 0; i < count; i++)
        check_page(at + i * PAGE, i % 2 ? key(from + i) : key_of(given.seed, i, 99),
                   "private mapping of a file");
    MUST(munmap(at, count * PAGE) == 0);
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    state = mix(given.seed);
    arena = map(given.pages * PAGE);
    version = calloc(given.pages, sizeof *version);
    MUST(version != NULL);
    for (size_t page = 0; page < given.pages; page++) fill_page(arena + page * PAGE, key(page));
    const char *directory = getenv("TMPDIR") ? getenv("TMPDIR") : "/var/tmp";
    char name[512];
    snprintf(name, sizeof name, "%s/sysio-XXXXXX", directory);
    int fd = mkstemp(name);
    MUST(fd >= 0);
    /* Not every file system has O_DIRECT: where it has none, that round goes through the page
     * cache. */
    int direct = open(name, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (direct < 0) direct = open(name, O_RDWR | O_CLOEXEC);
    MUST(direct >= 0);
    unlink(name);
    int pipe_ends[2], sockets[2];
    MUST(pipe(pipe_ends) == 0);
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    double end = now() + given.seconds;
    for (size_t rounds = 0; rounds < 10 || now() < end; rounds++) {
        through_file(fd, "pread and pwrite");
        through_file(direct, "O_DIRECT pread and pwrite");
        through_vectors(fd);
        through_descriptors(pipe_ends[0], pipe_ends[1], "pipe");
        through_descriptors(sockets[0], sockets[1], "socket");
        through_futexes();
        small_results(directory);
        private_file(fd);
    }
    check(0, given.pages, "page at the end");
    return ok("sysio", NULL);
}
