/* Pages that the kernel or another process reads or writes through a reference,
 * while the program's memory goes out: what comes out of a pipe, of a socket, of a device is what
 * was put in, and what others write arrives. MODE says what has the reference. Each mode fills
 * pages, gives them away, makes the memory go out and be filled with other contents, and reads what
 * was given. */
#include "common.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <signal.h>
#include <sys/wait.h>

#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#endif
#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

enum { GIVEN = 128 };

static struct arguments given;
static unsigned char *arena, *buffer, *back;
static uint64_t round_now;
static size_t evicted;

static uint64_t key(size_t page) {
    return key_of(given.seed + round_now, page, 1);
}

static void fill_given(void) {
    for (size_t page = 0; page < GIVEN; page++) fill_page(buffer + page * PAGE, key(page));
}

/* Everything goes out and other contents come into whatever frames were freed: old pages are read,
 * new ones are written. */
static void churn(void) {
    madvise(buffer, GIVEN * PAGE, MADV_PAGEOUT);
    unsigned char *more = map(8ul << 20);
    memset(more, 'Z', 8ul << 20);
    for (size_t page = 0; page < given.pages; page++)
        glance_page(arena + page * PAGE, key_of(given.seed, page, 0), "arena");
    munmap(more, 8ul << 20);
    unsigned char there[GIVEN];
    MUST(mincore(buffer, GIVEN * PAGE, there) == 0);
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (size_t page = 0; fd >= 0 && page < GIVEN; page++) {
        uint64_t word = 0;
        MUST(pread(fd, &word, 8, (off_t)((uintptr_t)(buffer + page * PAGE) / PAGE * 8)) == 8);
        evicted += word >> 63 == 0;
    }
    if (fd >= 0) close(fd);
}

static void check_back(const char *what) {
    for (size_t page = 0; page < GIVEN; page++) check_page(back + page * PAGE, key(page), what);
    for (size_t page = 0; page < GIVEN; page++)
        check_page(buffer + page * PAGE, key(page), "the buffer itself");
}

static void read_back(int fd, size_t bytes) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = read(fd, back + have, bytes - have);
        MUST(n > 0);
        have += (size_t)n;
    }
}

/* A system call past libc. */
static long bare(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* MODE vmsplice, syscall, tee, pushed: how pages get into the pipe. `raw` goes past libc and counts
 * what is wrong. */
static size_t wrong_raw;
static void through_pipe(void) {
    int pipes[2], copy[2];
    MUST(pipe2(pipes, O_CLOEXEC) == 0 && fcntl(pipes[1], F_SETPIPE_SZ, GIVEN * PAGE) >= 0);
    struct iovec part = {buffer, GIVEN * PAGE};
    ssize_t in;
    if (!strcmp(given.mode, "raw"))
        in = bare(SYS_vmsplice, pipes[1], (long)&part, 1, 0, 0, 0);
    else if (!strcmp(given.mode, "syscall"))
        in = syscall(SYS_vmsplice, pipes[1], &part, 1ul, 0ul);
    else
        in = vmsplice(pipes[1], &part, 1, 0);
    MUST(in == (ssize_t)(GIVEN * PAGE));
    int from = pipes[0];
    if (!strcmp(given.mode, "tee") || !strcmp(given.mode, "splice")) {
        MUST(pipe2(copy, O_CLOEXEC) == 0 && fcntl(copy[1], F_SETPIPE_SZ, GIVEN * PAGE) >= 0);
        if (!strcmp(given.mode, "tee"))
            MUST(tee(pipes[0], copy[1], GIVEN * PAGE, 0) == in);
        else
            MUST(splice(pipes[0], NULL, copy[1], NULL, GIVEN * PAGE, 0) == in);
        close(pipes[0]), close(pipes[1]);
        from = copy[0], pipes[1] = copy[1];
    }
    churn();
    read_back(from, GIVEN * PAGE);
    if (!strcmp(given.mode, "raw")) {
        for (size_t page = 0; page < GIVEN; page++)
            wrong_raw += *(uint64_t *)(back + page * PAGE) != word_of(key(page), 0);
    } else
        check_back("a page from the pipe");
    close(from), close(pipes[1]);
}

static void tcp_pair(int ends[2]) {
    int one = 1, listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    MUST(bind(listening, (void *)&at, sizeof at) == 0 && listen(listening, 1) == 0 &&
         getsockname(listening, (void *)&at, &len) == 0);
    ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int room = 4 << 20;
    MUST(setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    MUST(connect(ends[0], (void *)&at, sizeof at) == 0 &&
         (ends[1] = accept(listening, NULL, NULL)) >= 0);
    MUST(setsockopt(ends[0], SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0);
    close(listening);
}

/* The kernel's word on whether what was sent with MSG_ZEROCOPY was copied after all. */
static size_t notified, copied;
static void notifications(int fd) {
    char space[256];
    for (;;) {
        struct msghdr message = {.msg_control = space, .msg_controllen = sizeof space};
        if (recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            struct sock_extended_err *e = (void *)CMSG_DATA(c);
            if (e->ee_origin != SO_EE_ORIGIN_ZEROCOPY) continue;
            size_t n = e->ee_data - e->ee_info + 1;
            notified += n;
            if (e->ee_code & SO_EE_CODE_ZEROCOPY_COPIED) copied += n;
        }
    }
}

static void through_tcp(void) {
    int ends[2];
    tcp_pair(ends);
    size_t sent = 0;
    while (sent < GIVEN * PAGE) {
        ssize_t n = send(ends[0], buffer + sent, GIVEN * PAGE - sent, MSG_ZEROCOPY | MSG_DONTWAIT);
        if (n < 0) break;
        sent += (size_t)n;
    }
    MUST(sent >= PAGE);
    churn();
    for (size_t have = 0; have < GIVEN * PAGE;) {
        if (sent < GIVEN * PAGE) {
            ssize_t n =
                send(ends[0], buffer + sent, GIVEN * PAGE - sent, MSG_ZEROCOPY | MSG_DONTWAIT);
            if (n > 0) sent += (size_t)n;
        }
        ssize_t n = read(ends[1], back + have, sent - have);
        MUST(n > 0);
        have += (size_t)n;
    }
    notifications(ends[0]);
    check_back("a page from the TCP connection");
    close(ends[0]), close(ends[1]);
}

static void through_udp(void) {
    int one = 1, in = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0),
        out = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    MUST(bind(in, (void *)&at, sizeof at) == 0 && getsockname(in, (void *)&at, &len) == 0);
    MUST(setsockopt(out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0);
    int room = 4 << 20;
    MUST(setsockopt(in, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room) == 0 ||
         setsockopt(in, SOL_SOCKET, SO_RCVBUF, &room, sizeof room) == 0);
    size_t pages = 0;
    for (; pages + 8 <= 32; pages += 8)
        MUST(sendto(out, buffer + pages * PAGE, 8 * PAGE, MSG_ZEROCOPY, (void *)&at, sizeof at) ==
             8 * PAGE);
    churn();
    for (size_t page = 0; page < pages; page += 8)
        MUST(recv(in, back + page * PAGE, 8 * PAGE, 0) == 8 * PAGE);
    for (size_t page = 0; page < pages; page++)
        check_page(back + page * PAGE, key(page), "a page from the datagrams");
    notifications(out);
    close(in), close(out);
}

/* io_uring without its library: one call at a time. */
static struct {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
} ring;

/* As io_uring's library does it, or through libc. */
static long ring_call(long number, long a, long b, long c, long d) {
    return !strcmp(given.mode, "uring-bare") ? bare(number, a, b, c, d, 0, 0)
                                             : syscall(number, a, b, c, d, 0l, 0l);
}

static int ring_open(void) {
    struct io_uring_params p = {0};
    ring.fd = (int)ring_call(SYS_io_uring_setup, 64, (long)&p, 0, 0);
    if (ring.fd < 0) return -1;
    char *sq = mmap(NULL, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, p.cq_off.cqes + p.cq_entries * sizeof *ring.cqes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_CQ_RING);
    ring.sqes = mmap(NULL, p.sq_entries * sizeof *ring.sqes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    MUST(sq != MAP_FAILED && cq != MAP_FAILED && ring.sqes != MAP_FAILED);
    ring.sq_tail = (void *)(sq + p.sq_off.tail), ring.sq_mask = (void *)(sq + p.sq_off.ring_mask),
    ring.sq_array = (void *)(sq + p.sq_off.array);
    ring.cq_head = (void *)(cq + p.cq_off.head), ring.cq_tail = (void *)(cq + p.cq_off.tail),
    ring.cq_mask = (void *)(cq + p.cq_off.ring_mask);
    ring.cqes = (void *)(cq + p.cq_off.cqes);
    return 0;
}

static void ring_submit(struct io_uring_sqe sqe) {
    unsigned tail = *ring.sq_tail, at = tail & *ring.sq_mask;
    ring.sqes[at] = sqe;
    ring.sq_array[at] = at;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
    MUST(ring_call(SYS_io_uring_enter, ring.fd, 1, 0, 0) == 1);
}

static int ring_result(void) {
    for (;;) {
        unsigned head = *ring.cq_head;
        if (head != __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE)) {
            int result = ring.cqes[head & *ring.cq_mask].res;
            __atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
            return result;
        }
        MUST(ring_call(SYS_io_uring_enter, ring.fd, 0, 1, IORING_ENTER_GETEVENTS) >= 0);
    }
}

static void through_ring(int fixed) {
    int ends[2];
    tcp_pair(ends);
    if (fixed && round_now == 1) {
        struct iovec part = {buffer, GIVEN * PAGE};
        MUST(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &part, 1u) == 0);
    }
    struct io_uring_sqe sqe = {.opcode = IORING_OP_SEND_ZC,
                               .fd = ends[0],
                               .addr = (uintptr_t)buffer,
                               .len = GIVEN * PAGE,
                               .ioprio = fixed ? IORING_RECVSEND_FIXED_BUF : 0,
                               .msg_flags = MSG_WAITALL};
    ring_submit(sqe);
    churn();
    read_back(ends[1], GIVEN * PAGE);
    MUST(ring_result() == GIVEN * PAGE);
    ring_result(); /* the notification */
    check_back("a page that io_uring sent");
    close(ends[0]), close(ends[1]);
}

/* Eight bytes of another process's memory. /proc/PID/mem answers EIO where the page is out
 * (docs/semantics.md): then it is brought in by a call that waits, and tried again. */
static void transfer(pid_t of, int fd, uint64_t *word, void *at, int writes, int by_call) {
    struct iovec mine = {word, 8}, theirs = {at, 8};
    for (;;) {
        ssize_t n =
            by_call  ? (writes ? process_vm_writev : process_vm_readv)(of, &mine, 1, &theirs, 1, 0)
            : writes ? pwrite(fd, word, 8, (off_t)(uintptr_t)at)
                     : pread(fd, word, 8, (off_t)(uintptr_t)at);
        if (n == 8) return;
        MUST(!by_call && n < 0 && errno == EIO);
        uint64_t ignored;
        struct iovec away = {&ignored, 8};
        MUST(process_vm_readv(of, &away, 1, &theirs, 1, 0) == 8);
    }
}

/* Another process writes into the pages while they go in and out: nothing that it wrote is lost. */
static void written_from_outside(void) {
    int way[2], by_call = !strcmp(given.mode, "writev");
    MUST(pipe2(way, O_CLOEXEC) == 0);
    pid_t parent = getpid();
    pid_t writer = fork();
    MUST(writer >= 0);
    if (writer == 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/mem", (int)parent);
        int fd = open(path, O_RDWR | O_CLOEXEC);
        MUST(fd >= 0);
        close(way[1]);
        static uint64_t last[GIVEN];
        uint64_t random = given.seed, serial = 0;
        struct pollfd end = {.fd = way[0], .events = POLLIN};
        for (int over = 0; !over;) {
            over = poll(&end, 1, 0) != 0;
            for (size_t i = 0; i < GIVEN; i++) {
                size_t page = over ? i : below(&random, GIVEN);
                unsigned char *at = buffer + page * PAGE + 8;
                uint64_t found = 0;
                transfer(parent, fd, &found, at, 0, by_call);
                if (last[page] != 0 && found != last[page])
                    mismatch(at, last[page], found, "a word written from outside");
                last[page] = found = mix(++serial) | 1;
                transfer(parent, fd, &found, at, 1, by_call);
            }
        }
        _exit(0);
    }
    close(way[0]);
    double until = now() + given.seconds;
    while (now() < until) churn();
    MUST(write(way[1], "", 1) == 1);
    int status;
    MUST(waitpid(writer, &status, 0) == writer && WIFEXITED(status));
    if (WEXITSTATUS(status) != 0) die("the writer ended with %d", WEXITSTATUS(status));
    close(way[1]);
}

/* Memory that the kernel keeps out of swap itself: droppable and secret. Contents are as they were,
 * or (droppable) gone. */
static void special(void) {
    int fd = (int)syscall(447, 0);
    if (fd >= 0) {
        MUST(ftruncate(fd, 64 * PAGE) == 0);
        unsigned char *secret = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (secret != MAP_FAILED) {
            for (size_t page = 0; page < 64; page++) fill_page(secret + page * PAGE, key(page));
            churn();
            for (size_t page = 0; page < 64; page++)
                check_page(secret + page * PAGE, key(page), "secret memory");
            munmap(secret, 64 * PAGE);
        }
        close(fd);
    }
    unsigned char *droppable =
        mmap(NULL, 4ul << 20, PROT_READ | PROT_WRITE, 0x08 | MAP_ANONYMOUS, -1, 0);
    if (droppable == MAP_FAILED) return;
    for (size_t page = 0; page < 1024; page++) fill_page(droppable + page * PAGE, key(page));
    churn();
    for (size_t page = 0; page < 1024; page++) {
        uint64_t word = *(volatile uint64_t *)(droppable + page * PAGE + 2048);
        if (word != 0 && word != word_of(key(page), 256))
            mismatch(droppable + page * PAGE, word_of(key(page), 256), word, "droppable memory");
    }
    munmap(droppable, 4ul << 20);
}

/* Another process gives advice on the pages. */
static void advised_from_outside(void) {
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    MUST(self >= 0);
    pid_t other = fork();
    MUST(other >= 0);
    if (other == 0) {
        static const int kinds[] = {20 /* COLD */, 21 /* PAGEOUT */, 3 /* WILLNEED */,
                                    25 /* COLLAPSE */};
        uint64_t random = given.seed;
        for (;;) {
            size_t page = below(&random, GIVEN);
            struct iovec part = {buffer + page * PAGE, (1 + below(&random, GIVEN - page)) * PAGE};
            syscall(440, self, &part, 1ul, kinds[below(&random, 4)], 0);
        }
    }
    double until = now() + given.seconds;
    while (now() < until) {
        churn();
        for (size_t page = 0; page < GIVEN; page++)
            check_page(buffer + page * PAGE, key(page), "a page that others give advice on");
    }
    kill(other, 9);
    waitpid(other, NULL, 0);
    close(self);
}

int main(int count, char **words) {
    given = parse(count, words, "vmsplice");
    const char *mode = given.mode;
    /* Before there is much to manage: one made past libc is found when management begins. */
    if (!strncmp(mode, "uring", 5) && ring_open() < 0) {
        printf("no io_uring\n");
        return ok("references", mode);
    }
    arena = map(given.pages * PAGE);
    buffer = map(GIVEN * PAGE);
    back = map(GIVEN * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 0));
    double until = now() + given.seconds;
    do {
        round_now++;
        fill_given();
        if (!strcmp(mode, "tcp"))
            through_tcp();
        else if (!strcmp(mode, "udp"))
            through_udp();
        else if (!strcmp(mode, "uring") || !strcmp(mode, "uring-bare"))
            through_ring(0);
        else if (!strcmp(mode, "uring-fixed"))
            through_ring(1);
        else if (!strcmp(mode, "mem") || !strcmp(mode, "writev"))
            written_from_outside();
        else if (!strcmp(mode, "special"))
            special();
        else if (!strcmp(mode, "advised"))
            advised_from_outside();
        else
            through_pipe();
    } while (now() < until);
    printf("%llu rounds, %zu of the pages given were out; %zu sends, %zu of them copied by the "
           "kernel; %zu wrong past libc\n",
           (unsigned long long)round_now, evicted, notified, copied, wrong_raw);
    return ok("references", mode);
}
