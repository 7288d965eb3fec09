"""Cox's partial likelihood: against a computation by the definition, pair by pair, and autograd through it."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from fednmap.core import Problem, info_of
from fednmap.problems import Cox

SIZES = (12, 40, 7)


def data(seed=0, tied=True):
    rng = torch.Generator().manual_seed(seed)
    found = []
    for i, m in enumerate(SIZES):
        a = torch.randn(m, 4, generator=rng, dtype=torch.float64) + 0.2 * i
        time = torch.rand(m, generator=rng, dtype=torch.float64) * torch.exp(-a[:, 0]) * 10
        time = time.ceil() if tied else time
        event = (torch.rand(m, generator=rng) < 0.7).double()
        found.append((a, torch.stack([time, event], 1)))
    return found


def by_definition(pairs, ties, weights):
    def f(x):
        total = 0.0
        for (a, y), weight in zip(pairs, weights, strict=True):
            eta, time, event = a @ x, y[:, 0], y[:, 1]
            likelihood = 0.0
            for t in torch.unique(time[event == 1]):
                dead = (time == t) & (event == 1)
                risk, tied = torch.exp(eta[time >= t]).sum(), torch.exp(eta[dead]).sum()
                d = int(dead.sum())
                for k in range(d):
                    likelihood = likelihood - torch.log(risk - (k / d * tied if ties == "efron" else 0.0))
                likelihood = likelihood + eta[dead].sum()
            total = total - weight * likelihood / len(a)
        return total

    return f


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("weights", ["samples", None, [0.2, 0.5, 0.3]])
def test_it_is_the_partial_likelihood(ties, weights):
    pairs = data()
    problem = Cox(pairs, ties=ties, weights=weights)
    share = {None: [1 / 3] * 3, "samples": [m / sum(SIZES) for m in SIZES]}.get(
        weights if weights != [0.2, 0.5, 0.3] else 0
    )
    f = by_definition(pairs, ties, share or weights)
    x = torch.tensor([0.5, -1.0, 0.3, 2.0], dtype=torch.float64)
    assert torch.allclose(problem.loss(x), f(x), rtol=1e-12)
    assert torch.allclose(problem.gradient(x), jacobian(f, x), rtol=1e-10, atol=1e-12)
    assert torch.allclose(problem.hessian(x), hessian(f, x), rtol=1e-9, atol=1e-11)
    top = float(torch.linalg.eigvalsh(problem.hessian(x))[-1])
    assert problem.smoothness(x) == pytest.approx(top, rel=2e-2)


def test_without_ties_both_ways_agree():
    pairs, x = data(tied=False), torch.ones(4, dtype=torch.float64)
    assert torch.equal(Cox(pairs, ties="efron").gradient(x), Cox(pairs, ties="breslow").gradient(x))
    assert not torch.allclose(Cox(data(), ties="efron").gradient(x), Cox(data(), ties="breslow").gradient(x))


def test_clients_stacks_and_parts_agree():
    problem = Cox(data())
    assert isinstance(problem, Problem)
    x = torch.stack([torch.full((4,), v, dtype=torch.float64) for v in (0.1, -0.4, 0.8)])
    ids = torch.tensor([2, 0, 1])
    stacked = problem.oracle(ids, 0)(x, 0)
    for row, i in enumerate(ids):
        assert torch.allclose(problem.oracle(i, 0)(x[row], 0), stacked[row], rtol=1e-12, atol=1e-14)
        assert torch.allclose(problem.alone(int(i)).gradient(x[row]), stacked[row], rtol=1e-12, atol=1e-14)
    every = problem.oracle(torch.arange(3), 0)(x[0], 0)
    assert torch.allclose(info_of(problem).weights @ every, problem.gradient(x[0]), rtol=1e-12, atol=1e-14)
    parts = [problem.part(k, 2) for k in range(2)]
    assert torch.allclose(sum(p.gradient(x[0]) for p in parts), problem.gradient(x[0]), rtol=1e-12, atol=1e-14)
    assert torch.allclose(sum(p.loss(x[0]) for p in parts), problem.loss(x[0]), rtol=1e-12)


def test_the_order_of_rows_does_not_matter():
    pairs, x = data(), torch.ones(4, dtype=torch.float64)
    turned = [(a.flip(0), y.flip(0)) for a, y in pairs]
    assert torch.allclose(Cox(pairs).gradient(x), Cox(turned).gradient(x), rtol=1e-12, atol=1e-14)


def test_large_scores_do_not_overflow():
    problem = Cox(data())
    for size in (1e3, -1e3):
        x = torch.full((4,), size, dtype=torch.float64)
        assert torch.isfinite(problem.loss(x))
        assert torch.isfinite(problem.gradient(x)).all()
    x = torch.ones(4, dtype=torch.float32)
    assert problem.gradient(x).dtype == problem.loss(x).dtype == torch.float32
    assert torch.allclose(problem.gradient(x).double(), problem.gradient(x.double()), atol=1e-5)


def test_baseline_is_breslows_estimator_and_cumulative_hazards_sum_to_the_events():
    """At any x the residuals of a stratum, expected minus observed events, sum to 0."""
    pairs = data()
    problem = Cox(pairs, ties="breslow")
    x = torch.tensor([0.5, -1.0, 0.3, 0.2], dtype=torch.float64)
    for i, (a, y) in enumerate(pairs):
        times, hazard = problem.baseline(x, i)
        assert bool((times.diff() > 0).all())
        at = torch.searchsorted(times, y[:, 0].contiguous(), right=True)
        expected = torch.exp(a @ x) * torch.cat([torch.zeros(1, dtype=torch.float64), hazard])[at]
        assert torch.allclose(expected.sum(), y[:, 1].sum(), rtol=1e-12)
    one = (torch.zeros(3, 1), torch.tensor([[1.0, 1], [2, 1], [3, 1]]))
    assert torch.allclose(
        Cox([one]).baseline(torch.zeros(1), 0)[1], torch.tensor([1 / 3, 1 / 3 + 1 / 2, 11 / 6]).double()
    )


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        ([[1.0, 2.0]], {}, "the event in row 0 is 2"),
        ([[1.0, 0.0]], {}, "every row is censored"),
        ([[1.0]], {}, r"a time and an event"),
        ([[float("inf"), 1.0]], {}, "NaN or infinity"),
        ([[1.0, 1.0]], {"ties": "exact"}, "choose from efron, breslow"),
    ],
)
def test_what_does_not_fit_is_refused(targets, options, message):
    with pytest.raises(ValueError, match=message):
        Cox([(torch.ones(1, 2), torch.tensor(targets))], **options)
