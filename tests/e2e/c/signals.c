/* Signal handlers over swapped memory. A timer's handler reads and verifies pages, on an alternate
 * stack that is swapped itself; a SIGSEGV handler opens PROT_NONE pages that are swapped out, and
 * the access that faulted continues. */
#include "common.h"
#include <signal.h>
#include <sys/time.h>

static struct arguments given;
static unsigned char *arena;
static uint32_t *version;
static volatile sig_atomic_t ticks, opened;
static uint64_t handler_random;

/* The lower half never changes, so a handler may read it at any time. */
static void on_alarm(int number) {
    (void)number;
    int saved = errno;
    for (int i = 0; i < 4; i++) {
        size_t page = below(&handler_random, given.pages / 2);
        check_page(arena + page * PAGE, key_of(given.seed, page, 1),
                   "page read in a signal handler");
    }
    ticks++;
    errno = saved;
}

static void on_segv(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    unsigned char *at = (unsigned char *)((uintptr_t)info->si_addr & ~(PAGE - 1));
    if (at < arena || at >= arena + given.pages * PAGE || info->si_code != SEGV_ACCERR) {
        static const char text[] = "FAILED: SIGSEGV that the program did not cause\n";
        if (write(1, text, sizeof text - 1) < 0) _exit(4);
        _exit(3);
    }
    if (mprotect(at, PAGE, PROT_READ | PROT_WRITE) != 0) _exit(4);
    opened++;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    arena = map(given.pages * PAGE);
    version = calloc(given.pages, sizeof *version);
    MUST(version != NULL);
    /* In a mapping of its own, which gets cold like the rest between two ticks. */
    stack_t alternate = {.ss_sp = map(1 << 20), .ss_size = 1 << 20};
    MUST(sigaltstack(&alternate, NULL) == 0);
    struct sigaction alarm_action = {.sa_handler = on_alarm, .sa_flags = SA_ONSTACK | SA_RESTART};
    struct sigaction segv_action = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO | SA_RESTART};
    MUST(sigaction(SIGALRM, &alarm_action, NULL) == 0);
    MUST(sigaction(SIGSEGV, &segv_action, NULL) == 0);
    for (size_t page = 0; page < given.pages; page++) {
        version[page] = 1;
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    }
    handler_random = mix(given.seed + 7);
    struct itimerval timer = {{0, 2000}, {0, 2000}};
    MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    uint64_t random = mix(given.seed);
    double end = now() + given.seconds;
    size_t half = given.pages / 2, faults = 0;
    for (size_t rounds = 0; rounds < 200 || now() < end; rounds++) {
        size_t length = 1 + below(&random, 32), from = half + below(&random, half - length);
        MUST(mprotect(arena + from * PAGE, length * PAGE, PROT_NONE) == 0);
        for (size_t page = from; page < from + length; page++) {
            if (next(&random) & 1) {
                check_page(arena + page * PAGE, key_of(given.seed, page, version[page]),
                           "page opened by the SIGSEGV handler");
            } else {
                version[page]++;
                fill_page(arena + page * PAGE, key_of(given.seed, page, version[page]));
            }
        }
        faults += length;
        for (int i = 0; i < 200; i++) {
            size_t page = below(&random, given.pages);
            glance_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "page");
        }
    }
    timer = (struct itimerval){0};
    MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
    if ((size_t)opened != faults)
        die("%zu protected pages were touched, the handler saw %zu", faults, (size_t)opened);
    if (ticks == 0) die("the timer's handler never ran");
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, version[page]), "page at the end");
    return ok("signals", NULL);
}
