"""Cox regression: weights, sparse rows, large columns; parity with lifelines."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.model_selection import StratifiedKFold

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedGLM,
    FederatedLasso,
    FederatedLogisticRegression,
)
from fednmap.problems import Cox

TIGHT = {"tol": 1e-10, "max_rounds": 3000}


def patients(rows=240, seed=0, ties=True):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 4))
    X[:, 3] = rng.random(rows) < 0.3
    time = rng.exponential(np.exp(-X @ [0.6, -0.4, 0.0, 0.8]))
    time = np.ceil(8 * time) if ties else time
    return X, np.column_stack([time, rng.random(rows) < 0.7]), np.array(["a", "b", "c", "d"])[np.arange(rows) % 4]


def frame(X, y, sites, weight=None):
    table = pd.DataFrame(X, columns=list("uvwz")).assign(time=y[:, 0], event=y[:, 1], site=sites)
    return table if weight is None else table.assign(weight=weight)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_lifelines_stratified_efron(ties, weighted):
    lifelines = pytest.importorskip("lifelines")
    X, y, sites = patients(ties=ties)
    weight = np.random.default_rng(1).integers(1, 4, len(X)) if weighted else None
    theirs = lifelines.CoxPHFitter().fit(
        frame(X, y, sites, weight),
        "time",
        "event",
        strata=["site"],
        weights_col="weight" if weighted else None,
        fit_options={"precision": 1e-12},
    )
    mine = FederatedCoxRegression(**TIGHT).fit(X, y, sites, weight)
    assert mine.coef_ == pytest.approx(theirs.params_.to_numpy(), abs=1e-6)
    found = mine.inference(X, y, sites, weight)
    assert found.error == pytest.approx(theirs.standard_errors_.to_numpy(), rel=1e-5)
    ratio = mine.predict_hazard(X) / theirs.predict_partial_hazard(frame(X, y, sites)).to_numpy()
    assert ratio == pytest.approx(np.full(len(X), ratio[0]))


def test_lifelines_penalised():
    lifelines = pytest.importorskip("lifelines")
    X, y, sites = patients()
    X = (X - X.mean(0)) / X.std(0, ddof=1)  # as lifelines does before it penalises
    theirs = lifelines.CoxPHFitter(penalizer=0.1).fit(
        frame(X, y, sites), "time", "event", strata=["site"], fit_options={"precision": 1e-12}
    )
    mine = FederatedCoxRegression("ridge", 0.1, standardize=False, **TIGHT).fit(X, y, sites)
    assert mine.coef_ == pytest.approx(theirs.params_.to_numpy(), abs=1e-6)


def test_breslow_is_efron_without_ties_and_lifelines_survival():
    lifelines = pytest.importorskip("lifelines")
    X, y, sites = patients(ties=False)
    efron, breslow = (FederatedCoxRegression(ties=ties, **TIGHT).fit(X, y, sites) for ties in ("efron", "breslow"))
    assert breslow.coef_ == pytest.approx(efron.coef_, abs=1e-7)
    one = sites == "a"
    theirs = lifelines.CoxPHFitter().fit(frame(X, y, sites)[one].drop(columns="site"), "time", "event")
    mine = FederatedCoxRegression(**TIGHT).fit(X[one], y[one])
    times = np.sort(y[one & (y[:, 1] == 1), 0])[:20]  # between events lifelines interpolates
    expected = theirs.predict_survival_function(frame(X, y, sites)[one].head(3), times).to_numpy().T
    assert mine.predict_survival(X[one][:3], times) == pytest.approx(expected, abs=1e-5)


def test_breslow_by_the_likelihood_itself():
    """Brute force: the definition, with loops."""
    X, y, sites = patients(60)
    b = np.array([0.3, -0.2, 0.1, 0.5])
    total = 0.0
    for site in np.unique(sites):
        rows = np.flatnonzero(sites == site)
        for i in rows[y[rows, 1] == 1]:
            risk = rows[y[rows, 0] >= y[i, 0]]
            total += np.log(np.exp(X[risk] @ b).sum()) - X[i] @ b
    data = [(torch.tensor(X[sites == s]), torch.tensor(y[sites == s])) for s in np.unique(sites)]
    assert float(Cox(data, ties="breslow").loss(torch.tensor(b))) == pytest.approx(total / len(X))


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_weights(ties):
    """A weight of 2 is a row twice where ties are Breslow's; units of weights do not matter; gradients are slopes."""
    X, y, sites = patients()
    weight = np.random.default_rng(2).integers(1, 4, len(X)).astype(float)
    weighted = FederatedCoxRegression(ties=ties, **TIGHT).fit(X, y, sites, weight)
    again = FederatedCoxRegression(ties=ties, **TIGHT).fit(X, y, sites, 10 * weight)
    assert again.coef_ == pytest.approx(weighted.coef_, abs=1e-8)
    if ties == "breslow":
        twice = np.repeat(np.arange(len(X)), weight.astype(int))
        copied = FederatedCoxRegression(ties=ties, **TIGHT).fit(X[twice], y[twice], sites[twice])
        assert weighted.coef_ == pytest.approx(copied.coef_, abs=1e-7)
        assert weighted.objective_ == pytest.approx(copied.objective_)
        for site in "abcd":
            for mine, theirs in zip(weighted.baseline_[site], copied.baseline_[site], strict=True):
                assert mine == pytest.approx(theirs)
        errors = [
            e.inference(*given).error
            for e, given in ((weighted, (X, y, sites, weight)), (copied, (X[twice], y[twice], sites[twice])))
        ]
        assert errors[0] == pytest.approx(errors[1], rel=1e-5)
    zero = np.where(np.arange(len(X)) % 5 == 0, 0, weight)
    without = FederatedCoxRegression(ties=ties, **TIGHT).fit(X[zero > 0], y[zero > 0], sites[zero > 0], zero[zero > 0])
    assert FederatedCoxRegression(ties=ties, **TIGHT).fit(X, y, sites, zero).coef_ == pytest.approx(without.coef_)


def test_sparse_rows_are_dense_ones():
    X, y, sites = patients()
    X = X * (np.random.default_rng(3).random(X.shape) < 0.4)
    dense = FederatedCoxRegression("l1", 0.01, **TIGHT).fit(X, y, sites)
    thin = FederatedCoxRegression("l1", 0.01, **TIGHT).fit(sparse.csr_array(X), y, sites)
    assert thin.coef_ == pytest.approx(dense.coef_, abs=1e-7)
    assert thin.score(sparse.csr_array(X), y, sites) == pytest.approx(dense.score(X, y, sites))
    assert thin.predict_survival(sparse.csr_array(X), [1.0], site="a") == pytest.approx(
        dense.predict_survival(X, [1.0], site="a"), abs=1e-6
    )


def test_columns_like_years_do_not_overflow():
    X, y, sites = patients()
    moved = X + np.array([2000.0, 0, 1e5, 0])
    mine = FederatedCoxRegression(**TIGHT).fit(5 * X, y, sites)
    other = FederatedCoxRegression(**TIGHT).fit(5 * moved, y, sites)
    with np.errstate(all="raise"):
        assert other.predict_hazard(5 * moved) == pytest.approx(mine.predict_hazard(5 * X), rel=1e-4)
        curves = other.predict_survival(5 * moved, [1.0, 3.0], site="b")
    assert curves == pytest.approx(mine.predict_survival(5 * X, [1.0, 3.0], site="b"), abs=1e-4)
    assert (curves > 0).any()
    assert (curves < 1).all()


def test_the_loss_of_a_site_left_out_is_its_own_also_where_rows_weigh_more_there():
    rng = np.random.default_rng(0)
    X, where = rng.normal(size=(90, 3)), np.repeat([0, 1, 2], 30)
    y = np.column_stack([rng.exponential(np.exp(-X[:, 0])), rng.random(90) < 0.8]).astype(float)
    weight = np.where(where == 0, 5.0, 1.0)
    chosen = FederatedCoxRegressionCV(cv="leave-one-site-out", lambdas=[0.1], tol=1e-9).fit(X, y, where, weight)
    out = where == 0
    model = FederatedCoxRegression("l1", 0.1, tol=1e-9).fit(X[~out], y[~out], where[~out], weight[~out])
    alone = Cox([(torch.tensor(X[out]), torch.tensor(y[out]))], sample_weights=torch.tensor(weight[out]))
    assert chosen.cv_losses_[0, 0] == pytest.approx(float(alone.loss(torch.tensor(model.coef_))))


@pytest.mark.parametrize("names", [("cens", "time"), ("t", "a")])
def test_a_structured_array_is_time_and_event_whatever_its_fields_are_called(names):
    X, y, sites = patients()
    event, time = names
    structured = np.zeros(len(y), [(event, bool), (time, np.float32)])
    structured[event], structured[time] = y[:, 1], y[:, 0]
    columns = np.column_stack([structured[time], y[:, 1]])
    theirs = FederatedCoxRegression().fit(X, structured, sites)
    assert np.array_equal(theirs.coef_, FederatedCoxRegression().fit(X, columns, sites).coef_)
    assert theirs.score(X, structured, sites) == theirs.score(X, columns, sites)
    chosen = FederatedCoxRegressionCV(lambdas=3, cv=StratifiedKFold(3)).fit(X, structured, sites)
    assert chosen.cv_losses_.shape == (3, 3)


def test_other_structured_arrays_are_refused():
    X, y, sites = patients()
    two = np.zeros(len(y), [("a", float), ("b", float)])
    with pytest.raises(InputError, match=r"expected y with two fields.*got a \(float64\), b \(float64\); give"):
        FederatedCoxRegression().fit(X, two, sites)
    for estimator in (FederatedLasso(), FederatedLogisticRegression(), FederatedGLM("logistic")):
        with pytest.raises(InputError, match=r"expected one target per row, got .* fields a, b; give one"):
            estimator.fit(X, two, sites)
