"""How often the 95 % intervals of `inference` hold the truth, after fits with and without a penalty.

python benchmarks/intervals.py [trials]: logistic regression, 300 rows, 20 columns of which 5 count.
"""

import sys

import numpy as np

from fednmap.estimators import FederatedLogisticRegression, FederatedLogisticRegressionCV

ROWS, TRUTH = 300, np.array([1.0, -0.8, 0.6, -0.5, 0.4, *[0.0] * 15])


def fits(X, y):
    """The estimators, by name."""
    first = np.abs((y - y.mean()) @ ((X - X.mean(0)) / X.std(0))).max() / len(y)
    return {
        "none": FederatedLogisticRegression("none"),
        "l1, 0.3 lambda_max": FederatedLogisticRegression("l1", 0.3 * first),
        "l1, min": FederatedLogisticRegressionCV(select="min", lambdas=20),
        "l1, 1se": FederatedLogisticRegressionCV(select="1se", lambdas=20),
    }


def main(trials):
    rng, hits = np.random.default_rng(1), {}
    for _ in range(trials):
        X = rng.normal(size=(ROWS, len(TRUTH)))
        y = (X @ TRUTH + rng.logistic(size=ROWS) > 0).astype(int)
        for name, make in fits(X, y).items():
            found = make.fit(X, y).inference(X, y)
            hits.setdefault(name, []).append((found.low[:-1] <= TRUTH) & (found.high[:-1] >= TRUTH))
    print(f"{trials} trials\n\n| fit | signals | others |\n|---|---|---|")
    for name, inside in hits.items():
        share = np.mean(inside, 0)
        print(f"| {name} | {share[TRUTH != 0].mean():.3f} | {share[TRUTH == 0].mean():.3f} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
