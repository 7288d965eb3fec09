"""The heterogeneous lasso on which distances to the optimum are measured, and runs on it."""

from collections import deque
from functools import cache

from fednmap import simulate
from fednmap.regularizers import L1
from fednmap.testing import heterogeneous, optimum, smoothness

PHI = L1(0.2)
PROBLEM = heterogeneous()
L = smoothness(PROBLEM)


@cache
def best(weight):
    """argmin f + weight |x|_1, for weight 0 the least-squares solution."""
    return optimum(PROBLEM, L1(weight))


def last(algorithm, problem=PROBLEM, **options):
    """The last round of a run."""
    return deque(simulate(algorithm, problem, **options), maxlen=1)[0]


def models(algorithm, problem, **options):
    """The model after every round."""
    return [algorithm.model(r.server) for r in simulate(algorithm, problem, **options)]


def distance(x, to):
    return float((x - to).norm() / to.norm())


def gap(xs, ys):
    """The largest difference between two trajectories."""
    return max(float((x - y).abs().max()) for x, y in zip(xs, ys, strict=True))
