/* Processes that end, or become another program, while their threads write memory that is out.
 * Whatever leaves such a process is right, however little it is: no page of zeros. MODE is how they
 * end: exit, killed, exec, abort, fault (`mixed`: in turn); or the process is killed while its
 * child needs its memory, and writes it: vfork, clone (a fork past libc), atfork (in a fork
 * handler). Each process writes to a socket, a pipe or a file, which its parent reads. MB is the
 * memory of one process; SECONDS, if below 1000, else the number of processes. */
#include "common.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

static const size_t HEAD = 2ul << 20;
static struct arguments given;

static uint64_t word_at(size_t page) {
    return (uint64_t)page << 8 | 0x81;
}

struct way {
    int fd;
    size_t pages;
    unsigned char *data, *head;
};

/* Again and again: what stays in memory, which takes a while to copy, and behind it one page that
 * is out. */
static void *writes(void *x) {
    struct way *way = x;
    uint64_t random = mix((uint64_t)getpid() << 32 ^ (uint64_t)now());
    for (;;) {
        size_t page = below(&random, way->pages);
        *(uint64_t *)way->head = page;
        struct iovec parts[2] = {{way->head, HEAD}, {way->data + page * PAGE, PAGE}};
        if (writev(way->fd, parts, 2) <= 0) return x;
    }
}

/* The child of a process that is killed: what is out of its memory, which lives on, cannot be
 * brought back, nor what the child has not got yet. */
static void outlive(struct way *way) {
    pid_t parent = getppid();
    /* The parent's engine has heard of the child by then. */
    usleep(3000);
    kill(parent, SIGKILL);
    while (getppid() == parent) usleep(1000);
    usleep(50000);
    for (size_t page = 0; page < way->pages; page += 16) {
        *(uint64_t *)way->head = page;
        struct iovec parts[2] = {{way->head, HEAD}, {way->data + page * PAGE, PAGE}};
        if (writev(way->fd, parts, 2) != (ssize_t)(HEAD + PAGE)) _exit(1);
    }
    _exit(0);
}

static struct way *forked;

static void outlive_in_handler(void) {
    outlive(forked);
}

/* What libc's fork does in the kernel, past it. */
static long clone_past_libc(void) {
    long result;
    register long r10 asm("r10") = 0;
    register long r8 asm("r8") = 0;
    asm volatile("syscall"
                 : "=a"(result)
                 : "a"(SYS_clone), "D"((long)SIGCHLD), "S"(0L), "d"(0L), "r"(r10), "r"(r8)
                 : "rcx", "r11", "memory");
    return result;
}

static void become(const char *how, int fd, useconds_t delay) {
    struct way way = {.fd = fd, .pages = given.pages};
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    way.head = map(HEAD);
    memset(way.head, 1, HEAD);
    mlock(way.head, HEAD);
    way.data = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        for (size_t at = 0; at < WORDS; at++)
            ((uint64_t *)(way.data + page * PAGE))[at] = word_at(page);
    if (!strcmp(how, "vfork")) {
        if (vfork() == 0) outlive(&way);
        _exit(0);
    }
    if (!strcmp(how, "clone")) {
        if (clone_past_libc() == 0) outlive(&way);
        for (;;) pause();
    }
    if (!strcmp(how, "atfork")) {
        forked = &way;
        pthread_atfork(NULL, NULL, outlive_in_handler);
        fork();
        for (;;) pause();
    }
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, writes, &way) == 0);
    usleep(delay);
    if (!strcmp(how, "exec")) execl("/bin/true", "true", (char *)NULL);
    if (!strcmp(how, "killed")) raise(SIGKILL);
    if (!strcmp(how, "abort")) abort();
    if (!strcmp(how, "fault")) raise(SIGSEGV);
    _exit(0);
}

/* Pages that came, or came in part; writes that ended where their page was to come, because that
 * was out. */
static size_t whole, torn, held;

static void check_end(const unsigned char *from, size_t have, const char *how,
                      const char *through) {
    uint64_t page = *(const uint64_t *)from;
    for (size_t at = HEAD; at + 8 <= have; at += 8)
        if (*(const uint64_t *)(from + at) != word_at(page)) {
            fprintf(stderr, "%s through a %s: ", how, through);
            mismatch(from + at, word_at(page), *(const uint64_t *)(from + at),
                     "what left a process that ended");
        }
    if (have == HEAD + PAGE)
        whole++;
    else
        torn += have > HEAD, held += have == HEAD;
}

int main(int count, char **words) {
    given = parse(count, words, "mixed");
    static const char *ends[] = {"exit", "killed", "exec", "abort", "fault"},
                      *ways[] = {"socket", "pipe", "file"};
    unsigned char *in = map(HEAD + PAGE);
    size_t processes = 0, most = given.seconds >= 1000 ? (size_t)given.seconds : (size_t)-1;
    uint64_t state = given.seed;
    double until = now() + given.seconds;
    char name[] = "/tmp/swaptide-endings-XXXXXX";
    int file = mkstemp(name);
    MUST(file >= 0);
    unlink(name);
    const char *preload = getenv("LD_PRELOAD");
    int managed = preload != NULL && strstr(preload, "swaptide") != NULL;
    int is_mixed = !strcmp(given.mode, "mixed"), is_vfork = !strcmp(given.mode, "vfork");
    /* Every end through everything, twice, and some that meet what they are to show. */
    size_t least = is_mixed ? 30 : 3, least_held = managed && (is_mixed || is_vfork) ? 3 : 0;
    while (processes < most &&
           (given.seconds >= 1000 || now() < until ||
            ((processes < least || held < least_held) && now() < until + 6 * given.seconds))) {
        const char *how = strcmp(given.mode, "mixed") ? given.mode : ends[processes % 5],
                   *through = ways[processes / 5 % 3];
        /* Only the end of a stream tells that the child of one that was killed has ended. */
        if (processes / 5 % 3 == 2 && strcmp(given.mode, "mixed")) through = "pipe";
        useconds_t delay = 10000 + below(&state, 20000);
        int pair[2] = {-1, -1};
        if (!strcmp(through, "socket")) {
            int room = 16 << 20;
            MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
            if (setsockopt(pair[1], SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) != 0)
                setsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        } else if (!strcmp(through, "pipe")) {
            MUST(pipe(pair) == 0);
            fcntl(pair[1], F_SETPIPE_SZ, 1 << 20);
        } else {
            MUST(ftruncate(file, 0) == 0 && lseek(file, 0, SEEK_SET) == 0);
        }
        fflush(stdout);
        pid_t child = fork();
        MUST(child >= 0);
        if (child == 0) {
            if (pair[0] >= 0) close(pair[0]);
            become(how, pair[1] >= 0 ? pair[1] : file, delay);
        }
        if (pair[0] >= 0) {
            close(pair[1]);
            size_t have = 0;
            for (;;) {
                ssize_t n = read(pair[0], in + have, HEAD + PAGE - have);
                if (n <= 0) break;
                have += (size_t)n;
                if (have < HEAD + PAGE) continue;
                check_end(in, have, how, through);
                have = 0;
            }
            check_end(in, have, how, through);
            close(pair[0]);
        }
        MUST(waitpid(child, NULL, 0) == child);
        if (pair[0] < 0) {
            off_t end = lseek(file, 0, SEEK_END);
            for (off_t at = 0; at < end; at += (off_t)(HEAD + PAGE)) {
                ssize_t n = pread(file, in, HEAD + PAGE, at);
                MUST(n >= 0);
                check_end(in, (size_t)n, how, through);
            }
        }
        processes++;
    }
    printf("%zu processes ended; %zu pages came, %zu in part; %zu writes ended before theirs\n",
           processes, whole, torn, held);
    if (processes < least || held < least_held) die("too few to tell");
    return ok("endings", given.mode);
}
