/* Memory in unusual shapes: each mode fills about MB megabytes in one of them, reads all of it back
 * several times, and verifies it.
 *
 * small      mappings of 4K to 60K that the kernel cannot merge; they are changed, unmapped, grown
 *            and made again, then forked
 * churn      the same by threads that map, fill, verify and unmap without pause
 * readonly   private memory that is made read-only after it was filled; part of it is made writable
 *            again and changed
 * locked     a part is locked; the rest is walked through
 * sparse     one page in each 2 MiB of a large reservation: page tables as large as the data
 * stacks     hundreds of threads that wait with touched stacks
 * environ    children with large arguments and environments
 * sysv       System V shared memory and private memory
 * posix      shared memory objects and memory files and private memory
 * forktree   three generations that change a part each
 */
#include "common.h"
#include <fcntl.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/wait.h>

static struct arguments given;

static uint64_t key_at(uint64_t page, uint64_t version) {
    return key_of(given.seed, page, version);
}

/* Small mappings */

#define LARGEST 15

struct small {
    unsigned char *at;
    unsigned pages;
    uint64_t id, version;
};

/* An unmapped page on either side keeps the kernel from merging it with others. */
static void small_map(struct small *one, uint64_t id, unsigned pages) {
    unsigned char *at =
        mmap(NULL, (pages + 1) * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(at != MAP_FAILED);
    MUST(munmap(at + pages * PAGE, PAGE) == 0);
    *one = (struct small){.at = at, .pages = pages, .id = id, .version = 1};
    for (unsigned page = 0; page < pages; page++)
        fill_page(at + page * PAGE, key_at(id * LARGEST + page, 1));
}

static void small_check(const struct small *one, const char *what) {
    for (unsigned page = 0; page < one->pages; page++)
        check_page(one->at + page * PAGE, key_at(one->id * LARGEST + page, one->version), what);
}

static void small_write(struct small *one) {
    one->version++;
    for (unsigned page = 0; page < one->pages; page++)
        fill_page(one->at + page * PAGE, key_at(one->id * LARGEST + page, one->version));
}

static void small_mode(void) {
    size_t room = given.pages, count = 0, used = 0;
    struct small *all = calloc(room, sizeof *all);
    uint64_t state = given.seed, id = 0;
    MUST(all != NULL);
    for (; used + LARGEST < room && count < 20000; count++) {
        small_map(&all[count], id++, 1 + below(&state, LARGEST));
        used += all[count].pages;
    }
    for (size_t i = 0; i < count; i++) small_check(&all[i], "filled");
    double end = now() + given.seconds;
    while (now() < end) {
        struct small *one = &all[below(&state, count)];
        switch (below(&state, 6)) {
        case 0:
            MUST(munmap(one->at, one->pages * PAGE) == 0);
            small_map(one, id++, 1 + below(&state, LARGEST));
            break;
        case 1:
            MUST(mprotect(one->at, PAGE, PROT_READ) == 0);
            small_check(one, "read-only");
            MUST(mprotect(one->at, PAGE, PROT_READ | PROT_WRITE) == 0);
            small_write(one);
            break;
        case 2: {
            /* It grows by a page if there is none behind it, and moves if there is. */
            if (one->pages == LARGEST) break;
            unsigned char *to =
                mremap(one->at, one->pages * PAGE, (one->pages + 1) * PAGE, MREMAP_MAYMOVE);
            MUST(to != MAP_FAILED);
            one->at = to;
            check_page(to + one->pages * PAGE, 0, "grown by");
            fill_page(to + one->pages * PAGE, key_at(one->id * LARGEST + one->pages, one->version));
            one->pages++;
            small_check(one, "moved");
            break;
        }
        case 3:
            MUST(madvise(one->at, PAGE, MADV_DONTNEED) == 0);
            check_page(one->at, 0, "given up");
            small_write(one);
            break;
        default: small_check(one, "changed"); small_write(one);
        }
    }
    for (int child = 0; child < 2; child++) {
        pid_t pid = fork();
        MUST(pid >= 0);
        if (pid == 0) {
            for (size_t i = child; i < count; i += 2) small_check(&all[i], "in a child");
            for (size_t i = 0; i < count / 8; i++)
                small_write(&all[i]), small_check(&all[i], "written in a child");
            _exit(0);
        }
        int status;
        MUST(waitpid(pid, &status, 0) == pid);
        if (status != 0) die("a child ended with %x", status);
    }
    for (size_t i = 0; i < count; i++) small_check(&all[i], "at the end");
}

static void *born_and_gone(void *argument) {
    enum { HELD = 1500 };
    static _Thread_local struct small held[HELD];
    uint64_t number = (uintptr_t)argument, state = given.seed + number, id = number << 32;
    double end = now() + given.seconds;
    for (size_t round = 0; now() < end; round++) {
        struct small *one = &held[round % HELD];
        if (one->at != NULL) {
            small_check(one, "a thread's");
            MUST(munmap(one->at, one->pages * PAGE) == 0);
        }
        small_map(one, id++, 1 + below(&state, LARGEST));
    }
    return NULL;
}

static void churn_mode(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        MUST(pthread_create(&threads[i], NULL, born_and_gone, (void *)i) == 0);
    for (int i = 0; i < 4; i++) MUST(pthread_join(threads[i], NULL) == 0);
}

/* Memory that cannot be moved */

static unsigned char *filled(size_t pages, uint64_t first) {
    unsigned char *at = map(pages * PAGE);
    for (size_t page = 0; page < pages; page++)
        fill_page(at + page * PAGE, key_at(first + page, 1));
    return at;
}

static void checked(const unsigned char *at, size_t pages, uint64_t first, const char *what) {
    for (size_t page = 0; page < pages; page++)
        check_page(at + page * PAGE, key_at(first + page, 1), what);
}

static void readonly_mode(void) {
    size_t part = given.pages / 8;
    unsigned char *parts[8];
    for (int i = 0; i < 8; i++) {
        parts[i] = filled(part, i * part);
        if (i % 2 == 0) MUST(mprotect(parts[i], part * PAGE, PROT_READ) == 0);
    }
    double end = now() + given.seconds;
    do {
        for (int i = 0; i < 8; i++)
            checked(parts[i], part, i * part, i % 2 ? "writable" : "read-only");
        MUST(mprotect(parts[0], part * PAGE, PROT_READ | PROT_WRITE) == 0);
        for (size_t page = 0; page < part; page++)
            fill_page(parts[0] + page * PAGE, key_at(page, 1));
        MUST(mprotect(parts[0], part * PAGE, PROT_READ) == 0);
    } while (now() < end);
}

static void locked_mode(void) {
    size_t part = given.pages / 8;
    unsigned char *locked = filled(part, 0), *rest = filled(7 * part, part);
    MUST(mlock(locked, part * PAGE) == 0);
    double end = now() + given.seconds;
    do {
        checked(rest, 7 * part, part, "next to locked memory");
        unsigned char there[1024];
        for (size_t page = 0; page < part; page += sizeof there) {
            size_t n = part - page < sizeof there ? part - page : sizeof there;
            MUST(mincore(locked + page * PAGE, n * PAGE, there) == 0);
            for (size_t i = 0; i < n; i++)
                if ((there[i] & 1) == 0) die("locked page %zu is not in memory", page + i);
        }
        checked(locked, part, 0, "locked");
    } while (now() < end);
}

static void sparse_mode(void) {
    size_t step = 2ul << 20, count = given.pages / 4;
    unsigned char *at = mmap(NULL, count * step, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    MUST(at != MAP_FAILED);
    double end = now() + given.seconds;
    for (size_t i = 0; i < count; i++) fill_page(at + i * step + i % 512 * PAGE, key_at(i, 1));
    do {
        for (size_t i = 0; i < count; i++)
            check_page(at + i * step + i % 512 * PAGE, key_at(i, 1), "sparse");
    } while (now() < end);
}

/* Stacks, arguments, environments */

static pthread_barrier_t touched, checked_all;

static void *deep(void *argument) {
    uint64_t number = (uintptr_t)argument;
    enum { DEPTH = 48 };
    unsigned char space[(DEPTH + 1) * PAGE];
    unsigned char *page = (unsigned char *)(((uintptr_t)space + PAGE - 1) & ~(PAGE - 1));
    for (int i = 0; i < DEPTH; i++) fill_page(page + i * PAGE, key_at(number * DEPTH + i, 1));
    pthread_barrier_wait(&touched);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < DEPTH; i++)
            check_page(page + i * PAGE, key_at(number * DEPTH + i, 1), "on a stack");
    pthread_barrier_wait(&checked_all);
    return NULL;
}

static void stacks_mode(void) {
    size_t count = given.pages / 50;
    pthread_t *threads = calloc(count, sizeof *threads);
    pthread_attr_t attributes;
    MUST(threads != NULL && pthread_attr_init(&attributes) == 0 &&
         pthread_attr_setstacksize(&attributes, 512 << 10) == 0);
    MUST(pthread_barrier_init(&touched, NULL, count) == 0 &&
         pthread_barrier_init(&checked_all, NULL, count) == 0);
    for (size_t i = 0; i < count; i++)
        MUST(pthread_create(&threads[i], &attributes, deep, (void *)i) == 0);
    for (size_t i = 0; i < count; i++) MUST(pthread_join(threads[i], NULL) == 0);
}

enum { STRINGS = 14, LENGTH = 60000 };

static void letters(char *text, uint64_t number) {
    for (size_t i = 0; i < LENGTH; i++) text[i] = 'a' + mix(given.seed + number * LENGTH + i) % 26;
    text[LENGTH] = 0;
}

/* In a child: the arguments and the environment came whole. */
static void as_child(char **words) {
    extern char **environ;
    char *expected = malloc(LENGTH + 1);
    MUST(expected != NULL);
    for (int i = 0; i < STRINGS; i++) {
        letters(expected, i);
        if (strcmp(words[5 + i], expected) != 0) die("argument %d of a child", i);
        char name[16];
        snprintf(name, sizeof name, "UNUSUAL%d", i);
        letters(expected, STRINGS + i);
        const char *found = getenv(name);
        if (found == NULL || strcmp(found, expected) != 0) die("%s in a child's environment", name);
    }
    _exit(0);
}

static void environ_mode(char **words) {
    char *list[5 + STRINGS + 1] = {"/proc/self/exe", words[1], words[2], words[3], "child"};
    for (int i = 0; i < STRINGS; i++) {
        list[5 + i] = malloc(LENGTH + 1);
        MUST(list[5 + i] != NULL);
        letters(list[5 + i], i);
        char name[16], value[LENGTH + 1];
        snprintf(name, sizeof name, "UNUSUAL%d", i);
        letters(value, STRINGS + i);
        MUST(setenv(name, value, 1) == 0);
    }
    size_t pages = given.pages / 2;
    unsigned char *heap = filled(pages, 0);
    double end = now() + given.seconds;
    do {
        pid_t children[6];
        for (int i = 0; i < 6; i++) {
            children[i] = fork();
            MUST(children[i] >= 0);
            if (children[i] == 0) {
                execv(list[0], list);
                die("execv: %s", strerror(errno));
            }
        }
        for (int i = 0; i < 6; i++) {
            int status;
            MUST(waitpid(children[i], &status, 0) == children[i]);
            if (status != 0) die("a child ended with %x", status);
        }
        checked(heap, pages, 0, "with children");
    } while (now() < end);
}

/* Shared memory */

static void next_to_shared(unsigned char *shared, size_t pages) {
    unsigned char *heap = filled(given.pages, pages);
    for (size_t page = 0; page < pages; page++) fill_page(shared + page * PAGE, key_at(page, 1));
    double end = now() + given.seconds;
    uint64_t version = 1;
    do {
        pid_t pid = fork();
        MUST(pid >= 0);
        if (pid == 0) {
            for (size_t page = 0; page < pages; page++) {
                check_page(shared + page * PAGE, key_at(page, version), "shared, in a child");
                fill_page(shared + page * PAGE, key_at(page, version + 1));
            }
            _exit(0);
        }
        int status;
        MUST(waitpid(pid, &status, 0) == pid);
        if (status != 0) die("a child ended with %x", status);
        version++;
        for (size_t page = 0; page < pages; page++)
            check_page(shared + page * PAGE, key_at(page, version), "shared");
        checked(heap, given.pages, pages, "next to shared memory");
    } while (now() < end);
}

static void sysv_mode(void) {
    size_t pages = given.pages / 4;
    int id = shmget(IPC_PRIVATE, pages * PAGE, IPC_CREAT | 0600);
    MUST(id >= 0);
    unsigned char *at = shmat(id, NULL, 0);
    MUST(at != (void *)-1 && shmctl(id, IPC_RMID, NULL) == 0);
    next_to_shared(at, pages);
    MUST(shmdt(at) == 0);
}

static void posix_mode(void) {
    size_t pages = given.pages / 4;
    int fd = memfd_create("unusual", MFD_CLOEXEC);
    MUST(fd >= 0 && ftruncate(fd, pages * PAGE) == 0);
    unsigned char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(at != MAP_FAILED);
    next_to_shared(at, pages);
    unsigned char page[PAGE];
    for (size_t i = 0; i < pages; i++) {
        MUST(pread(fd, page, PAGE, i * PAGE) == (ssize_t)PAGE);
        if (memcmp(page, at + i * PAGE, PAGE) != 0)
            die("the file differs from its mapping at page %zu", i);
    }
}

static void forktree_mode(void) {
    size_t pages = given.pages / 4;
    unsigned char *heap = filled(pages, 0);
    for (int generation = 1; generation <= 3; generation++) {
        pid_t pid = fork();
        MUST(pid >= 0);
        if (pid > 0) {
            int status;
            MUST(waitpid(pid, &status, 0) == pid);
            if (status != 0) die("a child ended with %x", status);
            break;
        }
        for (size_t page = generation - 1; page < pages; page += 4) {
            check_page(heap + page * PAGE, key_at(page, 1), "an ancestor's");
            fill_page(heap + page * PAGE, key_at(page, 10 + generation));
        }
        for (size_t page = generation - 1; page < pages; page += 4)
            check_page(heap + page * PAGE, key_at(page, 10 + generation), "its own");
        if (generation == 3) _exit(0);
    }
    for (size_t page = 3; page < pages; page += 4)
        check_page(heap + page * PAGE, key_at(page, 1), "untouched");
}

int main(int count, char **words) {
    given = parse(count, words, "small");
    const char *mode = given.mode;
    pid_t self = getpid();
    if (strcmp(mode, "child") == 0)
        as_child(words);
    else if (strcmp(mode, "small") == 0)
        small_mode();
    else if (strcmp(mode, "churn") == 0)
        churn_mode();
    else if (strcmp(mode, "readonly") == 0)
        readonly_mode();
    else if (strcmp(mode, "locked") == 0)
        locked_mode();
    else if (strcmp(mode, "sparse") == 0)
        sparse_mode();
    else if (strcmp(mode, "stacks") == 0)
        stacks_mode();
    else if (strcmp(mode, "environ") == 0)
        environ_mode(words);
    else if (strcmp(mode, "sysv") == 0)
        sysv_mode();
    else if (strcmp(mode, "posix") == 0)
        posix_mode();
    else if (strcmp(mode, "forktree") == 0)
        forktree_mode();
    else
        die("unknown mode %s", mode);
    if (getpid() != self) _exit(0);
    return ok("unusual", mode);
}
