/* What a program that means harm does to its supervisor, or to the daemon, by the socket and by the
 * shared segment. Modes:
 *     deputy VICTIM    writes the number of a process into a free slot and counts that swap space
 *                      is out (--strict kills its members)
 *     mirror           gives area 0 a mirror that is not there, then every other number
 *     truncate         cuts the segment
 *     maps PROGRAM     asks for its own list of mappings, and is a set-uid program when the answer
 *                      comes
 *     requests N       N requests from the wrong process, half, long, with descriptors, never sent,
 *                      over and over
 *     scribble SECONDS writes random words all over the segment
 *     inject MB        asks for each failure that tests can have, and reads shared memory that is
 *                      out meanwhile
 *     ask SOCKET WORD...  asks at another run's socket (its own for -), and says what it got. WORD:
 *                      the request's letter and the number of bytes behind it
 *     fill MB          writes incompressible memory beyond its limit on the size of files
 *     lock MB SECONDS  locks memory and waits
 *     follow PROGRAM   asks that its fork be followed, and executes a copy of this program
 *                      instead, as `begun`
 *     begun             forks, and sees whether its child begins where it should
 * The offsets in the segment are given by SEGMENT_* in the environment (see test_security.py).
 */
#include "common.h"
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

static const char *socket_name;

static int connected(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(socket_name);
    if (length >= sizeof address.sun_path) length = sizeof address.sun_path - 1;
    memcpy(address.sun_path + 1, socket_name, length);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (void *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + length))
        return -1;
    struct timeval timeout = {3, 0};
    setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof timeout);
    return s;
}

/* The descriptor of an answer; -1 where there is none. */
static int answer(int s) {
    char bytes[64], control[64];
    struct iovec vector = {bytes, sizeof bytes};
    struct msghdr header = {.msg_iov = &vector,
                            .msg_iovlen = 1,
                            .msg_control = control,
                            .msg_controllen = sizeof control};
    if (recvmsg(s, &header, MSG_CMSG_CLOEXEC) < 1 || !CMSG_FIRSTHDR(&header)) return -1;
    return *(int *)CMSG_DATA(CMSG_FIRSTHDR(&header));
}

static int asked(const char *request, size_t length) {
    int s = connected();
    if (s < 0) return -1;
    int fd = send(s, request, length, MSG_NOSIGNAL) == (ssize_t)length ? answer(s) : -1;
    close(s);
    return fd;
}

/* One request, as large as it has to be and with a descriptor: nothing is wrong with it. */
static const char *outcome(const char *word) {
    char request[64] = {word[0]}, control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec vector = {request, 1 + strtoul(word + 1, NULL, 10)};
    MUST(vector.iov_len <= sizeof request);
    struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), s = connected();
    MUST(null >= 0);
    if (s < 0) return "no socket";
    if (strchr("HJK", word[0])) {
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        struct cmsghdr *first = CMSG_FIRSTHDR(&header);
        *first = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(first), &null, sizeof null);
    }
    if (sendmsg(s, &header, MSG_NOSIGNAL) < 0) return "refused";
    ssize_t got = recv(s, request, sizeof request, 0);
    int is_held = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    close(s);
    close(null);
    return got > 0 ? "given" : is_held ? "held" : "refused";
}

static char *segment(size_t *length) {
    int fd = asked("S", 1);
    struct stat found;
    if (fd < 0 || fstat(fd, &found)) die("the supervisor gives no segment");
    *length = found.st_size;
    char *at = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) die("mmap: %s", strerror(errno));
    return at;
}

static size_t offset(const char *name) {
    const char *text = getenv(name);
    if (!text) die("%s is not set", name);
    return strtoul(text, NULL, 0);
}

static uint32_t *word(char *at, size_t place) {
    return (uint32_t *)(at + place);
}

/* The slot in which a number stands. */
static size_t slot_of(char *at, uint32_t pid) {
    size_t first = offset("SEGMENT_PROCS"), size = offset("SEGMENT_SLOT");
    for (size_t slot = first; slot < first + 512 * size; slot += size)
        if (*word(at, slot) == pid) return slot;
    return 0;
}

static void drop_privileges(void) {
    if (getuid() == 0 && (setgroups(0, NULL) || setgid(65534) || setuid(65534)))
        die("setuid: %s", strerror(errno));
}

static int deputy(uint32_t victim) {
    drop_privileges();
    usleep(200000);
    size_t length, full = offset("SEGMENT_SWAP_FULL");
    char *at = segment(&length);
    size_t own = slot_of(at, getpid());
    if (!own) die("it has no slot");
    /* A free slot, below the last one that was ever taken. */
    size_t end = offset("SEGMENT_SLOTS_END"), next = own + 8 * offset("SEGMENT_SLOT");
    if (*word(at, end) < 16) *word(at, end) = 16;
    *word(at, next + 12) = 0;
    *word(at, next) = victim;
    *word(at, next + 4) = 1;
    for (int i = 0; i < 2500; i++) {
        __atomic_fetch_add((uint64_t *)(at + own + full), 1, __ATOMIC_RELAXED);
        __atomic_fetch_add((uint64_t *)(at + next + full), 1, __ATOMIC_RELAXED);
        usleep(1000);
    }
    puts("OK deputy");
    return 0;
}

static int mirror(void) {
    drop_privileges();
    usleep(200000);
    size_t length, place = offset("SEGMENT_MIRROR");
    char *at = segment(&length);
    uint32_t before = *word(at, place);
    pid_t parent = getppid();
    for (uint32_t lie = 17; lie < 2000; lie += 7) {
        *word(at, place) = lie == 24 ? 100 : lie;
        usleep(2000);
    }
    *word(at, place) = UINT32_MAX;
    usleep(500000);
    *word(at, place) = before;
    if (getppid() != parent) die("the supervisor is gone");
    puts("OK mirror");
    return 0;
}

static int cut(void) {
    usleep(200000);
    int fd = asked("S", 1);
    if (fd < 0) die("the supervisor gives no segment");
    if (ftruncate(fd, 0) == 0) die("the segment was cut");
    if (ftruncate(fd, 1l << 40) == 0) die("the segment was made longer");
    puts("OK truncate");
    return 0;
}

static int maps(const char *program) {
    setvbuf(stdout, NULL, _IONBF, 0);
    drop_privileges();
    usleep(200000);
    int hold[2], s = connected();
    pid_t self = getpid();
    if (s < 0 || pipe(hold)) die("connect: %s", strerror(errno));
    fcntl(s, F_SETFD, 0);
    fcntl(hold[1], F_SETFD, FD_CLOEXEC);
    if (fork() == 0) {
        usleep(300000);
        send(s, "M", 1, MSG_NOSIGNAL);
        int fd = answer(s);
        char text[400] = "";
        ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (n > 0)
            printf("FAILED: the supervisor gives %.80s\n", text);
        else
            puts("OK maps");
        kill(self, SIGKILL);
        _exit(0);
    }
    dup2(hold[0], 0);
    int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    dup2(null, 2);
    execl(program, program, "root", "-c", "true", NULL);
    return 2;
}

/* As `maps`, but this process itself sends the request right before it executes the program. */
static int race(const char *program, int rounds) {
    setvbuf(stdout, NULL, _IONBF, 0);
    drop_privileges();
    usleep(200000);
    int seen = 0;
    for (int i = 0; i < rounds; i++) {
        int pair[2], hold[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) || pipe(hold)) die("socketpair");
        int s = connected();
        if (s < 0) die("connect: %s", strerror(errno));
        pid_t child = fork();
        if (child == 0) {
            int own = connected();
            if (own < 0) _exit(0);
            dup2(own, s);
            fcntl(s, F_SETFD, 0);
            /* Its parent has the connection too. */
            union {
                char bytes[CMSG_SPACE(sizeof(int))];
                struct cmsghdr align;
            } control = {0};
            struct iovec vector = {"x", 1};
            struct msghdr header = {.msg_iov = &vector,
                                    .msg_iovlen = 1,
                                    .msg_control = control.bytes,
                                    .msg_controllen = sizeof control};
            struct cmsghdr *first = CMSG_FIRSTHDR(&header);
            *first = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
            memcpy(CMSG_DATA(first), &own, sizeof own);
            sendmsg(pair[1], &header, 0);
            dup2(hold[0], 0);
            int null = open("/dev/null", O_WRONLY);
            dup2(null, 1);
            dup2(null, 2);
            send(own, i % 2 ? "M" : "P", 1, MSG_NOSIGNAL);
            execl(program, program, "root", "-c", "true", NULL);
            _exit(2);
        }
        close(pair[1]);
        int theirs = answer(pair[0]);
        int fd = theirs < 0 ? -1 : answer(theirs);
        char text[4096];
        ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        text[n > 0 ? n : 0] = 0;
        if (i % 2 && n > 0 && strstr(text, program)) seen++;
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        for (int *at = (int[]){pair[0], hold[0], hold[1], s, theirs, fd, -2}; *at != -2; at++)
            if (*at >= 0) close(*at);
    }
    if (seen) die("%d of %d lists of mappings were those of %s", seen, rounds, program);
    puts("OK race");
    return 0;
}

static int requests(int rounds, uint64_t seed) {
    drop_privileges();
    usleep(100000);
    static const char kinds[] = "SAUHPMTIFRJGV?\0x";
    int files[2] = {open("/dev/null", O_RDWR), open("/proc/self/status", O_RDONLY)};
    int silent[8];
    memset(silent, -1, sizeof silent);
    for (int i = 0; i < rounds; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint32_t chance = seed >> 33;
        char message[64];
        for (size_t b = 0; b < sizeof message; b++) message[b] = seed >> (b % 8 * 8) ^ b;
        message[0] = kinds[chance % (sizeof kinds - 1)];
        size_t length = chance / 16 % 3 == 0        ? 1 + chance / 64 % 40
                        : strchr("A", message[0])   ? 2
                        : strchr("HRG", message[0]) ? 9
                        : strchr("VF", message[0])  ? 21
                                                    : 1;
        int s = connected();
        if (s < 0) die("the supervisor does not answer: %s", strerror(errno));
        struct timeval soon = {0, 20000};
        setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon);
        union {
            char bytes[CMSG_SPACE(2 * sizeof(int))];
            struct cmsghdr align;
        } control = {0};
        int count = chance / 128 % 3;
        struct iovec vector = {message, length};
        struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1};
        if (count) {
            header.msg_control = control.bytes;
            header.msg_controllen = CMSG_SPACE(count * sizeof(int));
            struct cmsghdr *first = CMSG_FIRSTHDR(&header);
            *first = (struct cmsghdr){CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
            memcpy(CMSG_DATA(first), files, count * sizeof(int));
        }
        switch (chance / 1024 % 4) {
        case 0: /* never */
            if (silent[i % 8] >= 0) close(silent[i % 8]);
            silent[i % 8] = s;
            continue;
        case 1: /* by another process */
            if (fork() == 0) {
                sendmsg(s, &header, MSG_NOSIGNAL);
                int fd = answer(s);
                _exit(fd >= 0 && strchr("PMTU", message[0]) ? 1 : 0);
            }
            int status;
            wait(&status);
            if (status)
                die("a request of another process than the one that connected was answered: %c",
                    message[0]);
            break;
        default:
            sendmsg(s, &header, MSG_NOSIGNAL);
            int fd = answer(s);
            if (fd >= 0) close(fd);
        }
        close(s);
    }
    puts("OK requests");
    return 0;
}

static int scribble(double seconds, uint64_t seed) {
    drop_privileges();
    usleep(200000);
    size_t length, procs = offset("SEGMENT_PROCS"), size = offset("SEGMENT_SLOT"),
                   groups = offset("SEGMENT_GROUPS");
    char *at = segment(&length);
    /* Its parent is the run's supervisor; its own engine, if it has one, is its own matter. */
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    uint64_t words = 0;
    do {
        for (int i = 0; i < 64; i++, words++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            size_t from, span;
            switch (seed >> 60 & 3) {
            case 0: from = 0, span = offset("SEGMENT_HEADER"); break;
            case 1: from = procs, span = 16 * size; break;
            case 2: from = groups, span = 64 * 64 + 4096; break;
            default: from = offset("SEGMENT_HEADER"), span = 8192;
            }
            uint32_t value = seed >> 20;
            if (seed >> 57 & 1)
                value = 1u << (value & 31);
            else if (seed >> 58 & 1)
                value &= 127;
            else if (seed >> 59 & 1)
                value = offset("VICTIM");
            *word(at, from + (seed >> 24) % span / 4 * 4) = value;
        }
        usleep(1000);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec + now.tv_nsec / 1e9 - start.tv_sec - start.tv_nsec / 1e9 < seconds);
    printf("OK scribble: %lu words\n", (unsigned long)words);
    return 0;
}

/* Engines and the pager of shared memory go by what the run was started with. */
static int inject(size_t megabytes, uint64_t seed) {
    drop_privileges();
    size_t length, pages = megabytes << 8;
    uint32_t *fail = word(segment(&length), offset("SEGMENT_FAIL"));
    volatile uint64_t *region = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(region != MAP_FAILED);
    for (size_t page = 0; page < pages; page++)
        for (size_t at = 0; at < WORDS; at++)
            region[page * WORDS + at] = word_of(key_of(seed, page, 1), at);
    for (uint32_t number = 16; number > 0; number--) {
        __atomic_store_n(fail, number, __ATOMIC_SEQ_CST);
        for (size_t page = number - 1; page < pages; page += 16)
            if (region[page * WORDS + 7] != word_of(key_of(seed, page, 1), 7))
                die("page %zu is wrong", page);
    }
    puts("OK inject");
    return 0;
}

static int fill(size_t megabytes, int ignore) {
    struct rlimit limit = {1 << 20, 1 << 20};
    MUST(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    if (ignore) signal(SIGXFSZ, SIG_IGN);
    size_t length = megabytes << 20;
    uint64_t *words =
                 mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
             x = 88172645463325252u;
    MUST(words != MAP_FAILED);
    for (size_t i = 0; i < length / 8; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        words[i] = x;
    }
    sleep(1);
    x = 88172645463325252u;
    for (size_t i = 0; i < length / 8; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        if (words[i] != x) mismatch(words + i, x, words[i], "after writes that were too far");
    }
    puts("OK fill");
    return 0;
}

/* Where the child of `begun` must not begin, at a well-known address: code, and a stack
 * behind it. */
#define ELSEWHERE 0x200000000ul
#define ELSEWHERE_STACK (ELSEWHERE + (1 << 16) - 256)

static int follow(const char *program) {
    setvbuf(stdout, NULL, _IONBF, 0);
    drop_privileges();
    unsigned char request[21] = {'F'};
    uint32_t tid = gettid();
    uint64_t places[2] = {ELSEWHERE, ELSEWHERE_STACK};
    memcpy(request + 1, &tid, 4);
    memcpy(request + 5, places, 16);
    int s = connected();
    if (s < 0 || send(s, request, sizeof request, MSG_NOSIGNAL) != sizeof request)
        die("connect: %s", strerror(errno));
    char reply[8];
    puts(recv(s, reply, sizeof reply, 0) == 1 ? "followed" : "refused");
    /* A process whose connection ends is released. */
    fcntl(s, F_SETFD, 0);
    execl(program, program, "begun", NULL);
    return 2;
}

static void begun_elsewhere(void) {
    static const char *const said[] = {"FAILED: a child began elsewhere, as root\n",
                                       "FAILED: a child began elsewhere\n"};
    const char *text = said[geteuid() != 0];
    _exit(write(1, text, strlen(text)) < 0 ? 66 : 67);
}

static int begun(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    unsigned char *at = mmap((void *)ELSEWHERE, 1 << 16, PROT_READ | PROT_WRITE | PROT_EXEC,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    MUST(at == (void *)ELSEWHERE);
    /* mov rax, begun_elsewhere; jmp rax. The stack is eight bytes off, as behind a call. */
    uint64_t target = (uintptr_t)begun_elsewhere;
    memcpy(at, "\x48\xb8", 2);
    memcpy(at + 2, &target, 8);
    memcpy(at + 10, "\xff\xe0", 2);
    printf("begun: user %d, effective %d\n", (int)getuid(), (int)geteuid());
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) _exit(0);
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (status) die("the child ended with %x", status);
    puts("OK follow");
    return 0;
}

int main(int count, char **words) {
    if (count < 2) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *mode = words[1], *first = count > 2 ? words[2] : "0",
               *second = count > 3 ? words[3] : "1";
    socket_name = getenv("SWAPTIDE_SOCKET");
    if (!strcmp(mode, "ask")) {
        if (strcmp(first, "-")) socket_name = first;
        for (int i = 3; i < count; i++) printf("%c %s\n", words[i][0], outcome(words[i]));
        return 0;
    }
    if (!strcmp(mode, "fill")) return fill(atoi(first), atoi(second));
    if (!strcmp(mode, "lock")) {
        size_t length = (size_t)atoi(first) << 20;
        char *at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        MUST(at != MAP_FAILED && mlock(at, length) == 0);
        memset(at, 1, length);
        usleep(atof(second) * 1e6);
        munmap(at, length);
        sleep(4);
        puts("OK lock");
        return 0;
    }
    if (!strcmp(mode, "begun")) return begun();
    if (!socket_name) die("not under swaptide");
    if (!strcmp(mode, "deputy")) return deputy(atoi(first));
    if (!strcmp(mode, "mirror")) return mirror();
    if (!strcmp(mode, "truncate")) return cut();
    if (!strcmp(mode, "maps")) return maps(first);
    if (!strcmp(mode, "follow")) return follow(first);
    if (!strcmp(mode, "race")) return race(first, atoi(second));
    if (!strcmp(mode, "requests")) return requests(atoi(first), atoi(second));
    if (!strcmp(mode, "inject")) return inject(atoi(first), atoi(second));
    if (!strcmp(mode, "scribble")) return scribble(atof(first), atoi(second));
    return 2;
}
