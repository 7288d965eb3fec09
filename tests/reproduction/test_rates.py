"""The rates over more rounds: copies in one run are runs of their own; the nonconvex problem has the PL condition."""

import math

import numpy as np
import pytest
import torch

from fednmap.simulation import simulate
from reproduction import rates as R
from reproduction.table1_trials import algorithm
from reproduction.trials import Curve


def row(label):
    return next(r for r in R.ROWS if r.label == label)


@pytest.mark.parametrize(
    "label", ["FedNMap, PL", "FedNMap, nonconvex PL", "Zhang, strongly convex", "FedNMap, nonconvex"]
)
def test_copies_in_one_run_are_runs_of_their_own(label):
    """A copy that starts elsewhere does not move the others, and each is what a run of it alone gives."""
    r = row(label)
    one, three = (R.ALL[r.problem](4, replicas=k) for k in (1, 3))
    kind, far = algorithm(r.method, R.ALL_PHI[r.problem], 0.2, 4), torch.full((20,), 2.0, dtype=torch.float64)
    alone = [list(simulate(kind, one, rounds=20, start=start))[-1] for start in (one.start, far)]
    starts = torch.cat([one.start, far, one.start])
    together = list(simulate(kind, three, rounds=20, start=starts))[-1]
    found = three.copies(kind.model(together.server))
    torch.testing.assert_close(found[0], kind.model(alone[0].server))
    torch.testing.assert_close(found[1], kind.model(alone[1].server))
    torch.testing.assert_close(found[2], found[0])


def test_copies_have_noise_of_their_own():
    f = R.ALL["PL"](4, noise=2.0, replicas=3)
    noise = f.copies(f.oracle(torch.arange(4), 1)(f.start, 0)) - f.copies(
        R.ALL["PL"](4, replicas=3).oracle(torch.arange(4), 1)(f.start, 0)
    )
    assert noise.shape == (4, 3, 20)
    assert noise.flatten(0, 1).unique(dim=0).shape[0] == 12


def test_the_nonconvex_problem_has_the_pl_condition_with_its_penalty():
    """psi is a sum over the coordinates, so the smallest of their PL constants is its constant."""
    f, lam = R.ALL["nonconvex PL"](2), float(R.ALL_PHI["nonconvex PL"].value(torch.ones(1)))
    torch.testing.assert_close(f.mean, 0.4 * torch.eye(20, dtype=torch.float64))
    smallest = math.inf
    for b in f.b.tolist():
        x = np.sort(np.append(np.linspace(-40, 40, 200_001), [0.0, b]))
        u = x - b
        psi, slope = 0.2 * u**2 + 0.3 * np.sin(u) ** 2 + lam * abs(x), 0.4 * u + 0.3 * np.sin(2 * u)
        distance = np.where(x == 0, np.maximum(abs(slope) - lam, 0), abs(slope + lam * np.sign(x)))
        gap = psi - psi.min()
        smallest = min(smallest, (distance[gap > 1e-6] ** 2 / (2 * gap[gap > 1e-6])).min())
    assert 0.1 < smallest < 0.4
    bent = 0.4 + 0.6 * np.cos(2 * np.linspace(0, 3, 1000))
    assert bent.min() < -0.19


def test_gradients_of_the_nonconvex_problem():
    f, x = R.ALL["nonconvex PL"](4, replicas=2), torch.linspace(-3, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(f.gradient(x), torch.func.grad(f.loss)(x))
    torch.testing.assert_close(f.oracle(torch.arange(4), 0)(x, 0).mean(0), f.gradient(x))


def test_the_first_rounds_of_a_long_run_are_the_short_run():
    label = "FedNMap, PL"
    (short,), (first, _) = (R.errors(label, 2, 2, lengths, 0.25, 0, 2) for lengths in ((16,), (16, 40)))
    np.testing.assert_array_equal(short, first)


def curves(power, best=0.12):
    """Errors T^power at step `best`, twice that elsewhere."""
    found = []
    for trial in range(3):
        points = [(T, s) for T in (32, 128, 512) for s in (0.25, 0.12, 0.062)]
        T, step = (np.array(v) for v in zip(*points, strict=True))
        value = T.astype(float) ** (power + 0.001 * trial) * np.where(step == best, 1.0, 2.0)
        setting = {"figure": "rates", "method": "FedNMap", "problem": "PL", "factor": "T", "trial": trial}
        columns = {"round": T, "n": np.full(9, 8.0), "Q": np.full(9, 4.0), "step": step, "value": value}
        found.append(Curve(setting, columns))
    return found


@pytest.mark.parametrize(("power", "best", "holds"), [(-1.0, 0.12, True), (-0.5, 0.12, False), (-1.0, 0.25, None)])
def test_the_verdict_follows_from_the_errors(power, best, holds):
    (claim,) = R.judge(curves(power, best)).claims
    assert claim.holds is holds
