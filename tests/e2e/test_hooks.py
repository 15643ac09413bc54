"""What threads and programs may be like that come through swaptide's hooks, and what the library
uses of other objects.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ctl import until
from harness import param
from processes import descendants, kill_tree, status_fields

# What the library may take from other objects, and why the program's own definition of it does no
# harm. All else must be bound inside of it (crates/swaptide-agent/src/libc_names.rs): a name that
# an engine thread calls would run code of the program there.
TAKEN = {
    # Called by the constructor, by hooks and by fork handlers alone: on threads of the program.
    "__register_atfork dladdr dlsym environ __errno_location",
    # The message of a panic, which ends the process.
    "_Unwind_[A-Za-z]+ abort dl_iterate_phdr fstat64 getcwd getenv gettid lseek64 readlink",
    "realpath stat64 statx __xpg_strerror_r",
    # The standard library's, for destructors of thread-locals, of which the engine has none.
    "__cxa_thread_atexit_impl __tls_get_addr pthread_key_create pthread_key_delete",
    "pthread_setspecific",
    # Named by codecs for contexts that they make themselves. These are given theirs.
    "free malloc ZSTD_trace_(de)?compress_(begin|end)",
    # The linker's and the loader's.
    "__cxa_finalize __gmon_start__ _ITM_(de)?registerTMCloneTable",
}


@pytest.mark.swaptide(budget=16, swaps=False)
def test_library_takes(case):
    """The built library takes nothing from other objects but what is on the list."""
    library = Path(case.swaptide).parent / "libswaptide_agent.so"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    allowed = re.compile("|".join(word for words in TAKEN for word in words.split()))
    more = sorted(name for name in names if not allowed.fullmatch(name))
    assert names and not more, f"it also takes {', '.join(more)}"


@pytest.mark.swaptide(budget=32, limit=90, allowance=16, forks=True)
def test_interposed(case):
    """A program that has functions of its own under libc's names."""
    case.run_c("interposed", "functions", megabytes=64)


SANITIZED = r"""
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
int main(void) {
    static unsigned char *kept[96];
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 96; i++) {
            if (round == 0) memset(kept[i] = malloc(1 << 20), i, 1 << 20);
            for (int at = 0; at < 1 << 20; at += 512)
                if (kept[i][at] != i) return 3;
        }
    static char *volatile lost;
    lost = malloc(1234);
    lost = NULL;
    puts("OK sanitized");
    fflush(stdout);
    return 0;
}
"""


SANITIZERS = [
    param(("-fsanitize=address", "-static-libasan"), id="address"),
    param(("-fsanitize=leak",), id="leak"),
]


def run_sanitized(case, flags):
    source, program = case.directory / "sanitized.c", case.directory / "sanitized"
    source.write_text(SANITIZED)
    made = subprocess.run(["gcc", *flags, "-o", program, source], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("gcc has no such library to link: install libgcc-*-dev")
    plain = case.run([program], native=True, status=None)
    if "1234 byte(s) leaked in 1 allocation(s)" not in plain.errors():
        pytest.skip(f"it cannot look for leaks here: {plain.errors()[-300:]}")
    done = case.run([program], status=plain.status)
    assert done.text() == "OK sanitized\n", f"it printed {done.text()!r}"
    said = [line for line in done.errors().splitlines() if line.startswith("SUMMARY")]
    assert said == [line for line in plain.errors().splitlines() if line.startswith("SUMMARY")], (
        f"it says {done.errors()!r}"
    )


# The process that reads the memory has it all for its own as well, and everything comes in first.
@pytest.mark.swaptide(budget=64, limit=90, allowance=96, forks=True, needs=("gcc",))
@pytest.mark.parametrize("flags", SANITIZERS)
def test_sanitized(case, flags):
    """A program into which a sanitizer is linked, which has functions of libc's for itself. At its
    end it stops all threads of the process, reads all memory, and finds one lost block.
    """
    run_sanitized(case, flags)


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=64, limit=90, allowance=96, forks=True, needs=("gcc",))
@pytest.mark.parametrize("flags", SANITIZERS)
def test_sanitized_unprivileged(case, flags):
    """The same for an ordinary user, whose forks are followed with ptrace as well."""
    run_sanitized(case, flags)


def is_held(pid):
    """Whether a process is stopped by a tracer that waits for a page of its memory."""
    try:
        fields = status_fields(pid)
        tracer = int(fields["TracerPid"])
        return tracer and "userfault" in Path(f"/proc/{tracer}/wchan").read_text()
    except (OSError, KeyError):
        return False


@pytest.mark.full
@pytest.mark.swaptide(budget=32, swaps=False, native=False, limit=90, needs=("gcc",))
def test_full_sanitized_told_to_end(case):
    """LeakSanitizer in a program that has the function by which swaptide knows it: it stops all
    threads and waits for a page that one of them brings. Told to end, the run ends.
    """
    source, program = case.directory / "sanitized.c", case.directory / "sanitized"
    source.write_text(SANITIZED + "int __lsan_is_turned_off(void) { return 0; }\n")
    made = subprocess.run(["gcc", "-fsanitize=leak", "-o", program, source], capture_output=True)
    if made.returncode != 0:
        pytest.skip("gcc has no such library to link: install libgcc-*-dev")
    run = subprocess.Popen([str(word) for word in case.command(program)], stderr=subprocess.PIPE)
    try:
        until(case, "the stop of all threads", lambda: any(map(is_held, descendants(run.pid))))
        time.sleep(1)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(timeout=30) == 128 + signal.SIGKILL, f"{run.returncode}"
    finally:
        if run.poll() is None:
            kill_tree(run.pid)
            run.kill()
            run.wait()


OTHER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/mman.h>
int others_maps;
void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset) {
    void *(*next)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");
    others_maps++;
    return next(at, len, prot, flags, fd, offset);
}
"""
ASKS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
int main(void) {
    void *libc = dlopen("libc.so.6", RTLD_NOW);
    int *count = dlsym(RTLD_DEFAULT, "others_maps"), before = count ? *count : 0;
    if (mmap(NULL, 1 << 20, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED) return 1;
    printf("other %s\n", count && *count > before ? "called" : "not called");
    printf("handle %s\n", dlsym(libc, "mmap") == dlsym(RTLD_DEFAULT, "mmap") ? "same" : "past");
    return 0;
}
"""


@pytest.mark.swaptide(budget=32, swaps=False, needs=("gcc",))
@pytest.mark.parametrize("kind", ["other", "handle"])
def test_preloads(case, kind):
    """What does not come through: other libraries' hooks of mmap are not called by swaptide's, and
    libc's own handle leads past those.
    """
    program, library = case.directory / "asks", case.directory / "libother.so"
    for text, path, flags in ((ASKS, program, []), (OTHER, library, ["-shared", "-fPIC"])):
        source = path.with_suffix(".c")
        source.write_text(text)
        subprocess.run(["gcc", *flags, "-o", path, source, "-ldl"], check=True)
    env = {**os.environ, **({"LD_PRELOAD": str(library)} if kind == "other" else {})}
    plain = case.run([program], native=True, env=env).text().splitlines()
    lines = case.run([program], env=env).text().splitlines()
    right, limit = {
        "other": ("other called", "other not called"),
        "handle": ("handle same", "handle past"),
    }[kind]
    expected = right if case.native else limit
    assert right in plain and expected in lines, f"{plain} without swaptide, {lines}"


# These programs are short: they have grown before much of them is managed.
CANCELLED = ["fork", "mmap", "mremap"]


@pytest.mark.swaptide(budget=32, limit=60, forks=True, allowance=64)
@pytest.mark.parametrize("mode", CANCELLED)
def test_cancelled(case, mode):
    """What is no point of cancellation is none under swaptide either."""
    case.run_c("cancelled", mode, megabytes=64)


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=32, limit=60, forks=True, allowance=64)
@pytest.mark.parametrize("mode", CANCELLED)
def test_cancelled_unprivileged(case, mode):
    """The same for an ordinary user, whose forks are followed."""
    case.run_c("cancelled", mode, megabytes=64)


@pytest.mark.swaptide(budget=32, limit=60, forks=True)
@pytest.mark.parametrize("mode", ["exec", "advise", "handler"])
def test_narrow(case, mode):
    """Hooks work on the shortest of stacks."""
    case.run_c("narrow", mode, megabytes=64)


LOCKED = r"""
import fcntl, os, shutil, sys
path = sys.argv[1]
shutil.copy("/bin/true", path)
held = open(path, "rb")
fcntl.lockf(held, fcntl.LOCK_SH)
os.waitpid(os.posix_spawn(path, [path], os.environ), 0)
child = os.fork()
if child == 0:
    os.execve(path, [path], os.environ)
os.waitpid(child, 0)
child = os.fork()
if child == 0:
    try:
        fcntl.lockf(open(path, "r+b"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the lock is gone"
print("OK")
"""


@pytest.mark.swaptide(budget=64, forks=True, swaps=False)
@pytest.mark.parametrize("options", [(), ("--inject",)], ids=["alone", "inject"])
def test_exec_locks(case, options):
    """A process keeps its locks on a file that it executes: a close of any descriptor of the file
    would drop them."""
    words = [case.python, "-c", LOCKED, case.directory / "program"]
    assert case.run(words, options=list(options)).text() == "OK\n"
