"""
Constraints: amounts and portfolios
===================================

Constraints are penalties too: 0 inside a set, infinite outside, and the prox is the projection. Two uses. Amounts of
substances cannot be negative, and that alone removes most false ones. The parts of a portfolio are shares:
nonnegative, and one in sum.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from fednmap import Tolerance, run
from fednmap.algorithms import FedNMapMemory
from fednmap.problems import LeastSquares
from fednmap.regularizers import NonNegative, Simplex, Zero


def fit(data, phi):
    problem = LeastSquares(data)
    method = FedNMapMemory(phi, eta_a=1 / problem.smoothness(), Q=1, memory=20)
    return run(method, problem, rounds=3000, every=100, stop=Tolerance(1e-7)).x


# %%
# What is in the mixture?
# -----------------------
# Four laboratories measure the spectrum of the same mixture, each in a band of its own, and keep their readings. 24
# substances with overlapping lines come into question, five of them are in it.

rng = np.random.default_rng(4)
wave, substances = np.linspace(0, 1, 240), 24
lines = [
    sum(h * np.exp(-(((wave - c) / 0.04) ** 2)) for h, c in rng.uniform((0.3, 0), (1, 1), (4, 2)))
    for _ in range(substances)
]
spectra = torch.tensor(np.stack(lines, 1))
amounts = torch.zeros(substances).double()
amounts[[2, 7, 11, 16, 21]] = torch.tensor([1.0, 0.6, 0.35, 0.8, 0.5]).double()
readings = spectra @ amounts + 0.1 * torch.tensor(rng.normal(size=240))
bands = [slice(60 * k, 60 * (k + 1)) for k in range(4)]
laboratories = [(spectra[band], readings[band]) for band in bands]
free, nonnegative = fit(laboratories, Zero()), fit(laboratories, NonNegative())

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1, 1.25))
colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
for k, band in enumerate(bands):
    left.plot(wave[band], readings[band], ".", markersize=3, color=colors[k], label=f"laboratory {k + 1}")
left.plot(wave, spectra @ nonnegative, color="black", linewidth=1, label="the joint fit")
left.set(xlabel="wave length", ylabel="intensity", ylim=(-0.4, float(readings.max()) * 1.35))
left.legend(fontsize=8, ncols=3, frameon=False, loc="upper left", columnspacing=1, handletextpad=0.4)
at = np.arange(substances)
right.bar(at, amounts, 0.9, color="#dddddd", label="truth")
right.plot(at - 0.15, free, "x", color="#D55E00", label=f"free: {int((free < 0).sum())} negative amounts")
right.plot(
    at + 0.15,
    nonnegative,
    "o",
    markersize=5,
    color="#0072B2",
    label=f"nonnegative: {int((nonnegative == 0).sum())} exactly 0",
)
right.axhline(0, color="#777777", linewidth=0.8)
right.set(xlabel="substance", ylabel="amount", ylim=(min(-0.4, float(free.min()) - 0.1), 1.75))
right.legend(fontsize=9, frameon=False, loc="upper right")

# %%
# A portfolio of eight assets
# ---------------------------
# Five funds keep what they have observed of the assets' daily returns, each in a market of its own temper. Least
# squares of the portfolio's return against a wanted one is its variance plus the squared distance of its mean from
# the target; the simplex makes shares of it.

assets, days = 8, 250
names = ["bonds", "utilities", "staples", "health", "energy", "banks", "chips", "start-ups"]
mean = np.linspace(0.01, 0.12, assets)
spread = np.linspace(0.15, 1.6, assets)
funds = []
for k in range(5):
    market = rng.normal(size=(days, 1)) * (0.5 + 0.25 * k)
    returns = mean + spread * (0.6 * market * rng.uniform(0.5, 1.2, assets) + 0.8 * rng.normal(size=(days, assets)))
    funds.append(torch.tensor(returns))


def portfolio(target, phi):
    return fit([(r, torch.full((days,), target).double()) for r in funds], phi)


targets = np.concatenate([[0], np.geomspace(0.3, 40, 17)])
shares = torch.stack([portfolio(t, Simplex()) for t in targets])
pooled = torch.cat(funds)
risk, gain = (pooled @ shares.T).std(0), (pooled @ shares.T).mean(0)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", width_ratios=(1.2, 1))
palette = plt.get_cmap("cividis")(np.linspace(0, 1, assets))
stack = left.stackplot(gain, shares.T, colors=palette, edgecolor="white", linewidth=0.5, labels=names)
left.set(xlabel="mean return per day (%)", ylabel="share", xlim=(float(gain[0]), float(gain[-1])), ylim=(0, 1))
left.set_title("Shares along the frontier: each sums to 1", fontsize=10)
right.plot(risk, gain, "o-", color="#0072B2", markersize=4, label="portfolios on the simplex")
right.plot(pooled.std(0), pooled.mean(0), "s", color="#D55E00", label="single assets")
for name, a, b in zip(names, pooled.std(0), pooled.mean(0), strict=True):
    right.annotate(name, (a, b), (5, -9), textcoords="offset points", fontsize=8)
right.set(xlim=(0, 1.9), xlabel="deviation per day (%)", ylabel="mean return per day (%)")
right.set_title("More return for the same risk", fontsize=10)
right.legend(frameon=False, fontsize=9)
handles, labels = left.get_legend_handles_labels()
left.legend(handles[::-1], labels[::-1], loc="center left", fontsize=8, framealpha=0.9)
plt.show()
