"""
Four hospitals, one sparse model
================================

Patients of four hospitals, one logistic regression, simulated in one process: which risk factors enter first as the
penalty falls, what their coefficients are, and whether a hospital is better off with the joint model than alone.
The data are UCI's heart disease where its files are at hand, else scikit-learn's breast-cancer data cut into four
sites.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer

from fednmap.data import cache, load
from fednmap.estimators import FederatedLogisticRegression, FederatedLogisticRegressionCV

# %%
# Rows of all sites stand in one table here, with the site of each row; in a deployment every site has its own.


def heart_disease():
    data = load("heart-disease")
    names = [
        *("age", "male", "blood pressure", "cholesterol", "blood sugar > 120", "highest heart rate"),
        *("pain under exercise", "ST depression", "atypical angina", "pain, not anginal", "no chest pain"),
        *("ECG: ST-T abnormal", "ECG: thick ventricle"),
    ]
    hospitals = np.array(["Cleveland", "Hungary", "Switzerland", "Long Beach"])
    train = data.x_train.numpy(), data.y_train.numpy(), hospitals[data.clients]
    test = data.x_test.numpy(), data.y_test.numpy(), hospitals[data.test_clients]
    return names, train, test


def breast_cancer():
    data = load_breast_cancer()
    keep = [j for j, name in enumerate(data.feature_names) if name.startswith("mean")]
    x, y = data.data[:, keep], 1 - data.target
    x = (x - x.mean(0)) / x.std(0)
    site = np.array(["site A", "site B", "site C", "site D"])[np.argsort(np.argsort(x[:, 1])) * 4 // len(x)]
    held = np.arange(len(x)) % 5 == 4
    names = [name.removeprefix("mean ") for name in data.feature_names[keep]]
    return names, (x[~held], y[~held], site[~held]), (x[held], y[held], site[held])


at_hand = cache.find("heart_disease", ["processed.va.data"])
names, (x, y, site), (x_test, y_test, site_test) = heart_disease() if at_hand else breast_cancer()
print({str(name): int((site == name).sum()) for name in dict.fromkeys(site)})

# %%
# The path, and lam chosen by leaving one hospital out
# ----------------------------------------------------

chosen = FederatedLogisticRegressionCV("l1", cv="leave-one-site-out", select="min").fit(x, y, sites=site)
path = chosen.path_
colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]

figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
coefs = path.coefs[:, 0, :]
order = np.argsort(-coefs[-1])
places = coefs[-1, order].copy()
for k in range(1, len(places)):  # names that would lie on each other move down
    places[k] = min(places[k], places[k - 1] - 0.048 * np.ptp(coefs))
places += (coefs[-1, order] - places).mean()
for k, j in enumerate(order):
    line = {"color": colors[k % 7], "linestyle": ("-", "--")[k // 7 % 2]}
    axes.plot(path.lambdas, coefs[:, j], linewidth=1.8, **line)
    end = path.lambdas[-1]
    axes.annotate(
        names[j],
        (end, coefs[-1, j]),
        (end / 1.35, places[k]),
        fontsize=8.5,
        va="center",
        color=line["color"],
        arrowprops={"arrowstyle": "-", "color": line["color"], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
    )
axes.axvline(chosen.lam_, color="#777777", linestyle=":")
axes.annotate(
    f"chosen: {chosen.lam_:.3g}",
    (chosen.lam_, 0.02),
    (4, 0),
    xycoords=("data", "axes fraction"),
    textcoords="offset points",
    fontsize=8.5,
)
axes.axhline(0, color="#999999", linewidth=0.8)
axes.set(xscale="log", xlabel="lam, falling to the right", ylabel="coefficient (per standard deviation)")
axes.set_xlim(path.lambdas[0], path.lambdas[-1] / 9)
axes.spines[["top", "right"]].set_visible(False)

# %%
# How sure
# --------
# Intervals come from the sum of the hospitals' Hessians, one more message per hospital.

joint = FederatedLogisticRegression("l1", lam=chosen.lam_).fit(x, y, sites=site)
table = joint.inference(x, y, site)
estimate, low, high = (np.asarray(v)[: len(names)] for v in (table.estimate, table.low, table.high))
up, coef = np.argsort(estimate), joint.coef_.ravel()

figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
rows = np.arange(len(names))
axes.hlines(rows, low[up], high[up], color="#999999", linewidth=3, label="95 % interval, shrinkage undone")
axes.plot(estimate[up], rows, "|", color="#555555", markersize=9)
alive = coef[up] != 0
axes.plot(coef[up][alive], rows[alive], "o", color="#0072B2", label="joint sparse model")
axes.plot(np.zeros((~alive).sum()), rows[~alive], "x", color="#D55E00", label="coefficient exactly 0")
axes.axvline(0, color="#999999", linewidth=0.8)
axes.set_yticks(rows, [names[j] for j in up])
axes.set(xlabel="coefficient (per standard deviation)")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(loc="lower right", frameon=False)

# %%
# Together or alone
# -----------------
# Each hospital fits a model to its own rows, with the same penalty; both are judged on patients kept back, of all
# four hospitals together and of its own alone. Few patients were kept back at small hospitals, so single differences
# there are chance.

hospitals = list(dict.fromkeys(site))
alone = {h: FederatedLogisticRegression("l1", lam=chosen.lam_).fit(x[site == h], y[site == h]) for h in hospitals}
figure, both = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
for axes, title, everywhere in zip(
    both, ("on patients of all hospitals", "on its own patients"), (True, False), strict=True
):
    kept = [np.full(len(y_test), True) if everywhere else site_test == h for h in hospitals]
    own = [100 * alone[h].score(x_test[k], y_test[k]) for h, k in zip(hospitals, kept, strict=True)]
    shared = [100 * joint.score(x_test[k], y_test[k]) for k in kept]
    at = np.arange(len(hospitals))
    for shift, scores, color, hatch, label in (
        (-0.2, own, "#E69F00", "//", "alone"),
        (0.2, shared, "#0072B2", "", "joint"),
    ):
        bars = axes.bar(at + shift, scores, 0.38, color=color, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(at, [f"{h}\n{k.sum()} rows" for h, k in zip(hospitals, kept, strict=True)], fontsize=8.5)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
both[0].set(ylabel="accuracy (%)", ylim=(0, 118))
both[1].legend(loc="upper right", ncols=2, frameon=False)
plt.show()
