/* A file system of its own (FUSE) between two processes: the kernel copies between the server's
 * cold memory and the reader's, also by direct reads, whose pages it holds while the server takes
 * its time. Every page that is read is the one that the server has. Needs the right to mount.
 *
 * MODE: what is read into is
 *     private   the process's own memory
 *     shared    of a shared mapping, and the file is not open for direct I/O: the server says that
 *               it is read so
 *     detached  the same, of a file system that is mounted nowhere any more
 *     ring      of a shared mapping, and the file is open for direct I/O only as one that is
 *               registered with an io_uring */
#include "common.h"
#include "ring.h"
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>

enum { AT_ONCE = 16 };

static struct arguments given;

static void reply(int fd, const struct fuse_in_header *in, int error, const void *body,
                  size_t len) {
    struct fuse_out_header out = {
        .len = (uint32_t)(sizeof out + (error ? 0 : len)), .error = error, .unique = in->unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)(uintptr_t)body, len}};
    /* The answer to an interrupted request is not wanted. */
    if (writev(fd, parts, error || len == 0 ? 1 : 2) < 0 && errno != ENOENT)
        die("answering: %s", strerror(errno));
}

static struct fuse_attr attributes(uint64_t node) {
    struct fuse_attr attr = {.ino = node, .nlink = 1, .blksize = PAGE};
    attr.mode = node == 1 ? S_IFDIR | 0755 : S_IFREG | 0644;
    attr.size = node == 1 ? 0 : given.pages * PAGE;
    return attr;
}

static void serve(int fd) {
    unsigned char *arena = map(given.pages * PAGE), *requests = map(1ul << 20);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 7));
    uint64_t count = 0, slot = 0;
    for (;;) {
        /* Requests are read into cold memory, too. */
        unsigned char *request = requests + (slot++ % 7) * (128ul << 10);
        ssize_t n = read(fd, request, 128ul << 10);
        if (n < 0 && (errno == EINTR || errno == ENOENT)) continue;
        if (n <= 0) _exit(0);
        const struct fuse_in_header *in = (void *)request;
        const void *body = request + sizeof *in;
        switch (in->opcode) {
        case FUSE_INIT: {
            const struct fuse_init_in *init = body;
            struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                        .minor = init->minor < 31 ? init->minor : 31,
                                        .max_readahead = 0,
                                        .max_write = 64 << 10,
                                        .max_background = 16};
            reply(fd, in, 0, &out, sizeof out);
            break;
        }
        case FUSE_LOOKUP: {
            struct fuse_entry_out out = {
                .nodeid = 2, .attr = attributes(2), .entry_valid = 60, .attr_valid = 60};
            reply(fd, in, 0, &out, sizeof out);
            break;
        }
        case FUSE_GETATTR: {
            struct fuse_attr_out out = {.attr = attributes(in->nodeid), .attr_valid = 60};
            reply(fd, in, 0, &out, sizeof out);
            break;
        }
        case FUSE_OPEN: {
            struct fuse_open_out out = {.fh = 1, .open_flags = FOPEN_DIRECT_IO};
            reply(fd, in, 0, &out, sizeof out);
            break;
        }
        case FUSE_READ: {
            const struct fuse_read_in *read = body;
            if (++count % 8 == 0) usleep(30000);
            reply(fd, in, 0, arena + read->offset, read->size);
            break;
        }
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
        case FUSE_INTERRUPT: break;
        case FUSE_FLUSH:
        case FUSE_RELEASE: reply(fd, in, 0, NULL, 0); break;
        default: reply(fd, in, -ENOSYS, NULL, 0);
        }
    }
}

static unsigned char *into;
static _Atomic size_t out_while_read;
static _Atomic int reading, over;

static void *pushes_out(void *x) {
    int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    while (!over) {
        madvise(into, AT_ONCE * PAGE, MADV_PAGEOUT);
        uint64_t words[AT_ONCE];
        if (reading && map >= 0 &&
            pread(map, words, sizeof words, (off_t)((uintptr_t)into / PAGE * 8)) == sizeof words)
            for (size_t i = 0; i < AT_ONCE; i++) out_while_read += words[i] >> 63 == 0;
        usleep(500);
    }
    return x;
}

int main(int count, char **words) {
    given = parse(count, words, "private");
    int is_private = strcmp(given.mode, "private") == 0, by_ring = strcmp(given.mode, "ring") == 0;
    char dir[] = "/tmp/swaptide-fuse-XXXXXX", options[128], path[64];
    MUST(mkdtemp(dir));
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    MUST(fd >= 0);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    MUST(mount("swaptide-test", dir, "fuse", MS_NOSUID | MS_NODEV, options) == 0);
    pid_t server = fork();
    MUST(server >= 0);
    if (server == 0) serve(fd);
    close(fd);
    unsigned char *cold = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(cold + page * PAGE, key_of(given.seed, page, 9));
    snprintf(path, sizeof path, "%s/f", dir);
    int is_direct = is_private || by_ring ? O_DIRECT : 0;
    int file = open(path, O_RDONLY | is_direct | O_CLOEXEC);
    MUST(file >= 0);
    int is_detached = strcmp(given.mode, "detached") == 0;
    if (is_detached) MUST(umount2(dir, MNT_DETACH) == 0);
    struct ring ring;
    if (by_ring) {
        MUST(ring_make(&ring));
        MUST(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, &file, 1) == 0);
        close(file);
    }
    unsigned char *shared = NULL;
    if (is_private) {
        into = map(AT_ONCE * PAGE);
    } else {
        shared = mmap(NULL, given.pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
        MUST(shared != MAP_FAILED);
        for (size_t page = 0; page < given.pages; page++)
            fill_page(shared + page * PAGE, key_of(given.seed, page, 5));
        into = shared;
    }
    pthread_t pusher;
    MUST(pthread_create(&pusher, NULL, pushes_out, NULL) == 0);
    uint64_t state = given.seed, rounds = 0;
    double until = now() + given.seconds;
    while (now() < until) {
        size_t page = below(&state, given.pages - AT_ONCE);
        memset(into, 'x', AT_ONCE * PAGE);
        reading = 1;
        ssize_t n = by_ring ? ring_do(&ring, IORING_OP_READ, 0, into, AT_ONCE * PAGE, page * PAGE,
                                      -1, IOSQE_FIXED_FILE)
                            : pread(file, into, AT_ONCE * PAGE, (off_t)(page * PAGE));
        reading = 0;
        MUST(n == AT_ONCE * PAGE);
        for (size_t i = 0; i < AT_ONCE; i++)
            check_page(into + i * PAGE, key_of(given.seed, page + i, 7), "a page of the file");
        check_page(cold + page * PAGE, key_of(given.seed, page, 9), "a page of the reader's");
        if (shared && page >= AT_ONCE)
            check_page(shared + page * PAGE, key_of(given.seed, page, 5), "a shared page");
        rounds++;
    }
    over = 1;
    pthread_join(pusher, NULL);
    close(by_ring ? ring.fd : file);
    if (!is_detached) MUST(umount2(dir, MNT_DETACH) == 0);
    rmdir(dir);
    kill(server, SIGKILL);
    MUST(waitpid(server, NULL, 0) == server);
    printf("%llu reads; %zu pages were out while they were read into\n", (unsigned long long)rounds,
           (size_t)out_while_read);
    return ok("fuse", given.mode);
}
