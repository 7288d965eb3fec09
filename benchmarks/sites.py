"""Four hospitals of UCI's heart disease data: which coefficients differ, and whose model predicts best.

python benchmarks/sites.py: logistic regression with l1, 740 patients without missing values. lam and mu are those with
the least held-out loss of five folds within hospitals, each model with its own. "new hospital" leaves one out.
"""

from itertools import product

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

from fednmap.data.heart_disease import FACTORS, HOSPITALS, patients
from fednmap.estimators import FederatedLogisticRegression
from fednmap.report.data_table import DataTable

LAMS, SHARES = (0.003, 0.01, 0.03), (0.35, 0.7, 1.2)
KINDS = {"joint": "none", "own intercepts": "intercepts", "sparse deviations": "sparse"}


def model(effects, lam, share):
    mu = share * lam if effects == "sparse" else None
    return FederatedLogisticRegression("l1", lam, site_effects=effects, mu=mu, tol=1e-5)


def separate(X, y, sites, lam):
    """Every hospital's own model, by name."""
    every = {name: sites == name for name in np.unique(sites)}
    return {name: model("none", lam, 1).fit(X[mine], y[mine]) for name, mine in every.items()}


def within(X, y, sites, fold, effects, lam, share):
    """Probabilities of held-out rows of known hospitals; effects "separate" is every hospital by itself."""
    found = np.zeros(len(y))
    for k in range(5):
        train, test = fold != k, fold == k
        if effects != "separate":
            fitted = model(effects, lam, share).fit(X[train], y[train], sites[train])
            found[test] = fitted.predict_proba(X[test], sites[test])[:, 1]
            continue
        for name, fitted in separate(X[train], y[train], sites[train], lam).items():
            mine = test & (sites == name)
            found[mine] = fitted.predict_proba(X[mine])[:, 1]
    return found


def outside(X, y, sites, effects, lam, share):
    """Loss and AUC at a hospital that was left out, mean over hospitals; "separate": mean over the others' models."""
    losses, areas = [], []
    for name in np.unique(sites):
        test = sites == name
        train = ~test
        if effects == "separate":
            fits = list(separate(X[train], y[train], sites[train], lam).values())
        else:
            fits = [model(effects, lam, share).fit(X[train], y[train], sites[train])]
        shares = [fitted.predict_proba(X[test])[:, 1] for fitted in fits]
        losses.append(np.mean([log_loss(y[test], p) for p in shares]))
        areas.append(np.mean([roc_auc_score(y[test], p) for p in shares]))
    return np.mean(losses), np.mean(areas)


def main():
    x, labels, clients = patients()
    X, y, sites = x.double().numpy(), labels.numpy(), np.array(list(HOSPITALS))[clients.numpy()]
    order = np.lexsort((np.random.default_rng(0).random(len(y)), y, sites))
    fold = np.empty(len(y), int)
    fold[order] = np.arange(len(y)) % 5
    rows = []
    for name, effects in {**KINDS, "separate": "separate"}.items():
        tried = product(LAMS, SHARES if effects == "sparse" else [1.0])
        each = {at: within(X, y, sites, fold, effects, *at) for at in tried}
        best = min(each, key=lambda at: log_loss(y, each[at]))
        area = np.mean([roc_auc_score(y[sites == s], each[best][sites == s]) for s in HOSPITALS])
        mu = best[0] * best[1] if effects == "sparse" else None
        rows.append([name, best[0], mu, log_loss(y, each[best]), float(area), *outside(X, y, sites, effects, *best)])
    head = ["model", "lam", "mu", "loss, known hospital", "AUC, known", "loss, new hospital", "AUC, new"]
    print(DataTable(head, rows).markdown(), "\n")
    chosen = dict(zip(KINDS, rows, strict=False))["sparse deviations"]
    fitted = model("sparse", chosen[1], chosen[2] / chosen[1]).fit(X, y, sites)
    own = fitted.site_effects_
    named = type(own)(own.sites, FACTORS, own.intercept, own.deviation)
    print(named.table(fitted.coef_).markdown())


if __name__ == "__main__":
    main()
