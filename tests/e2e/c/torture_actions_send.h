/* Actions of torture.c by which others read or write pages of an area: a pipe and a TCP connection
 * that hold references to them (MODE sends alone: from the first such call on, the engine goes
 * another way), and other processes. */
#ifndef SWAPTIDE_TEST_TORTURE_ACTIONS_SEND_H
#define SWAPTIDE_TEST_TORTURE_ACTIONS_SEND_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#ifndef SO_ZEROCOPY
#define SO_ZEROCOPY 60
#define MSG_ZEROCOPY 0x4000000
#endif

static int sends;
static __thread int connection[2];

static void connect_once(void) {
    if (connection[0] != 0) return;
    int one = 1, room = 4 << 20, listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    MUST(bind(listening, (void *)&at, sizeof at) == 0 && listen(listening, 1) == 0 &&
         getsockname(listening, (void *)&at, &len) == 0);
    connection[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(setsockopt(connection[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    MUST(connect(connection[0], (void *)&at, sizeof at) == 0 &&
         (connection[1] = accept(listening, NULL, NULL)) >= 0);
    MUST(setsockopt(connection[0], SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0);
    close(listening);
}

/* Has the pages go out, and other contents come into frames. */
static void stir(struct thread *self, struct area *area, size_t from, size_t count) {
    madvise(at_page(area, from), count * PAGE, 21 /* PAGEOUT */);
    struct area *other = &self->area[below(&self->random, AREAS)];
    if (other == area) return;
    open_area(self, other);
    for (size_t n = 0; n < 256; n++)
        verify_page(self, other, below(&self->random, other->pages),
                    "page read while others are sent");
}

static void verify_sent(struct thread *self, struct area *area, size_t from, size_t bytes,
                        const char *what) {
    for (size_t at = 0; at < bytes / 8; at++) {
        uint64_t expected = expected_of(&area->page[from + at / WORDS], at % WORDS),
                 found = ((uint64_t *)self->buffer)[at];
        if (found == expected) continue;
        whose(found);
        tell(area, from + at / WORDS);
        mismatch(self->buffer + at * 8, expected, found, what);
    }
}

static void receive(struct thread *self, int fd, size_t bytes) {
    for (size_t have = 0; have < bytes;) {
        ssize_t n = read(fd, self->buffer + have, bytes - have);
        MUST(n > 0);
        have += (size_t)n;
    }
}

/* Pages with contents that are certain. */
static size_t certain_run(struct thread *self, struct area *area, size_t *from) {
    size_t count = some_run(self, area, from, BUFFER);
    for (size_t page = *from; page < *from + count; page++)
        if (area->page[page].state == LAZY) write_page(self, area, page);
    return count;
}

static void by_reference(struct thread *self, struct area *area) {
    size_t from, count = certain_run(self, area, &from);
    if (below(&self->random, 2) == 0) {
        int ends[2];
        MUST(pipe2(ends, O_CLOEXEC) == 0);
        fcntl(ends[1], F_SETPIPE_SZ, BUFFER * PAGE);
        struct iovec part = {at_page(area, from), count * PAGE};
        ssize_t in = vmsplice(ends[1], &part, 1, SPLICE_F_NONBLOCK);
        MUST(in > 0 || errno == EAGAIN);
        note(self, area, "spliced", from, count);
        stir(self, area, from, count);
        if (in > 0) {
            receive(self, ends[0], (size_t)in);
            verify_sent(self, area, from, (size_t)in, "page from a pipe");
        }
        close(ends[0]);
        close(ends[1]);
        return;
    }
    connect_once();
    ssize_t out =
        send(connection[0], at_page(area, from), count * PAGE, MSG_ZEROCOPY | MSG_DONTWAIT);
    note(self, area, "sent", from, count);
    stir(self, area, from, count);
    if (out > 0) {
        receive(self, connection[1], (size_t)out);
        verify_sent(self, area, from, (size_t)out, "page from a connection");
    }
    char control[128];
    struct msghdr told = {.msg_control = control, .msg_controllen = sizeof control};
    while (recvmsg(connection[0], &told, MSG_ERRQUEUE | MSG_DONTWAIT) >= 0)
        told.msg_controllen = sizeof control;
}

/* Another process reads pages of an area, and writes them to another place of this one. */
static void by_others(struct thread *self, struct area *area) {
    if (atomic_fetch_add(&children, 1) >= CHILDREN) {
        atomic_fetch_sub(&children, 1);
        return;
    }
    size_t from, count = certain_run(self, area, &from), bytes = count * PAGE;
    pid_t parent = getpid();
    fflush(stdout);
    note(self, area, "read by another process", from, count);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        unsigned char *own = map(bytes);
        struct iovec mine = {own, bytes}, theirs = {at_page(area, from), bytes},
                     back = {self->buffer, bytes};
        MUST(process_vm_readv(parent, &mine, 1, &theirs, 1, 0) == (ssize_t)bytes);
        MUST(process_vm_writev(parent, &mine, 1, &back, 1, 0) == (ssize_t)bytes);
        _exit(0);
    }
    stir(self, area, from, count);
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (status != 0) die("a reader ended with status %x", (unsigned)status);
    atomic_fetch_sub(&children, 1);
    verify_sent(self, area, from, bytes, "page that another process wrote");
}
#endif
