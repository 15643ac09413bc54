"""Pages that others hold: references of pipes, sockets and rings, writers outside, and processes
that end while they write.

docs/kernel-references.md names these cases for each holder.
"""

import os
import re

from legacy import Case, Skip


def outside(mode, seconds=1):
    return lambda context: context.c("references", mode, megabytes=48, seconds=seconds)


def past_libc(context):
    """A bare vmsplice instruction is not seen: another page's bytes come out of the pipe. The limit
    that docs/semantics.md describes; the program's own pages stay right, and so does the pipe of the
    program that calls libc (references-vmsplice)."""
    if context.native:
        return
    wrong = 0
    for _ in range(4):
        done = context.c("references", "raw", megabytes=48, seconds=2)
        wrong += int(re.search(r"(\d+) wrong past libc", done.text())[1])
        if wrong:
            return
    context.expect(wrong > 0, "nothing came out wrong: is this still a limit? see docs/semantics.md")


def fuse(context):
    """A file system between two processes, with cold memory on both sides."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        raise Skip("only root can mount, where there is a /dev/fuse")
    context.c("fuse", megabytes=24, seconds=3, last="OK fuse")


MODES = (
    "vmsplice",
    "syscall",
    "tee",
    "splice",
    "tcp",
    "udp",
    "uring",
    "uring-bare",
    "uring-fixed",
    "mem",
    "writev",
    "special",
    "advised",
)

CASES = [
    *[
        Case(
            f"references-{mode}",
            outside(mode),
            16,
            allowance=12,
            forks=mode in ("mem", "writev", "advised"),
            swaps=mode != "uring-fixed",
        )
        for mode in MODES
    ],
    Case(
        "full-torture-sends",
        lambda context: context.c("torture", "sends", megabytes=192, seconds=600),
        48,
        full=True,
        limit=900,
        allowance=192,
        forks=True,
    ),
    Case("references-past-libc", past_libc, 16, allowance=12, full=True),
    Case("fuse", fuse, 16, allowance=24, forks=True),
    Case(
        "torture-sends",
        lambda context: context.c("torture", "sends", megabytes=96, seconds=6),
        32,
        allowance=128,
        forks=True,
    ),
    Case(
        "endings",
        lambda context: context.c("endings", "mixed", megabytes=24, seconds=5),
        16,
        allowance=24,
        forks=True,
    ),
    Case(
        "endings-thousand",
        lambda context: context.c("endings", "mixed", megabytes=24, seconds=1000),
        16,
        full=True,
        limit=600,
        allowance=24,
        forks=True,
    ),
]
