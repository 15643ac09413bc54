"""One page of each 64K, in an order that is always the same and has nothing to do with addresses:
what goes out together is wanted together.
"""

import hashlib
import mmap
import sys

pages, rounds = int(sys.argv[1]), int(sys.argv[2])
PAGE, APART = 4096, 1 << 16
memory = mmap.mmap(-1, pages * APART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_NOHUGEPAGE)


def order():
    """Every number below `pages` (no multiple of 7919) once."""
    return ((at * 7919) % pages for at in range(pages))


def content(page, version):
    """Bytes that do not compress."""
    return hashlib.shake_128(b"%d %d" % (page, version)).digest(PAGE)


for page in order():
    memory[page * APART : page * APART + PAGE] = content(page, 0)
wrong = 0
for version in range(rounds):
    for page in order():
        found = memory[page * APART : page * APART + PAGE]
        wrong += found != content(page, version * (page % 3 == 0))
        if page % 3 == 0:
            memory[page * APART : page * APART + PAGE] = content(page, version + 1)
print(f"{pages} pages, {rounds} rounds, {wrong} wrong")
sys.exit(wrong != 0)
