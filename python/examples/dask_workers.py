"""Workers of dask.distributed in one budget: python3 dask_workers.py [RAM [MIB]]. Needs dask and
distributed."""

import random
import sys

from distributed import Client, LocalCluster

import swaptide


def make(seed: int, mebibytes: int) -> bytearray:
    """Stays on the worker that made it."""
    return bytearray(random.Random(seed).randbytes(1 << 20) * mebibytes)


def is_right(seed: int, data: bytearray) -> bool:
    piece = random.Random(seed).randbytes(1 << 20)
    return all(data[at : at + (1 << 20)] == piece for at in range(0, len(data), 1 << 20))


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    swaptide.limit(ram)
    # swaptide holds the memory down: dask need neither spill nor restart workers for it.
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address=None
    )
    with cluster, Client(cluster) as client:
        seeds = range(8)
        made = client.map(make, seeds, mebibytes=mebibytes // 8)
        client.gather(client.map(len, made))
        now = swaptide.stats()
        assert all(client.gather(client.map(is_right, seeds, made)))
    assert now.swapped_bytes > 0, now
    print("OK", now)


if __name__ == "__main__":
    main()
