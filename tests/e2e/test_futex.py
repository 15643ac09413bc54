"""Words that the kernel reads and writes by itself, limits and filters of a process."""

import os
import subprocess
import time

import pytest

from harness import param


@pytest.mark.swaptide(budget=24, allowance=8)
@pytest.mark.parametrize(
    "mode",
    [
        "robust",
        param("pi", allowance=12),
        "words",
        # 20,000 stacks, of which each thread has touched two or three pages.
        param("churn", budget=32, allowance=16),
        "files",
        "bare",
    ],
)
def test_futex(case, mode):
    case.run_c("futex", mode, megabytes=64)


@pytest.mark.swaptide(budget=24, allowance=16)
@pytest.mark.parametrize(
    "mode",
    [
        "kill",
        "trap",
        "errno",
        "strict",
        "hole",
        # The process is let go before it forks.
        param("fork", allowance=128, forks=True),
        param("bare", allowance=128, forks=True),
        param("race", allowance=32, forks=True),
    ],
)
def test_filtered(case, mode):
    case.run_c("filtered", mode, megabytes=64, seconds=2)


def ends_with(case, kind, mode, stderr, statuses):
    """A program whose engine ends, with a standard error that does not take the message: it ends
    all the same.
    """
    words = case.command(options=["--quiet"])
    words += [case.binary(mode[0]), 96, 20, case.seed, *mode[1:]]
    started = time.monotonic()
    program = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, "SWAPTIDE_TEST_FAIL": str(kind)},
    )
    try:
        status = program.wait(timeout=40)
    except subprocess.TimeoutExpired:
        status = None
        subprocess.run(["pkill", "-KILL", "-P", str(program.pid)], check=False)
        program.kill()
        program.wait()
    wall = time.monotonic() - started
    assert status in statuses, f"status {status} after {wall:.1f} s, expected one of {statuses}"


@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_ends_full_pipe(case):
    """Standard error is a pipe that is full, and is not read before the program has ended."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while os.write(writes, bytes(65536)):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(writes, True)
    ends_with(case, 1, ("heap", "threads"), writes, (134,))
    os.close(reads)
    os.close(writes)


@pytest.mark.full
@pytest.mark.swaptide(budget=32, swaps=False, native=False)
def test_ends_inode_lock(case):
    """Standard error is a file whose inode lock is held by a thread that waits for a page."""
    with open(case.directory / "stderr", "wb") as file:
        ends_with(case, 3, ("futex", "inode"), file, (134, 137))
