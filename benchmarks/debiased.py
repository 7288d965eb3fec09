"""How often the 95 % intervals of `debiased` hold the truth, with more columns than rows.

python benchmarks/debiased.py [trials]: linear and logistic regression, 200 rows at 4 sites, 300 columns whose
correlation is 0.5^|j - k|, 10 signals spread over them.
"""

import sys

import numpy as np

from fednmap.estimators import FederatedGLM

ROWS, COLUMNS = 200, 300
TRUTH = np.zeros(COLUMNS)
TRUTH[::30] = np.tile([1.0, -0.5], 5)
LAM = {"gaussian": np.sqrt(2 * np.log(COLUMNS) / ROWS), "logistic": np.sqrt(2 * np.log(COLUMNS) / ROWS) / 3}


def main(trials):
    rng, found = np.random.default_rng(1), {name: [] for name in LAM}
    root = np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(np.arange(COLUMNS), np.arange(COLUMNS))))
    for _ in range(trials):
        X, sites = rng.normal(size=(ROWS, COLUMNS)) @ root.T, np.arange(ROWS) % 4
        eta = X @ TRUTH
        y = {"gaussian": eta + rng.normal(size=ROWS), "logistic": (eta + rng.logistic(size=ROWS) > 0) * 1}
        for name, lam in LAM.items():
            said = FederatedGLM(name, "l1", lam).fit(X, y[name], sites).debiased(X, y[name], sites)
            inside = (said.low <= TRUTH) & (said.high >= TRUTH)
            found[name].append([inside, said.high - said.low, said.p_value < 0.05])
    print(f"{trials} trials, 95 % intervals\n")
    print("| family | columns | coverage | mean length | p < 0.05 |\n|---|---|---|---|---|")
    for name, each in found.items():
        inside, length, small = np.mean(each, 0)
        for label, some in (("signals", TRUTH != 0), ("zeros", TRUTH == 0)):
            numbers = (inside[some].mean(), length[some].mean(), small[some].mean())
            print(f"| {name} | {label} | " + " | ".join(f"{v:.3f}" for v in numbers) + " |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
