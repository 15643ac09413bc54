/* Hooks on stacks that are as short as stacks may be.
 *
 *     narrow MB SECONDS SEED MODE
 *
 * exec      a thread of PTHREAD_STACK_MIN executes with 600 variables
 * advise    the same gives advice by a descriptor
 * handler   a handler on a short alternate stack executes in the child of a vfork
 */
#include "common.h"

#include <limits.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define VARIABLES 600

static struct arguments given;
static unsigned char *arena;
static char *variables[VARIABLES + 1];
static int self;

static void *executes(void *unused) {
    char *arguments[] = {"echo", "OK narrow exec", NULL};
    execve("/bin/echo", arguments, variables);
    return unused;
}

static void *advises(void *unused) {
    struct iovec first = {arena, PAGE}, whole[40];
    for (size_t i = 0; i < 40; i++) whole[i] = (struct iovec){arena + i * PAGE, PAGE};
    MUST(process_madvise(self, &first, 1, MADV_COLD, 0) == (ssize_t)PAGE);
    MUST(process_madvise(self, whole, 40, MADV_COLD, 0) == (ssize_t)(40 * PAGE));
    /* Not one of them where the last cannot be read, and those before it where it is refused. */
    MUST(process_madvise(self, (void *)8, 1, MADV_COLD, 0) == -1 && errno == EFAULT);
    return unused;
}

static void handler(int number) {
    (void)number;
    char *arguments[] = {"true", NULL}, *none[] = {NULL};
    pid_t child = vfork();
    if (child == 0) {
        execve("/bin/true", arguments, none);
        _exit(9);
    }
    int status = 1;
    waitpid(child, &status, 0);
    static const char said[] = "OK narrow handler\n";
    if (status == 0 && write(STDOUT_FILENO, said, sizeof said - 1) > 0) _exit(0);
    _exit(1);
}

static void crash(void) {
    /* What the kernel saves of the registers, what the loader saves of them, and 1 KiB. */
    size_t bytes = 2 * getauxval(AT_MINSIGSTKSZ) + 1024;
    unsigned char *stack = map(2 * PAGE + bytes);
    MUST(mprotect(stack, PAGE, PROT_NONE) == 0);
    stack_t alternate = {.ss_sp = stack + PAGE, .ss_size = bytes};
    MUST(sigaltstack(&alternate, NULL) == 0);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    MUST(sigaction(SIGUSR1, &action, NULL) == 0);
    raise(SIGUSR1);
}

int main(int count, char **words) {
    given = parse(count, words, "exec");
    arena = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    for (size_t i = 0; i < VARIABLES; i++) MUST(asprintf(&variables[i], "V%zu=1", i) > 0);
    self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (strcmp(given.mode, "handler") == 0) crash();
    pthread_attr_t attributes;
    pthread_t thread;
    MUST(pthread_attr_init(&attributes) == 0);
    MUST(pthread_attr_setstacksize(&attributes, 16384) == 0);
    MUST(pthread_create(&thread, &attributes,
                        strcmp(given.mode, "exec") == 0 ? executes : advises, NULL) == 0);
    MUST(pthread_join(thread, NULL) == 0);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
    return ok("narrow", given.mode);
}
