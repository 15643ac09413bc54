"""Words that the kernel reads and writes by itself, limits and filters of a process."""

import os
import subprocess
import time

from legacy import Case


def program(mode, megabytes=64, seconds=2):
    def run(context):
        context.c("futex", mode, megabytes=megabytes, seconds=30 if context.case.full else seconds)

    return run


def filtered(mode):
    return lambda context: context.c("filtered", mode, megabytes=64)


def ends_with(context, kind, mode, stderr, statuses):
    """A program whose engine ends, with a standard error that does not take the message: it ends
    all the same.
    """
    words = [context.swaptide, "run", "--ram", f"{context.budget}M", "--quiet", "--"]
    words += [context.binary(mode[0]), 96, 20, context.seed, *mode[1:]]
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
    context.expect(
        status in statuses, f"status {status} after {wall:.1f} s, expected one of {statuses}"
    )


def ends_by_pipe(context):
    """Standard error is a pipe that is full, and nobody reads it before the program has ended."""
    if context.native:
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while os.write(writes, bytes(65536)):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(writes, True)
    ends_with(context, 1, ("heap", "threads"), writes, (134,))
    os.close(reads)
    os.close(writes)


def ends_by_inode(context):
    """Standard error is a file whose inode lock is held by a thread that waits for a page."""
    if context.native:
        return
    with open(context.directory / "stderr", "wb") as file:
        ends_with(context, 3, ("futex", "inode"), file, (134, 137))


CASES = [
    Case("futex-robust", program("robust"), 24, allowance=8),
    Case("futex-pi", program("pi"), 24, allowance=12),
    Case("futex-words", program("words"), 24, allowance=8),
    # 20,000 stacks, of which each thread has touched two or three pages.
    Case("futex-churn", program("churn"), 32, allowance=16),
    Case("futex-files", program("files"), 24, allowance=8),
    Case("ends-full-pipe", ends_by_pipe, 32, swaps=False),
    Case("ends-inode-lock", ends_by_inode, 32, swaps=False),
    Case("futex-bare", program("bare"), 24, allowance=8),
    *[
        Case(f"filtered-{mode}", filtered(mode), 24, allowance=16)
        for mode in ("kill", "trap", "errno", "strict")
    ],
    # The process is let go before it forks.
    Case("filtered-fork", filtered("fork"), 24, allowance=128, forks=True),
]
