/* A program that leaves the directory it was started in, and unmounts what that is on.
 *
 *     leaves MB SECONDS SEED MODE PLACE [PROGRAM ...]
 *
 * mounts    mounts at PLACE, in a mount namespace of its own, and executes PROGRAM there; ends
 *           with status 77 where that is not permitted
 * unmounts  leaves PLACE and unmounts it, while most of its memory is out and a child lives */
#include "common.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

static int mounts(const char *place, char **program) {
    if (unshare(CLONE_NEWNS) != 0) return 77;
    MUST(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    MUST(mount("none", place, "tmpfs", 0, NULL) == 0 && chdir(place) == 0);
    execv(program[0], program);
    die("%s: %s", program[0], strerror(errno));
}

int main(int count, char **words) {
    struct arguments given = parse(count, words, NULL);
    if (count < 6) die("no place");
    const char *place = words[5];
    if (strcmp(given.mode, "mounts") == 0) return mounts(place, words + 6);
    unsigned char *arena = map(given.pages * PAGE);
    for (size_t page = 0; page < given.pages; page++)
        fill_page(arena + page * PAGE, key_of(given.seed, page, 1));
    MUST(chdir("/") == 0);
    int ends[2];
    char byte;
    MUST(pipe(ends) == 0);
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) {
        close(ends[1]);
        _exit(read(ends[0], &byte, 1) != 0);
    }
    /* A thread of swaptide's may be about to leave. */
    double began = now();
    int result;
    while ((result = umount(place)) != 0 && errno == EBUSY && now() - began < 3) usleep(20000);
    if (result != 0) die("umount: %s", strerror(errno));
    close(ends[1]);
    int status = 1;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    for (size_t page = 0; page < given.pages; page++)
        check_page(arena + page * PAGE, key_of(given.seed, page, 1), "page");
    return ok("leaves", given.mode);
}
