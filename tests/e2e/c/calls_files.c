/* System calls about files, descriptors and waiting for them: see calls.h. */
#include "calls.h"
#include <linux/aio_abi.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <net/if.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/signalfd.h>
#include <sys/statfs.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/xattr.h>
#include <termios.h>
#include <utime.h>

/* A directory of this run's own; tests use paths in it. */
static char directory[400];

static char *path_of(const char *name) {
    char all[500];
    snprintf(all, sizeof all, "%s/%s", directory, name);
    return text(all);
}

static int open_file(const char *name, int flags) {
    char all[500];
    snprintf(all, sizeof all, "%s/%s", directory, name);
    int fd = open(all, flags | O_CLOEXEC, 0600);
    MUST(fd >= 0);
    return fd;
}

static void close_both(const int *two) {
    close(two[0]);
    close(two[1]);
}

#define DATA (5 * PAGE + 100)

/* Data through a descriptor */

TEST(read_write) {
    int fd = open_file("data", O_RDWR | O_CREAT | O_TRUNC);
    unsigned char *from = buffer(DATA), *to = buffer(DATA);
    fill(from, DATA, 1);
    out();
    answer("write", write(fd, from, DATA));
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    out();
    answer("read", read(fd, to, DATA));
    say(" same=%d", is_filled(to, DATA, 1));
    fill(from, DATA, 2);
    out();
    answer("pwrite", pwrite(fd, from, DATA, 1000));
    out();
    answer("pread", pread(fd, to, DATA, 1000));
    say(" same=%d", is_filled(to, DATA, 2));
    struct iovec *vector = buffer(3 * sizeof *vector), *back = buffer(3 * sizeof *back);
    vector[0] = (struct iovec){from, 100}, vector[1] = (struct iovec){from + 100, PAGE};
    vector[2] = (struct iovec){from + 100 + PAGE, DATA - 100 - PAGE};
    back[0] = (struct iovec){to, 3 * PAGE}, back[1] = (struct iovec){to + 3 * PAGE, 1};
    back[2] = (struct iovec){to + 3 * PAGE + 1, DATA - 3 * PAGE - 1};
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    fill(from, DATA, 3);
    out();
    answer("writev", writev(fd, vector, 3));
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    out();
    answer("readv", readv(fd, back, 3));
    say(" same=%d", is_filled(to, DATA, 3));
    fill(from, DATA, 4);
    out();
    answer("pwritev", pwritev(fd, vector, 3, 7));
    out();
    answer("preadv", preadv(fd, back, 3, 7));
    say(" same=%d", is_filled(to, DATA, 4));
    fill(from, DATA, 5);
    out();
    answer("pwritev2", pwritev2(fd, vector, 3, 9, RWF_DSYNC));
    out();
    answer("preadv2", preadv2(fd, back, 3, 9, 0));
    say(" same=%d", is_filled(to, DATA, 5));
    close(fd);
}

TEST(direct) {
    int fd = open_file("direct", O_RDWR | O_CREAT | O_TRUNC);
    /* Not every file system has it; the calls are the same. */
    fcntl(fd, F_SETFL, O_DIRECT);
    unsigned char *from = buffer_aligned(8 * PAGE, PAGE), *to = buffer_aligned(8 * PAGE, PAGE);
    for (uint64_t salt = 1; salt < 4; salt++) {
        fill(from, 8 * PAGE, salt);
        out();
        answer("pwrite", pwrite(fd, from, 8 * PAGE, 0));
        out();
        answer("pread", pread(fd, to, 8 * PAGE, 0));
        say(" same=%d", is_filled(to, 8 * PAGE, salt));
    }
    close(fd);
}

TEST(pipes) {
    int *ends = buffer(2 * sizeof *ends);
    out();
    answer("pipe", syscall(SYS_pipe, ends));
    close_both(ends);
    out();
    answer("pipe2", syscall(SYS_pipe2, ends, O_CLOEXEC));
    unsigned char *from = buffer(DATA), *to = buffer(DATA);
    fill(from, DATA, 1);
    out();
    answer("write", write(ends[1], from, DATA));
    int *waiting = buffer(sizeof *waiting);
    out();
    answer("FIONREAD", ioctl(ends[0], FIONREAD, waiting));
    say(" %d", *waiting);
    out();
    size_t done = 0;
    while (done < DATA) {
        ssize_t got = read(ends[0], to + done, DATA - done);
        MUST(got > 0);
        done += (size_t)got;
    }
    say(" same=%d", is_filled(to, DATA, 1));
    *waiting = 1;
    out();
    answer("FIONBIO", ioctl(ends[0], FIONBIO, waiting));
    answer("empty", read(ends[0], to, 1));
    close_both(ends);
}

TEST(splices) {
    int fd = open_file("splice", O_RDWR | O_CREAT | O_TRUNC), ends[2], others[2];
    MUST(pipe(ends) == 0 && pipe(others) == 0);
    unsigned char *from = buffer(4 * PAGE), *to = buffer(4 * PAGE);
    loff_t *offset = buffer(sizeof *offset), *other = buffer(sizeof *other);
    fill(from, 4 * PAGE, 1);
    MUST(pwrite(fd, from, 4 * PAGE, 0) == (ssize_t)(4 * PAGE));
    out();
    answer("splice", splice(fd, offset, ends[1], NULL, 4 * PAGE, 0));
    say(" offset=%lld", (long long)*offset);
    answer("tee", tee(ends[0], others[1], 4 * PAGE, 0));
    out();
    answer("read", read(ends[0], to, 4 * PAGE));
    say(" same=%d", is_filled(to, 4 * PAGE, 1));
    *offset = 8 * PAGE;
    out();
    answer("splice", splice(others[0], NULL, fd, offset, 4 * PAGE, 0));
    out();
    answer("pread", pread(fd, to, 4 * PAGE, 8 * PAGE));
    say(" same=%d", is_filled(to, 4 * PAGE, 1));
    *offset = 0;
    out();
    answer("sendfile", sendfile(ends[1], fd, offset, 4 * PAGE));
    say(" offset=%lld", (long long)*offset);
    /* From a pipe into memory. */
    struct iovec *vector = buffer(sizeof *vector);
    vector->iov_base = to, vector->iov_len = 4 * PAGE;
    memset(to, 0, 4 * PAGE);
    out();
    answer("vmsplice_in", vmsplice(ends[0], vector, 1, 0));
    say(" same=%d", is_filled(to, 4 * PAGE, 1));
    *offset = 0, *other = 20 * PAGE;
    out();
    answer("copy_file_range", copy_file_range(fd, offset, fd, other, 4 * PAGE, 0));
    say(" offsets=%lld,%lld", (long long)*offset, (long long)*other);
    out();
    answer("pread", pread(fd, to, 4 * PAGE, 20 * PAGE));
    say(" same=%d", is_filled(to, 4 * PAGE, 1));
    close(fd);
    close_both(ends);
    close_both(others);
}

TEST(vmsplice) {
    /* The pipe has the pages themselves. Afterwards the memory goes out and comes in again while
     * they lie there. */
    int ends[2];
    MUST(pipe(ends) == 0);
    MUST(fcntl(ends[1], F_SETPIPE_SZ, 1 << 20) > 0);
    size_t size = 64 * PAGE;
    unsigned char *from = buffer_aligned(size, PAGE), *to = buffer_aligned(size, PAGE);
    struct iovec *vector = buffer(sizeof *vector);
    vector->iov_base = from, vector->iov_len = size;
    fill(from, size, 1);
    out();
    answer("vmsplice", vmsplice(ends[1], vector, 1, 0));
    out();
    memset(to, 1, size);
    out();
    fill(to, size, 9);
    out();
    size_t done = 0;
    while (done < size) {
        ssize_t got = read(ends[0], to + done, size - done);
        MUST(got > 0);
        done += (size_t)got;
    }
    say(" same=%d", is_filled(to, size, 1));
    out();
    say(" kept=%d", is_filled(from, size, 1));
    close_both(ends);
}

/* Names, states and attributes */

TEST(stats) {
    int fd = open_file("stat", O_RDWR | O_CREAT | O_TRUNC);
    MUST(ftruncate(fd, 12345) == 0);
    char *path = path_of("stat"), *empty = text("");
    struct stat *a = buffer(sizeof *a), *b = buffer(sizeof *b), *c = buffer(sizeof *c),
                *d = buffer(sizeof *d);
    struct statx *x = buffer(sizeof *x);
    out();
    answer("stat", syscall(SYS_stat, path, a));
    answer("fstat", syscall(SYS_fstat, fd, b));
    answer("lstat", syscall(SYS_lstat, path, c));
    answer("newfstatat", syscall(SYS_newfstatat, AT_FDCWD, path, d, 0));
    out();
    answer("statx", syscall(SYS_statx, AT_FDCWD, path, 0, STATX_BASIC_STATS, x));
    say(" %ld %ld %ld %ld %llu", a->st_size, b->st_size, c->st_size, d->st_size,
        (unsigned long long)x->stx_size);
    out();
    answer("statx_fd", syscall(SYS_statx, fd, empty, AT_EMPTY_PATH, STATX_BASIC_STATS, x));
    struct statfs *fs = buffer(sizeof *fs), *fs2 = buffer(sizeof *fs2);
    out();
    answer("statfs", syscall(SYS_statfs, path, fs));
    answer("fstatfs", syscall(SYS_fstatfs, fd, fs2));
    say(" same=%d", fs->f_type == fs2->f_type && fs->f_bsize > 0);
    unsigned char *ustat = buffer(64);
    out();
    works("ustat", syscall(SYS_ustat, a->st_dev, ustat));
    out();
    answer("access", syscall(SYS_access, path, R_OK));
    out();
    answer("faccessat", syscall(SYS_faccessat, AT_FDCWD, path, R_OK));
    out();
    answer("faccessat2", syscall(SYS_faccessat2, AT_FDCWD, path, R_OK, 0));
    uint64_t *range = buffer(16), *state = buffer(40);
    range[1] = PAGE;
    out();
    answer("cachestat", syscall(451, fd, range, state, 0));
    unsigned char *attr = buffer(64);
    out();
    works("file_getattr", syscall(468, AT_FDCWD, path, attr, 24, 0));
    works("file_setattr", syscall(469, AT_FDCWD, path, attr, 24, 0));
    close(fd);
}

TEST(opens) {
    char *path = path_of("opened"), *other = path_of("opened2");
    struct open_how *how = buffer(sizeof *how);
    how->flags = O_RDWR | O_CREAT;
    how->mode = 0600;
    out();
    int a = (int)works("creat", syscall(SYS_creat, path, 0600));
    out();
    int b = (int)works("open", syscall(SYS_open, path, O_RDONLY));
    out();
    int c = (int)works("openat", syscall(SYS_openat, AT_FDCWD, path, O_RDONLY));
    out();
    int d = (int)works("openat2", syscall(SYS_openat2, AT_FDCWD, other, how, sizeof *how));
    close(a), close(b), close(c), close(d);
    char *name = text("a memory file");
    out();
    a = (int)works("memfd_create", syscall(SYS_memfd_create, name, 0));
    close(a);
    out();
    answer("truncate", truncate(path, 77));
    unsigned char *handle = buffer(sizeof(struct file_handle) + 128);
    struct file_handle *of = (struct file_handle *)handle;
    of->handle_bytes = 128;
    int *mount = buffer(sizeof *mount);
    out();
    long found = works("name_to_handle_at", name_to_handle_at(AT_FDCWD, path, of, mount, 0));
    if (found == 0) {
        int base = open(directory, O_RDONLY | O_CLOEXEC);
        out();
        int again = (int)works("open_by_handle_at", open_by_handle_at(base, of, O_RDONLY));
        close(base);
        close(again);
    }
}

TEST(directories) {
    char *one = path_of("d1"), *two = path_of("d2"), *file = path_of("d1/file"),
         *link_path = path_of("d1/link");
    char *symbolic = path_of("d1/symbolic"), *node = path_of("d1/node"),
         *target = text("where it points"), *got = buffer(3000);
    out();
    answer("mkdir", syscall(SYS_mkdir, one, 0700));
    out();
    answer("mknod", syscall(SYS_mknod, file, S_IFREG | 0600, 0));
    out();
    answer("mknodat", syscall(SYS_mknodat, AT_FDCWD, node, S_IFIFO | 0600, 0));
    out();
    answer("link", syscall(SYS_link, file, link_path));
    out();
    answer("symlink", syscall(SYS_symlink, target, symbolic));
    out();
    answer("readlink", syscall(SYS_readlink, symbolic, got, 3000));
    say(" same=%d", strcmp(got, target) == 0);
    memset(got, 0, 3000);
    out();
    answer("readlinkat", syscall(SYS_readlinkat, AT_FDCWD, symbolic, got, 3000));
    say(" same=%d", strcmp(got, target) == 0);
    unsigned char *entries = buffer(8 * PAGE);
    int fd = open_file("d1", O_RDONLY | O_DIRECTORY);
    out();
    works("getdents64", syscall(SYS_getdents64, fd, entries, 8 * PAGE));
    MUST(lseek(fd, 0, SEEK_SET) == 0);
    out();
    works("getdents", syscall(SYS_getdents, fd, entries, 8 * PAGE));
    char *cwd = buffer(3000), *before = getcwd(NULL, 0);
    out();
    answer("chdir", syscall(SYS_chdir, one));
    out();
    works("getcwd", syscall(SYS_getcwd, cwd, 3000));
    say(" same=%d", strcmp(cwd, one) == 0);
    MUST(chdir(before) == 0);
    free(before);
    close(fd);
    out();
    answer("chmod", syscall(SYS_chmod, file, 0640));
    answer("fchmodat", syscall(SYS_fchmodat, AT_FDCWD, file, 0600));
    out();
    answer("fchmodat2", syscall(452, AT_FDCWD, file, 0600, 0));
    answer("chown", syscall(SYS_chown, file, getuid(), getgid()));
    out();
    answer("lchown", syscall(SYS_lchown, file, getuid(), getgid()));
    answer("fchownat", syscall(SYS_fchownat, AT_FDCWD, file, getuid(), getgid(), 0));
    struct timespec *times = buffer(2 * sizeof *times);
    struct timeval *older = buffer(2 * sizeof *older);
    struct utimbuf *oldest = buffer(sizeof *oldest);
    times[1].tv_sec = 1000000, older[1].tv_sec = 2000000, oldest->modtime = 3000000;
    struct stat state;
    out();
    answer("utimensat", syscall(SYS_utimensat, AT_FDCWD, file, times, 0));
    MUST(stat(file, &state) == 0);
    say(" %ld", state.st_mtime);
    out();
    answer("utimes", syscall(SYS_utimes, file, older));
    out();
    answer("futimesat", syscall(SYS_futimesat, AT_FDCWD, file, older));
    out();
    answer("utime", syscall(SYS_utime, file, oldest));
    MUST(stat(file, &state) == 0);
    say(" %ld", state.st_mtime);
    out();
    answer("rename", syscall(SYS_rename, one, two));
    out();
    answer("renameat", syscall(SYS_renameat, AT_FDCWD, two, AT_FDCWD, one));
    out();
    answer("renameat2", syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, two, 0));
    MUST(rename(two, one) == 0);
    out();
    answer("unlink", syscall(SYS_unlink, file));
    out();
    answer("unlinkat", syscall(SYS_unlinkat, AT_FDCWD, link_path, 0));
    MUST(unlink(symbolic) == 0 && unlink(node) == 0);
    out();
    answer("linkat", syscall(SYS_linkat, AT_FDCWD, file, AT_FDCWD, link_path, 0));
    answer("symlinkat", syscall(SYS_symlinkat, target, AT_FDCWD, symbolic));
    MUST(unlink(symbolic) == 0);
    out();
    answer("rmdir", syscall(SYS_rmdir, one));
    out();
    answer("mkdirat", syscall(SYS_mkdirat, AT_FDCWD, one, 0700));
    MUST(rmdir(one) == 0);
}

TEST(attributes) {
    int fd = open_file("attributes", O_RDWR | O_CREAT);
    char *path = path_of("attributes"), *name = text("user.sweep"), *list = buffer(3000);
    unsigned char *value = buffer(1000), *got = buffer(1000);
    fill(value, 1000, 8);
    out();
    answer("setxattr", setxattr(path, name, value, 1000, 0));
    out();
    answer("getxattr", getxattr(path, name, got, 1000));
    say(" same=%d", is_filled(got, 1000, 8));
    out();
    answer("lsetxattr", lsetxattr(path, name, value, 900, 0));
    answer("lgetxattr", lgetxattr(path, name, got, 1000));
    out();
    answer("fsetxattr", fsetxattr(fd, name, value, 1000, 0));
    out();
    answer("fgetxattr", fgetxattr(fd, name, got, 1000));
    out();
    works("listxattr", listxattr(path, list, 3000));
    works("llistxattr", llistxattr(path, list, 3000));
    out();
    works("flistxattr", flistxattr(fd, list, 3000));
    struct {
        uint64_t value;
        uint32_t size, flags;
    } *args = buffer(sizeof *args);
    args->value = (uintptr_t)value, args->size = 800;
    out();
    answer("setxattrat", syscall(463, AT_FDCWD, path, 0, name, args, sizeof *args));
    args->value = (uintptr_t)got, args->size = 1000;
    out();
    answer("getxattrat", syscall(464, AT_FDCWD, path, 0, name, args, sizeof *args));
    out();
    works("listxattrat", syscall(465, AT_FDCWD, path, 0, list, 3000));
    out();
    works("removexattrat", syscall(466, AT_FDCWD, path, 0, name));
    out();
    works("removexattr", removexattr(path, name));
    works("lremovexattr", lremovexattr(path, name));
    works("fremovexattr", fremovexattr(fd, name));
    close(fd);
}

TEST(locks) {
    int fd = open_file("locks", O_RDWR | O_CREAT);
    struct flock *lock = buffer(sizeof *lock);
    lock->l_type = F_WRLCK;
    lock->l_len = 100;
    out();
    answer("SETLK", fcntl(fd, F_SETLK, lock));
    out();
    answer("GETLK", fcntl(fd, F_GETLK, lock));
    say(" type=%d", lock->l_type);
    lock->l_pid = 0;
    out();
    answer("OFD", fcntl(fd, F_OFD_SETLK, lock));
    struct f_owner_ex *owner = buffer(sizeof *owner);
    owner->type = F_OWNER_PID, owner->pid = getpid();
    out();
    answer("SETOWN_EX", fcntl(fd, F_SETOWN_EX, owner));
    memset(owner, 0, sizeof *owner);
    out();
    answer("GETOWN_EX", fcntl(fd, F_GETOWN_EX, owner));
    say(" mine=%d", owner->pid == getpid());
    uint64_t *hint = buffer(8);
    out();
    answer("GET_RW_HINT", fcntl(fd, F_GET_RW_HINT, hint));
    close(fd);
}

TEST(ioctls) {
    int fd = open_file("ioctls", O_RDWR | O_CREAT | O_TRUNC);
    unsigned char page[PAGE] = {1};
    MUST(write(fd, page, PAGE) == (ssize_t)PAGE && fsync(fd) == 0);
    int *flags = buffer(sizeof *flags);
    out();
    works("GETFLAGS", ioctl(fd, FS_IOC_GETFLAGS, flags));
    struct fsxattr *attr = buffer(sizeof *attr);
    out();
    works("FSGETXATTR", ioctl(fd, FS_IOC_FSGETXATTR, attr));
    struct fiemap *map = buffer(sizeof *map + 4 * sizeof(struct fiemap_extent));
    map->fm_length = 1 << 20, map->fm_extent_count = 4;
    out();
    works("FIEMAP", ioctl(fd, FS_IOC_FIEMAP, map));
    struct file_clone_range *clone = buffer(sizeof *clone);
    clone->src_fd = fd, clone->src_length = PAGE, clone->dest_offset = PAGE;
    out();
    works("FICLONERANGE", ioctl(fd, FICLONERANGE, clone));
    struct file_dedupe_range *dedupe =
        buffer(sizeof *dedupe + sizeof(struct file_dedupe_range_info));
    dedupe->src_length = PAGE, dedupe->dest_count = 1, dedupe->info[0].dest_fd = fd,
    dedupe->info[0].dest_offset = PAGE;
    out();
    works("FIDEDUPERANGE", ioctl(fd, FIDEDUPERANGE, dedupe));
    close(fd);
    int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    MUST(master >= 0);
    struct winsize *size = buffer(sizeof *size);
    size->ws_row = 7, size->ws_col = 9;
    out();
    answer("TIOCSWINSZ", ioctl(master, TIOCSWINSZ, size));
    memset(size, 0, sizeof *size);
    out();
    answer("TIOCGWINSZ", ioctl(master, TIOCGWINSZ, size));
    say(" %d %d", size->ws_row, size->ws_col);
    struct termios *modes = buffer(sizeof *modes);
    out();
    answer("TCGETS", ioctl(master, TCGETS, modes));
    out();
    answer("TCSETS", ioctl(master, TCSETS, modes));
    close(master);
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    MUST(sock >= 0);
    struct ifconf *conf = buffer(sizeof *conf);
    struct ifreq *list = buffer(32 * sizeof *list), *one = buffer(sizeof *one);
    conf->ifc_len = 32 * sizeof *list, conf->ifc_req = list;
    out();
    answer("SIOCGIFCONF", ioctl(sock, SIOCGIFCONF, conf));
    say(" some=%d", conf->ifc_len > 0);
    strcpy(one->ifr_name, "lo");
    out();
    answer("SIOCGIFFLAGS", ioctl(sock, SIOCGIFFLAGS, one));
    say(" up=%d", one->ifr_flags & IFF_UP);
    close(sock);
}

/* Waiting */

TEST(polls) {
    int ends[2];
    MUST(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    struct pollfd *fds = buffer(2 * sizeof *fds);
    fds[0] = (struct pollfd){ends[0], POLLIN, 0}, fds[1] = (struct pollfd){ends[1], POLLOUT, 0};
    struct timespec *limit = buffer(sizeof *limit);
    limit->tv_sec = 5;
    uint64_t *mask = buffer(8);
    out();
    answer("poll", syscall(SYS_poll, fds, 2, 5000));
    say(" %x %x", fds[0].revents, fds[1].revents);
    out();
    answer("ppoll", syscall(SYS_ppoll, fds, 2, limit, mask, 8));
    fd_set *in = buffer(sizeof *in), *ready = buffer(sizeof *ready);
    FD_SET(ends[0], in);
    FD_SET(ends[1], ready);
    struct timeval *tv = buffer(sizeof *tv);
    tv->tv_sec = 5;
    out();
    answer("select", syscall(SYS_select, 64, in, ready, NULL, tv));
    struct {
        uint64_t *mask;
        size_t size;
    } *both = buffer(sizeof *both);
    both->mask = mask, both->size = 8;
    out();
    answer("pselect6", syscall(SYS_pselect6, 64, in, ready, NULL, limit, both));
    say(" %d %d", FD_ISSET(ends[0], in) != 0, FD_ISSET(ends[1], ready) != 0);
    struct epoll_event *event = buffer(sizeof *event), *got = buffer(4 * sizeof *got);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    event->events = EPOLLIN, event->data.u64 = 0x1234567890abcdef;
    out();
    answer("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], event));
    out();
    answer("epoll_wait", syscall(SYS_epoll_wait, epoll, got, 4, 5000));
    say(" %llx", (unsigned long long)got[0].data.u64);
    out();
    answer("epoll_pwait", syscall(SYS_epoll_pwait, epoll, got, 4, 5000, mask, 8));
    out();
    answer("epoll_pwait2", syscall(SYS_epoll_pwait2, epoll, got, 4, limit, mask, 8));
    close(epoll);
    close_both(ends);
}

static void *write_later(void *argument) {
    usleep(20000);
    MUST(write(*(int *)argument, "later", 5) == 5);
    return NULL;
}

/* The memory goes out while the call waits, and the result is written then. */
TEST(long_waits) {
    int ends[2];
    MUST(pipe(ends) == 0);
    unsigned char *to = buffer(100);
    struct pollfd *fds = buffer(sizeof *fds);
    for (int way = 0; way < 2; way++) {
        pthread_t thread;
        MUST(pthread_create(&thread, NULL, write_later, &ends[1]) == 0);
        fds[0] = (struct pollfd){ends[0], POLLIN, 0};
        out();
        if (way == 0) answer("poll", poll(fds, 1, 5000));
        out();
        answer("read", read(ends[0], to, 100));
        say(" same=%d", memcmp(to, "later", 5) == 0);
        MUST(pthread_join(thread, NULL) == 0);
    }
    close_both(ends);
}

TEST(counters) {
    uint64_t *value = buffer(8), *got = buffer(8);
    int fd = eventfd(0, EFD_CLOEXEC);
    *value = 12345;
    out();
    answer("write", write(fd, value, 8));
    out();
    answer("read", read(fd, got, 8));
    say(" %llu", (unsigned long long)*got);
    close(fd);
    fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    struct itimerspec *new = buffer(sizeof *new), *old = buffer(sizeof *old);
    new->it_value.tv_nsec = 1000000;
    out();
    answer("timerfd_settime", timerfd_settime(fd, 0, new, old));
    out();
    answer("read", read(fd, got, 8));
    say(" %llu", (unsigned long long)*got);
    out();
    answer("timerfd_gettime", timerfd_gettime(fd, old));
    close(fd);
    uint64_t *mask = buffer(8), *before = buffer(8);
    *mask = 1ull << (SIGUSR2 - 1);
    MUST(syscall(SYS_rt_sigprocmask, SIG_BLOCK, mask, before, 8) == 0);
    out();
    fd = (int)works("signalfd4", syscall(SYS_signalfd4, -1, mask, 8, SFD_CLOEXEC));
    MUST(raise(SIGUSR2) == 0);
    struct signalfd_siginfo *info = buffer(sizeof *info);
    out();
    answer("read", read(fd, info, sizeof *info));
    say(" %u", info->ssi_signo);
    out();
    works("signalfd", syscall(SYS_signalfd, fd, mask, 8));
    MUST(syscall(SYS_rt_sigprocmask, SIG_SETMASK, before, NULL, 8) == 0);
    close(fd);
}

TEST(watches) {
    char *path = text(directory), *name = path_of("watched");
    int fd = inotify_init1(IN_CLOEXEC);
    out();
    works("inotify_add_watch", inotify_add_watch(fd, path, IN_CREATE));
    close(open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    unlink(name);
    unsigned char *events = buffer(3000);
    out();
    works("read", read(fd, events, 3000));
    say(" same=%d", strcmp((char *)events + sizeof(struct inotify_event), "watched") == 0);
    close(fd);
    fd = fanotify_init(FAN_CLOEXEC | FAN_CLASS_NOTIF, O_RDONLY);
    works("fanotify_init", fd);
    if (fd < 0) return;
    out();
    works("fanotify_mark",
          fanotify_mark(fd, FAN_MARK_ADD, FAN_OPEN | FAN_EVENT_ON_CHILD, AT_FDCWD, path));
    close(open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    unlink(name);
    out();
    ssize_t got = read(fd, events, 3000);
    works("read", got);
    struct fanotify_event_metadata *event = (void *)events;
    say(" mask=%x", (unsigned)event->mask);
    if (event->fd >= 0) close(event->fd);
    close(fd);
}

/* Mounts: all in a namespace of a child's own, or refused to an ordinary user. */

TEST(mounts) {
    char *type = text("tmpfs"), *key = text("size"), *value = text("64k"),
         *here = path_of("mounted"), *none = text("none");
    char *empty = text("");
    struct mount_attr *attr = buffer(sizeof *attr);
    attr->attr_set = MOUNT_ATTR_NOEXEC;
    struct {
        uint32_t size, spare;
        uint64_t id, param, mnt_ns_id;
    } *request = buffer(32);
    unsigned char *state = buffer(6000);
    uint64_t *list = buffer(64 * 8);
    MUST(mkdir(here, 0700) == 0);
    out();
    int fs = (int)works("fsopen", syscall(SYS_fsopen, type, 0));
    if (fs >= 0) {
        out();
        works("fsconfig", syscall(SYS_fsconfig, fs, 1 /* SET_STRING */, key, value, 0));
        works("create", syscall(SYS_fsconfig, fs, 6 /* CMD_CREATE */, NULL, NULL, 0));
        int mnt = (int)works("fsmount", syscall(SYS_fsmount, fs, 0, 0));
        out();
        works("mount_setattr",
              syscall(SYS_mount_setattr, mnt, empty, AT_EMPTY_PATH, attr, sizeof *attr));
        close(mnt);
        close(fs);
    }
    out();
    int tree = (int)works("open_tree", syscall(SYS_open_tree, AT_FDCWD, here, 0));
    close(tree);
    out();
    works("fspick", syscall(SYS_fspick, AT_FDCWD, here, 0));
    works("move_mount", syscall(SYS_move_mount, AT_FDCWD, none, AT_FDCWD, here, 0));
    request->size = 24, request->id = UINT64_MAX;
    out();
    works("listmount", syscall(458, request, list, 64, 0));
    request->id = list[0], request->param = 1;
    out();
    works("statmount", syscall(457, request, state, 6000, 0));
    out();
    works("umount2", syscall(SYS_umount2, here, 0));
    works("open_tree_attr", syscall(467, AT_FDCWD, none, 0, attr, sizeof *attr));
    out();
    IN_CHILD({
        if (unshare(CLONE_NEWNS) != 0) _exit(errno);
        if (syscall(SYS_mount, none, text("/"), NULL, 0x44000 /* MS_REC | MS_PRIVATE */, NULL) != 0)
            _exit(101);
        if (syscall(SYS_mount, none, here, type, 0, text("size=64k")) != 0) _exit(102);
        _exit(syscall(SYS_umount2, here, 0) == 0 ? 7 : 103);
    });
    out();
    IN_CHILD(_exit(syscall(SYS_chroot, here) == 0 ? 7 : errno));
    MUST(rmdir(here) == 0);
}

/* Requests that run concurrently with the program */

TEST(aio) {
    int fd = open_file("aio", O_RDWR | O_CREAT | O_TRUNC);
    aio_context_t *context = buffer(sizeof *context);
    out();
    answer("setup", syscall(SYS_io_setup, 8, context));
    unsigned char *from = buffer(DATA), *to = buffer(DATA);
    struct iocb *one = buffer(sizeof *one), **list = buffer(2 * sizeof *list);
    struct io_event *events = buffer(2 * sizeof *events);
    struct timespec *limit = buffer(sizeof *limit);
    fill(from, DATA, 6);
    limit->tv_sec = 5;
    for (int way = 0; way < 2; way++) {
        memset(one, 0, sizeof *one);
        one->aio_fildes = (uint32_t)fd;
        one->aio_lio_opcode = way ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
        one->aio_buf = (uintptr_t)(way ? to : from);
        one->aio_nbytes = DATA;
        list[0] = one;
        out();
        answer("submit", syscall(SYS_io_submit, *context, 1, list));
        out();
        if (way == 0) answer("getevents", syscall(SYS_io_getevents, *context, 1, 2, events, limit));
        if (way == 1)
            answer("pgetevents", syscall(SYS_io_pgetevents, *context, 1, 2, events, limit, NULL));
        say(" res=%lld", (long long)events[0].res);
    }
    say(" same=%d", is_filled(to, DATA, 6));
    out();
    answer("cancel", syscall(SYS_io_cancel, *context, one, events));
    answer("destroy", syscall(SYS_io_destroy, *context));
    close(fd);
}

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask, *sq_flags;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *sq, *cq;
    size_t sq_size, cq_size, sqes_size;
    int polls;
};

static int ring_open(struct ring *ring, struct io_uring_params *params) {
    ring->polls = (params->flags & IORING_SETUP_SQPOLL) != 0;
    ring->fd = (int)syscall(SYS_io_uring_setup, 8, params);
    if (ring->fd < 0) return -1;
    ring->sq_size = params->sq_off.array + params->sq_entries * 4;
    ring->cq_size = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    ring->sqes_size = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->sq = mmap(NULL, ring->sq_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                    ring->fd, IORING_OFF_SQ_RING);
    ring->cq = mmap(NULL, ring->cq_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                    ring->fd, IORING_OFF_CQ_RING);
    ring->sqes = mmap(NULL, ring->sqes_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      ring->fd, IORING_OFF_SQES);
    MUST(ring->sq != MAP_FAILED && ring->cq != MAP_FAILED && ring->sqes != MAP_FAILED);
    ring->sq_tail = (unsigned *)((char *)ring->sq + params->sq_off.tail);
    ring->sq_mask = (unsigned *)((char *)ring->sq + params->sq_off.ring_mask);
    ring->sq_array = (unsigned *)((char *)ring->sq + params->sq_off.array);
    ring->sq_flags = (unsigned *)((char *)ring->sq + params->sq_off.flags);
    ring->cq_head = (unsigned *)((char *)ring->cq + params->cq_off.head);
    ring->cq_tail = (unsigned *)((char *)ring->cq + params->cq_off.tail);
    ring->cq_mask = (unsigned *)((char *)ring->cq + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)((char *)ring->cq + params->cq_off.cqes);
    return 0;
}

static void ring_close(struct ring *ring) {
    munmap(ring->sq, ring->sq_size);
    munmap(ring->cq, ring->cq_size);
    munmap(ring->sqes, ring->sqes_size);
    close(ring->fd);
}

/* Puts one request into the ring and gives its result. All that the test uses is out when it is
 * submitted. */
static int ring_do(struct ring *ring, const struct io_uring_sqe *sqe) {
    unsigned tail = *ring->sq_tail, at = tail & *ring->sq_mask;
    ring->sqes[at] = *sqe;
    ring->sq_array[at] = at;
    out();
    __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    unsigned flags = IORING_ENTER_GETEVENTS;
    if (ring->polls && __atomic_load_n(ring->sq_flags, __ATOMIC_SEQ_CST) & IORING_SQ_NEED_WAKEUP)
        flags |= IORING_ENTER_SQ_WAKEUP;
    long result;
    do result = syscall(SYS_io_uring_enter, ring->fd, 1, 1, flags, NULL, 0);
    while (result < 0 && errno == EINTR);
    MUST(result >= 0);
    unsigned head = *ring->cq_head;
    while (__atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) == head) {
        result = syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0);
        MUST(result >= 0 || errno == EINTR);
    }
    int res = ring->cqes[head & *ring->cq_mask].res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return res;
}

static void ring_says(const char *what, int res) {
    if (res < 0)
        say(" %s=%s", what, strerrorname_np(-res));
    else
        say(" %s=%d", what, res);
}

static void through_ring(unsigned setup_flags, unsigned char sqe_flags) {
    struct io_uring_params *params = buffer(sizeof *params);
    params->flags = setup_flags;
    params->sq_thread_idle = 50;
    struct ring ring;
    out();
    if (ring_open(&ring, params) != 0) {
        say(" setup=%s", strerrorname_np(errno));
        return;
    }
    int fd = open_file("ring", O_RDWR | O_CREAT | O_TRUNC);
    unsigned char *from = buffer(DATA), *to = buffer(DATA);
    struct iovec *vector = buffer(2 * sizeof *vector);
    vector[0] = (struct iovec){from, PAGE}, vector[1] = (struct iovec){from + PAGE, DATA - PAGE};
#define DO(name, ...)                                                                              \
    do {                                                                                           \
        struct io_uring_sqe sqe_ = {.flags = sqe_flags, __VA_ARGS__};                              \
        ring_says(name, ring_do(&ring, &sqe_));                                                    \
    } while (0)
    fill(from, DATA, 1);
    DO("write", .opcode = IORING_OP_WRITE, .fd = fd, .addr = (uintptr_t)from, .len = DATA);
    DO("read", .opcode = IORING_OP_READ, .fd = fd, .addr = (uintptr_t)to, .len = DATA);
    say(" same=%d", is_filled(to, DATA, 1));
    fill(from, DATA, 2);
    DO("writev", .opcode = IORING_OP_WRITEV, .fd = fd, .addr = (uintptr_t)vector, .len = 2);
    vector[0] = (struct iovec){to, 3 * PAGE},
    vector[1] = (struct iovec){to + 3 * PAGE, DATA - 3 * PAGE};
    DO("readv", .opcode = IORING_OP_READV, .fd = fd, .addr = (uintptr_t)vector, .len = 2);
    say(" same=%d", is_filled(to, DATA, 2));
    /* Paths and structures. */
    char *path = path_of("ring"), *other = path_of("ring2");
    struct statx *state = buffer(sizeof *state);
    DO("statx", .opcode = IORING_OP_STATX, .fd = AT_FDCWD, .addr = (uintptr_t)path,
       .len = STATX_SIZE, .off = (uintptr_t)state);
    say(" size=%llu", (unsigned long long)state->stx_size);
    DO("renameat", .opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD, .addr = (uintptr_t)path,
       .len = (unsigned)AT_FDCWD, .off = (uintptr_t)other);
    DO("renameat", .opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD, .addr = (uintptr_t)other,
       .len = (unsigned)AT_FDCWD, .off = (uintptr_t)path);
    struct __kernel_timespec *limit = buffer(sizeof *limit);
    limit->tv_nsec = 1000000;
    DO("timeout", .opcode = IORING_OP_TIMEOUT, .fd = -1, .addr = (uintptr_t)limit, .len = 1);
    /* Sockets. */
    int pair[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    fill(from, DATA, 3);
    DO("send", .opcode = IORING_OP_SEND, .fd = pair[0], .addr = (uintptr_t)from, .len = DATA);
    DO("recv", .opcode = IORING_OP_RECV, .fd = pair[1], .addr = (uintptr_t)to, .len = DATA,
       .msg_flags = MSG_WAITALL);
    say(" same=%d", is_filled(to, DATA, 3));
    struct msghdr *message = buffer(sizeof *message);
    vector[0] = (struct iovec){from, DATA};
    message->msg_iov = vector, message->msg_iovlen = 1;
    fill(from, DATA, 4);
    DO("sendmsg", .opcode = IORING_OP_SENDMSG, .fd = pair[0], .addr = (uintptr_t)message, .len = 1);
    vector[0].iov_base = to;
    DO("recvmsg", .opcode = IORING_OP_RECVMSG, .fd = pair[1], .addr = (uintptr_t)message, .len = 1,
       .msg_flags = MSG_WAITALL);
    say(" same=%d", is_filled(to, DATA, 4));
    close_both(pair);
    /* Buffers that the ring holds, as long as it has them. */
    vector[0] = (struct iovec){from, DATA}, vector[1] = (struct iovec){to, DATA};
    out();
    answer("register", syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, vector, 2));
    fill(from, DATA, 5);
    DO("write_fixed", .opcode = IORING_OP_WRITE_FIXED, .fd = fd, .addr = (uintptr_t)from,
       .len = DATA, .buf_index = 0);
    DO("read_fixed", .opcode = IORING_OP_READ_FIXED, .fd = fd, .addr = (uintptr_t)to, .len = DATA,
       .buf_index = 1);
    say(" same=%d", is_filled(to, DATA, 5));
    answer("unregister",
           syscall(SYS_io_uring_register, ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0));
    int *files = buffer(2 * sizeof *files);
    files[0] = fd, files[1] = -1;
    out();
    answer("files", syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, files, 2));
    /* Buffers that the kernel chooses from. */
    int ends[2];
    MUST(pipe(ends) == 0 && write(ends[1], "chosen", 6) == 6);
    unsigned char *pool = buffer(4 * 64);
    DO("provide", .opcode = IORING_OP_PROVIDE_BUFFERS, .fd = 4, .addr = (uintptr_t)pool, .len = 64,
       .off = 1, .buf_group = 7);
    struct io_uring_sqe chosen = {.opcode = IORING_OP_READ,
                                  .fd = ends[0],
                                  .len = 64,
                                  .flags = sqe_flags | IOSQE_BUFFER_SELECT,
                                  .buf_group = 7};
    ring_says("read_chosen", ring_do(&ring, &chosen));
    int is_there = 0;
    for (int i = 0; i < 4; i++) is_there |= memcmp(pool + 64 * i, "chosen", 6) == 0;
    say(" same=%d", is_there);
    close_both(ends);
    close(fd);
    ring_close(&ring);
#undef DO
}

TEST(io_uring) {
    through_ring(0, 0);
}

/* The same by the ring's worker threads, which borrow this memory. */
TEST(io_uring_workers) {
    through_ring(0, IOSQE_ASYNC);
}

/* The same by a thread of the kernel's that polls for requests. */
TEST(io_uring_polled) {
    through_ring(IORING_SETUP_SQPOLL, 0);
}

static void clean_up(void) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    MUST(system(command) == 0);
}

int main(int count, char **words) {
    static const struct test tests[] = {
        T(read_write), T(direct), T(pipes),       T(splices),          T(vmsplice),
        T(stats),      T(opens),  T(directories), T(attributes),       T(locks),
        T(ioctls),     T(polls),  T(long_waits),  T(counters),         T(watches),
        T(mounts),     T(aio),    T(io_uring),    T(io_uring_workers), T(io_uring_polled),
    };
    const char *above = getenv("TMPDIR") ? getenv("TMPDIR") : "/var/tmp";
    snprintf(directory, sizeof directory, "%s/calls-XXXXXX", above);
    MUST(mkdtemp(directory) != NULL);
    int result = run_tests(count, words, "calls_files", tests, sizeof tests / sizeof *tests);
    clean_up();
    return result;
}
