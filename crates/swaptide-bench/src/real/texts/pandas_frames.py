"""Group-by, join and sort of a table with pandas."""

import sys

import numpy as np
import pandas as pd

rows = int(sys.argv[1])
draw = np.random.default_rng(7)
table = pd.DataFrame(
    {
        "key": draw.integers(0, rows // 50, rows),
        "name": pd.Series(draw.integers(0, 1000, rows)).map(lambda n: f"name-{n:04d}"),
        "x": draw.normal(size=rows),
        "y": draw.integers(0, 1 << 20, rows),
    }
)
other = pd.DataFrame({"key": np.arange(rows // 50), "z": draw.normal(size=rows // 50)})
for _ in range(3):
    grouped = table.groupby(["key"]).agg({"x": "mean", "y": "sum"})
    joined = table.merge(other, on="key")
    by_name = joined.groupby("name")["z"].sum()
    ordered = joined.sort_values(["name", "y", "x"])
sums = [grouped["x"].sum(), by_name.sum()]
print(" ".join(f"{s:.6f}" for s in sums), grouped["y"].sum(), ordered["y"].iloc[::9973].sum())
