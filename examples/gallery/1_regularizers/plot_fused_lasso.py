"""
Fused lasso: a signal in pieces
===============================

Eight sensors watch one signal, each during some time only and each with noise of its own. Total variation asks for a
signal that jumps seldom. Fitting together uses every sensor where it has something to say, and weighs noise against
noise before it decides on a jump; smoothing at each sensor and averaging afterwards decides too early.
"""

import matplotlib.pyplot as plt
import torch

from fednmap import Tolerance, run
from fednmap.algorithms import FedNMapMemory
from fednmap.problems import LeastSquares
from fednmap.regularizers import TotalVariation

LENGTH, SENSORS = 300, 8
rng = torch.Generator().manual_seed(3)
levels = torch.tensor([0.0, 2.0, 1.2, -1.0, 0.5, 3.0, 0.0]).double()
jumps = torch.tensor([40, 90, 130, 180, 215, 245])
truth = levels[torch.bucketize(torch.arange(LENGTH), jumps, right=True)]

# %%
# A sensor sees a window of the time, and its rows of the least-squares problem pick those coordinates. Every sensor
# gives as many readings, so that all rows count the same.

noise, data = [0.4 + 0.1 * k for k in range(SENSORS)], []
for k in range(SENSORS):
    first = int(k * (LENGTH - 120) / (SENSORS - 1))
    seen = torch.arange(first, first + 120)
    readings = truth[seen] + noise[k] * torch.randn(120, generator=rng, dtype=torch.float64)
    data.append((torch.eye(LENGTH, dtype=torch.float64)[seen], readings))


def fit(clients, weight):
    """min mean squares / 2 + weight * total variation, to a tolerance."""
    problem = LeastSquares(clients)
    method = FedNMapMemory(TotalVariation(weight), eta_a=1 / problem.smoothness(), Q=1, memory=20)
    return run(method, problem, rounds=2000, every=50, stop=Tolerance(1e-5))


together = fit(data, 0.006)
print(together.ended)

# %%
# Alone, a sensor says nothing outside of its window; the mean is taken over those that have looked. Both ways have
# the weight of total variation that suits them best, among a few, found by comparing with the truth.

total, count = torch.zeros(LENGTH).double(), torch.zeros(LENGTH).double()
for a, b in data:
    seen = a.sum(0) > 0
    total += torch.where(seen, fit([(a, b)], 0.02).x, 0.0)
    count += seen

figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True)
shades = plt.get_cmap("viridis")
for k, (a, b) in enumerate(data):
    above.plot(a.argmax(1), b, ".", markersize=3, color=shades(k / SENSORS), alpha=0.8)
    above.plot([a.argmax(1)[0], a.argmax(1)[-1]], [5.1 + 0.35 * k] * 2, color=shades(k / SENSORS), linewidth=3)
above.text(2, 6.2, "when each\nsensor looked", fontsize=9, va="bottom")
above.set(ylabel="readings", ylim=(-3.2, 8.2))
averaged = total / count
for values, style, color, width, label in (
    (truth, "-", "#bbbbbb", 5, "truth"),
    (averaged, "--", "#D55E00", 1.5, "smoothed alone, then averaged"),
    (together.x, "-", "#0072B2", 2, "fitted together"),
):
    mistake = "" if values is truth else f": error {float((values - truth).square().mean().sqrt()):.2f}"
    below.plot(values, style, color=color, linewidth=width, label=label + mistake)
pieces = 1 + int((together.x.diff().abs() > 1e-6).sum())
below.set(xlabel="time", ylabel="signal", ylim=(-1.6, 4.6))
below.set_title(
    f"The joint signal: {pieces} pieces in place of {LENGTH} values; the true one has {len(levels)}", fontsize=10
)
below.legend(loc="upper left", frameon=False, ncols=3, fontsize=9)
plt.show()
