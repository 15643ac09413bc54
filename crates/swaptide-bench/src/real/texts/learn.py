"""Training of a forest and of a linear model with scikit-learn."""

import sys

import numpy as np
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import SGDClassifier

rows = int(sys.argv[1])
draw = np.random.default_rng(7)
x = draw.normal(size=(rows, 40))
y = (x[:, :5].sum(axis=1) + draw.normal(size=rows) > 0).astype(int)
forest = RandomForestClassifier(n_estimators=8, max_depth=14, random_state=1, n_jobs=2).fit(x, y)
linear = SGDClassifier(max_iter=3, tol=None, random_state=1).fit(x, y)
print(f"{forest.score(x[:20000], y[:20000]):.6f} {linear.score(x, y):.6f}")
