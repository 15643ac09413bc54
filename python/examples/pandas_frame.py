"""Sums of groups in pandas within a budget for a block: python3 pandas_frame.py [RAM [MIB]]. Needs
pandas."""

import sys

import numpy
import pandas

import swaptide


def main() -> None:
    ram = sys.argv[1] if len(sys.argv) > 1 else "1G"
    mebibytes = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    rows = (mebibytes << 20) // 3 // 8
    with swaptide.budget(ram):
        # In order, as most of what pandas does. A sort touches memory at random, which is slow as
        # soon as much of it is out.
        frame = pandas.DataFrame({"value": numpy.arange(rows)})
        frame["key"] = frame["value"] % 100
        frame["sum"] = frame["value"].cumsum()
        now = swaptide.stats()
        total = rows * (rows - 1) // 2
        assert int(frame.groupby("key")["value"].sum().sum()) == total
        assert int(frame["sum"].iloc[-1]) == total
        del frame
    assert now.swapped_bytes > 0, now
    print("OK", now)


if __name__ == "__main__":
    main()
