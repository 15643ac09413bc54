"""Pages that others hold: references of pipes, sockets and rings, writers outside, and processes
that end while they write.

docs/kernel-references.md names these cases for each holder."""

import os
import re

import pytest

from harness import full, param


@pytest.mark.swaptide(budget=16, allowance=12)
@pytest.mark.parametrize(
    "mode",
    [
        "vmsplice",
        "syscall",
        "tee",
        "splice",
        "tcp",
        "udp",
        "uring",
        "uring-bare",
        param("uring-fixed", swaps=False),
        param("mem", forks=True),
        param("writev", forks=True),
        "special",
        param("advised", forks=True),
    ],
)
def test_references(case, mode):
    case.run_c("references", mode, megabytes=48, seconds=1)


@pytest.mark.full
@pytest.mark.swaptide(budget=16, allowance=12, native=False)
def test_references_past_libc(case):
    """A bare vmsplice instruction is not seen: another page's bytes come out of the pipe. The limit
    is in docs/kernel-references.md. A program that calls libc is right (references-vmsplice)."""
    wrong = 0
    for _ in range(4):
        done = case.run_c("references", "raw", megabytes=48, seconds=2)
        wrong += int(re.search(r"(\d+) wrong past libc", done.text())[1])
        if wrong:
            return
    assert wrong > 0, "nothing came out wrong: is this still a limit? see docs/semantics.md"


@pytest.mark.swaptide(budget=16, allowance=24, forks=True)
def test_fuse(case):
    """A file system between two processes, with cold memory on both sides."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount, where there is a /dev/fuse")
    case.run_c("fuse", "private", megabytes=24, seconds=3)


@pytest.mark.swaptide(budget=24, allowance=48)
@pytest.mark.parametrize("mode", ["shared", "detached", full("ring")])
def test_fuse_into(case, mode):
    """What the kernel holds while a server takes its time is of a shared mapping: it stays in."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount, where there is a /dev/fuse")
    case.run_c("fuse", mode, megabytes=24, seconds=5, options=["--shared"])


@pytest.mark.swaptide(budget=16, allowance=24, forks=True)
def test_endings(case):
    case.run_c("endings", "mixed", megabytes=24, seconds=5)


@pytest.mark.swaptide(budget=16, allowance=24, forks=True, complaint="what was swapped out is lost")
@pytest.mark.parametrize("mode", ["vfork", full("clone")])
def test_endings_of_parents(case, mode):
    """A process is killed while its child runs on its memory, or has not got its own yet: what the
    child lacks is SIGBUS and EFAULT, no zeros.
    """
    case.run_c("endings", mode, megabytes=24, seconds=5)


@pytest.mark.swaptide(budget=16, allowance=48, forks=True)
def test_endings_atfork(case):
    """A process is killed by its child's fork handler: the child has all its memory."""
    case.run_c("endings", "atfork", megabytes=24, seconds=5)


@pytest.mark.full
@pytest.mark.swaptide(budget=16, limit=600, allowance=24, forks=True)
def test_endings_thousand(case):
    case.run_c("endings", "mixed", megabytes=24, seconds=1000)
