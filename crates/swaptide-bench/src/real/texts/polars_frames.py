"""Group-by, join and sort of a table with polars."""

import sys

import numpy as np
import polars as pl

rows = int(sys.argv[1])
draw = np.random.default_rng(7)
table = pl.DataFrame(
    {
        "key": draw.integers(0, rows // 50, rows),
        "name": [f"name-{n:04d}" for n in draw.integers(0, 1000, rows)],
        "x": draw.integers(0, 1 << 30, rows),
        "y": draw.integers(0, 1 << 20, rows),
    }
)
other = pl.DataFrame({"key": np.arange(rows // 50), "z": draw.integers(0, 1 << 30, rows // 50)})
for _ in range(3):
    grouped = table.group_by("key").agg(pl.col("x").max(), pl.col("y").sum())
    joined = table.join(other, on="key")
    by_name = joined.group_by("name").agg(pl.col("z").sum())
    ordered = joined.sort(["name", "y", "x"])
print(grouped["x"].sum(), grouped["y"].sum(), by_name["z"].sum(), ordered["y"][::9973].sum())
