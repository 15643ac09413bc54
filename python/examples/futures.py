"""concurrent.futures, processes and threads, in one budget: python3 futures.py [RAM [MIB]]."""

import multiprocessing
import random
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import swaptide


def make(seed: int, mebibytes: int) -> tuple[int, bytearray]:
    return seed, bytearray(random.Random(seed).randbytes(1 << 20) * mebibytes)


def is_right(made: tuple[int, bytearray]) -> bool:
    seed, data = made
    piece = random.Random(seed).randbytes(1 << 20)
    return all(data[at : at + (1 << 20)] == piece for at in range(0, len(data), 1 << 20))


def work(seed: int, mebibytes: int) -> bool:
    """One task of a process: fills memory and reads it."""
    return is_right(make(seed, mebibytes))


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    swaptide.limit(ram)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(make, range(8), [mebibytes // 8] * 8))
        now = swaptide.stats()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=spawn) as processes:
            assert all(processes.map(work, range(4), [mebibytes // 8] * 4))
        assert all(threads.map(is_right, made))
    assert now.swapped_bytes > 0, now
    print("OK", now)


if __name__ == "__main__":
    main()
