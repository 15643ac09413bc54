/* System calls that send, wait for others or share: sockets, queues, semaphores, futexes, keys. See
 * calls.h. */
#include "calls.h"
#include <arpa/inet.h>
#include <linux/errqueue.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/un.h>

#define DATA (5 * PAGE + 100)

static void close_both(const int *two) {
    close(two[0]);
    close(two[1]);
}

/* Two ends of a TCP connection over loopback, made with all addresses out. */
static void connected(int *ends) {
    struct sockaddr_in *at = buffer(sizeof *at), *peer = buffer(sizeof *peer),
                       *name = buffer(sizeof *name);
    socklen_t *size = buffer(sizeof *size);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(listener >= 0 && ends[0] >= 0);
    at->sin_family = AF_INET;
    at->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    out();
    answer("bind", bind(listener, (struct sockaddr *)at, sizeof *at));
    MUST(listen(listener, 1) == 0);
    *size = sizeof *name;
    out();
    answer("getsockname", getsockname(listener, (struct sockaddr *)name, size));
    say(" size=%u", *size);
    out();
    answer("connect", connect(ends[0], (struct sockaddr *)name, sizeof *name));
    *size = sizeof *peer;
    out();
    ends[1] = (int)works("accept4", accept4(listener, (struct sockaddr *)peer, size, SOCK_CLOEXEC));
    *size = sizeof *name;
    out();
    answer("getpeername", getpeername(ends[1], (struct sockaddr *)name, size));
    say(" same=%d",
        name->sin_port == peer->sin_port && name->sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    close(listener);
}

static size_t receive_all(int fd, unsigned char *to, size_t size) {
    size_t done = 0;
    while (done < size) {
        ssize_t got = recv(fd, to + done, size - done, 0);
        MUST(got > 0);
        done += (size_t)got;
    }
    return done;
}

TEST(tcp) {
    int ends[2];
    connected(ends);
    unsigned char *from = buffer(DATA), *to = buffer(DATA);
    fill(from, DATA, 1);
    out();
    answer("send", send(ends[0], from, DATA, 0));
    out();
    say(" got=%zu", receive_all(ends[1], to, DATA));
    say(" same=%d", is_filled(to, DATA, 1));
    fill(from, DATA, 2);
    out();
    answer("write", write(ends[1], from, DATA));
    out();
    say(" got=%zu", receive_all(ends[0], to, DATA));
    say(" same=%d", is_filled(to, DATA, 2));
    close_both(ends);
}

TEST(accept) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in *name = buffer(sizeof *name), *peer = buffer(sizeof *peer);
    socklen_t *size = buffer(sizeof *size);
    name->sin_family = AF_INET;
    name->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    out();
    answer("bind", bind(listener, (struct sockaddr *)name, sizeof *name));
    MUST(listen(listener, 1) == 0);
    *size = sizeof *name;
    MUST(getsockname(listener, (struct sockaddr *)name, size) == 0);
    MUST(connect(client, (struct sockaddr *)name, sizeof *name) == 0);
    *size = sizeof *peer;
    out();
    int server = (int)works("accept", accept(listener, (struct sockaddr *)peer, size));
    say(" size=%u loopback=%d", *size, peer->sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    close(server), close(client), close(listener);
}

/* The socket has the pages themselves until the other end has read them. */
TEST(zerocopy) {
    int ends[2], on = 1;
    connected(ends);
    size_t size = 16 * PAGE;
    unsigned char *from = buffer_aligned(size, PAGE), *to = buffer_aligned(size, PAGE);
    fill(from, size, 1);
    answer("SO_ZEROCOPY", setsockopt(ends[0], SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on));
    out();
    answer("send", send(ends[0], from, size, MSG_ZEROCOPY));
    out();
    fill(to, size, 9);
    out();
    say(" got=%zu", receive_all(ends[1], to, size));
    say(" same=%d", is_filled(to, size, 1));
    say(" kept=%d", is_filled(from, size, 1));
    struct msghdr *message = buffer(sizeof *message);
    unsigned char *control = buffer(200);
    message->msg_control = control, message->msg_controllen = 200;
    struct pollfd fds = {ends[0], 0, 0};
    MUST(poll(&fds, 1, 5000) == 1);
    out();
    works("completion", recvmsg(ends[0], message, MSG_ERRQUEUE));
    close_both(ends);
}

TEST(messages) {
    int pair[2];
    int *made = buffer(2 * sizeof *made);
    out();
    answer("socketpair", syscall(SYS_socketpair, AF_UNIX, SOCK_DGRAM, 0, made));
    pair[0] = made[0], pair[1] = made[1];
    int big = 1 << 20;
    for (int i = 0; i < 2; i++)
        MUST(setsockopt(pair[i], SOL_SOCKET, SO_SNDBUF, &big, sizeof big) == 0);
    unsigned char *from = buffer(DATA), *to = buffer(DATA),
                  *control = buffer(CMSG_SPACE(sizeof(int))), *control2 = buffer(300);
    struct msghdr *message = buffer(sizeof *message), *got = buffer(sizeof *got);
    struct iovec *vector = buffer(2 * sizeof *vector), *back = buffer(2 * sizeof *back);
    vector[0] = (struct iovec){from, PAGE}, vector[1] = (struct iovec){from + PAGE, DATA - PAGE};
    back[0] = (struct iovec){to, DATA - 8}, back[1] = (struct iovec){to + DATA - 8, 8};
    message->msg_iov = vector, message->msg_iovlen = 2, message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(sizeof(int));
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS,
    header->cmsg_len = CMSG_LEN(sizeof(int));
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    memcpy(CMSG_DATA(header), &null, sizeof null);
    fill(from, DATA, 1);
    out();
    answer("sendmsg", sendmsg(pair[0], message, 0));
    got->msg_iov = back, got->msg_iovlen = 2, got->msg_control = control2,
    got->msg_controllen = 300;
    out();
    answer("recvmsg", recvmsg(pair[1], got, MSG_CMSG_CLOEXEC));
    header = CMSG_FIRSTHDR(got);
    int passed = -1;
    if (header != NULL) memcpy(&passed, CMSG_DATA(header), sizeof passed);
    say(" same=%d passed=%d control=%zu", is_filled(to, DATA, 1), fcntl(passed, F_GETFD) >= 0,
        got->msg_controllen);
    close(passed);
    close(null);
    /* Several at once. */
    struct mmsghdr *many = buffer(3 * sizeof *many), *more = buffer(3 * sizeof *more);
    struct timespec *limit = buffer(sizeof *limit);
    limit->tv_sec = 5;
    for (int i = 0; i < 3; i++) {
        many[i].msg_hdr.msg_iov = vector, many[i].msg_hdr.msg_iovlen = 2;
        more[i].msg_hdr.msg_iov = back, more[i].msg_hdr.msg_iovlen = 2;
    }
    fill(from, DATA, 2);
    out();
    answer("sendmmsg", sendmmsg(pair[0], many, 3, 0));
    say(" %u %u %u", many[0].msg_len, many[1].msg_len, many[2].msg_len);
    out();
    answer("recvmmsg", recvmmsg(pair[1], more, 3, 0, limit));
    say(" %u %u %u same=%d", more[0].msg_len, more[1].msg_len, more[2].msg_len,
        is_filled(to, DATA, 2));
    close_both(pair);
}

TEST(datagrams) {
    int one = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0),
        two = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in *at = buffer(sizeof *at), *sender = buffer(sizeof *sender);
    socklen_t *size = buffer(sizeof *size);
    at->sin_family = AF_INET;
    at->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    MUST(bind(two, (struct sockaddr *)at, sizeof *at) == 0);
    *size = sizeof *at;
    MUST(getsockname(two, (struct sockaddr *)at, size) == 0);
    unsigned char *from = buffer(9000), *to = buffer(9000);
    fill(from, 9000, 1);
    out();
    answer("sendto", sendto(one, from, 9000, 0, (struct sockaddr *)at, sizeof *at));
    *size = sizeof *sender;
    out();
    answer("recvfrom", recvfrom(two, to, 9000, 0, (struct sockaddr *)sender, size));
    say(" same=%d size=%u", is_filled(to, 9000, 1), *size);
    close(one), close(two);
    /* Netlink: the kernel answers with a list. */
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    struct {
        struct nlmsghdr header;
        struct rtgenmsg message;
    } *request = buffer(sizeof *request);
    request->header.nlmsg_len = sizeof *request, request->header.nlmsg_type = RTM_GETLINK;
    request->header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
    unsigned char *list = buffer(32768);
    out();
    answer("netlink", send(fd, request, sizeof *request, 0));
    out();
    works("list", recv(fd, list, 32768, 0));
    say(" type=%u", ((struct nlmsghdr *)list)->nlmsg_type);
    close(fd);
}

TEST(options) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), pair[2];
    int *value = buffer(sizeof *value);
    socklen_t *size = buffer(sizeof *size);
    *value = 1;
    out();
    answer("KEEPALIVE", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value, sizeof *value));
    *value = 0, *size = sizeof *value;
    out();
    answer("KEEPALIVE", getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, value, size));
    say(" %d", *value);
    struct linger *linger = buffer(sizeof *linger);
    linger->l_onoff = 1, linger->l_linger = 3;
    out();
    answer("LINGER", setsockopt(fd, SOL_SOCKET, SO_LINGER, linger, sizeof *linger));
    struct timeval *tv = buffer(sizeof *tv);
    tv->tv_sec = 2;
    out();
    answer("RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, tv, sizeof *tv));
    unsigned char *info = buffer(sizeof(struct tcp_info));
    *size = sizeof(struct tcp_info);
    out();
    answer("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, size));
    char *congestion = buffer(64);
    *size = 64;
    out();
    answer("CONGESTION", getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, size));
    say(" some=%d", congestion[0] != 0);
    struct sock_filter *code = buffer(sizeof *code);
    *code = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, 0xffff);
    struct sock_fprog *program = buffer(sizeof *program);
    program->len = 1, program->filter = code;
    out();
    answer("ATTACH_FILTER", setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, program, sizeof *program));
    unsigned char *ip = buffer(40);
    *size = 40;
    out();
    answer("IP_OPTIONS", getsockopt(fd, IPPROTO_IP, IP_OPTIONS, ip, size));
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    struct ucred *credentials = buffer(sizeof *credentials);
    *size = sizeof *credentials;
    out();
    answer("PEERCRED", getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, credentials, size));
    say(" mine=%d", credentials->pid == getpid());
    close_both(pair);
    close(fd);
    struct sockaddr_un *name = buffer(sizeof *name);
    name->sun_family = AF_UNIX;
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    out();
    answer("bind_unix", bind(fd, (struct sockaddr *)name, sizeof(sa_family_t)));
    close(fd);
}

/* System V and POSIX queues */

TEST(msg) {
    int id = msgget(IPC_PRIVATE, IPC_CREAT | 0600);
    MUST(id >= 0);
    struct {
        long type;
        unsigned char data[5000];
    } *from = buffer(sizeof *from), *to = buffer(sizeof *to);
    from->type = 7;
    fill(from->data, 5000, 1);
    out();
    answer("msgsnd", msgsnd(id, from, 5000, 0));
    out();
    answer("msgrcv", msgrcv(id, to, 5000, 7, 0));
    say(" type=%ld same=%d", to->type, is_filled(to->data, 5000, 1));
    struct msqid_ds *state = buffer(sizeof *state);
    out();
    answer("stat", msgctl(id, IPC_STAT, state));
    out();
    answer("set", msgctl(id, IPC_SET, state));
    MUST(msgctl(id, IPC_RMID, NULL) == 0);
}

TEST(sem) {
    int id = semget(IPC_PRIVATE, 3, IPC_CREAT | 0600);
    MUST(id >= 0);
    unsigned short *values = buffer(3 * sizeof *values), *got = buffer(3 * sizeof *got);
    values[0] = 1, values[1] = 2, values[2] = 3;
    out();
    answer("setall", semctl(id, 0, SETALL, values));
    struct sembuf *operations = buffer(2 * sizeof *operations);
    operations[0] = (struct sembuf){0, -1, 0}, operations[1] = (struct sembuf){2, 4, 0};
    struct timespec *limit = buffer(sizeof *limit);
    limit->tv_nsec = 1000000;
    out();
    answer("semop", semop(id, operations, 2));
    out();
    answer("semtimedop", semtimedop(id, operations, 2, limit));
    out();
    answer("getall", semctl(id, 0, GETALL, got));
    say(" %d %d %d", got[0], got[1], got[2]);
    struct semid_ds *state = buffer(sizeof *state);
    out();
    answer("stat", semctl(id, 0, IPC_STAT, state));
    say(" n=%lu", state->sem_nsems);
    MUST(semctl(id, 0, IPC_RMID) == 0);
}

TEST(mq) {
    char all[64];
    snprintf(all, sizeof all, "/calls-%d", getpid());
    char *name = text(all);
    struct mq_attr *attr = buffer(sizeof *attr), *old = buffer(sizeof *old);
    attr->mq_maxmsg = 3, attr->mq_msgsize = 6000;
    out();
    int fd = (int)works("mq_open", syscall(SYS_mq_open, name + 1, O_RDWR | O_CREAT, 0600, attr));
    if (fd < 0) return;
    unsigned char *from = buffer(6000), *to = buffer(6000);
    struct timespec *limit = buffer(sizeof *limit);
    limit->tv_sec = time(NULL) + 60;
    unsigned *priority = buffer(sizeof *priority);
    fill(from, 6000, 1);
    out();
    answer("timedsend", syscall(SYS_mq_timedsend, fd, from, 6000, 5, limit));
    out();
    answer("timedreceive", syscall(SYS_mq_timedreceive, fd, to, 6000, priority, limit));
    say(" priority=%u same=%d", *priority, is_filled(to, 6000, 1));
    struct sigevent *event = buffer(sizeof *event);
    event->sigev_notify = SIGEV_NONE;
    out();
    answer("notify", syscall(SYS_mq_notify, fd, event));
    memset(attr, 0, sizeof *attr);
    attr->mq_flags = O_NONBLOCK;
    out();
    answer("getsetattr", syscall(SYS_mq_getsetattr, fd, attr, old));
    say(" most=%ld", old->mq_maxmsg);
    answer("empty", syscall(SYS_mq_timedreceive, fd, to, 6000, priority, NULL));
    close(fd);
    out();
    answer("unlink", syscall(SYS_mq_unlink, name + 1));
}

/* Futexes. The operations that write their word themselves are those of the program `futexes`. */

static uint32_t *volatile shared_word, *volatile second_word;
static atomic_int is_about_to_wait;

static void *wait_on_word(void *argument) {
    int command = (int)(intptr_t)argument;
    atomic_store(&is_about_to_wait, 1);
    long result = syscall(SYS_futex, shared_word, command, 1, NULL, NULL, FUTEX_BITSET_MATCH_ANY);
    return (void *)(intptr_t)(result == 0 ? 0 : errno);
}

static long wake_until_one(long number, void *word, long a, long b, void *c, long d) {
    /* Its waiter may not be there yet, and the word may go out between two tries. */
    for (int turn = 0; turn < 2000; turn++) {
        out();
        long result = syscall(number, word, a, b, c, d, 0);
        if (result != 0) return result;
        usleep(1000);
    }
    return 0;
}

TEST(futex) {
    uint32_t *word = buffer(4), *second = buffer(4);
    struct timespec *limit = buffer(sizeof *limit);
    *word = 1;
    limit->tv_nsec = 1000000;
    out();
    answer("late", syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 1, limit, NULL, 0));
    out();
    answer("differs", syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 2, limit, NULL, 0));
    out();
    answer("bitset", syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, 1, limit, NULL, 1));
    out();
    answer("nobody", syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0));
    shared_word = word, second_word = second;
    pthread_t thread;
    void *result;
    MUST(pthread_create(&thread, NULL, wait_on_word, (void *)(intptr_t)FUTEX_WAIT_PRIVATE) == 0);
    answer("wake", wake_until_one(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, 0));
    MUST(pthread_join(thread, &result) == 0);
    say(" waiter=%ld", (long)(intptr_t)result);
    MUST(pthread_create(&thread, NULL, wait_on_word, (void *)(intptr_t)FUTEX_WAIT_PRIVATE) == 0);
    /* Moves it to the second word, whose page is out, and wakes it there. */
    long moved = 0;
    for (int turn = 0; turn < 2000 && moved == 0; turn++) {
        out();
        moved = syscall(SYS_futex, word, FUTEX_CMP_REQUEUE_PRIVATE, 0, 1, second, 1);
        if (moved == 0) usleep(1000);
    }
    answer("requeue", moved);
    answer("wake", wake_until_one(SYS_futex, second, FUTEX_WAKE_PRIVATE, 1, NULL, 0));
    MUST(pthread_join(thread, &result) == 0);
    say(" waiter=%ld", (long)(intptr_t)result);
    /* Shared: the kernel looks for the page itself. */
    out();
    answer("shared_late", syscall(SYS_futex, word, FUTEX_WAIT, 1, limit, NULL, 0));
    MUST(pthread_create(&thread, NULL, wait_on_word, (void *)(intptr_t)FUTEX_WAIT) == 0);
    answer("shared_wake", wake_until_one(SYS_futex, word, FUTEX_WAKE, 1, NULL, 0));
    MUST(pthread_join(thread, &result) == 0);
    struct futex_waitv *several = buffer(2 * sizeof *several);
    several[0] = (struct futex_waitv){
        .val = 1, .uaddr = (uintptr_t)word, .flags = FUTEX_32 | FUTEX_PRIVATE_FLAG};
    several[1] = (struct futex_waitv){
        .val = 0, .uaddr = (uintptr_t)second, .flags = FUTEX_32 | FUTEX_PRIVATE_FLAG};
    clock_gettime(CLOCK_MONOTONIC, limit);
    out();
    answer("waitv", syscall(SYS_futex_waitv, several, 2, 0, limit, CLOCK_MONOTONIC));
    several[1].val = 9;
    out();
    answer("waitv", syscall(SYS_futex_waitv, several, 2, 0, limit, CLOCK_MONOTONIC));
    out();
    answer("futex_wait",
           syscall(455, word, 1, ~0u, FUTEX_32 | FUTEX_PRIVATE_FLAG, limit, CLOCK_MONOTONIC));
    out();
    answer("futex_wake", syscall(454, word, ~0u, 1, FUTEX_32 | FUTEX_PRIVATE_FLAG));
    several[1].val = 0;
    out();
    answer("futex_requeue", syscall(456, several, 0, 1, 1));
}

TEST(pthread_waits) {
    /* libc's own: the mutex and the condition are out while one waits. */
    pthread_mutex_t *mutex = buffer(sizeof *mutex);
    pthread_cond_t *condition = buffer(sizeof *condition);
    struct timespec *limit = buffer(sizeof *limit);
    MUST(pthread_mutex_init(mutex, NULL) == 0 && pthread_cond_init(condition, NULL) == 0);
    MUST(clock_gettime(CLOCK_REALTIME, limit) == 0);
    limit->tv_nsec += 3000000;
    if (limit->tv_nsec >= 1000000000) limit->tv_nsec -= 1000000000, limit->tv_sec++;
    MUST(pthread_mutex_lock(mutex) == 0);
    out();
    say(" %s", strerrorname_np(pthread_cond_timedwait(condition, mutex, limit)));
    out();
    MUST(pthread_mutex_unlock(mutex) == 0);
}

TEST(keys) {
    char *type = text("user"), *name = text("swaptide:calls"), *text_out = buffer(300);
    unsigned char *payload = buffer(1000), *got = buffer(1000);
    fill(payload, 1000, 1);
    out();
    long key = works(
        "add_key", syscall(SYS_add_key, type, name, payload, 1000, -2 /* the process's keyring */));
    out();
    works("request_key", syscall(SYS_request_key, type, name, NULL, 0));
    if (key < 0) return;
    out();
    answer("read", syscall(SYS_keyctl, 11 /* READ */, key, got, 1000, 0));
    say(" same=%d", is_filled(got, 1000, 1));
    fill(payload, 900, 2);
    out();
    answer("update", syscall(SYS_keyctl, 2 /* UPDATE */, key, payload, 900, 0));
    out();
    works("describe", syscall(SYS_keyctl, 6 /* DESCRIBE */, key, text_out, 300, 0));
    say(" same=%d", strstr(text_out, "swaptide:calls") != NULL);
    works("revoke", syscall(SYS_keyctl, 3 /* REVOKE */, key, 0, 0, 0));
}

int main(int count, char **words) {
    static const struct test tests[] = {
        T(tcp), T(accept), T(zerocopy), T(messages), T(datagrams),     T(options), T(msg),
        T(sem), T(mq),       T(futex),    T(pthread_waits), T(keys),
    };
    return run_tests(count, words, "calls_ipc", tests, sizeof tests / sizeof *tests);
}
