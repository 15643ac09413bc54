/* System calls about processes, signals, time, scheduling and the memory itself: see calls.h. */
#include "calls.h"
#include <asm/prctl.h>
#include <linux/bpf.h>
#include <linux/capability.h>
#include <linux/elf.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/kcmp.h>
#include <linux/landlock.h>
#include <linux/mempolicy.h>
#include <linux/perf_event.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <sys/time.h>
#include <sys/times.h>
#include <sys/timex.h>
#include <sys/user.h>
#include <sys/utsname.h>

/* The kernel's set of signals has 8 bytes. */
typedef uint64_t signals;
#define BIT(signal) (1ull << ((signal) - 1))

struct kernel_sigaction {
    void (*handler)(int, siginfo_t *, void *);
    unsigned long flags;
    void (*restorer)(void);
    signals mask;
};

/* Signals */

TEST(rt_sigaction) {
    struct kernel_sigaction *new = buffer(sizeof *new), *old = buffer(sizeof *old);
    MUST(syscall(SYS_rt_sigaction, SIGUSR2, NULL, new, 8) == 0);
    new->mask = BIT(SIGHUP) | BIT(SIGUSR1);
    new->handler = (void *)1; /* SIG_IGN */
    out();
    answer("set", syscall(SYS_rt_sigaction, SIGUSR2, new, old, 8));
    out();
    answer("get", syscall(SYS_rt_sigaction, SIGUSR2, NULL, old, 8));
    say(" mask=%llx ignored=%d", (unsigned long long)old->mask, old->handler == (void *)1);
    old->handler = NULL;
    MUST(syscall(SYS_rt_sigaction, SIGUSR2, old, NULL, 8) == 0);
}

TEST(rt_sigprocmask) {
    signals *set = buffer(8), *old = buffer(8);
    *set = BIT(SIGUSR1);
    out();
    answer("block", syscall(SYS_rt_sigprocmask, SIG_BLOCK, set, old, 8));
    say(" before=%d", (*old & BIT(SIGUSR1)) != 0);
    signals *pending = buffer(8);
    MUST(raise(SIGUSR1) == 0);
    out();
    answer("pending", syscall(SYS_rt_sigpending, pending, 8));
    say(" USR1=%d", (*pending & BIT(SIGUSR1)) != 0);
    siginfo_t *info = buffer(sizeof *info);
    struct timespec *limit = buffer(sizeof *limit);
    limit->tv_sec = 5;
    out();
    answer("wait", syscall(SYS_rt_sigtimedwait, set, info, limit, 8));
    say(" signo=%d mine=%d", info->si_signo, info->si_pid == getpid());
    /* One that is never sent. */
    limit->tv_sec = 0;
    limit->tv_nsec = 1000000;
    out();
    answer("late", syscall(SYS_rt_sigtimedwait, set, info, limit, 8));
    MUST(syscall(SYS_rt_sigprocmask, SIG_SETMASK, old, NULL, 8) == 0);
}

TEST(rt_sigqueueinfo) {
    signals *set = buffer(8), *old = buffer(8);
    *set = BIT(SIGRTMIN + 1);
    MUST(syscall(SYS_rt_sigprocmask, SIG_BLOCK, set, old, 8) == 0);
    siginfo_t *sent = buffer(sizeof *sent), *got = buffer(sizeof *got);
    for (int way = 0; way < 3; way++) {
        memset(sent, 0, sizeof *sent);
        sent->si_signo = SIGRTMIN + 1;
        sent->si_code = SI_QUEUE;
        sent->si_value.sival_int = 77 + way;
        int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
        MUST(pidfd >= 0);
        out();
        if (way == 0) answer("queue", syscall(SYS_rt_sigqueueinfo, getpid(), SIGRTMIN + 1, sent));
        if (way == 1)
            answer("tgqueue",
                   syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), SIGRTMIN + 1, sent));
        if (way == 2) answer("pidfd", syscall(SYS_pidfd_send_signal, pidfd, SIGRTMIN + 1, sent, 0));
        close(pidfd);
        out();
        answer("wait", syscall(SYS_rt_sigtimedwait, set, got, NULL, 8));
        say(" value=%d", got->si_value.sival_int);
    }
    MUST(syscall(SYS_rt_sigprocmask, SIG_SETMASK, old, NULL, 8) == 0);
}

static volatile sig_atomic_t handled;
static void *volatile handled_on;
static void count_signal(int number, siginfo_t *info, void *context) {
    (void)number, (void)info, (void)context;
    int here;
    handled_on = &here;
    handled++;
}

TEST(rt_sigsuspend) {
    struct sigaction action = {.sa_sigaction = count_signal, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGUSR1, &action, NULL) == 0);
    signals *set = buffer(8), old;
    *set = BIT(SIGUSR1);
    MUST(syscall(SYS_rt_sigprocmask, SIG_BLOCK, set, &old, 8) == 0);
    MUST(raise(SIGUSR1) == 0);
    *set = 0;
    handled = 0;
    out();
    answer("suspend", syscall(SYS_rt_sigsuspend, set, 8));
    say(" handled=%d", (int)handled);
    MUST(syscall(SYS_rt_sigprocmask, SIG_SETMASK, &old, NULL, 8) == 0);
}

TEST(sigaltstack) {
    size_t size = 16 * PAGE;
    unsigned char *stack = buffer_aligned(size, PAGE);
    stack_t *new = buffer(sizeof *new), *old = buffer(sizeof *old);
    new->ss_sp = stack;
    new->ss_size = size;
    struct sigaction action = {.sa_sigaction = count_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    MUST(sigaction(SIGUSR1, &action, NULL) == 0);
    handled = 0;
    out();
    answer("set", sigaltstack(new, NULL));
    out();
    answer("get", sigaltstack(NULL, old));
    say(" same=%d", old->ss_sp == stack && old->ss_size == size);
    /* The frame of the signal is written to the stack that is out. */
    out();
    MUST(raise(SIGUSR1) == 0);
    say(" handled=%d on_it=%d", (int)handled,
        (unsigned char *)handled_on >= stack && (unsigned char *)handled_on < stack + size);
    new->ss_flags = SS_DISABLE;
    out();
    answer("disable", sigaltstack(new, NULL));
}

/* Time */

TEST(clocks) {
    struct timespec *at = buffer(sizeof *at), *later = buffer(sizeof *later);
    struct timeval *tv = buffer(sizeof *tv);
    struct timezone *tz = buffer(sizeof *tz);
    time_t *seconds = buffer(sizeof *seconds);
    struct tms *tms = buffer(sizeof *tms);
    out();
    answer("gettime", syscall(SYS_clock_gettime, CLOCK_MONOTONIC, at));
    answer("getres", syscall(SYS_clock_getres, CLOCK_MONOTONIC, later));
    say(" res=%ld", later->tv_nsec);
    answer("gettimeofday", syscall(SYS_gettimeofday, tv, tz));
    works("time", syscall(SYS_time, seconds));
    works("times", syscall(SYS_times, tms));
    say(" sane=%d", at->tv_sec > 0 && labs(*seconds - tv->tv_sec) <= 1);
    struct timex *timex = buffer(sizeof *timex);
    out();
    works("adjtimex", syscall(SYS_adjtimex, timex));
    out();
    works("clock_adjtime", syscall(SYS_clock_adjtime, CLOCK_REALTIME, timex));
    say(" sane=%d", timex->time.tv_sec >= tv->tv_sec);
    /* The libc functions write from user space. */
    out();
    answer("vdso", clock_gettime(CLOCK_MONOTONIC, later));
    say(" later=%d", later->tv_sec >= at->tv_sec);
}

TEST(sleeps) {
    struct timespec *wanted = buffer(sizeof *wanted), *rest = buffer(sizeof *rest);
    wanted->tv_nsec = 1000000;
    out();
    answer("nanosleep", syscall(SYS_nanosleep, wanted, rest));
    out();
    answer("clock_nanosleep", syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, wanted, rest));
    /* Interrupted: the rest is written. */
    struct sigaction action = {.sa_sigaction = count_signal, .sa_flags = SA_SIGINFO};
    MUST(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval *timer = buffer(sizeof *timer), *old = buffer(sizeof *old);
    timer->it_value.tv_usec = 20000;
    wanted->tv_sec = 5;
    out();
    answer("setitimer", syscall(SYS_setitimer, ITIMER_REAL, timer, old));
    answer("nanosleep", syscall(SYS_nanosleep, wanted, rest));
    say(" rest=%d", rest->tv_sec >= 3 && rest->tv_sec <= 5);
    out();
    answer("getitimer", syscall(SYS_getitimer, ITIMER_REAL, old));
    say(" off=%d", old->it_value.tv_sec == 0 && old->it_value.tv_usec == 0);
}

TEST(timers) {
    struct sigevent *event = buffer(sizeof *event);
    int *id = buffer(sizeof *id);
    struct itimerspec *new = buffer(sizeof *new), *old = buffer(sizeof *old);
    event->sigev_notify = SIGEV_NONE;
    out();
    answer("create", syscall(SYS_timer_create, CLOCK_MONOTONIC, event, id));
    int timer = *id;
    new->it_value.tv_sec = 1000;
    out();
    answer("settime", syscall(SYS_timer_settime, timer, 0, new, old));
    out();
    answer("gettime", syscall(SYS_timer_gettime, timer, old));
    say(" runs=%d", old->it_value.tv_sec >= 990);
    answer("delete", syscall(SYS_timer_delete, timer));
}

/* What the process is */

TEST(names) {
    struct utsname *uts = buffer(sizeof *uts);
    struct sysinfo *info = buffer(sizeof *info);
    struct rusage *usage = buffer(sizeof *usage);
    struct rlimit *limit = buffer(sizeof *limit), *other = buffer(sizeof *other);
    out();
    answer("uname", syscall(SYS_uname, uts));
    say(" %s", uts->sysname);
    answer("sysinfo", syscall(SYS_sysinfo, info));
    say(" unit=%u", info->mem_unit);
    answer("getrusage", syscall(SYS_getrusage, RUSAGE_SELF, usage));
    say(" sane=%d", usage->ru_maxrss > 0);
    answer("getrlimit", syscall(SYS_getrlimit, RLIMIT_CORE, limit));
    out();
    answer("setrlimit", syscall(SYS_setrlimit, RLIMIT_CORE, limit));
    out();
    answer("prlimit", syscall(SYS_prlimit64, 0, RLIMIT_CORE, limit, other));
    say(" same=%d", limit->rlim_cur == other->rlim_cur && limit->rlim_max == other->rlim_max);
    gid_t *groups = buffer(64 * sizeof *groups);
    out();
    works("getgroups", syscall(SYS_getgroups, 64, groups));
    uid_t *ids = buffer(sizeof *ids), *ids2 = buffer(sizeof *ids), *ids3 = buffer(sizeof *ids);
    out();
    answer("getresuid", syscall(SYS_getresuid, ids, ids2, ids3));
    say(" same=%d", *ids == getuid() && *ids2 == geteuid());
    out();
    answer("getresgid", syscall(SYS_getresgid, ids, ids2, ids3));
    say(" same=%d", *ids == getgid() && *ids2 == getegid());
    unsigned *cpu = buffer(sizeof *cpu), *node = buffer(sizeof *node);
    out();
    answer("getcpu", syscall(SYS_getcpu, cpu, node, NULL));
    say(" sane=%d", *cpu < 4096);
    unsigned char *random = buffer(300);
    out();
    answer("getrandom", syscall(SYS_getrandom, random, 300, 0));
    unsigned sum = 0;
    for (int i = 0; i < 300; i++) sum |= random[i];
    say(" sane=%d", sum == 255);
    unsigned long *dummy = buffer(8);
    out();
    works("getpriority", getpriority(PRIO_PROCESS, 0));
    answer("sysfs", syscall(SYS_sysfs, 1, text("no such file system")));
    answer("get_fs", syscall(SYS_arch_prctl, ARCH_GET_FS, dummy));
    say(" sane=%d", *dummy != 0);
    unsigned char *ldt = buffer(64);
    out();
    answer("modify_ldt", syscall(SYS_modify_ldt, 0, ldt, 64));
}

TEST(capabilities) {
    struct __user_cap_header_struct *header = buffer(sizeof *header);
    struct __user_cap_data_struct *data = buffer(2 * sizeof *data);
    header->version = _LINUX_CAPABILITY_VERSION_3;
    out();
    answer("capget", syscall(SYS_capget, header, data));
    say(" %x", data[0].effective);
    out();
    answer("capset", syscall(SYS_capset, header, data));
    gid_t *groups = buffer(2 * sizeof *groups);
    groups[0] = 1, groups[1] = 2;
    out();
    IN_CHILD(_exit(syscall(SYS_setgroups, 2, groups) == 0 ? 5 : errno));
}

TEST(scheduling) {
    unsigned long *mask = buffer(128);
    out();
    works("getaffinity", syscall(SYS_sched_getaffinity, 0, 128, mask));
    out();
    answer("setaffinity", syscall(SYS_sched_setaffinity, 0, 128, mask));
    struct sched_param *param = buffer(sizeof *param);
    out();
    answer("getparam", syscall(SYS_sched_getparam, 0, param));
    out();
    answer("setparam", syscall(SYS_sched_setparam, 0, param));
    out();
    answer("setscheduler", syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, param));
    struct timespec *slice = buffer(sizeof *slice);
    out();
    answer("rr_get_interval", syscall(SYS_sched_rr_get_interval, 0, slice));
    unsigned char *attr = buffer(128);
    out();
    answer("getattr", syscall(SYS_sched_getattr, 0, attr, 128, 0));
    out();
    answer("setattr", syscall(SYS_sched_setattr, 0, attr, 0));
}

TEST(prctl) {
    char *name = text("a name"), *got = buffer(16);
    int *number = buffer(sizeof *number);
    char before[16];
    MUST(prctl(PR_GET_NAME, before) == 0);
    out();
    answer("set_name", prctl(PR_SET_NAME, name));
    out();
    answer("get_name", prctl(PR_GET_NAME, got));
    say(" %s", got);
    MUST(prctl(PR_SET_NAME, before) == 0);
    out();
    answer("pdeathsig", prctl(PR_GET_PDEATHSIG, number));
    out();
    answer("reaper", prctl(PR_GET_CHILD_SUBREAPER, number));
    out();
    answer("tsc", prctl(PR_GET_TSC, number));
    int **address = buffer(sizeof *address);
    out();
    answer("tid_address", prctl(PR_GET_TID_ADDRESS, address));
    unsigned long *auxv = buffer(512);
    out();
    works("auxv", prctl(0x41555856 /* PR_GET_AUXV */, auxv, 512, 0, 0));
    say(" sane=%d", auxv[0] != 0);
    unsigned char *place = map(PAGE);
    char *anon = text("sweep");
    out();
    answer("anon_name", prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, place, PAGE, anon));
    munmap(place, PAGE);
    /* Other machines' settings, and those of kernels with a certain configuration. */
    out();
    answer("mm", prctl(PR_SET_MM, PR_SET_MM_MAP_SIZE, number, 0, 0));
    out();
    answer("unalign", prctl(PR_GET_UNALIGN, number));
    answer("endian", prctl(PR_GET_ENDIAN, number));
    answer("fpemu", prctl(PR_GET_FPEMU, number));
    answer("fpexc", prctl(PR_GET_FPEXC, number));
    unsigned long *cookie = buffer(sizeof *cookie);
    out();
    answer("core", prctl(62 /* PR_SCHED_CORE */, 0 /* GET */, 0, 0, cookie));
}

/* Processes */

TEST(execve) {
    char **argv = buffer(4 * sizeof *argv), **envp = buffer(3 * sizeof *envp);
    char *path = text("/bin/sh"), *script = buffer_aligned(3000, 1);
    /* A long argument over several pages. */
    char *long_one = buffer_aligned(20000, 1);
    memset(long_one, 'x', 19999);
    strcpy(script, "test ${#LONG} = 19994 && test \"$OTHER\" = 'two words' && exit 9");
    memcpy(long_one, "LONG=", 5);
    argv[0] = text("sh"), argv[1] = text("-c"), argv[2] = script;
    envp[0] = long_one, envp[1] = text("OTHER=two words");
    char *empty = text("");
    out();
    IN_CHILD(execve(path, argv, envp); _exit(100));
    out();
    IN_CHILD(syscall(SYS_execve, path, argv, envp); _exit(100));
    int fd = open("/bin/sh", O_RDONLY | O_CLOEXEC);
    MUST(fd >= 0);
    out();
    IN_CHILD(syscall(SYS_execveat, fd, empty, argv, envp, AT_EMPTY_PATH); _exit(100));
    close(fd);
    /* vfork: the child runs in this memory. */
    out();
    pid_t child = vfork();
    if (child == 0) {
        execve(path, argv, envp);
        _exit(100);
    }
    int status;
    MUST(waitpid(child, &status, 0) == child);
    say(" vfork=%d", WEXITSTATUS(status));
    /* Arrays and strings that are not there. */
    envp[1] = (char *)64;
    out();
    answer("execve", execve(path, argv, envp));
    answer("execve", execve(path, argv, (char **)4096));
    answer("execve", syscall(SYS_execve, path, argv, envp));
    answer("execveat", syscall(SYS_execveat, AT_FDCWD, path, argv, 8ul, 0));
}

static int raw_child(void *argument) {
    return *(int *)argument;
}

TEST(clone) {
    struct clone_args *args = buffer(sizeof *args);
    int *parent_tid = buffer(sizeof *parent_tid), *child_tid = buffer(sizeof *child_tid),
        *pidfd = buffer(sizeof *pidfd);
    args->flags = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_PIDFD;
    args->exit_signal = SIGCHLD;
    args->parent_tid = (uintptr_t)parent_tid;
    args->child_tid = (uintptr_t)child_tid;
    args->pidfd = (uintptr_t)pidfd;
    siginfo_t *info = buffer(sizeof *info);
    struct rusage *usage = buffer(sizeof *usage);
    out();
    answer("clone3", syscall(SYS_clone3, 64ul, sizeof *args));
    answer("clone3", syscall(SYS_clone3, NULL, sizeof *args));
    long child = syscall(SYS_clone3, args, sizeof *args);
    if (child == 0) _exit(*child_tid == (int)syscall(SYS_gettid) ? 6 : 7);
    works("clone3", child);
    say(" parent_tid=%d", *parent_tid == (int)child);
    MUST(*pidfd > 0);
    out();
    answer("waitid", syscall(SYS_waitid, P_PID, child, info, WEXITED, usage));
    say(" status=%d code=%d same=%d", info->si_status, info->si_code, info->si_pid == (int)child);
    close(*pidfd);
    int *status = buffer(sizeof *status), *value = buffer(sizeof *value);
    *value = 11;
    unsigned char *stack = buffer_aligned(16 * PAGE, PAGE);
    out();
    child = clone(raw_child, stack + 16 * PAGE, SIGCHLD, value);
    works("clone", child);
    out();
    works("wait4", syscall(SYS_wait4, child, status, 0, usage));
    say(" status=%d", WEXITSTATUS(*status));
}

static void child_for_ptrace(volatile uint64_t *word) {
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
    _exit(*word == 0x5678 ? 3 : 4);
}

TEST(ptrace) {
    uint64_t *word = buffer(8);
    *word = 0x1234;
    struct user_regs_struct *registers = buffer(sizeof *registers);
    struct iovec *vector = buffer(sizeof *vector);
    siginfo_t *info = buffer(sizeof *info);
    uint64_t *set = buffer(8);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) child_for_ptrace(word);
    int status;
    MUST(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
    vector->iov_base = registers;
    vector->iov_len = sizeof *registers;
    /* The tracer's memory is out. What of the tracee's is out cannot be read: docs/semantics.md.
     * Here it was never out. */
    out();
    answer("getregset", ptrace(PTRACE_GETREGSET, child, NT_PRSTATUS, vector));
    say(" size=%d", vector->iov_len == sizeof *registers);
    out();
    answer("setregset", ptrace(PTRACE_SETREGSET, child, NT_PRSTATUS, vector));
    out();
    answer("getregs", ptrace(PTRACE_GETREGS, child, NULL, registers));
    out();
    answer("getsiginfo", ptrace(PTRACE_GETSIGINFO, child, NULL, info));
    say(" signo=%d", info->si_signo);
    out();
    answer("getsigmask", ptrace(PTRACE_GETSIGMASK, child, 8, set));
    kill(child, SIGKILL);
    MUST(waitpid(child, &status, 0) == child);
}

TEST(process_vm) {
    size_t size = 5 * PAGE;
    unsigned char *there = buffer(size), *here = buffer(size);
    struct iovec *local = buffer(2 * sizeof *local), *remote = buffer(2 * sizeof *remote);
    fill(there, size, 1);
    int ready[2], go_on[2];
    MUST(pipe(ready) == 0 && pipe(go_on) == 0);
    out();
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        char byte = 1;
        /* Shared with the parent since the fork, or out. */
        if (write(ready[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1) _exit(9);
        _exit(is_filled(there, size, 2) ? 3 : 4);
    }
    char byte;
    MUST(read(ready[0], &byte, 1) == 1);
    local[0] = (struct iovec){here, PAGE}, local[1] = (struct iovec){here + PAGE, size - PAGE};
    remote[0] = (struct iovec){there, 3 * PAGE},
    remote[1] = (struct iovec){there + 3 * PAGE, size - 3 * PAGE};
    out();
    answer("readv", syscall(SYS_process_vm_readv, child, local, 2, remote, 2, 0));
    say(" same=%d", is_filled(here, size, 1));
    fill(here, size, 2);
    out();
    answer("writev", syscall(SYS_process_vm_writev, child, local, 2, remote, 2, 0));
    say(" kept=%d", is_filled(there, size, 1));
    MUST(write(go_on[1], &byte, 1) == 1);
    int status;
    MUST(waitpid(child, &status, 0) == child);
    say(" child=%d", WEXITSTATUS(status));
    for (int i = 0; i < 2; i++) close(ready[i]), close(go_on[i]);
}

TEST(proc_mem) {
    /* Its own memory through /proc: as by a debugger. Pages that are out answer EIO,
     * docs/semantics.md; brought in they answer. */
    size_t size = 2 * PAGE;
    unsigned char *there = buffer(size), *here = buffer(size);
    fill(there, size, 1);
    int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    MUST(fd >= 0);
    if (!is_moving) {
        MUST(is_filled(there, size, 1));
        answer("pread", pread(fd, here, size, (off_t)(uintptr_t)there));
        say(" same=%d", is_filled(here, size, 1));
    }
    close(fd);
}

/* The memory itself */

TEST(mincore) {
    unsigned char *range = buffer_aligned(4 * PAGE, PAGE), *there = buffer(32);
    fill(range, 4 * PAGE, 1);
    out();
    answer("mincore", syscall(SYS_mincore, range, 4 * PAGE, there));
    /* What is out is not in core, as with the kernel's swap; what is near may come in with other
     * pages. */
    say(" sane=%d", ((there[0] | there[1] | there[2] | there[3]) & ~1) == 0);
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
}

TEST(protections) {
    unsigned char *range = buffer_aligned(4 * PAGE, PAGE);
    fill(range, 4 * PAGE, 1);
    out();
    answer("read_only", mprotect(range, 4 * PAGE, PROT_READ));
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
    out();
    answer("none", mprotect(range, 4 * PAGE, PROT_NONE));
    out();
    answer("all", syscall(SYS_pkey_mprotect, range, 4 * PAGE, PROT_READ | PROT_WRITE, -1));
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
    out();
    answer("mlock", mlock(range, 2 * PAGE));
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
    answer("munlock", munlock(range, 2 * PAGE));
    out();
    answer("mlock2", syscall(SYS_mlock2, range, 4 * PAGE, 1 /* MLOCK_ONFAULT */));
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
    answer("munlock", munlock(range, 4 * PAGE));
    answer("munlockall", munlockall());
    out();
    answer("msync", msync(range, 4 * PAGE, MS_SYNC));
    say(" same=%d", is_filled(range, 4 * PAGE, 1));
}

static unsigned char *filled_mapping(size_t pages) {
    unsigned char *range = map(pages * PAGE);
    fill(range, pages * PAGE, 5);
    if (is_managed) madvise(range, pages * PAGE, MADV_PAGEOUT);
    return range;
}

TEST(mremap) {
    unsigned char *range = filled_mapping(256), *place = map(256 * PAGE);
    unsigned char *moved =
        mremap(range, 256 * PAGE, 256 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    say(" moved=%d same=%d", moved == place, is_filled(moved, 256 * PAGE, 5));
    madvise(moved, 256 * PAGE, MADV_PAGEOUT);
    unsigned char *old = mremap(moved, 256 * PAGE, 256 * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
    say(" kept=%d same=%d zeros=%d", old != MAP_FAILED, is_filled(old, 256 * PAGE, 5),
        moved[0] == 0 && moved[255 * PAGE] == 0);
    madvise(old, 256 * PAGE, MADV_PAGEOUT);
    unsigned char *grown = mremap(old, 256 * PAGE, 512 * PAGE, MREMAP_MAYMOVE);
    say(" grown=%d same=%d", grown != MAP_FAILED, is_filled(grown, 256 * PAGE, 5));
    madvise(grown, 512 * PAGE, MADV_PAGEOUT);
    unsigned char *shrunk = mremap(grown, 512 * PAGE, 256 * PAGE, 0);
    say(" shrunk=%d same=%d", shrunk == grown, is_filled(shrunk, 256 * PAGE, 5));
    munmap(shrunk, 256 * PAGE);
    munmap(moved, 256 * PAGE);
}

TEST(mseal) {
    unsigned char *range = filled_mapping(256);
    answer("seal", syscall(462, range, 256 * PAGE, 0));
    answer("unmap", munmap(range, 256 * PAGE));
    say(" same=%d", is_filled(range, 256 * PAGE, 5));
    answer("protect", mprotect(range, 256 * PAGE, PROT_READ));
    answer("discard", madvise(range, PAGE, MADV_DONTNEED));
    if (is_managed) madvise(range, 256 * PAGE, MADV_PAGEOUT);
    say(" same=%d", is_filled(range, 256 * PAGE, 5));
}

TEST(brk) {
    unsigned char *end = sbrk(0);
    MUST(sbrk(64 * PAGE) == end);
    fill(end, 64 * PAGE, 7);
    madvise((void *)(((uintptr_t)end + PAGE - 1) & ~(PAGE - 1)), 63 * PAGE, MADV_PAGEOUT);
    say(" same=%d", is_filled(end, 64 * PAGE, 7));
    MUST(sbrk(-64 * (long)PAGE) != (void *)-1);
    MUST(sbrk(64 * PAGE) == end);
    say(" zero=%d", end[PAGE] == 0 && end[63 * PAGE] == 0);
    MUST(sbrk(-64 * (long)PAGE) != (void *)-1);
}

TEST(advice) {
    /* Every advice that exists for private memory, on memory that is out. What keeps contents must
     * keep them. */
    static const struct {
        const char *name;
        int advice, keeps;
    } all[] = {{"normal", 0, 1},           {"random", 1, 1},         {"sequential", 2, 1},
               {"willneed", 3, 1},         {"dontneed", 4, 0},       {"free", 8, -1},
               {"remove", 9, 1},           {"dontfork", 10, 1},      {"dofork", 11, 1},
               {"mergeable", 12, 1},       {"unmergeable", 13, 1},   {"hugepage", 14, 1},
               {"nohugepage", 15, 1},      {"dontdump", 16, 1},      {"dodump", 17, 1},
               {"wipeonfork", 18, 1},      {"keeponfork", 19, 1},    {"cold", 20, 1},
               {"pageout", 21, 1},         {"populate_read", 22, 1}, {"populate_write", 23, 1},
               {"dontneed_locked", 24, 0}, {"collapse", 25, 1}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        unsigned char *range = filled_mapping(256);
        long result = madvise(range, 256 * PAGE, all[i].advice);
        /* COLLAPSE needs a huge page and an aligned range; the kernel may have none. */
        if (all[i].advice != 25) answer(all[i].name, result);
        int same = is_filled(range, 256 * PAGE, 5), zeros = 1;
        for (size_t byte = 0; byte < 256 * PAGE; byte += 64) zeros &= range[byte] == 0;
        if (all[i].keeps == 1) say("/%d", same);
        if (all[i].keeps == 0) say("/%d", zeros);
        if (all[i].keeps == -1) say("/%d", same || zeros);
        munmap(range, 256 * PAGE);
    }
}

TEST(process_madvise) {
    unsigned char *range = filled_mapping(256);
    struct iovec *vector = buffer(2 * sizeof *vector);
    vector[0] = (struct iovec){range, 256 * PAGE},
    vector[1] = (struct iovec){range + 256 * PAGE, 256 * PAGE};
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    MUST(pidfd >= 0);
    static const int advice[] = {MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED};
    for (size_t i = 0; i < 3; i++) {
        out();
        answer("advise", syscall(SYS_process_madvise, pidfd, vector, 2, advice[i], 0));
        say("/%d", is_filled(range, 256 * PAGE, 5));
    }
    close(pidfd);
    munmap(range, 256 * PAGE);
}

TEST(numa) {
    unsigned char *range = buffer_aligned(4 * PAGE, PAGE);
    fill(range, 4 * PAGE, 3);
    void **pages = buffer(4 * sizeof *pages);
    int *status = buffer(4 * sizeof *status), *nodes = buffer(4 * sizeof *nodes),
        *mode = buffer(sizeof *mode);
    unsigned long *mask = buffer(128);
    for (int i = 0; i < 4; i++) pages[i] = range + i * PAGE;
    out();
    answer("move_pages", syscall(SYS_move_pages, 0, 4, pages, NULL, status, 0));
    for (int i = 0; i < 4; i++)
        if (status[i] != 0 && status[i] != -ENOENT && status[i] != -EFAULT)
            say(" status=%d", status[i]);
    out();
    answer("move_pages", syscall(SYS_move_pages, 0, 4, pages, nodes, status, 2 /* MPOL_MF_MOVE */));
    say(" same=%d", is_filled(range, 4 * PAGE, 3));
    mask[0] = 1;
    out();
    answer("mbind", syscall(SYS_mbind, range, 4 * PAGE, MPOL_BIND, mask, 64, MPOL_MF_MOVE));
    say(" same=%d", is_filled(range, 4 * PAGE, 3));
    out();
    answer("get_mempolicy", syscall(SYS_get_mempolicy, mode, mask, 1024, range, MPOL_F_ADDR));
    say(" mode=%d", *mode);
    out();
    answer("home_node", syscall(SYS_set_mempolicy_home_node, range, 4 * PAGE, 0, 0));
    mask[0] = 1;
    out();
    answer("set_mempolicy", syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask, 64));
    answer("set_mempolicy", syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0));
    out();
    answer("migrate_pages", syscall(SYS_migrate_pages, 0, 64, mask, mask));
    say(" same=%d", is_filled(range, 4 * PAGE, 3));
    MUST(syscall(SYS_mbind, range, 4 * PAGE, MPOL_DEFAULT, NULL, 0, 0) == 0);
}

TEST(shared_memory) {
    int id = shmget(IPC_PRIVATE, 256 * PAGE, IPC_CREAT | 0600);
    MUST(id >= 0);
    unsigned char *range = filled_mapping(256);
    struct shmid_ds *state = buffer(sizeof *state);
    out();
    answer("stat", syscall(SYS_shmctl, id, IPC_STAT, state));
    say(" size=%zu", state->shm_segsz);
    unsigned char *at = shmat(id, NULL, 0);
    MUST(at != (void *)-1);
    fill(at, 256 * PAGE, 9);
    say(" same=%d", is_filled(range, 256 * PAGE, 5));
    answer("detach", shmdt(at));
    munmap(range, 256 * PAGE);
    MUST(shmctl(id, IPC_RMID, NULL) == 0);
}

/* Filters, programs and rings given to the kernel */

TEST(seccomp) {
    /* uname fails with 77 for this thread. */
    struct sock_filter lines[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_uname, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 77),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_filter *code = buffer(sizeof lines);
    memcpy(code, lines, sizeof lines);
    struct sock_fprog *program = buffer(sizeof *program);
    program->len = 4;
    program->filter = code;
    uint32_t *action = buffer(4);
    *action = SECCOMP_RET_LOG;
    struct seccomp_notif_sizes *sizes = buffer(sizeof *sizes);
    out();
    answer("available", syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, action));
    answer("sizes", syscall(SYS_seccomp, SECCOMP_GET_NOTIF_SIZES, 0, sizes));
    say(" %u", sizes->seccomp_notif);
    out();
    IN_CHILD({
        struct utsname name;
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, program) != 0) _exit(2);
        errno = 0;
        _exit(uname(&name) == -1 ? errno : 3);
    });
    out();
    IN_CHILD({
        struct utsname name;
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program) != 0) _exit(2);
        errno = 0;
        _exit(uname(&name) == -1 ? errno : 3);
    });
}

TEST(landlock) {
    struct landlock_ruleset_attr *attr = buffer(sizeof *attr);
    attr->handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_DIR;
    out();
    int fd = (int)works("create", syscall(SYS_landlock_create_ruleset, attr, sizeof *attr, 0));
    if (fd < 0) return;
    struct landlock_path_beneath_attr *rule = buffer(sizeof *rule);
    rule->allowed_access = LANDLOCK_ACCESS_FS_MAKE_DIR;
    rule->parent_fd = open("/tmp", O_PATH | O_CLOEXEC);
    out();
    answer("rule", syscall(SYS_landlock_add_rule, fd, LANDLOCK_RULE_PATH_BENEATH, rule, 0));
    close(rule->parent_fd);
    close(fd);
}

TEST(bpf) {
    union bpf_attr *attr = buffer(sizeof *attr);
    attr->map_type = BPF_MAP_TYPE_ARRAY;
    attr->key_size = 4, attr->value_size = 3000, attr->max_entries = 2;
    out();
    int fd = (int)works("create", syscall(SYS_bpf, BPF_MAP_CREATE, attr, sizeof *attr));
    if (fd < 0) return;
    uint32_t *key = buffer(4);
    unsigned char *value = buffer(3000), *got = buffer(3000);
    *key = 1;
    fill(value, 3000, 4);
    memset(attr, 0, sizeof *attr);
    attr->map_fd = (uint32_t)fd, attr->key = (uintptr_t)key, attr->value = (uintptr_t)value;
    out();
    answer("update", syscall(SYS_bpf, BPF_MAP_UPDATE_ELEM, attr, sizeof *attr));
    attr->value = (uintptr_t)got;
    out();
    answer("lookup", syscall(SYS_bpf, BPF_MAP_LOOKUP_ELEM, attr, sizeof *attr));
    say(" same=%d", is_filled(got, 3000, 4));
    close(fd);
}

TEST(perf) {
    struct perf_event_attr *attr = buffer(sizeof *attr);
    attr->type = PERF_TYPE_SOFTWARE;
    attr->size = sizeof *attr;
    attr->config = PERF_COUNT_SW_TASK_CLOCK;
    uint64_t *count = buffer(8), *id = buffer(8);
    out();
    int fd =
        (int)works("open", syscall(SYS_perf_event_open, attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC));
    if (fd < 0) return;
    out();
    answer("read", read(fd, count, 8));
    answer("id", ioctl(fd, PERF_EVENT_IOC_ID, id));
    say(" sane=%d", *count > 0 && *id > 0);
    close(fd);
}

TEST(userfaultfd) {
    int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    works("open", fd);
    if (fd < 0) return;
    struct uffdio_api *api = buffer(sizeof *api);
    api->api = UFFD_API;
    out();
    answer("api", ioctl(fd, UFFDIO_API, api));
    say(" sane=%d", api->ioctls != 0);
    /* Below the size from which mappings are managed at once. */
    unsigned char *range =
        mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(range != MAP_FAILED);
    struct uffdio_register *reg = buffer(sizeof *reg);
    reg->range.start = (uintptr_t)range, reg->range.len = 2 * PAGE,
    reg->mode = UFFDIO_REGISTER_MODE_MISSING;
    out();
    answer("register", ioctl(fd, UFFDIO_REGISTER, reg));
    unsigned char *source = buffer_aligned(PAGE, PAGE);
    fill(source, PAGE, 6);
    struct uffdio_copy *copy = buffer(sizeof *copy);
    copy->dst = (uintptr_t)range, copy->src = (uintptr_t)source, copy->len = PAGE;
    out();
    answer("copy", ioctl(fd, UFFDIO_COPY, copy));
    say(" copied=%lld same=%d", (long long)copy->copy, is_filled(range, PAGE, 6));
    struct uffdio_zeropage *zero = buffer(sizeof *zero);
    zero->range.start = (uintptr_t)range + PAGE, zero->range.len = PAGE;
    out();
    answer("zero", ioctl(fd, UFFDIO_ZEROPAGE, zero));
    close(fd);
    munmap(range, 2 * PAGE);
}

TEST(lists) {
    /* Registered lists and words of a thread of its own: the thread ends with them in memory. */
    struct robust_list_head *head = NULL, **got = buffer(sizeof *got);
    size_t *length = buffer(sizeof *length);
    out();
    answer("get_robust_list", syscall(SYS_get_robust_list, 0, got, length));
    head = *got;
    say(" size=%zu there=%d", *length, head != NULL);
    answer("set_robust_list", syscall(SYS_set_robust_list, head, *length));
    works("set_tid_address",
          syscall(SYS_set_tid_address, syscall(SYS_set_tid_address, NULL) ? NULL : NULL));
}

TEST(process_mrelease) {
    fflush(stdout);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0)
        for (;;) pause();
    int pidfd = (int)syscall(SYS_pidfd_open, child, 0);
    answer("alive", syscall(448 /* process_mrelease */, pidfd, 0));
    MUST(kill(child, SIGKILL) == 0);
    /* It may be gone by then. */
    syscall(448, pidfd, 0);
    close(pidfd);
    MUST(waitpid(child, NULL, 0) == child);
}

TEST(security) {
    uint32_t *size = buffer(4);
    uint64_t *modules = buffer(1024);
    *size = 1024;
    out();
    works("lsm_list_modules", syscall(461, modules, size, 0));
    unsigned char *attribute = buffer(4096);
    *size = 4096;
    out();
    works("lsm_get_self_attr", syscall(459, 100, attribute, size, 0));
    out();
    works("lsm_set_self_attr", syscall(460, 100, attribute, *size, 0));
    char *log = buffer(4000);
    out();
    works("syslog", syscall(SYS_syslog, 3, log, 4000));
    answer("map_shadow_stack", syscall(453, NULL, PAGE, 0));
    char *name = text("no such module");
    out();
    answer("delete_module", syscall(SYS_delete_module, name, 0));
    answer("init_module", syscall(SYS_init_module, name, 5, name));
    answer("finit_module", syscall(SYS_finit_module, -1, name, 0));
    answer("kexec_load", syscall(SYS_kexec_load, 0, 1, name, 0xffffffff));
    answer("acct", syscall(SYS_acct, text("/no/such/file")));
    answer("swapon", syscall(SYS_swapon, text("/no/such/file"), 0));
    answer("swapoff", syscall(SYS_swapoff, text("/no/such/file")));
    answer("pivot_root", syscall(SYS_pivot_root, text("/no/such"), text("/no/such/one")));
    answer("quotactl", syscall(SYS_quotactl, 0x80000100, text("/no/such/device"), 0, buffer(64)));
    answer("quotactl_fd", syscall(443, -1, 0x80000100, 0, buffer(64)));
    answer("kexec_file_load", syscall(SYS_kexec_file_load, -1, -1, 5, name, 0xffffffff));
    answer("reboot", syscall(SYS_reboot, 1, 2, 3, buffer(16)));
    answer("ioperm", syscall(SYS_ioperm, 1 << 20, 1, 0));
    answer("sethostname", syscall(SYS_sethostname, name, 1000));
    answer("setdomainname", syscall(SYS_setdomainname, name, 1000));
    answer("settimeofday", syscall(SYS_settimeofday, &(struct timeval){.tv_usec = -1}, NULL));
    struct timespec *bad = buffer(sizeof *bad);
    bad->tv_nsec = -1;
    out();
    answer("clock_settime", syscall(SYS_clock_settime, CLOCK_REALTIME, bad));
    answer("remap_file_pages", syscall(SYS_remap_file_pages, bad, PAGE, 0, 0, 0));
}

int main(int count, char **words) {
    static const struct test tests[] = {
        T(rt_sigaction),
        T(rt_sigprocmask),
        T(rt_sigqueueinfo),
        T(rt_sigsuspend),
        T(sigaltstack),
        T(clocks),
        T(sleeps),
        T(timers),
        T(names),
        T(capabilities),
        T(scheduling),
        T(prctl),
        T(execve),
        T(clone),
        T(ptrace),
        T(process_vm),
        T(proc_mem),
        T(mincore),
        T(protections),
        T(mremap),
        T(mseal),
        T(brk),
        T(advice),
        T(process_madvise),
        T(numa),
        T(shared_memory),
        T(seccomp),
        T(landlock),
        T(bpf),
        T(perf),
        T(userfaultfd),
        T(lists),
        T(process_mrelease),
        T(security),
    };
    return run_tests(count, words, "calls_process", tests, sizeof tests / sizeof *tests);
}
