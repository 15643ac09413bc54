"""PageRank of a sparse graph."""

import sys

import numpy as np
import scipy.sparse as sp

nodes = int(sys.argv[1])
edges = nodes * 12
draw = np.random.default_rng(7)
# Few nodes have many links.
target = (nodes * draw.random(edges) ** 3).astype(np.int64)
source = draw.integers(0, nodes, edges)
matrix = sp.csr_matrix((np.ones(edges), (target, source)), shape=(nodes, nodes))
out = np.asarray(matrix.sum(axis=0)).ravel()
matrix = matrix @ sp.diags(1.0 / np.maximum(out, 1))
rank = np.full(nodes, 1.0 / nodes)
for _ in range(20):
    rank = 0.85 * (matrix @ rank) + 0.15 / nodes
print(f"{rank.sum():.9f} {np.sort(rank)[-5:].sum():.9f}")
