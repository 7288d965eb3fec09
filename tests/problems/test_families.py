"""Generalised linear models: every family against autograd, a second computation, and scikit-learn's solutions."""

import numpy as np
import pytest
import torch
from sklearn import linear_model
from torch.autograd.functional import hessian, jacobian

from fednmap.core import info_of
from fednmap.data import ClientData
from fednmap.problems import GLM, LeastSquares, Logistic, Pooled
from fednmap.problems.families import (
    FAMILIES,
    Bernoulli,
    Binomial,
    Gamma,
    Gaussian,
    Huber,
    Multinomial,
    NegativeBinomial,
    Ordinal,
    Poisson,
    ScaledHuber,
)

SIZES = (9, 30, 14)
EVERYBODY = torch.arange(len(SIZES))


def real(eta, rng):
    return eta[:, 0] + torch.randn(len(eta), generator=rng, dtype=torch.float64)


def outliers(eta, rng):
    y = real(eta, rng)
    y[::7] += 30
    return y


def counts(eta, rng):
    return torch.poisson(torch.exp(0.3 * eta[:, 0]), generator=rng)


def label(eta, rng):
    return (eta + torch.randn(eta.shape, generator=rng, dtype=torch.float64)).argmax(1)


def positive(eta, rng):
    return torch.exp(0.3 * eta[:, 0]) * (0.1 + torch.rand(len(eta), generator=rng, dtype=torch.float64))


def share(eta, rng):
    return torch.rand(len(eta), generator=rng, dtype=torch.float64).mul_(5).round_().div_(5)


def ordered(eta, rng):
    return (real(eta, rng) + 1.5).clamp(0, 3).long()


def with_offset(target):
    return lambda eta, rng: torch.stack([target(eta, rng).double(), real(eta, rng).mul_(0.2)], 1)


FAMILY = {
    "binomial": (Binomial(), 1, share),
    "gamma": (Gamma(), 1, positive),
    "negative-binomial": (NegativeBinomial(), 1, counts),
    "ordinal": (Ordinal(4), 1, ordered),
    "poisson, offset": (Poisson(), 1, with_offset(counts)),
    "negative-binomial, offset": (NegativeBinomial(), 1, with_offset(counts)),
    "ordinal, offset": (Ordinal(4), 1, with_offset(ordered)),
    "gaussian": (Gaussian(), 1, real),
    "logistic": (Bernoulli(), 2, label),
    "multinomial": (Multinomial(3), 3, label),
    "poisson": (Poisson(), 1, counts),
    "huber": (Huber(0.8), 1, outliers),
    "scaled-huber": (ScaledHuber(1.5), 1, outliers),
}


def made(kind, **options):
    family, scores, target = FAMILY[kind]
    rng = torch.Generator().manual_seed(3)
    truth = torch.randn(5, scores, generator=rng, dtype=torch.float64)
    data = []
    for i, m in enumerate(SIZES):
        a = torch.randn(m, 5, generator=rng, dtype=torch.float64) + 0.3 * i
        data.append((a, target(a @ truth + 0.5, rng)))
    return GLM(data, family, offset="offset" in kind, **options)


def point(problem, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return problem.start + 0.3 * torch.randn(problem.dim, generator=rng, dtype=torch.float64).abs()


def by_autograd(problem):
    """f written out row by row, from the definition of the model."""
    family, d = problem.family, problem.features

    def f(x):
        total = 0.0
        scores = family.outputs - family.constants
        w, rest = x[: scores * d].view(scores, d), x[scores * d :]
        c = rest[:scores] if problem.intercept else torch.zeros(scores, dtype=x.dtype)
        constants = rest[scores if problem.intercept else 0 :]
        weights = [1 / problem.n] * problem.n if problem.weights is None else problem.weights.tolist()
        for (a, y), weight in zip(problem.data, weights, strict=True):
            eta = torch.cat([a @ w.T + c, constants.expand(len(a), -1)], 1)
            if problem.offset:
                eta = eta + torch.eye(1, eta.shape[1]) * y[:, 1:]
                y = y[:, 0]
            eta = eta[:, 0] if family.outputs == 1 else eta
            total = total + weight * family.loss(eta, y).mean()
        return total

    return f


def test_every_family_is_tested():
    assert set(FAMILY) >= set(FAMILIES)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [None, "samples", [0.5, 0.2, 0.3]])
def test_loss_gradient_and_hessian_are_those_of_the_definition(kind, intercept, weights):
    problem = made(kind, intercept=intercept, weights=weights)
    x, f = point(problem), by_autograd(problem)
    gradient = jacobian(f, x)
    assert torch.allclose(problem.loss(x), f(x), rtol=1e-13)
    assert torch.allclose(problem.gradient(x), gradient, rtol=1e-12, atol=1e-14)
    assert torch.allclose(problem.hessian(x), hessian(f, x), rtol=1e-10, atol=1e-12)
    loss, same = problem.value_and_gradient(x)
    assert torch.allclose(loss, f(x), rtol=1e-13)
    assert torch.allclose(same, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("rows", [False, True])
def test_stack_common_point_one_client_and_padding_agree(kind, batch_size, rows, monkeypatch):
    weights = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(1)) if rows else None
    problem = made(kind, intercept=True, batch_size=batch_size, sample_weights=weights)
    ids = torch.tensor([2, 0, 1])
    apart = torch.stack([point(problem, seed) for seed in range(3)])
    stacked = problem.oracle(ids, 4)(apart, 1)
    for row, i in enumerate(ids):
        assert torch.allclose(problem.oracle(i, 4)(apart[row], 1), stacked[row], rtol=1e-12, atol=1e-14)
        assert torch.allclose(problem.alone(int(i)).oracle(torch.tensor([0]), 4)(apart[row], 1)[0], stacked[row])
    common = problem.oracle(ids, 4)(apart[0], 1)
    assert torch.allclose(problem.oracle(ids, 4)(apart[:1].expand(3, -1), 1), common, rtol=1e-12, atol=1e-14)
    monkeypatch.setattr("fednmap.problems.glm.SMALL_BYTES", 0)
    assert torch.allclose(problem.oracle(ids, 4)(apart, 1), stacked, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", FAMILY)
def test_rows_of_weight_two_count_as_two_rows(kind):
    problem = made(kind, intercept=True)
    pairs = list(problem.data)
    times = [torch.arange(m) % 3 for m in SIZES]
    repeated = [(a.repeat_interleave(k, 0), y.repeat_interleave(k, 0)) for (a, y), k in zip(pairs, times, strict=True)]
    x = point(problem)
    for weights in (None, "samples"):
        options = {"intercept": True, "offset": problem.offset, "weights": weights}
        weighted = GLM(pairs, problem.family, sample_weights=times, **options)
        plain = GLM(repeated, problem.family, **options)
        assert torch.allclose(weighted.loss(x), plain.loss(x), rtol=1e-13)
        assert torch.allclose(weighted.gradient(x), plain.gradient(x), rtol=1e-12, atol=1e-14)
        assert torch.allclose(
            weighted.oracle(EVERYBODY, 0)(x, 0), plain.oracle(EVERYBODY, 0)(x, 0), rtol=1e-12, atol=1e-14
        )
        assert torch.allclose(weighted.hessian(x), plain.hessian(x), rtol=1e-12, atol=1e-14)


def test_weighted_minibatches_are_unbiased():
    weights = torch.rand(sum(SIZES), generator=torch.Generator().manual_seed(1))
    problem = made("gaussian", batch_size=400, sample_weights=weights)
    x = point(problem)
    noisy = torch.stack([problem.oracle(EVERYBODY, t)(x, 0) for t in range(40)])
    exact = problem.exact().oracle(EVERYBODY, 0)(x, 0)
    assert bool(((noisy.mean(0) - exact).abs() <= 5 * noisy.std(0) / 40**0.5 + 1e-12).all())


def test_samples_weigh_the_same_however_they_are_divided():
    problem = made("poisson", intercept=True, weights="samples")
    pooled = GLM([(problem.data.x, problem.data.y)], Poisson(), intercept=True)
    x = point(problem)
    assert torch.allclose(problem.gradient(x), pooled.gradient(x), rtol=1e-12)
    assert torch.allclose(Pooled(problem).oracle(torch.tensor(0), 0)(x, 0), pooled.gradient(x), rtol=1e-12)


@pytest.mark.parametrize("kind", FAMILY)
def test_smoothness_bounds_the_hessian_and_is_reached_where_it_can_be(kind):
    problem = made(kind, intercept=True)
    x = point(problem)
    at_x = float(torch.linalg.eigvalsh(problem.hessian(x))[-1])
    L = problem.smoothness(x)
    assert at_x * (1 - 1e-9) <= L
    if problem.family.bound is None or kind == "gaussian":
        assert pytest.approx(at_x, rel=2e-3) == L
    if kind == "logistic":  # sigmoid' is 1/4 at 0, where every score is 0
        assert pytest.approx(float(torch.linalg.eigvalsh(problem.hessian(problem.start))[-1]), rel=2e-3) == L
    assert info_of(problem).smoothness() == problem.smoothness(problem.start)


def newton(problem, steps=50, ridge=0.0):
    """The minimiser of f + ridge |coefficients|^2, by Newton's method with halved steps."""
    x, penalised = 30 * problem.start, torch.zeros(problem.dim, dtype=torch.float64)
    penalised[problem.coefficients] = 2 * ridge

    def psi(x):
        return float(problem.loss(x)) + 0.5 * float((penalised * x.square()).sum())

    for _ in range(steps):
        gradient = problem.gradient(x) + penalised * x
        step = torch.linalg.solve(problem.hessian(x) + torch.diag(penalised + 1e-14), gradient)
        size = 1.0
        while not psi(x - size * step) <= psi(x) and size > 1e-6:
            size /= 2
        x = x - size * step
    assert float((problem.gradient(x) + penalised * x).norm()) < 1e-9
    return x


def test_solutions_are_scikit_learns():
    poisson = made("poisson", intercept=True, weights="samples")
    a, y = poisson.data.x.numpy(), poisson.data.y.numpy()
    reference = linear_model.PoissonRegressor(alpha=0.02, tol=1e-12, max_iter=10_000, solver="newton-cholesky").fit(
        a, y
    )
    x = newton(poisson, ridge=0.01)
    np.testing.assert_allclose(x, [*reference.coef_, reference.intercept_], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(poisson.mean(x, poisson.data.x), reference.predict(a), rtol=1e-7)

    huber = made("scaled-huber", intercept=True, weights="samples")
    a, y = huber.data.x.numpy(), huber.data.y.numpy()
    reference = linear_model.HuberRegressor(epsilon=1.5, alpha=0.3, tol=1e-9, max_iter=10_000).fit(a, y)
    x = newton(huber, ridge=0.3 / len(a))
    np.testing.assert_allclose(x, [*reference.coef_, reference.intercept_, reference.scale_], rtol=1e-6, atol=1e-6)
    for predicted in (huber.predict, huber.mean):  # without the scale
        np.testing.assert_allclose(
            predicted(x, huber.data.x), reference.predict(a), atol=1e-5
        )  # as near as L-BFGS comes

    binary = made("logistic", intercept=True, weights="samples")
    a, y = binary.data.x.numpy(), binary.data.y.numpy()
    reference = linear_model.LogisticRegression(C=1 / (0.04 * len(a)), tol=1e-12, max_iter=10_000).fit(a, y)
    x = newton(binary, ridge=0.02)
    np.testing.assert_allclose(x, [*reference.coef_[0], *reference.intercept_], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(binary.mean(x, binary.data.x), reference.predict_proba(a)[:, 1], rtol=1e-6)


def test_the_named_problems_are_families():
    rng = torch.Generator().manual_seed(0)
    a, y = torch.randn(20, 3, generator=rng, dtype=torch.float64), torch.randint(0, 3, (20,), generator=rng)
    x = torch.randn(9, generator=rng, dtype=torch.float64)
    assert torch.equal(Logistic([(a, y)]).gradient(x), GLM([(a, y)], "multinomial").gradient(x))
    targets = torch.randn(20, generator=rng, dtype=torch.float64)
    assert torch.equal(LeastSquares([(a, targets)]).gradient(x[:3]), GLM([(a, targets)], "gaussian").gradient(x[:3]))


@pytest.mark.parametrize(
    ("family", "targets", "options", "message"),
    [
        ("poisson", [1.0, -2.0], {}, "-2 .first in row 1.; counts must be at least 0"),
        ("logistic", [0.0, 2.0], {}, "with 2 classes use 0 to 1"),
        ("gamma", [1.0, 0.0], {}, "needs numbers above 0"),
        ("binomial", [1.0, 2.0], {}, "expected shares from 0 to 1"),
        ("poisson", [1.0, 2.0], {"offset": True}, "give 2 columns"),
        ("normal", [0.0, 2.0], {}, "unknown family 'normal'"),
        ("gaussian", [0.0, 2.0], {"weights": "rows"}, "'rows'; give \"samples\""),
        ("gaussian", [0.0, 2.0], {"sample_weights": torch.tensor([1.0])}, "must be 2 finite numbers"),
        ("gaussian", [0.0, 2.0], {"sample_weights": torch.tensor([1.0, -1.0])}, "finite numbers >= 0"),
    ],
)
def test_what_does_not_fit_is_refused(family, targets, options, message):
    with pytest.raises(ValueError, match=message):
        GLM([(torch.ones(2, 1), torch.tensor(targets))], family, **options)


def test_rows_of_no_weight_leave_their_client_without_a_say():
    a, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    data = ClientData(a, y, torch.tensor([3, 3]))
    problem = GLM(data, "gaussian", weights="samples", sample_weights=torch.tensor([1.0, 2, 1, 0, 0, 0]))
    alone = GLM([(a[:3], y[:3])], "gaussian", sample_weights=torch.tensor([1.0, 2, 1]))
    x = torch.ones(2, dtype=torch.float64)
    assert torch.allclose(problem.gradient(x), alone.gradient(x))
    assert problem.weights.tolist() == [1, 0]


@pytest.mark.parametrize("kind", FAMILY)
def test_several_points_and_clients_in_one_pass(kind):
    problem = made(kind, intercept=True, weights="samples")
    points = torch.stack([point(problem, seed) for seed in range(3)])
    if not problem.family.constants:
        assert torch.allclose(problem.gradients(points), torch.stack([problem.gradient(x) for x in points]))
        assert torch.allclose(problem.losses(points), torch.stack([problem.loss(x) for x in points]))
    assert float(problem.weights @ problem.client_losses(points[0])) == pytest.approx(float(problem.loss(points[0])))


def test_the_expected_curvature_is_the_mean_of_the_curvature():
    rng, eta = np.random.default_rng(0), torch.full((400_000,), 0.7, dtype=torch.float64)
    y = torch.from_numpy(rng.gamma(2.0, np.exp(0.7) / 2, len(eta)))
    assert float(Gamma().curvature(eta, y).mean()) == pytest.approx(1.0, rel=5e-3)
    a, m = 0.4, np.exp(0.7)
    y = torch.from_numpy(rng.negative_binomial(1 / a, 1 / (1 + a * m), len(eta)).astype(float))
    outputs = torch.stack([eta, torch.full_like(eta, a)], 1)
    family = NegativeBinomial()
    expected, observed = (part(outputs, y).mean(0) for part in (family.information, family.curvature))
    assert torch.allclose(expected, observed, rtol=1e-2, atol=6e-3)


def test_two_ordered_labels_are_logistic():
    rng = torch.Generator().manual_seed(0)
    a, y = torch.randn(20, 3, generator=rng, dtype=torch.float64), torch.arange(20) % 2
    x = torch.randn(4, generator=rng, dtype=torch.float64)
    one, other = (GLM([(a, y)], family, intercept=True) for family in ("ordinal", "logistic"))
    assert torch.allclose(one.gradient(x), other.gradient(x))
    assert torch.allclose(one.hessian(x), other.hessian(x))
