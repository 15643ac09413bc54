/* A program that locks itself in: a filter of system calls, for all its threads or for the calling
   one, that ends every thread which makes another call than a few. What is swapped must be there
   afterwards, or the process must end; it must never read zeros.

       confined MB SECONDS SEED MODE      MODE: threads (a filter for all threads), own (for the
                                          calling thread alone) */
#include "common.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static const int allowed[] = {SYS_read,
                              SYS_write,
                              SYS_exit,
                              SYS_exit_group,
                              SYS_futex,
                              SYS_brk,
                              SYS_mmap,
                              SYS_munmap,
                              SYS_madvise,
                              SYS_rt_sigreturn,
                              SYS_rt_sigprocmask,
                              SYS_clock_gettime,
                              SYS_clock_nanosleep,
                              SYS_nanosleep,
                              SYS_fstat,
                              SYS_newfstatat,
                              SYS_getpid,
                              SYS_gettid};

static void confine(int all) {
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter code[COUNT + 3] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))};
    for (int i = 0; i < COUNT; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)allowed[i],
                                                   (unsigned char)(COUNT - i), 0);
    code[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_THREAD);
    code[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = COUNT + 3, .filter = code};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all ? SECCOMP_FILTER_FLAG_TSYNC : 0,
                 &program) == 0);
}

static struct arguments given;
static unsigned char *arena;

static void *idle(void *argument) {
    for (;;) sleep(1);
    return argument;
}

int main(int count, char **words) {
    given = parse(count, words, "threads");
    arena = map(given.pages * PAGE);
    pthread_t other;
    MUST(pthread_create(&other, NULL, idle, NULL) == 0);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    /* Time for the filter to meet a process at rest, and one at work. */
    if (given.seed % 2) usleep(300000);
    confine(strcmp(given.mode, "threads") == 0);
    double end = now() + given.seconds;
    uint64_t random = mix(given.seed);
    do {
        for (size_t i = 0; i < 5000; i++) {
            size_t page = below(&random, given.pages);
            glance_page(arena + page * PAGE, key_of(given.seed, page, 1),
                        "page of a confined program");
        }
    } while (now() < end);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page at the end");
    return ok("confined", given.mode);
}
