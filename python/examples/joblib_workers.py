"""joblib's workers in one budget: python3 joblib_workers.py [RAM [MIB]]. Needs joblib."""

import random
import sys

from joblib import Parallel, delayed

import swaptide


def work(seed: int, mebibytes: int) -> tuple[bool, int]:
    """Fills memory, reads it, and says what was swapped out meanwhile."""
    piece = random.Random(seed).randbytes(1 << 20)
    data = bytearray(piece * mebibytes)
    swapped = swaptide.stats().swapped_bytes
    is_right = all(data[at : at + (1 << 20)] == piece for at in range(0, len(data), 1 << 20))
    return is_right, swapped


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    swaptide.limit(ram)
    done = Parallel(n_jobs=2)(delayed(work)(seed, mebibytes // 2) for seed in range(4))
    assert all(is_right for is_right, _ in done)
    swapped = max(swapped for _, swapped in done)
    assert swapped > 0, done
    print("OK", swapped >> 20, "MiB were out,", swaptide.stats())


if __name__ == "__main__":
    main()
