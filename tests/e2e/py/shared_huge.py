"""Shared memory that swaptide manages never consists of huge pages, whatever is advised."""

import errno
import mmap
import sys
from pathlib import Path

MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
SIZE = 16 << 20


def flags():
    """The VmFlags of the mapping."""
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "swaptide" in line and "memfd" in line:
            ours = True
        elif ours and line.startswith("VmFlags:"):
            return line.split()[1:]
    sys.exit("no managed mapping")


memory = mmap.mmap(-1, SIZE)
memory.write(bytes(SIZE))
memory.madvise(MADV_HUGEPAGE)
assert "hg" not in flags() and "nh" in flags(), flags()
try:
    memory.madvise(MADV_COLLAPSE)
    sys.exit("collapsed")
except OSError as error:
    assert error.errno == errno.EAGAIN, error
print("OK")
