"""The budget under unusual shapes of memory: `c/unusual.c` in each of its modes, and the memory
stressors of stress-ng (`stressors.py`)."""

import subprocess

import stressors
from harness import MIB
from legacy import Case


def shape(mode, megabytes=64, seconds=2):
    return lambda context: context.c("unusual", mode, megabytes=megabytes, seconds=seconds)


# MiB over the budget of 64 that a stressor may reach in the report, beyond the 8 that each may; and
# why.
BEYOND = {
    # Hundreds of processes of less than a megabyte each: none is managed, and what they share
    # counts once for each of them until it was looked at.
    "resources": 1 << 20,
    "pipeherd": 256,
    # It locks its mappings (MAP_LOCKED) as its seed has it: locked memory stays.
    "mmap": 256,
    # Two of three of its processes are new at each moment: what a fork shares counts for both until
    # it was looked at.
    "shm": 64,
    "mmapfork": 64,
}


def every_stressor(context):
    """Each stressor ends as it does without swaptide, verifies what it did, and stays within its
    bound.
    """
    rows, wrong = [stressors.HEADING], []
    for name in stressors.stressors():
        plain = stressors.run(name, 4)
        under = stressors.run(name, 4, context.swaptide, 64)
        rows.append(stressors.row(name, plain, under))
        if (under.status, under.hung) != (
            plain.status,
            plain.hung,
        ) or under.failures > plain.failures:
            wrong.append(
                f"{name}: status {under.status} instead of {plain.status}, "
                f"{under.said or 'nothing said'}"
            )
        bound = 64 + 8 + BEYOND.get(name, 0)
        if under.peak > bound * MIB:
            wrong.append(f"{name}: peak {under.peak / MIB:.1f} MiB, allowed {bound}")
    (context.directory / "table").write_text("\n".join(rows) + "\n")
    print("\n".join(rows), flush=True)
    context.expect(not wrong, "; ".join(wrong))


STAYS = r"""
import ctypes, mmap, os, sys, time
held = mmap.mmap(-1, 44 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(held))
libc = ctypes.CDLL(None, use_errno=True)
step = 1 << 20
for offset in range(0, len(held), step):
    ctypes.memset(at + offset, 0x5a, step)
    if sys.argv[1] == "locked":
        assert libc.mlock(ctypes.c_void_p(at + offset), ctypes.c_size_t(step)) == 0, ctypes.get_errno()
    else:
        assert libc.mprotect(ctypes.c_void_p(at + offset), ctypes.c_size_t(step), 1) == 0
time.sleep(1)
os._exit(0)
"""


def said(context):
    """The summary of a run that went past its budget names the memory that cannot go out."""
    if context.native:
        return
    for kind in ("locked", "read-only"):
        words = [
            context.swaptide,
            "run",
            "--ram",
            f"{context.budget}M",
            "--",
            context.python,
            "-c",
            STAYS,
            kind,
        ]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        named = (
            f"M of {kind} memory cannot be swapped" in done.stderr
            and "WENT PAST THE BUDGET" in done.stderr
        )
        context.expect(
            done.returncode == 0 and named, f"{kind}: {done.returncode}, {done.stderr!r}"
        )


CASES = [
    Case("unusual-said", said, 32, swaps=False),
    Case("unusual-small", shape("small", megabytes=56), 32, forks=True),
    Case("unusual-birth", shape("birth"), 32),
    Case("unusual-unprivileged", shape("small", megabytes=48), 32, unprivileged=True, forks=True),
    # What is read-only or locked stays, and so do the tops of stacks, which hold their threads'
    # control blocks.
    Case("unusual-readonly", shape("readonly", megabytes=48), 32, allowance=12),
    Case("unusual-locked", shape("locked"), 32),
    Case("unusual-sparse", shape("sparse", megabytes=128), 16),
    Case("unusual-stacks", shape("stacks", megabytes=48), 32, allowance=12),
    Case("unusual-environ", shape("environ"), 32, allowance=16, forks=True),
    # Without --shared such memory stays and does not count; private memory beside it keeps to the
    # budget.
    Case("unusual-sysv", shape("sysv", megabytes=48), 32, allowance=16, forks=True),
    Case("unusual-posix", shape("posix", megabytes=48), 32, allowance=16, forks=True),
    Case("unusual-forktree", shape("forktree", megabytes=256), 32, forks=True),
    Case(
        "full-stressors",
        every_stressor,
        64,
        full=True,
        limit=3600,
        needs=("stress-ng",),
        swaps=False,
    ),
]
