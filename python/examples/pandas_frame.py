"""A sort in pandas within a budget for a block: python3 pandas_frame.py [RAM [MIB]]. Needs
pandas."""

import sys

import numpy
import pandas

import swaptide


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    rows = (mebibytes << 20) // 2 // 16
    with swaptide.budget(ram):
        random = numpy.random.default_rng(1)
        frame = pandas.DataFrame(
            {"key": random.integers(0, 1 << 40, rows), "value": numpy.arange(rows)}
        )
        total = int(frame["value"].sum())
        ordered = frame.sort_values("key")
        now = swaptide.stats()
        assert ordered["key"].is_monotonic_increasing
        assert int(ordered["value"].sum()) == total
        del frame, ordered
    assert now.swapped_bytes > 0, now
    print("OK", now)


if __name__ == "__main__":
    main()
