"""What threads and programs may be like that come through swaptide's hooks, and what the library
uses of other objects.
"""

import re
import subprocess
from pathlib import Path

import pytest

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
    puts("OK sanitized");
    return 0;
}
"""


@pytest.mark.swaptide(budget=64, limit=90, allowance=64, needs=("gcc",))
def test_sanitized(case):
    """A program into which AddressSanitizer is linked, which has functions of libc's for itself."""
    source, program = case.directory / "sanitized.c", case.directory / "sanitized"
    source.write_text(SANITIZED)
    flags = ["-fsanitize=address", "-static-libasan"]
    made = subprocess.run(["gcc", *flags, "-o", program, source], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip("gcc has no libasan to link: install libgcc-*-dev")
    # Its search for leaks stops all threads and then reads memory.
    done = case.run(["env", "ASAN_OPTIONS=detect_leaks=0", program])
    assert done.text() == "OK sanitized\n", f"it printed {done.text()!r}"


# These programs are short: they have grown before much of them is managed.
CANCELLED = ["fork", "mmap", "mremap", "execve"]


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
