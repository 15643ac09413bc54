"""A pool of processes in one budget: python3 multiprocessing_pool.py [RAM [MIB]]."""

import hashlib
import multiprocessing
import random
import sys

import swaptide

WORKERS = 2
kept: list[tuple[bytearray, str]] = []
"""What a worker has made, with its digest."""


def make(seed: int, mebibytes: int) -> str:
    """Fills memory that this worker keeps."""
    data = bytearray(random.Random(seed).randbytes(1 << 20) * mebibytes)
    kept.append((data, hashlib.sha256(data).hexdigest()))
    return kept[-1][1]


def check(_turn: int) -> bool:
    """Reads all that this worker has."""
    return all(hashlib.sha256(data).hexdigest() == digest for data, digest in kept)


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    swaptide.limit(ram)
    pieces = 4 * WORKERS
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.starmap(make, [(seed, mebibytes // pieces) for seed in range(pieces)], chunksize=1)
        now = swaptide.stats()
        assert all(pool.map(check, range(pieces), chunksize=1))
    assert now.swapped_bytes > 0, now
    print("OK", now)


if __name__ == "__main__":
    main()
