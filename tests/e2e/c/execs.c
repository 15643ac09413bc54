/* Every way to become or start another program, with an environment that has nothing of this one's.
 * The other program must be managed as this one is: it has the same libraries preloaded, it finds
 * the variables it was given, and its memory verifies. */
#include "common.h"
#include <fcntl.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

static struct arguments given;
static const char *program, *name;
static char megabytes[32], seed[32], preloaded[4];

/* True if swaptide's library is mapped here. */
static int managed(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    MUST(maps != NULL);
    char line[8192];
    int found = 0;
    while (fgets(line, sizeof line, maps)) found |= strstr(line, "libswaptide_agent") != NULL;
    fclose(maps);
    return found;
}

static unsigned char *filled(void) {
    unsigned char *arena = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    return arena;
}

static void check_all(unsigned char *arena, const char *what) {
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), what);
}

static char *none[] = {NULL};
static char *own[] = {"WAY=own", "LD_PRELOAD=", NULL};
static char *long_list[6001];

static void start(const char *way, char **words) {
    if (strcmp(way, "execve") == 0)
        execve(program, words, none);
    else if (strcmp(way, "null") == 0)
        syscall(SYS_execve, program, words, NULL);
    else if (strcmp(way, "own") == 0)
        execve(program, words, own);
    else if (strcmp(way, "long") == 0)
        execve(program, words, long_list);
    else if (strcmp(way, "execvpe") == 0)
        execvpe(program, words, none);
    else if (strcmp(way, "execv") == 0)
        environ = none, execv(program, words);
    else if (strcmp(way, "execvp") == 0)
        clearenv(), execvp(program, words);
    else if (strcmp(way, "execl") == 0)
        environ = NULL,
        execl(program, words[0], words[1], words[2], words[3], words[4], words[5], words[6], NULL);
    else if (strcmp(way, "execlp") == 0)
        environ = none,
        execlp(program, words[0], words[1], words[2], words[3], words[4], words[5], words[6], NULL);
    else if (strcmp(way, "execle") == 0)
        execle(program, words[0], words[1], words[2], words[3], words[4], words[5], words[6], NULL,
               own);
    else if (strcmp(way, "fexecve") == 0)
        fexecve(open(program, O_RDONLY | O_CLOEXEC), words, none);
    else if (strcmp(way, "execveat") == 0)
        execveat(AT_FDCWD, program, words, none, 0);
    else if (strcmp(way, "syscall") == 0)
        syscall(SYS_execveat, AT_FDCWD, program, words, none, 0);
}

static const char *ways[] = {"execve",  "null",     "own",    "long",   "execvpe",
                             "execv",   "execvp",   "execl",  "execlp", "execle",
                             "fexecve", "execveat", "syscall"};

static char **child_words(const char *way) {
    static char *words[8];
    words[0] = (char *)name, words[1] = megabytes, words[2] = "0", words[3] = seed,
    words[4] = "child", words[5] = (char *)way, words[6] = preloaded;
    return words;
}

static void await(pid_t child, const char *way, const char *how) {
    int status;
    MUST(child > 0 && waitpid(child, &status, 0) == child);
    if (status != 0) die("%s after %s: wait status %#x", way, how, (unsigned)status);
}

/* One exec that fails, whose errno must come through. */
static void failures(void) {
    errno = 0;
    MUST(execve("/no/such/program", child_words("none"), none) == -1 && errno == ENOENT);
    errno = 0;
    MUST(execl("/no/such/program", "a", "b", "c", "d", "e", "f", "g", "h", NULL) == -1 &&
         errno == ENOENT);
    errno = 0;
    MUST(execle("/no/such/program", "a", NULL, own) == -1 && errno == ENOENT);
    errno = 0;
    MUST(execlp("no-such-program", "a", NULL) == -1 && errno == ENOENT);
    errno = 0;
    MUST(syscall(SYS_execve, "/no/such/program", child_words("none"), none) == -1 &&
         errno == ENOENT);
    pid_t child;
    MUST(posix_spawn(&child, "/no/such/program", NULL, NULL, child_words("none"), none) == ENOENT);
}

static int child(int count, char **words) {
    if (count != 7) die("%d words instead of 7", count);
    const char *way = words[5];
    if (managed() != atoi(words[6]))
        die("started by %s: swaptide's library is %s here", way, managed() ? "" : "not");
    const char *value = getenv("WAY");
    int expected = strcmp(way, "own") == 0 || strcmp(way, "execle") == 0;
    if (expected != (value && strcmp(value, "own") == 0))
        die("started by %s: WAY is %s", way, value ? value : "not set");
    if (strcmp(way, "long") == 0) MUST(getenv("V5999") && strcmp(getenv("V5999"), "5999") == 0);
    if (strcmp(way, "execve") == 0 && atoi(words[6]) == 0) MUST(environ[0] == NULL);
    unsigned char *arena = filled();
    check_all(arena, "in a program that was started without an environment");
    return 0;
}

int main(int count, char **words) {
    given = parse(count, words, NULL);
    name = words[0];
    static char self[4096];
    MUST(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    program = self;
    if (given.mode && strcmp(given.mode, "child") == 0) return child(count, words);
    snprintf(megabytes, sizeof megabytes, "%zu", given.megabytes / 2);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)given.seed + 1);
    snprintf(preloaded, sizeof preloaded, "%d", managed());
    for (int i = 0; i < 6000; i++) {
        char text[64];
        snprintf(text, sizeof text, "V%d=%d", i, i);
        MUST((long_list[i] = strdup(text)) != NULL);
    }
    unsigned char *arena = filled();
    failures();
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const char *way = ways[i];
        pid_t pid = fork();
        if (pid == 0) {
            start(way, child_words(way));
            die("%s came back: %s", way, strerror(errno));
        }
        await(pid, way, "fork");
        /* Ways that change this process's own environment have no place in the child of a vfork. */
        if (strncmp(way, "execl", 5) == 0 || strcmp(way, "execv") == 0 ||
            strcmp(way, "execvp") == 0)
            continue;
        pid = vfork();
        if (pid == 0) {
            start(way, child_words(way));
            _exit(9);
        }
        await(pid, way, "vfork");
    }
    pid_t pid;
    MUST(posix_spawn(&pid, program, NULL, NULL, child_words("execve"), none) == 0);
    await(pid, "posix_spawn", "itself");
    MUST(posix_spawnp(&pid, program, NULL, NULL, child_words("own"), own) == 0);
    await(pid, "posix_spawnp", "itself");
    check_all(arena, "in the program that started all the others");
    return ok("execs", NULL);
}
