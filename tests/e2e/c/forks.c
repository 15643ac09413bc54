/* fork, vfork, posix_spawn and exec by a process with swapped memory. Each MODE is one way in which
 * children come and go. */
#include "common.h"
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <linux/userfaultfd.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

static struct arguments given;
static const char *program, *result_path;
static unsigned char *arena;
static uint32_t *version;
static double end;

static int no_zero_pages;

static uint64_t key(size_t page, uint32_t number) {
    uint64_t key = key_of(given.seed, page, number);
    return no_zero_pages ? key | 0x100 : key;
}

static void write_page(size_t page, uint32_t number) {
    version[page] = number;
    fill_page(arena + page * PAGE, key(page, number));
}

static void check(size_t page, const char *what) {
    check_page(arena + page * PAGE, key(page, version[page]), what);
}

static void check_all(const char *what) {
    for (size_t page = 0; page < given.pages; page++) check(page, what);
}

static void rewrite(size_t from, size_t to, size_t step, uint32_t number) {
    for (size_t page = from; page < to; page += step) write_page(page, number);
}

static pid_t fork_or_die(void) {
    fflush(stdout);
    pid_t child = fork();
    MUST(child >= 0);
    return child;
}

/* The child must have ended well. */
static void await(pid_t child, const char *what) {
    int status;
    MUST(waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) die("%s: the child was ended by signal %d", what, WTERMSIG(status));
    if (WEXITSTATUS(status) != 0)
        die("%s: the child's exit status is %d", what, WEXITSTATUS(status));
}

/* Parent and two children verify everything and rewrite their own half, all at the same time. */
static void tree(void) {
    for (uint32_t round = 1; round < 3 || now() < end; round++) {
        pid_t children[2];
        for (uint32_t which = 0; which < 2; which++) {
            children[which] = fork_or_die();
            if (children[which] == 0) {
                check_all("in the child");
                rewrite(which, given.pages, 2, 1000 * round + which);
                check_all("in the child after it wrote");
                _exit(0);
            }
        }
        rewrite(0, given.pages / 2, 1, 1000 * round + 500);
        check_all("in the parent while its children live");
        for (int which = 0; which < 2; which++) await(children[which], "tree");
        check_all("in the parent after its children");
    }
}

/* Each generation rewrites a part, forks the next, and verifies when that one is gone. */
static void nested_from(uint32_t depth) {
    rewrite(depth, given.pages, 6, 100 + depth);
    if (depth < 5) {
        pid_t child = fork_or_die();
        if (child == 0) {
            nested_from(depth + 1);
            _exit(0);
        }
        await(child, "nested");
    }
    check_all("in one generation of six");
}

static atomic_int stop;

/* Owns every fifth page of the upper half, beginning with its number. */
static void *churn(void *argument) {
    size_t self = (size_t)argument;
    uint64_t random = mix(given.seed + self);
    uint32_t number = 1;
    size_t pages = given.pages / 2 / 5;
    while (!atomic_load(&stop)) {
        size_t page = given.pages / 2 + below(&random, pages) * 5 + self;
        check(page, "a thread's page while the process forks");
        write_page(page, ++number % 1000);
    }
    return NULL;
}

/* Forks while four threads write the upper half. The child must find the lower half whole, and no
 * written page empty. */
static void threaded(void) {
    pthread_t ids[4];
    for (size_t i = 0; i < 4; i++) MUST(pthread_create(&ids[i], NULL, churn, (void *)i) == 0);
    for (size_t round = 0; round < 5 || now() < end; round++) {
        pid_t child = fork_or_die();
        if (child == 0) {
            for (size_t page = 0; page < given.pages / 2; page++)
                check(page, "in the child of a threaded process");
            for (size_t page = given.pages / 2; page < given.pages; page++) {
                volatile uint64_t *words = (volatile uint64_t *)(arena + page * PAGE);
                if (words[1] == 0)
                    mismatch(arena + page * PAGE + 8, 1, 0,
                             "lost page in the child of a threaded process");
            }
            rewrite(0, given.pages / 2, 3, 7);
            for (size_t page = 0; page < given.pages / 2; page++)
                check(page, "in that child after it wrote");
            _exit(0);
        }
        await(child, "threaded");
    }
    atomic_store(&stop, 1);
    for (size_t i = 0; i < 4; i++) MUST(pthread_join(ids[i], NULL) == 0);
    check_all("in the parent after its threads");
}

/* The parent of the process that works on is gone when it begins to. */
static void orphan(void) {
    for (size_t round = 0; round < 2 || now() < end; round++) {
        int ends[2];
        MUST(pipe(ends) == 0);
        pid_t middle = fork_or_die();
        if (middle == 0) {
            pid_t middle_id = getpid();
            if (fork_or_die() != 0) _exit(0);
            while (getppid() == middle_id) usleep(1000);
            check_all("in the orphan");
            rewrite(0, given.pages, 2, 9);
            check_all("in the orphan after it wrote");
            _exit(write(ends[1], "k", 1) == 1 ? 0 : 4);
        }
        close(ends[1]);
        await(middle, "orphan");
        rewrite(1, given.pages, 3, 11 + (uint32_t)round);
        char word;
        if (read(ends[0], &word, 1) != 1) die("the orphan ended before it had verified its memory");
        close(ends[0]);
        check_all("in the parent of the orphan's parent");
    }
}

/* Children die in the middle of whatever they do. */
static void killed(void) {
    uint64_t random = mix(given.seed);
    for (uint32_t round = 0; round < 5 || now() < end; round++) {
        pid_t child = fork_or_die();
        if (child == 0)
            for (uint32_t number = 1;; number++) {
                check_all("in the child that will be killed");
                rewrite(0, given.pages, 1 + number % 3, number);
            }
        rewrite(round % 5, given.pages, 5, 20 + round);
        usleep((useconds_t)(1000 + below(&random, 150000)));
        MUST(kill(child, SIGKILL) == 0);
        int status;
        MUST(waitpid(child, &status, 0) == child);
        if (!WIFSIGNALED(status))
            die("the child that was to be killed exited with %d", WEXITSTATUS(status));
        check_all("in the parent after a child was killed");
    }
}

static void many(void) {
    uint64_t random = mix(given.seed);
    for (size_t round = 0; round < 40 || now() < end; round++) {
        pid_t children[4];
        for (int i = 0; i < 4; i++) {
            children[i] = fork_or_die();
            if (children[i] == 0) {
                uint64_t own = mix(random + (uint64_t)i);
                for (int touch = 0; touch < 50; touch++)
                    check(below(&own, given.pages), "in one of many children");
                _exit(0);
            }
        }
        for (int i = 0; i < 50; i++) {
            size_t page = below(&random, given.pages);
            check(page, "in the parent of many");
            write_page(page, 1 + (uint32_t)round);
        }
        for (int i = 0; i < 4; i++) await(children[i], "many");
    }
    check_all("in the parent of many at the end");
}

/* The command's own process exits, its daemon verifies afterwards and says so in a file. */
static void daemonise(void) {
    pid_t parent = getpid();
    pid_t child = fork_or_die();
    if (child != 0) _exit(0);
    while (getppid() == parent) usleep(1000);
    MUST(setsid() > 0);
    usleep(200000);
    check_all("in the daemon");
    rewrite(0, given.pages, 2, 5);
    check_all("in the daemon after it wrote");
    char temporary[1024];
    snprintf(temporary, sizeof temporary, "%s.new", result_path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    MUST(fd >= 0 && write(fd, "OK daemon\n", 10) == 10);
    close(fd);
    MUST(rename(temporary, result_path) == 0);
    _exit(0);
}

static char **child_words(void) {
    static char megabytes[32], seed[32];
    static char *words[6];
    snprintf(megabytes, sizeof megabytes, "%zu", given.megabytes / 4);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)given.seed + 1);
    words[0] = (char *)program, words[1] = megabytes, words[2] = "0", words[3] = seed,
    words[4] = "plain", words[5] = NULL;
    return words;
}

/* The child becomes a fresh program with memory of its own, by each of the ways there are. */
static void become(const char *way) {
    char **words = child_words();
    for (size_t round = 0; round < 3 || now() < end; round++) {
        pid_t child;
        if (strcmp(way, "exec") == 0) {
            child = fork_or_die();
            if (child == 0) {
                check(round % given.pages, "in the child before exec");
                execv(program, words);
                _exit(9);
            }
        } else if (strcmp(way, "vfork") == 0) {
            child = vfork();
            MUST(child >= 0);
            if (child == 0) {
                execv(program, words);
                _exit(9);
            }
        } else {
            MUST(posix_spawn(&child, program, NULL, NULL, words, environ) == 0);
        }
        rewrite(round % 4, given.pages, 4, 3 + (uint32_t)round);
        await(child, way);
        check_all("in the parent of another program");
    }
}

/* The child closes every descriptor it did not open itself, and works on. */
static void closefds(void) {
    for (size_t round = 0; round < 2 || now() < end; round++) {
        pid_t child = fork_or_die();
        if (child == 0) {
            for (int fd = 3; fd < 4096; fd++) close(fd);
            check_all("in the child without descriptors");
            rewrite(0, given.pages, 2, 13);
            check_all("in that child after it wrote");
            _exit(0);
        }
        await(child, "closefds");
        check_all("in the parent of a child without descriptors");
    }
}

/* A mapping grows, in place or by moving, and the new part is not touched before a child does. */
static void grown(void) {
    const size_t block = 256;
    size_t pages = block;
    unsigned char *at =
        mmap(NULL, block * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(at != MAP_FAILED);
    for (size_t page = 0; page < block; page++) fill_page(at + page * PAGE, key(page, 77));
    for (size_t round = 0; round < 4 || now() < end; round++) {
        /* What is managed when it grows is what counts: until then others are in the way. */
        rewrite(round % 4, given.pages, 4, 20 + (uint32_t)round);
        size_t more = pages + 1 + round % block;
        at = mremap(at, pages * PAGE, more * PAGE, MREMAP_MAYMOVE);
        MUST(at != MAP_FAILED);
        pid_t child = fork_or_die();
        if (child == 0) {
            for (size_t page = 0; page < block; page++)
                check_page(at + page * PAGE, key(page, 77), "in a child of one that grew");
            for (size_t page = pages; page < more; page++) {
                for (size_t word = 0; word < WORDS; word++)
                    MUST(((uint64_t *)(at + page * PAGE))[word] == 0);
                fill_page(at + page * PAGE, key(page, 78));
            }
            for (size_t page = pages; page < more; page++)
                check_page(at + page * PAGE, key(page, 78), "what a child wrote where it grew");
            _exit(0);
        }
        await(child, "grown");
        for (size_t page = pages; page < more; page++) MUST(*(uint64_t *)(at + page * PAGE) == 0);
        pages = more;
        if (pages > 16 * block) {
            MUST(mremap(at, pages * PAGE, block * PAGE, 0) == at);
            pages = block;
        }
    }
    check_all("in the parent at the end");
}

/* A child has what a move has left mapped (`MREMAP_DONTUNMAP`), empty. */
static void left(void) {
    const size_t block = 256, gap = 16;
    for (size_t round = 0; round < 4 || now() < end; round++) {
        /* Alone: what follows a managed mapping is looked for anyway. */
        unsigned char *around = mmap(NULL, (block + 2 * gap) * PAGE, PROT_READ,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        MUST(around != MAP_FAILED);
        unsigned char *at = around + gap * PAGE;
        MUST(mmap(at, block * PAGE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
        for (size_t page = 0; page < block; page++) fill_page(at + page * PAGE, key(page, 77));
        rewrite(round % 4, given.pages, 4, 20 + (uint32_t)round);
        unsigned char *moved = mremap(at, block * PAGE, block * PAGE,
                                      MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
        MUST(moved != MAP_FAILED);
        unsigned char *again = NULL;
        if (round % 2) {
            /* What was left moves on before it was touched. */
            again = mremap(at, block * PAGE, block * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
            MUST(again != MAP_FAILED);
        }
        pid_t child = fork_or_die();
        if (child == 0) {
            for (size_t page = 0; page < block; page++) {
                check_page(moved + page * PAGE, key(page, 77), "in a child, what was moved");
                check_page(at + page * PAGE, 0, "in a child, what the move has left");
                if (again) check_page(again + page * PAGE, 0, "in a child, what moved on");
                fill_page(at + page * PAGE, key(page, 78));
            }
            for (size_t page = 0; page < block; page++)
                check_page(at + page * PAGE, key(page, 78), "what a child wrote there");
            _exit(0);
        }
        await(child, "left");
        for (size_t page = 0; page < block; page++) {
            check_page(moved + page * PAGE, key(page, 77), "what was moved");
            check_page(at + page * PAGE, 0, "what the move has left");
        }
        MUST(munmap(around, (block + 2 * gap) * PAGE) == 0);
        MUST(munmap(moved, block * PAGE) == 0);
        if (again) MUST(munmap(again, block * PAGE) == 0);
    }
    check_all("in the parent at the end");
}

/* The same for a child past fork(2): without fork events its parent is let go before. */
static void parted(void) {
    const size_t block = 256, gap = 16;
    unsigned char *around = mmap(NULL, (block + 2 * gap) * PAGE, PROT_READ,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(around != MAP_FAILED);
    unsigned char *at = around + gap * PAGE;
    MUST(mmap(at, block * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
              0) == at);
    for (size_t page = 0; page < block; page++) fill_page(at + page * PAGE, key(page, 77));
    rewrite(0, given.pages, 1, 20);
    unsigned char *moved =
        mremap(at, block * PAGE, block * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    MUST(moved != MAP_FAILED);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    MUST(child >= 0);
    if (child == 0) {
        for (size_t page = 0; page < block; page++) {
            check_page(moved + page * PAGE, key(page, 77), "in a child, what was moved");
            check_page(at + page * PAGE, 0, "in a child, what the move has left");
        }
        _exit(0);
    }
    await(child, "parted");
    check_all("in the parent at the end");
}

enum { WARD = 512 };

/* Fills what is missing in the ward, as a program that pages by itself does. */
static void *warden(void *argument) {
    int fd = *(int *)argument;
    unsigned char *page = map(PAGE);
    struct uffd_msg message;
    while (read(fd, &message, sizeof message) == sizeof message) {
        if (message.event != UFFD_EVENT_PAGEFAULT) continue;
        uint64_t at = message.arg.pagefault.address & ~(uint64_t)(PAGE - 1);
        fill_page(page, key_of(given.seed, at / PAGE, 55));
        struct uffdio_copy copy = {.dst = at, .src = (uint64_t)page, .len = PAGE};
        MUST(ioctl(fd, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
    }
    return NULL;
}

static unsigned char *ward;

/* What the program pages by itself, behind a mapping that swaptide will manage. Before anything is
 * managed: the second one may not register. */
static void take_ward(void) {
    static int fd;
    ward = map(2 * WARD * PAGE) + WARD * PAGE;
    fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    MUST(fd >= 0);
    struct uffdio_api api = {.api = UFFD_API};
    MUST(ioctl(fd, UFFDIO_API, &api) == 0);
    struct uffdio_register registration = {.range = {(uint64_t)ward, WARD * PAGE},
                                           .mode = UFFDIO_REGISTER_MODE_MISSING};
    MUST(ioctl(fd, UFFDIO_REGISTER, &registration) == 0);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, warden, &fd) == 0);
}

/* It stays the program's, and comes along at forks. */
static void guarded(void) {
    unsigned char *before = ward - WARD * PAGE;
    for (size_t page = 0; page < WARD; page++) {
        fill_page(before + page * PAGE, key(page, 56));
        check_page(ward + page * PAGE, key_of(given.seed, (size_t)(ward + page * PAGE) / PAGE, 55),
                   "filled by the program itself");
        fill_page(ward + page * PAGE, key(page, 57));
    }
    for (size_t round = 0; round < 4 || now() < end; round++) {
        rewrite(round % 4, given.pages, 4, 20 + (uint32_t)round);
        pid_t child = fork_or_die();
        for (size_t page = 0; page < WARD; page++) {
            check_page(before + page * PAGE, key(page, 56),
                       "before what the program pages by itself");
            check_page(ward + page * PAGE, key(page, 57), "what the program pages by itself");
        }
        if (child == 0) _exit(0);
        await(child, "guarded");
    }
    check_all("in the parent at the end");
}

int main(int count, char **words) {
    given = parse(count, words, "tree");
    result_path = count > 5 ? words[5] : NULL;
    program = words[0];
    if (strcmp(given.mode, "guarded") == 0) take_ward();
    arena = map(given.pages * PAGE);
    version = map(given.pages * sizeof *version);
    no_zero_pages = strcmp(given.mode, "threaded") == 0;
    for (size_t page = 0; page < given.pages; page++) write_page(page, 1);
    end = now() + given.seconds;
    const char *mode = given.mode;
    if (strcmp(mode, "tree") == 0)
        tree();
    else if (strcmp(mode, "nested") == 0)
        nested_from(0);
    else if (strcmp(mode, "threaded") == 0)
        threaded();
    else if (strcmp(mode, "orphan") == 0)
        orphan();
    else if (strcmp(mode, "killed") == 0)
        killed();
    else if (strcmp(mode, "many") == 0)
        many();
    else if (strcmp(mode, "daemon") == 0 && result_path)
        daemonise();
    else if (strcmp(mode, "exec") == 0 || strcmp(mode, "vfork") == 0 || strcmp(mode, "spawn") == 0)
        become(mode);
    else if (strcmp(mode, "closefds") == 0)
        closefds();
    else if (strcmp(mode, "grown") == 0)
        grown();
    else if (strcmp(mode, "parted") == 0)
        parted();
    else if (strcmp(mode, "left") == 0)
        left();
    else if (strcmp(mode, "guarded") == 0)
        guarded();
    else if (strcmp(mode, "plain") == 0) {
        check_all("in a program that was started by exec");
        return 0;
    } else {
        fprintf(stderr, "forks: unknown mode %s\n", mode);
        return 2;
    }
    return ok("forks", mode);
}
