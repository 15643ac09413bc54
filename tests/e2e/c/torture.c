/* Everything a program can do to its memory, at random, by several threads at once, and a model
 * of what each page must hold. MODE threads; or single: one thread, and every fork is made while
 * nothing else happens; or sends: threads that also send pages by reference.
 *
 * An area is a mapping of some pages. A page holds what its key says, but for one word that may
 * have been written since: a page that came in and goes out changed by eight bytes. A key is never
 * used twice, so a word that is wrong tells whose it is. */
#ifdef TORTURE_ENGINE
#include "torture_engine.h"
#else
#define ALWAYS_QUIET 0
#define FORKS 3 /* of 1000 steps */
#endif
#include "common.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <sys/wait.h>

#ifndef MADV_POPULATE_READ /* musl's headers */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

enum { THREADS = 4, AREAS = 3, CHILDREN = 2, ACTS = 8192 };
enum state {
    HELD,
    LAZY
}; /* LAZY: after MADV_FREE, the old content or zeros, until it is written again */

struct page {
    uint64_t key; /* 0: zeros */
    uint64_t word;
    uint16_t at; /* WORDS: no word was changed */
    uint16_t state;
};

struct area {
    unsigned char *base;
    size_t pages;
    struct page *page; /* as many as the area may grow to */
    size_t most;
    int open; /* readable and writable */
    /* What was done last, to be told when something is wrong. */
    struct act {
        const char *what;
        size_t from, count, round;
    } act[ACTS];
    size_t acts;
};

struct thread {
    struct area area[AREAS];
    uint64_t random, serial, seed;
    size_t number, rounds;
    int file;
    unsigned char *buffer;
    double end;
};

enum { BUFFER = 64 }; /* pages */

static struct thread threads[THREADS];
static size_t working = THREADS;
/* Forks that find all threads at rest hold it for writing. */
static pthread_rwlock_t world = PTHREAD_RWLOCK_INITIALIZER;
static atomic_int children;

/* Whose word it is that was found in the wrong place. */
static void whose(uint64_t found) {
    for (size_t number = 0; found != 0 && number < working; number++) {
        for (size_t i = 0; i < AREAS; i++) {
            struct area *area = &threads[number].area[i];
            for (size_t page = 0; area->page != NULL && page < area->pages; page++) {
                if (area->page[page].key != found && area->page[page].word != found) continue;
                printf("the word found belongs to thread %zu, area %zu, page %zu at %p\n", number,
                       i, page, (void *)(area->base + page * PAGE));
                return;
            }
        }
    }
}

static void note(struct thread *self, struct area *area, const char *what, size_t from,
                 size_t count) {
    area->act[area->acts++ % ACTS] = (struct act){what, from, count, self->rounds};
}

/* What was done last to a page, newest first. */
static void tell(const struct area *area, size_t page) {
    size_t told = 0;
    for (size_t back = 1; back <= ACTS && back <= area->acts && told < 16; back++) {
        const struct act *act = &area->act[(area->acts - back) % ACTS];
        if (page < act->from || page >= act->from + act->count) continue;
        printf("round %zu: %s, pages %zu to %zu\n", act->round, act->what, act->from,
               act->from + act->count - 1);
        told++;
    }
}

static uint64_t expected_of(const struct page *page, size_t at) {
    return at == page->at ? page->word : word_of(page->key, at);
}

static void verify_page(struct thread *self, struct area *area, size_t number, const char *what) {
    const struct page *page = &area->page[number];
    const volatile uint64_t *word = (const volatile uint64_t *)(area->base + number * PAGE);
    /* The last word of a page that MADV_FREE may have emptied decides; it decides only once. */
    if (page->state == LAZY && expected_of(page, WORDS - 1) != 0 && word[WORDS - 1] == 0) {
        check_page((const void *)word, 0, "page after MADV_FREE");
        return;
    }
    for (size_t at = 0; at < WORDS; at++) {
        uint64_t expected = expected_of(page, at), found = word[at];
        if (found == expected) continue;
        if (page->state == LAZY && found == 0) {
            /* Emptied while it was looked at, or its last word was 0 all along. */
            check_page((const void *)word, 0, "page after MADV_FREE");
            return;
        }
        whose(found);
        uint64_t again = word[at];
        size_t zeros = 0, right = 0, around = 0;
        for (size_t i = 0; i < WORDS; i++) {
            zeros += word[i] == 0;
            right += word[i] == expected_of(page, i);
        }
        for (size_t i = number & ~(size_t)15; i < area->pages && i < (number | 15) + 1; i++)
            around +=
                expected_of(&area->page[i], 1) == ((volatile uint64_t *)(area->base + i * PAGE))[1];
        printf("thread %zu, area %zu at %p, page %zu of %zu, word %zu (a second look finds "
               "%016llx), round %zu, key %016llx, state %d,\n"
               "word %d was changed, %zu words are 0 and %zu right, %zu of the 16 pages around it "
               "are right\n",
               self->number, (size_t)(area - self->area), (void *)area->base, number, area->pages,
               at, (unsigned long long)again, self->rounds, (unsigned long long)page->key,
               page->state, page->at, zeros, right, around);
        tell(area, number);
        mismatch((const void *)(word + at), expected, found, what);
    }
}

static void verify(struct thread *self, struct area *area, size_t from, size_t count,
                   const char *what) {
    for (size_t page = from; page < from + count; page++) verify_page(self, area, page, what);
}

static void emptied(struct area *area, size_t from, size_t count) {
    for (size_t page = from; page < from + count; page++)
        area->page[page] = (struct page){.at = WORDS};
}

static uint64_t new_key(struct thread *self) {
    return key_of(self->seed, self->number, ++self->serial);
}

static void write_page(struct thread *self, struct area *area, size_t page) {
    area->page[page] = (struct page){.key = new_key(self), .at = WORDS};
    fill_page(area->base + page * PAGE, area->page[page].key);
}

/* One word of a page. After MADV_FREE it is read first: a write keeps what is there. */
static void write_word(struct thread *self, struct area *area, size_t number) {
    struct page *page = &area->page[number];
    if (page->state == LAZY || page->at != WORDS) {
        note(self, area, "written alone", number, 1);
        write_page(self, area, number);
        return;
    }
    page->at = (uint16_t)below(&self->random, WORDS);
    page->word = new_key(self);
    note(self, area, "a word written", number, 1);
    ((volatile uint64_t *)(area->base + number * PAGE))[page->at] = page->word;
}

static unsigned char *at_page(struct area *area, size_t page) {
    return area->base + page * PAGE;
}

/* A run of pages: most are short, some are all of the area. */
static size_t some_run(struct thread *self, struct area *area, size_t *from, size_t most) {
    size_t longest = (size_t)1 << below(&self->random, 12);
    size_t count = 1 + below(&self->random, longest);
    if (most && count > most) count = most;
    if (count > area->pages) count = area->pages;
    *from = below(&self->random, area->pages - count + 1);
    if (below(&self->random, 3) == 0 && count >= 16) *from &= ~(size_t)15;
    return count;
}

static void map_area(struct thread *self, struct area *area) {
    area->pages = area->most / 2 + below(&self->random, area->most / 2 + 1);
    area->base = map(area->pages * PAGE);
    area->open = 1;
    emptied(area, 0, area->pages);
    note(self, area, "mmap", 0, area->pages);
}

static void open_area(struct thread *self, struct area *area) {
    if (area->open) return;
    note(self, area, "opened", 0, area->pages);
    MUST(mprotect(area->base, area->pages * PAGE, PROT_READ | PROT_WRITE) == 0);
    area->open = 1;
}

static void advise(struct thread *self, struct area *area) {
    static const int hints[] = {
        MADV_NORMAL,  MADV_RANDOM,   MADV_SEQUENTIAL, MADV_WILLNEED,      MADV_COLD,
        MADV_PAGEOUT, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_READ, MADV_POPULATE_WRITE};
    size_t from, count = some_run(self, area, &from, 0);
    unsigned choice = (unsigned)below(&self->random, 20);
    if (choice < 4) {
        note(self, area, "MADV_DONTNEED", from, count);
        MUST(madvise(at_page(area, from), count * PAGE, MADV_DONTNEED) == 0);
        emptied(area, from, count);
    } else if (choice < 8) {
        note(self, area, "MADV_FREE", from, count);
        MUST(madvise(at_page(area, from), count * PAGE, MADV_FREE) == 0);
        for (size_t page = from; page < from + count; page++) area->page[page].state = LAZY;
    } else {
        size_t which = below(&self->random, sizeof hints / sizeof *hints);
        int hint = hints[which];
        if (hint >= MADV_POPULATE_READ && count > 256) count = 256;
        static const char *names[] = {"MADV_NORMAL",        "MADV_RANDOM",     "MADV_SEQUENTIAL",
                                      "MADV_WILLNEED",      "MADV_COLD",       "MADV_PAGEOUT",
                                      "MADV_HUGEPAGE",      "MADV_NOHUGEPAGE", "MADV_POPULATE_READ",
                                      "MADV_POPULATE_WRITE"};
        note(self, area, names[which], from, count);
        /* A kernel may not know it, or refuse it for want of memory; it changes nothing. */
        (void)madvise(at_page(area, from), count * PAGE, hint);
    }
}

/* Whether each seventh page of a mapping still has what `remap` wrote there: then it is the same
 * mapping. The kernel looks, for there may be none. */
static int is_untouched(struct thread *self, unsigned char *target, size_t pages) {
    for (size_t page = 0; page < pages; page += 7) {
        unsigned char found = 0;
        if (pwrite(self->file, &target[page * PAGE], 1, 0) != 1) return 0;
        MUST(pread(self->file, &found, 1, 0) == 1);
        if (found != 0xee) return 0;
    }
    return 1;
}

static void remap(struct thread *self, struct area *area) {
    size_t pages = area->most / 4 + below(&self->random, area->most - area->most / 4 + 1);
    size_t old = area->pages;
    unsigned choice = (unsigned)below(&self->random, 4);
    unsigned char *base, *target = NULL;
    if (choice == 0) {
        /* To another place of the same size, over a mapping that has something in it. */
        target = map(old * PAGE);
        for (size_t page = 0; page < old; page += 7) target[page * PAGE] = 0xee;
        base = mremap(area->base, old * PAGE, old * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
        pages = old;
    } else {
        base = mremap(area->base, old * PAGE, pages * PAGE, MREMAP_MAYMOVE);
    }
    if (base == MAP_FAILED) {
        /* Protection and advice for a part have made several mappings of it, which do not move in
         * one. */
        MUST(errno == EFAULT);
        note(self, area, target ? "mremap onto another mapping, refused" : "mremap, refused", 0,
             old);
        /* The target may be gone, and be something else's by now. */
        if (target && is_untouched(self, target, old)) MUST(munmap(target, old * PAGE) == 0);
        MUST(munmap(area->base, old * PAGE) == 0);
        map_area(self, area);
        return;
    }
    note(self, area,
         target               ? "mremap onto another mapping"
         : base == area->base ? "mremap in place"
                              : "mremap",
         0, pages);
    area->base = base;
    area->pages = pages;
    if (pages > old) emptied(area, old, pages - old);
}

static void unmap(struct thread *self, struct area *area) {
    if (below(&self->random, 4) == 0) {
        MUST(munmap(area->base, area->pages * PAGE) == 0);
        map_area(self, area);
        return;
    }
    /* A part, with something new at once in its place. */
    size_t from, count = some_run(self, area, &from, 0);
    unsigned char *at = at_page(area, from);
    note(self, area, "mmap over it", from, count);
    MUST(mmap(at, count * PAGE, PROT_READ | PROT_WRITE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == at);
    emptied(area, from, count);
}

static void protect(struct thread *self, struct area *area) {
    size_t from, count = some_run(self, area, &from, 0);
    int none = below(&self->random, 2) == 0;
    note(self, area, none ? "PROT_NONE" : "PROT_READ", from, count);
    MUST(mprotect(at_page(area, from), count * PAGE, none ? PROT_NONE : PROT_READ) == 0);
    if (!none) verify(self, area, from, count < 64 ? count : 64, "page that is read only");
    /* Sometimes only after other things have happened. */
    if (below(&self->random, 2) == 0) {
        MUST(mprotect(at_page(area, from), count * PAGE, PROT_READ | PROT_WRITE) == 0);
    } else {
        area->open = 0;
    }
}

/* The kernel reads pages and writes them: through a file, a pipe, and from one area to another. */
static void by_calls(struct thread *self, struct area *area) {
    struct area *other = &self->area[below(&self->random, AREAS)];
    open_area(self, other);
    size_t from, to, count = some_run(self, area, &from, BUFFER);
    if (count > other->pages) count = other->pages;
    to = below(&self->random, other->pages - count + 1);
    size_t bytes = count * PAGE;
    for (size_t page = from; page < from + count; page++)
        if (area->page[page].state == LAZY) write_page(self, area, page);
    if (area == other && from < to + count && to < from + count) to = from;
    switch (below(&self->random, 3)) {
    case 0:
        MUST(pwrite(self->file, at_page(area, from), bytes, 0) == (ssize_t)bytes);
        MUST(pread(self->file, at_page(other, to), bytes, 0) == (ssize_t)bytes);
        break;
    case 1: {
        int ends[2];
        MUST(pipe2(ends, O_CLOEXEC) == 0);
        for (size_t page = 0; page < count; page++) {
            struct iovec halves[2] = {{at_page(other, to + page), 1000},
                                      {at_page(other, to + page) + 1000, PAGE - 1000}};
            MUST(write(ends[1], at_page(area, from + page), PAGE) == (ssize_t)PAGE);
            MUST(readv(ends[0], halves, 2) == (ssize_t)PAGE);
        }
        close(ends[0]);
        close(ends[1]);
        break;
    }
    default:
        memcpy(self->buffer, at_page(area, from), bytes);
        memcpy(at_page(other, to), self->buffer, bytes);
    }
    note(self, area, "copied from", from, count);
    note(self, other, "copied to", to, count);
    memmove(&other->page[to], &area->page[from], count * sizeof *area->page);
    verify(self, other, to, count, "page copied by the kernel");
}

static void child(struct thread *self, int quiet, uint64_t random) {
    size_t first = quiet ? 0 : self->number, last = quiet ? working - 1 : self->number;
    for (size_t number = first; number <= last; number++) {
        struct thread *thread = &threads[number];
        thread->random = random;
        for (size_t i = 0; i < AREAS; i++) {
            struct area *area = &thread->area[i];
            open_area(self, area);
            size_t half = below(&thread->random, area->pages + 1);
            verify(thread, area, half, area->pages - half, "page in a forked child");
            for (size_t n = 0; n < 64; n++) {
                size_t from, count = some_run(thread, area, &from, 8);
                for (size_t page = from; page < from + count; page++)
                    write_page(thread, area, page);
            }
            verify(thread, area, 0, area->pages, "page in a forked child, later");
        }
    }
    _exit(0);
}

static void fork_once(struct thread *self) {
    if (atomic_fetch_add(&children, 1) >= CHILDREN) {
        atomic_fetch_sub(&children, 1);
        return;
    }
    int quiet = working == 1 || below(&self->random, 2) == 0 || ALWAYS_QUIET;
    uint64_t random = next(&self->random);
    if (quiet && working > 1) {
        pthread_rwlock_unlock(&world);
        pthread_rwlock_wrlock(&world);
    }
    fflush(stdout);
    for (size_t i = 0; i < AREAS; i++)
        note(self, &self->area[i], quiet ? "fork at rest" : "fork", 0, self->area[i].pages);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) child(self, quiet, random);
    if (quiet && working > 1) {
        pthread_rwlock_unlock(&world);
        pthread_rwlock_rdlock(&world);
    }
    /* The child writes to its copies, this thread to its own. */
    struct area *area = &self->area[0];
    open_area(self, area);
    for (size_t n = 0; n < 64; n++) write_word(self, area, below(&self->random, area->pages));
    int status;
    MUST(waitpid(pid, &status, 0) == pid);
    if (status != 0) die("a child ended with status %x", (unsigned)status);
    atomic_fetch_sub(&children, 1);
}

#if !defined TORTURE_ENGINE && !defined PAST_LIBC
/* Where hooks see nothing, words that the kernel writes by itself and changes that it does not
 * report have limits (docs/semantics.md). */
#define HAS_HOOKS
#include "torture_actions_futex.h"
#include "torture_actions_send.h"
#include "torture_shapes.h"
#endif

static void step(struct thread *self) {
    struct area *area = &self->area[below(&self->random, AREAS)];
    unsigned choice = (unsigned)below(&self->random, 1000);
    size_t from, count;
    open_area(self, area);
#ifdef HAS_HOOKS
    if (below(&self->random, 50) == 0) by_futex(self, area);
    if (below(&self->random, 40) == 0) {
        change_shape(self, area);
        return;
    }
#endif
    if (choice < 200) {
        count = some_run(self, area, &from, 0);
        note(self, area, "written", from, count);
        for (size_t page = from; page < from + count; page++) write_page(self, area, page);
    } else if (choice < 350) {
        for (size_t n = 0; n < 64; n++) write_word(self, area, below(&self->random, area->pages));
    } else if (choice < 500) {
        for (size_t n = 0; n < 64; n++)
            verify_page(self, area, below(&self->random, area->pages), "page touched at random");
    } else if (choice < 650) {
        count = some_run(self, area, &from, 0);
        verify(self, area, from, count, "page of a scan");
    } else if (choice < 670) {
        note(self, area, "scan of all", 0, area->pages);
        verify(self, area, 0, area->pages, "page of a scan of all");
    } else if (choice < 780) {
        advise(self, area);
    } else if (choice < 820) {
        remap(self, area);
    } else if (choice < 850) {
        unmap(self, area);
    } else if (choice < 890) {
        protect(self, area);
    } else if (choice < 960) {
#ifdef HAS_HOOKS
        if (sends && choice < 920)
            by_reference(self, area);
        else if (sends && choice < 923)
            by_others(self, area);
        else
#endif
            by_calls(self, area);
    } else if (choice < 980) {
        count = some_run(self, area, &from, 0);
        note(self, area, "memset", from, count);
        memset(at_page(area, from), 0, count * PAGE);
        emptied(area, from, count);
    } else if (choice < 980 + FORKS) {
        fork_once(self);
    } else {
        /* As a loop over all that changes a little of everything. */
        note(self, area, "every fourth page written", 0, area->pages);
        for (size_t page = below(&self->random, 4); page < area->pages; page += 4)
            write_word(self, area, page);
    }
}

static void verify_all(struct thread *self, const char *what) {
    for (size_t i = 0; i < AREAS; i++) {
        open_area(self, &self->area[i]);
        verify(self, &self->area[i], 0, self->area[i].pages, what);
    }
}

static void *work(void *given) {
    struct thread *self = given;
    while (now() < self->end) {
        pthread_rwlock_rdlock(&world);
        step(self);
        self->rounds++;
        pthread_rwlock_unlock(&world);
    }
    verify_all(self, "page at the end");
    return NULL;
}

static void set_up(size_t number, uint64_t seed, size_t pages) {
    struct thread *self = &threads[number];
    const char *directory = getenv("TMPDIR");
    *self = (struct thread){.seed = seed, .random = mix(seed + number), .number = number};
    self->file = open(directory ? directory : "/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    MUST(self->file >= 0);
    self->buffer = map(BUFFER * PAGE);
    for (size_t i = 0; i < AREAS; i++) {
        struct area *area = &self->area[i];
        /* On average an area is three quarters of what it may be. */
        area->most = pages / working / AREAS * 4 / 3;
        area->page = calloc(area->most + 1, sizeof *area->page);
        MUST(area->page != NULL);
        map_area(self, area);
    }
}

/* Every page has something in it. */
static void fill(struct thread *self) {
    for (size_t i = 0; i < AREAS; i++)
        for (size_t page = 0; page < self->area[i].pages; page++)
            write_page(self, &self->area[i], page);
}

#ifdef TORTURE_ENGINE
/* The areas of `count` threads, which have `pages` pages in all. */
void torture_set_up(const struct torture_calls *given, size_t count, size_t pages, uint64_t seed) {
    calls = *given;
    working = count;
    for (size_t number = 0; number < working; number++) set_up(number, seed, pages);
}

/* The life of a thread, or a part of it; how many steps it has made in all. */
size_t torture_work(size_t number, double seconds) {
    struct thread *self = &threads[number];
    if (self->rounds == 0) {
        /* A page's key is noted before the page is written: no fork at rest in between. */
        pthread_rwlock_rdlock(&world);
        fill(self);
        pthread_rwlock_unlock(&world);
    }
    self->end = now() + seconds;
    work(self);
    return self->rounds;
}

void torture_verify(void) {
    for (size_t number = 0; number < working; number++)
        verify_all(&threads[number], "page of a program that was let go");
}
#else
int main(int count, char **words) {
    struct arguments given = parse(count, words, "threads");
    if (strcmp(given.mode, "single") == 0) working = 1;
#ifdef HAS_HOOKS
    sends = strcmp(given.mode, "sends") == 0;
#endif
    for (size_t number = 0; number < working; number++) {
        set_up(number, given.seed, given.pages);
        fill(&threads[number]);
        threads[number].end = now() + given.seconds;
    }
    pthread_t handle[THREADS];
    for (size_t number = 1; number < working; number++)
        MUST(pthread_create(&handle[number], NULL, work, &threads[number]) == 0);
    work(&threads[0]);
    for (size_t number = 1; number < working; number++)
        MUST(pthread_join(handle[number], NULL) == 0);
    return ok("torture", given.mode);
}
#endif
