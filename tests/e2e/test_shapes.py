"""Calls that change what memory is without a word to a userfaultfd: guard pages, System V segments
over memory, lazy freeing, locks, memory that children find empty, a program's own userfaultfd.
`c/shapes.c` says what each mode looks at."""

import pytest

from harness import full, param


@pytest.mark.swaptide(budget=16, allowance=6)
@pytest.mark.parametrize(
    "mode",
    [
        "guard-zero",
        "guard-walk",
        "guard-walk-bare",
        "guard-grow",
        "guard-grow-bare",
        "guard-each-bare",
        "guard-one-bare",
        "guard-early-bare",
        "shmat",
        "shmat-bare",
        "free",
        # What is locked, or guarded and written past libc, is not pageable.
        param("lockall", allowance=24),
        param("lockall-first", allowance=24, swaps=False),
        "locked",
        param("wipe", forks=True),
        param("wipe-moved", forks=True, allowance=16),
        param("wipe-moved-bare", forks=True, allowance=16),
        param("dont-moved", forks=True, allowance=16),
        "own-pager",
        param("others", allowance=8),
        # What happens past libc, where nothing tells of a call.
        full("free-bare", allowance=16),
        "lockall-bare",
        param("wipe-bare", forks=True),
        "own-pager-bare",
        # The same calls by another way into the kernel.
        full("guard-zero-bare"),
        full("guard-zero-syscall"),
        full("guard-zero-process"),
        full("shmat-syscall"),
        full("free-syscall"),
        full("free-process"),
        full("lockall-syscall", allowance=24),
        full("own-pager-syscall"),
    ],
)
def test_shapes(case, mode):
    case.run_c("shapes", mode, megabytes=32, seconds=1)


@pytest.mark.unprivileged
@pytest.mark.swaptide(budget=16, allowance=16, forks=True)
@pytest.mark.parametrize(
    "mode", ["wipe-moved", full("wipe-moved-bare"), "dont-moved", full("dont-moved-bare")]
)
def test_followed_shapes(case, mode):
    """As a user without the capability: forks are followed."""
    case.run_c("shapes", mode, megabytes=32, seconds=1)
