"""A bytearray of MB megabytes, filled, read in order and at random, changed in place; prints
checksums.

walk.py MB SEED [--progress]
"""

import random
import sys
import zlib

BLOCK = 1 << 20


def main():
    megabytes, seed = int(sys.argv[1]), int(sys.argv[2])
    draw = random.Random(seed)
    data = bytearray(megabytes * BLOCK)
    view = memoryview(data)
    expected = []
    for number in range(megabytes):
        part = draw.randbytes(BLOCK // 8)
        block = b"".join(part[i : i + 512] * 8 for i in range(0, len(part), 512))
        view[number * BLOCK : (number + 1) * BLOCK] = block
        expected.append(zlib.crc32(block))
        if "--progress" in sys.argv and number % (megabytes // 8) == 0:
            print(f"  filled {number} of {megabytes} MiB", file=sys.stderr, flush=True)
    print("filled", megabytes)
    for turn, order in (
        ("forward", range(megabytes)),
        ("at random", draw.sample(range(megabytes), megabytes)),
    ):
        if "--progress" in sys.argv:
            print(f"  reading {turn}", file=sys.stderr, flush=True)
        for number in order:
            found = zlib.crc32(view[number * BLOCK : (number + 1) * BLOCK])
            if found != expected[number]:
                print(
                    f"MiB {number} read {turn} is wrong: {found:08x} instead of "
                    f"{expected[number]:08x}"
                )
                sys.exit(3)
    touched = 0
    for _ in range(megabytes * 16):
        at = draw.randrange(len(data))
        touched = (touched * 131 + data[at]) & 0xFFFFFFFF
        data[at] ^= 1
    print("all", f"{zlib.crc32(data):08x}", touched)


main()
