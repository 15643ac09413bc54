"""Calls that change what memory is without a word to a userfaultfd: guard pages, System V segments
over memory, lazy freeing, locks, memory that children find empty, a program's own userfaultfd.
`c/shapes.c` says what each mode looks at."""

from legacy import Case


def shapes(mode, megabytes=32):
    return lambda context: context.c("shapes", mode, megabytes=megabytes, seconds=1)


DEFAULT = (
    "guard-zero",
    "guard-walk",
    "guard-walk-bare",
    "guard-grow",
    "guard-grow-bare",
    "shmat",
    "shmat-bare",
    "free",
    "lockall",
    "lockall-first",
    "locked",
    "wipe",
    "own-pager",
    "others",
)
# The same calls by another way into the kernel. guard-zero-bare shows what a limit is like: nothing
# tells of it.
FULL = (
    "guard-zero-bare",
    "guard-zero-syscall",
    "guard-zero-process",
    "shmat-syscall",
    "free-syscall",
    "free-process",
    "lockall-syscall",
    "own-pager-syscall",
)
# What is locked, or guarded and written past libc, is not pageable.
ALLOWANCES = {"lockall": 24, "lockall-syscall": 24, "lockall-first": 24, "others": 8}

CASES = [
    Case(
        f"shapes-{mode}",
        shapes(mode),
        16,
        full=mode in FULL,
        allowance=ALLOWANCES.get(mode, 6),
        forks=mode == "wipe",
        swaps=mode != "lockall-first",
    )
    for mode in DEFAULT + FULL
]
