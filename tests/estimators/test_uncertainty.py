"""Standard errors: of several classes, of Huber's regression, with weights; over sites; infinite estimates."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedGLM,
    FederatedHuberRegressor,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
    FederatedPoissonRegressor,
)
from fednmap.problems.families import Huber

TIGHT = {"tol": 1e-10, "max_rounds": 3000}


def rows(n=300, p=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * [1.0, 10.0, 0.1][:p] + 5
    return X, X @ np.array([1.0, -0.1, 3.0])[:p] + rng.standard_t(3, n), np.arange(n) % 5


def with_one(X):
    return np.column_stack([X, np.ones(len(X))])


def test_multinomial_contrasts():
    """Against the information matrix of the model whose first class is the reference, by its definition."""
    X, y = load_wine(return_X_y=True)
    X = X[:, [1, 2]]
    fitted = FederatedLogisticRegression("none", **TIGHT).fit(X, y, np.arange(len(y)) % 3)
    found = fitted.inference(X, y, np.arange(len(y)) % 3)
    A = with_one(X)
    share = softmax(X @ fitted.coef_.T + fitted.intercept_, axis=1)
    information = np.zeros((6, 6))
    for j, k in np.ndindex(2, 2):
        curve = share[:, j + 1] * ((j == k) - share[:, k + 1])
        information[3 * j : 3 * j + 3, 3 * k : 3 * k + 3] = A.T @ (curve[:, None] * A)
    expected = np.sqrt(np.diag(np.linalg.inv(information))).reshape(2, 3)
    order = np.array([[0, 1, 6], [2, 3, 7], [4, 5, 8]])  # two columns and the intercept of each class
    for j in (0, 1):
        contrast = np.zeros((3, 9))
        contrast[range(3), order[j + 1]], contrast[range(3), order[0]] = 1, -1
        assert np.sqrt(np.diag(contrast @ found.covariance @ contrast.T)) == pytest.approx(expected[j], rel=1e-5)
    assert found.names[:2] == ("x0 [0]", "x1 [0]")
    assert found.names[-1] == "(intercept) [2]"
    assert found.estimate.reshape(-1)[:6].reshape(3, 2).sum(0) == pytest.approx(0, abs=1e-8)
    assert (found.p_value < 1).all()


def test_huber_is_the_sandwich_of_its_definition():
    X, y, sites = rows()
    fitted = FederatedHuberRegressor(penalty="none", **TIGHT).fit(X, y, sites)
    found = fitted.inference(X, y, sites)
    A, s, epsilon = with_one(X), fitted.scale_, 1.35
    r = y - A @ np.append(fitted.coef_, fitted.intercept_)
    inside = np.abs(r) <= epsilon * s
    u = np.clip(r / s, -epsilon, epsilon)
    scores = np.column_stack([-2 * u[:, None] * A, 1 - u**2])
    parts = np.column_stack([A, r / s])
    H = 2 / s * parts.T @ (inside[:, None] * parts)
    covariance = np.linalg.inv(H) @ scores.T @ scores @ np.linalg.inv(H)
    assert found.error == pytest.approx(np.sqrt(np.diag(covariance))[:4], rel=1e-4)
    textbook = s * np.sqrt(np.mean(u**2)) / np.mean(inside) * np.sqrt(np.diag(np.linalg.inv(A.T @ A)))
    assert found.error == pytest.approx(textbook, rel=0.15)


@pytest.mark.parametrize("family", ["gaussian", "logistic", "poisson"])
def test_whole_weights_are_copies_and_others_have_no_unit(family):
    X, y, sites = rows()
    y = {"gaussian": y, "logistic": (y > np.median(y)) * 1, "poisson": np.rint(np.abs(y))}[family]
    weight = np.random.default_rng(1).integers(1, 4, len(y))
    make = FederatedGLM(family, "none", **TIGHT)
    twice = np.repeat(np.arange(len(y)), weight)
    copied = make.fit(X[twice], y[twice], sites[twice])
    error = copied.inference(X[twice], y[twice], sites[twice]).error
    weighted = FederatedGLM(family, "none", **TIGHT).fit(X, y, sites, weight)
    assert weighted.coef_ == pytest.approx(copied.coef_, abs=1e-6)
    assert weighted.inference(X, y, sites, weight).error == pytest.approx(error, rel=1e-5)
    odd = weight + 0.25
    one, other = (make.fit(X, y, sites, c * odd).inference(X, y, sites, c * odd) for c in (1.0, 7.7))
    assert other.error == pytest.approx(one.error, rel=1e-6)
    assert other.estimate == pytest.approx(one.estimate, rel=1e-6)


@pytest.mark.parametrize("site_effects", ["none", "intercepts"])
def test_whole_weights_are_copies_in_a_sandwich_too(site_effects):
    X, y, sites = rows()
    weight = np.random.default_rng(1).integers(1, 4, len(y))
    twice = np.repeat(np.arange(len(y)), weight)
    kinds = [FederatedGLM("poisson", "none", site_effects=site_effects, **TIGHT)]
    kinds += [FederatedHuberRegressor(penalty="none", **TIGHT)] if site_effects == "none" else []
    y = np.rint(np.abs(y))
    for make in kinds:
        one = make.fit(X, y, sites, weight).inference(X, y, sites, weight, cov_type="HC0")
        other = make.fit(X[twice], y[twice], sites[twice]).inference(X[twice], y[twice], sites[twice], cov_type="HC0")
        assert one.error == pytest.approx(other.error, rel=1e-4)


def test_a_loss_that_is_no_likelihood_has_the_sandwich():
    X, y, sites = rows()
    fitted = FederatedGLM(Huber(1e6), "none", **TIGHT).fit(X, y, sites)  # least squares
    white = FederatedLinearRegression(**TIGHT).fit(X, y, sites).inference(X, y, sites, cov_type="HC0")
    found = fitted.inference(X, y, sites)
    assert found.cov_type == "HC0"
    assert found.error == pytest.approx(white.error, rel=1e-6)
    assert np.isnan(found.log_likelihood)


def test_relative_weights_give_whites_errors():
    X, y, sites = rows()
    weight = np.random.default_rng(1).random(len(y)) + 0.1
    fitted = FederatedLinearRegression(**TIGHT).fit(X, y, sites, weight)
    A = with_one(X)
    r = y - A @ np.append(fitted.coef_, fitted.intercept_)
    bread = np.linalg.inv(A.T @ (weight[:, None] * A))
    meat = (weight * r)[:, None] * A
    expected = np.sqrt(np.diag(bread @ meat.T @ meat @ bread))
    assert fitted.inference(X, y, sites, weight).error == pytest.approx(expected, rel=1e-5)
    by_site = FederatedLinearRegression(weights="sites", **TIGHT).fit(X, y, sites < 1)
    assert np.isfinite(by_site.inference(X, y, sites < 1).error).all()


def test_path_and_inference_leave_a_fitted_estimator_alone():
    X, y, sites = rows()
    words = np.where(y > np.median(y), "yes", "no")
    fitted = FederatedLogisticRegression("none").fit(X, words, sites)
    before = dict(vars(fitted))
    other = FederatedLogisticRegression("l1").fit(X, words, sites)
    kept = dict(vars(other))
    other.path(X[:, :2], y > np.median(y), sites, lambdas=3)
    with pytest.raises(InputError, match="other classes"):
        fitted.inference(X, y > np.median(y), sites)
    with pytest.raises(InputError, match="other columns"):
        fitted.inference(X[:, :2], words, sites)
    fitted.inference(X, words, sites)
    other.bootstrap(X, y > np.median(y), sites, times=2)
    assert vars(fitted) == before
    assert vars(other) == kept
    assert set(other.predict(X)) == {"yes", "no"}


@pytest.mark.filterwarnings("ignore:lam_ = .* of the grid")
def test_criteria_know_weights():
    X, y, sites = rows()
    weight = np.random.default_rng(1).integers(1, 4, len(y))
    twice = np.repeat(np.arange(len(y)), weight)
    lambdas = [1.0, 0.1, 0.01]
    make = FederatedLassoCV(select="bic", lambdas=lambdas, **TIGHT)
    copied = make.fit(X[twice], y[twice], sites[twice]).criterion_
    assert make.fit(X, y, sites, weight).criterion_ == pytest.approx(copied)
    one = make.fit(X, y, sites, weight + 0.5).criterion_
    assert make.fit(X, y, sites, 9.3 * (weight + 0.5)).criterion_ == pytest.approx(one)


def test_bootstrap_over_sites():
    X, y, _ = rows(60)
    same = np.tile(X, (4, 1)), np.tile(y, 4), np.repeat(np.arange(4), 60)
    flat = FederatedLasso(0.01, **TIGHT).bootstrap(*same, times=5)
    assert flat.error == pytest.approx(0, abs=1e-7)  # sites that do not differ
    X, y, sites = rows(400)
    found = FederatedLinearRegression().bootstrap(X, y, np.arange(400) % 40, times=100)
    wald = FederatedLinearRegression().fit(X, y).inference(X, y)
    assert found.names == wald.names
    assert found.estimate == pytest.approx(wald.estimate, rel=1e-4)
    assert found.error == pytest.approx(wald.error, rel=0.5)  # rows that were dealt out at random
    assert found.draws.shape == (100, 4)
    again = FederatedLinearRegression().bootstrap(X, y, np.arange(400) % 40, times=100)
    assert np.array_equal(again.draws, found.draws)
    own = FederatedLinearRegression(site_effects="intercepts").bootstrap(X, y, sites, times=3)
    assert len(own.names) == len(own.estimate) == X.shape[1]
    with pytest.raises(InputError, match="needs at least 3"):
        FederatedLasso().bootstrap(X, y, sites < 2)
    with pytest.raises(InputError, match="times is 1"):
        FederatedLasso().bootstrap(X, y, sites, times=1)


def test_a_draw_of_sites_without_a_class_is_left_out():
    """One site alone has class 2: a model of the others would put its intercept as low as it can."""
    X, y, _ = rows(120)
    X = (X - X.mean(0)) / X.std(0)
    sites, labels = np.repeat(np.arange(6), 20), (y > np.median(y)).astype(int)
    labels[:20:3] = 2
    found = FederatedLogisticRegression("ridge", 0.1).bootstrap(X, labels, sites, times=40)
    assert 0 < found.failed < 40  # about (5/6)^6 of them
    assert len(found.draws) == 40 - found.failed
    assert np.abs(found.draws[:, -3:]).max() < 5


def test_a_bootstrap_is_at_the_lam_that_was_chosen():
    X, y, sites = rows(120)
    fitted = FederatedLassoCV(select="1se").fit(X, y, sites)
    found = fitted.bootstrap(X, y, sites, times=3)
    assert found.estimate == pytest.approx([*fitted.coef_, fitted.intercept_], abs=1e-4)
    other = FederatedLasso(fitted.lam_).bootstrap(X, y, sites, times=3)
    assert np.array_equal(found.draws, other.draws)
    with pytest.raises(NotFittedError):
        FederatedLassoCV().bootstrap(X, y, sites, times=3)


FITTED = {
    "gaussian": FederatedLinearRegression,
    "logistic": FederatedLogisticRegression,
    "poisson": FederatedPoissonRegressor,
    "cox": FederatedCoxRegression,
}


def outcomes(family, n=300, seed=0):
    """Rows with a column of a rare level, the last, and targets that depend on the others."""
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.normal(size=(n, 3)), np.arange(n) < 8])
    eta = 0.8 * X[:, 0] - 0.5 * X[:, 1]
    time = rng.exponential(np.exp(-eta))
    y = {
        "gaussian": eta + rng.normal(size=n),
        "logistic": (eta + rng.logistic(size=n) > 0).astype(int),
        "multinomial": (eta[:, None] * [0, 1, -1] + rng.gumbel(size=(n, 3))).argmax(1),
        "poisson": rng.poisson(np.exp(eta)),
        "cox": np.column_stack([time, rng.random(n) < 0.7]),
    }[family]
    return X, y, np.arange(n) % 4


def unpenalised(family, **options):
    made = FITTED["logistic" if family == "multinomial" else family]
    return made(**options) if family == "gaussian" else made("none", **options)


@pytest.mark.parametrize("family", FITTED)
def test_units_do_not_matter(family):
    X, y, sites = outcomes(family)
    X = X[:, :3]
    units = np.array([1e4, 1.0, 1e-5])
    plain = unpenalised(family).fit(X, y, sites).inference(X, y, sites)
    scaled = unpenalised(family).fit(X, y, sites)
    scaled.coef_, scaled.standardize = scaled.coef_ / units, False  # the model of columns in other units
    found = scaled.inference(X * units, y, sites)
    assert found.error[:3] * units == pytest.approx(plain.error[:3], rel=1e-6)
    assert found.estimate[:3] * units == pytest.approx(plain.estimate[:3], rel=1e-6)
    assert found.error[3:] == pytest.approx(plain.error[3:], rel=1e-6)


@pytest.mark.parametrize("family", [*FITTED, "multinomial"])
def test_an_aliased_column_alone_has_no_standard_error(family):
    X, y, sites = outcomes(family)
    X = X[:, :3]
    more = np.column_stack([X[:, :2], np.full(len(X), 7.0), X[:, 0] - 2 * X[:, 1] + 3, X[:, 2]])
    kept = [0, 1, 4]
    fitted = unpenalised(family).fit(more, y, sites)
    with pytest.warns(UserWarning, match="independent columns, got 'x2', 'x3' determined") as record:
        found = fitted.inference(more, y, sites)
    assert len(record) == 1
    expected = unpenalised(family).fit(more[:, kept], y, sites).inference(more[:, kept], y, sites)
    place = [expected.names.index(name.replace("x4", "x2")) for name in found.names if name[:2] not in ("x2", "x3")]
    known = np.array([name[:2] not in ("x2", "x3") for name in found.names])
    for values, theirs in zip(
        (found.estimate, found.error, found.low, found.high, found.p_value),
        (expected.estimate, expected.error, expected.low, expected.high, expected.p_value),
        strict=True,
    ):
        assert np.isnan(values[~known]).all()
        assert values[known] == pytest.approx(theirs[place], rel=1e-6, abs=1e-9)
    assert np.isfinite(found.covariance[np.ix_(known, known)]).all()


@pytest.mark.parametrize("family", ["logistic", "multinomial", "poisson", "cox"])
@pytest.mark.parametrize("penalty", ["l1", "ridge", "mcp"])
def test_after_a_penalised_fit_the_estimates_are_maximum_likelihood(family, penalty):
    X, y, sites = outcomes(family)
    X = X[:, :3]
    shrunk = FITTED["logistic" if family == "multinomial" else family](penalty, 0.1).fit(X, y, sites)
    found = shrunk.inference(X, y, sites)
    expected = unpenalised(family, **TIGHT).fit(X, y, sites).inference(X, y, sites)
    assert np.abs(found.estimate[: shrunk.coef_.size] - shrunk.coef_.flatten()).max() > 0.01
    assert found.estimate == pytest.approx(expected.estimate, abs=1e-6)
    assert found.error == pytest.approx(expected.error, rel=1e-6)


@pytest.mark.parametrize("family", ["logistic", "multinomial", "poisson", "cox"])
@pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-9])
def test_a_level_without_events_has_an_infinite_estimate(family, tol):
    """The other estimates and errors are those of the rows without the level, which then say nothing of them."""
    X, y, sites = outcomes(family)
    level = X[:, 3] == 1
    if family == "cox":
        y[level, 1] = 0
    else:
        y[level] = 2 if family == "multinomial" else 0
    with pytest.warns(ConvergenceWarning, match="infinite ones for 'x3': the likelihood has no maximum") as record:
        fitted = unpenalised(family, tol=tol).fit(X, y, sites)
    assert len(record) == 1
    assert not fitted.converged_
    with pytest.warns(ConvergenceWarning, match="infinite ones for 'x3': the likelihood has no maximum"):
        found = fitted.inference(X, y, sites)
    infinite = np.array([name[:2] == "x3" for name in found.names])
    assert np.isinf(found.estimate[infinite]).all()
    assert np.isnan(found.error[infinite]).all()
    assert np.isnan(found.p_value[infinite]).all()
    if family != "cox":  # whose rows without events stay at risk until they are censored
        few = X[~level, :3], y[~level], sites[~level]
        expected = unpenalised(family, **TIGHT).fit(*few).inference(*few)
        assert found.estimate[~infinite] == pytest.approx(expected.estimate, abs=1e-5)
        assert found.error[~infinite] == pytest.approx(expected.error, rel=1e-5)
    y[0] = [y[0, 0], 1] if family == "cox" else 1
    X[8:10, 3] = 1  # and now one of each kind at least
    assert unpenalised(family, tol=tol).fit(X, y, sites).converged_


def test_separated_classes_and_monotone_hazards():
    X, y, sites = outcomes("logistic")
    X = X[:, :3]
    apart = (X[:, 0] + 0.5 * X[:, 1] > 0).astype(int)
    with pytest.warns(ConvergenceWarning, match="infinite ones for 'x0', 'x1'"):
        fitted = FederatedLogisticRegression("none").fit(X, apart, sites)
    with pytest.warns(ConvergenceWarning, match="infinite ones"):
        assert np.isnan(fitted.inference(X, apart, sites).error).all()
    with pytest.warns(ConvergenceWarning, match="infinite ones"):
        FederatedLogisticRegression("l1", 0.0).fit(X, apart, sites)  # a penalty that holds nothing
    for penalty, lam in (("l1", 1e-3), ("ridge", 1e-3), ("elastic-net", 1e-2)):
        assert FederatedLogisticRegression(penalty, lam).fit(X, apart, sites).converged_
    X, y, sites = outcomes("cox")
    X = np.column_stack([X[:, :3], -1e-3 * y[:, 0]])
    with pytest.warns(ConvergenceWarning, match="infinite ones for 'x3'"):
        fitted = FederatedCoxRegression().fit(X, y, sites)
    with pytest.warns(ConvergenceWarning, match="infinite ones for 'x3'"):
        found = fitted.inference(X, y, sites)
    assert np.isinf(found.estimate[3])
    assert np.isfinite(found.error[:3]).all()


def in_r(script, tmp_path, **tables):
    """What an R script prints as JSON, with these tables as data frames."""
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    lines = []
    for name, table in tables.items():
        np.savetxt(tmp_path / f"{name}.csv", table, delimiter=",", fmt="%.17g")
        lines.append(f'{name} <- as.matrix(read.csv("{tmp_path / name}.csv", header = FALSE))')
    told = 'cat("[", paste(ifelse(is.na(found), "null", sprintf("%.17g", found)), collapse = ","), "]")'
    done = subprocess.run(
        ["Rscript", "-e", "\n".join([*lines, script, told])], capture_output=True, text=True, timeout=120
    )
    if "there is no package" in done.stderr:
        pytest.skip("an R package is not installed")
    assert done.returncode == 0, done.stderr
    return np.array([np.nan if v is None else v for v in json.loads(done.stdout)])


R = {
    "gaussian": "fitted <- function(Z) lm(y ~ Z)",
    "logistic": "fitted <- function(Z, ...) glm(y ~ Z, family = binomial, ...)",
    "poisson": "fitted <- function(Z, ...) glm(y ~ Z, family = poisson, ...)",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FITTED, "multinomial"])
def test_standard_errors_are_rs(family, tmp_path):
    """lm, glm, coxph with strata, nnet; with an aliased column, and columns in very different units."""
    X, y, sites = outcomes(family)
    X = X[:, :3] * [1e5, 1.0, 1e-4] + [0.0, 50.0, 0.0]
    if family != "multinomial":
        X = np.column_stack([X[:, :2], X[:, 0] + 2 * X[:, 1], X[:, 2]])
    fitted = unpenalised(family).fit(X, y, sites)
    if family == "multinomial":
        found = fitted.inference(X, y, sites)
        script = """Z <- scale(X); library(nnet)
        H <- solve(vcov(multinom(y ~ Z, trace = FALSE, reltol = 1e-16, abstol = 1e-16, maxit = 5000)))
        found <- sqrt(diag(solve(H)))"""
        theirs = in_r(script, tmp_path, X=X, y=y).reshape(2, 4)[:, 1:] / X.std(0, ddof=1)
        for k in (1, 2):
            contrast = np.zeros((3, len(found.names)))
            contrast[range(3), 3 * k + np.arange(3)], contrast[range(3), range(3)] = 1, -1
            error = np.sqrt(np.diag(contrast @ found.covariance @ contrast.T))
            assert error == pytest.approx(theirs[k - 1], rel=1e-5)  # nnet stops early
        return
    with pytest.warns(UserWarning, match="got 'x2' determined"):
        found = fitted.inference(X, y, sites)
    if family == "cox":
        script = """library(survival); control <- coxph.control(eps = 1e-14, iter.max = 50)
        m <- coxph(Surv(y[, 1], y[, 2]) ~ X + strata(sites), control = control)
        found <- c(coef(m), ifelse(is.na(coef(m)), NA, sqrt(diag(vcov(m, complete = TRUE)))))"""
        theirs = in_r(script, tmp_path, X=X, y=y, sites=sites).reshape(2, -1)
    else:
        tight = "" if family == "gaussian" else ", epsilon = 1e-14"  # of which R makes the tolerance for aliases too
        script = f"""y <- y[, 1]; {R[family]}; known <- !is.na(coef(fitted(X))[-1])
        s <- coef(summary(fitted(X[, known]{tight}))); b <- matrix(NA, ncol(X), 2)
        b[known, ] <- s[-1, 1:2]; found <- c(b[, 1], s[1, 1], b[, 2], s[1, 2])"""
        theirs = in_r(script, tmp_path, X=X, y=y).reshape(2, -1)
    assert found.error == pytest.approx(theirs[1], rel=1e-6, nan_ok=True)
    assert found.estimate == pytest.approx(theirs[0], rel=1e-6, abs=1e-9, nan_ok=True)
    assert np.isnan(found.error).sum() == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["1se", "0.3 lambda_max"])
def test_intervals_cover(how):
    """Logistic, 300 rows, 20 columns of which 3 count: 95 % intervals of these, less three standard deviations."""
    rng, inside = np.random.default_rng(5), []
    truth = np.array([1.0, -0.8, 0.6, *[0.0] * 17])
    for _ in range(40):
        X = rng.normal(size=(300, 20))
        y = (X @ truth + rng.logistic(size=300) > 0).astype(int)
        first = np.abs((y - y.mean()) @ ((X - X.mean(0)) / X.std(0))).max() / 300
        make = FederatedLogisticRegression("l1", 0.3 * first)
        if how == "1se":
            make = FederatedLogisticRegressionCV("l1", select=how, lambdas=10, cv=3)
        found = make.fit(X, y).inference(X, y)
        inside.append(((found.low[:-1] <= truth) & (truth <= found.high[:-1]))[:3])
    assert np.mean(inside) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / np.size(inside))
