"""Epsilon, attacked: whoever sees the models guesses whether a client took part; its odds stay below the reported ones.

A client whose vector has the largest length that clipping leaves is there or not. The guess is by the model along that
vector; Clopper and Pearson's intervals turn its errors into a lower bound of epsilon that holds with 99.9 %.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import beta

pytest.importorskip("dp_accounting")

from fednmap import simulate
from fednmap.algorithms import FedAvg, FedNMap
from fednmap.privacy import Privacy
from fednmap.privacy.accounting import epsilon
from fednmap.problems import LeastSquares
from fednmap.regularizers import Zero

DELTA, CLIENTS = 1e-5, 4
METHODS = {
    "fednmap": FedNMap(Zero(), eta_a=0.1, Q=1),
    "fednmap, two steps": FedNMap(Zero(), eta_a=0.1, Q=2),
    "fedavg": FedAvg(Zero(), eta_a=0.1, Q=1),
}


def problem(there):
    """The first client pulls far along the first axis, or not at all; the others want to stay where they are."""
    eye, pulls = torch.eye(2, dtype=torch.float64), torch.zeros(CLIENTS, 2, dtype=torch.float64)
    pulls[0, 0] = 1e3 * there
    return LeastSquares([(eye, pull) for pull in pulls])


def seen(method, there, noise, rounds, trials):
    """The first coordinate of the last model, over many runs."""
    world, uplink, found = problem(there), Privacy(1.0, noise, DELTA), []
    for seed in range(trials):
        *_, last = simulate(method, world, rounds=rounds, seed=seed + 10**6 * there, uplink=[uplink])
        found.append(float(method.model(last.server)[0]))
    return np.array(found)


def lower_bound(without, with_, level=0.999):
    """Of epsilon, by the best of some thresholds, chosen on the first half of the runs and judged on the second."""
    half = len(without) // 2

    def bound(threshold, a, b):
        false, true = (a > threshold).sum(), (b > threshold).sum()
        high = beta.ppf(level, false + 1, len(a) - false)
        low = beta.ppf(1 - level, true, len(b) - true + 1) if true else 0.0
        return math.log(max(low - DELTA, 1e-12) / high)

    thresholds = np.quantile(np.concatenate([without, with_]), np.linspace(0.02, 0.98, 49))
    best = max(thresholds, key=lambda v: bound(v, without[:half], with_[:half]))
    return bound(best, without[half:], with_[half:])


def audited(method, noise, rounds, trials):
    without, with_ = (seen(method, there, noise, rounds, trials) for there in (0, 1))
    sign = 1 if with_.mean() > without.mean() else -1
    return lower_bound(sign * without, sign * with_)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_no_audit_is_above_the_reported_epsilon(method, rounds):
    found, reported = audited(METHODS[method], 1.5, rounds, 800), epsilon(1.5, 1.0, rounds, DELTA).pld
    print(f"{method}, {rounds} rounds: at least {found:.2f}, reported {reported:.2f}")
    assert found < reported


@pytest.mark.slow
def test_the_audit_notices_noise_that_is_too_small():
    assert audited(METHODS["fednmap"], 0.3, 1, 800) > epsilon(1.5, 1.0, 1, DELTA).pld
