"""Stability selection: frequencies over halves, and the bound on false selections."""

import numpy as np
import pytest

from fednmap import InputError
from fednmap.estimators import FederatedLasso, FederatedLogisticRegression, FederatedPoissonRegressor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 20))
Y = X[:, :3] @ [2.0, -2.0, 1.5] + RNG.normal(size=120)
SITE = np.arange(120) % 3


def test_signals_are_selected_and_frequencies_are_those_of_the_first_to_enter():
    found = FederatedLasso().stability(X, Y, SITE, times=20, most=5, lambdas=20)
    assert set(found.selected) >= {"x0", "x1", "x2"}
    assert found.frequency.sum() <= 5 + 1e-9
    assert found.error_bound == pytest.approx(25 / (0.5 * 20))
    assert [row[0] for row in found.table().rows[:3]] == ["x0", "x1", "x2"]
    again = FederatedLasso().stability(X, Y, SITE, times=20, most=5, lambdas=20)
    assert (again.frequency == found.frequency).all()


def test_halves_have_half_of_every_site(monkeypatch):
    from fednmap.estimators import stability

    seen = []
    whole = stability.path
    monkeypatch.setattr(stability, "path", lambda e, rows, **lam: (seen.append(rows), whole(e, rows, **lam))[1])
    uneven = np.where(np.arange(120) < 21, 0, np.where(np.arange(120) < 60, 1, 2))
    FederatedLasso().stability(X, Y, uneven, times=3, lambdas=5)
    assert [rows.sites.sizes.tolist() for rows in seen] == [[10, 19, 30]] * 3
    assert len({rows.y.tobytes() for rows in seen}) == 3


def test_columns_that_are_not_penalised_are_not_judged():
    """With x0 and x1 in every model, the others are selected as if these were no columns of the table."""
    options = {"times": 10, "threshold": 0.6, "lambdas": 20}
    found = FederatedLasso(penalty_factor={"x0": 0, "x1": 0}).stability(X, Y, SITE, **options)
    assert found.names == tuple(f"x{j}" for j in range(2, 20))
    assert found.most == 1  # sqrt(0.2 * 18)
    assert found.error_bound == pytest.approx(1 / (0.2 * 18))
    assert found.selected == ("x2",)
    whole = FederatedLasso(penalty_factor={"x0": 1, "x1": 1}).stability(X, Y, SITE, **options)
    assert whole.names[:2] == ("x0", "x1")
    with pytest.raises(InputError, match="a penalty factor above 0"):
        FederatedLasso(penalty_factor=[0.0] * 20).stability(X, Y, SITE)


@pytest.mark.slow
def test_noise_is_selected_no_more_often_than_the_bound_says():
    """20 data sets without any effect: the mean number of selected columns against the bound."""
    bound, false = 0.0, []
    for seed in range(20):
        random = np.random.default_rng(seed)
        noise, y = random.normal(size=(100, 40)), random.normal(size=100)
        found = FederatedLasso().stability(noise, y, np.arange(100) % 2, times=50, threshold=0.6, lambdas=20)
        bound = found.error_bound
        false.append(len(found.selected))
    assert bound <= 1
    assert np.mean(false) <= bound


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (FederatedPoissonRegressor("ridge"), {}, "expected a penalty that selects columns"),
        (FederatedLasso(), {"threshold": 0.5}, "threshold is 0.5"),
        (FederatedLasso(), {"most": 21}, "most is 21"),
        (FederatedLasso(), {"times": 1}, "times is 1"),
    ],
)
def test_what_cannot_be_selected_is_refused(model, given, words):
    with pytest.raises(InputError, match=words):
        model.stability(X, np.abs(Y), SITE, **given)


def test_a_logistic_model_is_selected_too():
    found = FederatedLogisticRegression("l1").stability(X, Y > 0, SITE, times=4, lambdas=10)
    assert found.frequency[0] > 0
