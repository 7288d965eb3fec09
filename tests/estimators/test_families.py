"""Gamma, negative binomial, binomial and ordinal models, offsets: against scipy, scikit-learn and R."""

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit, gammaln
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import GammaRegressor
from sklearn.metrics import d2_tweedie_score

from fednmap import InputError
from fednmap.estimators import (
    FederatedBinomialRegressor,
    FederatedBinomialRegressorCV,
    FederatedCoxRegression,
    FederatedGammaRegressor,
    FederatedGammaRegressorCV,
    FederatedGLM,
    FederatedLinearRegression,
    FederatedLogisticRegression,
    FederatedNegativeBinomialRegressor,
    FederatedNegativeBinomialRegressorCV,
    FederatedOrdinalRegression,
    FederatedOrdinalRegressionCV,
    FederatedPoissonRegressor,
)

TIGHT = {"tol": 1e-10, "max_rounds": 3000}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(240, 3)) * [1.0, 10.0, 0.1] + 3
    score = (X - 3) @ [0.4, -0.05, 3.0]
    y = {
        "gamma": rng.gamma(2.0, np.exp(score) / 2),
        "negative-binomial": rng.negative_binomial(1.5, 1 / (1 + np.exp(score + 1) / 1.5)),
        "ordinal": np.digitize(score + rng.logistic(size=240), [-1.0, 0.3, 1.0]),
        "trials": rng.integers(0, 6, 240),
    }
    y["successes"] = rng.binomial(y["trials"], expit(score))
    return X, y, rng.permutation(240) % 4


def with_one(X):
    return np.column_stack([X, np.ones(len(X))])


def minimiser(f, start):
    """By BFGS on columns of like size, and Newton steps with differences of f's gradient as the Hessian."""
    return minimize(f, start, method="BFGS", options={"gtol": 1e-9, "maxiter": 5000}).x


def test_gamma_is_scikit_learns(rows):
    X, y, site = rows
    fitted = FederatedGammaRegressor("ridge", 0.3, standardize=False, **TIGHT).fit(X, y["gamma"], site)
    reference = GammaRegressor(alpha=0.3, tol=1e-12, max_iter=5000, solver="newton-cholesky").fit(X, y["gamma"])
    np.testing.assert_allclose(fitted.coef_, reference.coef_, rtol=1e-6, atol=1e-8)
    assert fitted.score(X, y["gamma"]) == pytest.approx(d2_tweedie_score(y["gamma"], reference.predict(X), power=2))


def test_gamma_errors_are_those_of_expected_information(rows):
    X, y, site = rows
    fitted = FederatedGammaRegressor("none", **TIGHT).fit(X, y["gamma"], site)
    found, A = fitted.inference(X, y["gamma"], site), with_one(X)
    residual = y["gamma"] / fitted.predict(X) - 1
    dispersion = residual @ residual / (len(X) - 4)
    np.testing.assert_allclose(found.error, np.sqrt(dispersion * np.diag(np.linalg.inv(A.T @ A))), rtol=1e-6)


def test_negative_binomial_is_the_maximum_of_its_likelihood(rows):
    X, y, site = rows
    y, A = y["negative-binomial"], with_one((X - X.mean(0)) / X.std(0))

    def f(x):
        m, r = np.exp(A @ x[:4]), np.exp(-x[4])
        free = gammaln(y + r) - gammaln(r) - gammaln(y + 1)
        return -np.mean(free + r * np.log(r / (r + m)) + y * np.log(m / (r + m)))

    x = minimiser(f, np.zeros(5))
    fitted = FederatedNegativeBinomialRegressor("none", **TIGHT).fit(X, y, site)
    np.testing.assert_allclose(fitted.coef_ * X.std(0), x[:3], atol=1e-5)
    assert fitted.theta_ == pytest.approx(np.exp(-x[4]), rel=1e-5)
    assert fitted.dispersion_ == pytest.approx(1 / fitted.theta_)
    assert fitted.objective_ == pytest.approx(f(x), abs=1e-12)
    m = fitted.predict(X)
    A = with_one(X)
    information = A.T @ ((m / (1 + m * fitted.dispersion_))[:, None] * A)
    found = fitted.inference(X, y, site)
    np.testing.assert_allclose(found.error, np.sqrt(np.diag(np.linalg.inv(information))), rtol=1e-5)
    assert 0 < fitted.score(X, y) < 1
    named = FederatedGLM("negative-binomial", "none", **TIGHT).fit(X, y, site)
    assert named.theta_ == fitted.theta_


def test_counts_without_overdispersion_are_said_to_be_poissons(rows):
    X, _, site = rows
    y = np.random.default_rng(1).binomial(8, 0.5, len(X))  # which vary less
    for estimator in (FederatedNegativeBinomialRegressor("none"), FederatedGLM("negative-binomial", "none")):
        with pytest.warns(ConvergenceWarning, match="do not vary more than Poisson's"):
            estimator.fit(X, y, site)
    np.testing.assert_allclose(estimator.coef_, FederatedPoissonRegressor("none").fit(X, y, site).coef_, atol=1e-2)


def test_binomial_counts_are_rows_of_trials(rows):
    X, y, site = rows
    counts = np.stack([y["successes"], y["trials"]], 1)
    failures = y["trials"] - y["successes"]
    one = np.repeat(np.arange(len(X)), y["trials"])
    label = np.concatenate([[1] * s + [0] * f for s, f in zip(y["successes"], failures, strict=True)])
    for penalty, lam in (("none", None), ("l1", 0.02)):
        fitted = FederatedBinomialRegressor(penalty, lam, **TIGHT).fit(X, counts, site)
        apart = FederatedLogisticRegression(penalty, lam, **TIGHT).fit(X[one], label, site[one])
        np.testing.assert_allclose(fitted.coef_, apart.coef_[0], atol=1e-7)
        np.testing.assert_allclose(fitted.predict(X[one]), apart.predict_proba(X[one])[:, 1], atol=1e-7)
        errors = fitted.inference(X, counts, site).error
        np.testing.assert_allclose(errors, apart.inference(X[one], label, site[one]).error, rtol=1e-6)
    some = y["trials"] > 0
    shares = (y["successes"][some] / y["trials"][some], y["trials"][some])
    given = FederatedBinomialRegressor("none", **TIGHT).fit(X[some], shares[0], site[some], shares[1])
    np.testing.assert_allclose(given.coef_, FederatedBinomialRegressor("none", **TIGHT).fit(X, counts, site).coef_)
    assert 0 < given.score(X, counts) < 1


def test_ordinal_is_the_maximum_of_its_likelihood(rows):
    X, y, site = rows
    y, A = y["ordinal"], (X - X.mean(0)) / X.std(0)

    def f(x):
        t = np.r_[-np.inf, x[3], x[3] + np.cumsum(np.exp(x[4:])), np.inf]
        score = A @ x[:3]
        return -np.mean(np.log(expit(t[y + 1] - score) - expit(t[y] - score)))

    x = minimiser(f, np.zeros(6))
    fitted = FederatedOrdinalRegression("none", **TIGHT).fit(X, y, site)
    np.testing.assert_allclose(fitted.coef_ * X.std(0), x[:3], atol=1e-5)
    thresholds = np.r_[x[3], x[3] + np.cumsum(np.exp(x[4:]))] + (x[:3] / X.std(0)) @ X.mean(0)
    np.testing.assert_allclose(fitted.thresholds_, thresholds, atol=1e-4)
    assert fitted.objective_ == pytest.approx(f(x), abs=1e-10)
    share = fitted.predict_proba(X)
    np.testing.assert_allclose(share.sum(1), 1)
    np.testing.assert_allclose(-np.log(share[np.arange(len(y)), y]).mean(), fitted.objective_)
    assert fitted.inference(X, y, site).names == ("x0", "x1", "x2", "0|1", "1|2", "2|3")


def test_two_ordered_labels_are_logistic(rows):
    X, y, site = rows
    y = y["ordinal"] > 1
    kinds = FederatedOrdinalRegression, FederatedLogisticRegression
    one, other = (kind("l1", 0.02, **TIGHT).fit(X, y, site) for kind in kinds)
    np.testing.assert_allclose(one.coef_, other.coef_[0], atol=1e-7)
    np.testing.assert_allclose(one.predict_proba(X), other.predict_proba(X), atol=1e-7)


def test_the_order_of_labels(rows):
    X, y, site = rows
    words = np.array(["none", "few", "some", "many"])[y["ordinal"]]
    plain = FederatedOrdinalRegression().fit(X, y["ordinal"], site)
    order = ["none", "few", "some", "many"]
    given = FederatedOrdinalRegression(order=order).fit(X, words, site)
    frame = pd.Series(pd.Categorical(words, ["never", *order], ordered=True))
    for other in (given, FederatedOrdinalRegression().fit(X, frame, site)):
        np.testing.assert_array_equal(other.coef_, plain.coef_)
        assert other.classes_.tolist() == order
    assert (given.predict(X) == np.array(order)[plain.predict(X)]).all()
    with pytest.raises(InputError, match="expected order to name every label once"):
        FederatedOrdinalRegression(order=order[1:]).fit(X, words, site)
    with pytest.raises(InputError, match="got none of 'all'"):
        FederatedOrdinalRegression(order=[*order, "all"]).fit(X, words, site)


@pytest.mark.parametrize(
    "family", ["poisson", "negative-binomial", "gamma", "logistic", "gaussian", "huber", "ordinal"]
)
def test_an_offset_is_a_column_with_the_coefficient_one(family, rows):
    """A column whose coefficient is estimated as d is d times an offset."""
    X, y, site = rows
    y = y | {"poisson": y["negative-binomial"], "logistic": y["ordinal"] > 1, "huber": y["gamma"]}
    y = y["gamma" if family == "gaussian" else family]
    z = np.cos(np.arange(len(X)))
    kind = FederatedOrdinalRegression if family == "ordinal" else lambda *a, **k: FederatedGLM(family, *a, **k)
    free = kind("none", **TIGHT).fit(np.column_stack([X, z]), y, site)
    d = np.ravel(free.coef_)[-1]
    fixed = kind("none", offset=-1, **TIGHT).fit(np.column_stack([X, d * z]), y, site)
    np.testing.assert_allclose(np.ravel(fixed.coef_), np.ravel(free.coef_)[:-1], atol=2e-6, rtol=1e-5)
    assert fixed.objective_ == pytest.approx(free.objective_, abs=1e-9)
    a, b = fixed.predict(np.column_stack([X, d * z])), free.predict(np.column_stack([X, z]))
    np.testing.assert_allclose(a, b, rtol=1e-4) if family != "ordinal" else np.testing.assert_array_equal(a, b)


def test_exposure_by_name_with_paths_folds_and_errors(rows):
    X, y, site = rows
    time = np.random.default_rng(2).uniform(0.5, 3, len(X))
    frame = pd.DataFrame({"a": X[:, 0], "years [at risk]": time, "b": X[:, 1], "c": X[:, 2]})
    y = y["negative-binomial"]
    fitted = FederatedPoissonRegressor("none", exposure="years [at risk]", **TIGHT).fit(frame, y, site)
    assert len(fitted.coef_) == 3
    assert fitted.inference(frame, y, site).names == ("a", "b", "c", "(intercept)")
    logs = frame.assign(**{"years [at risk]": np.log(time)})
    other = FederatedPoissonRegressor("none", offset="years [at risk]", **TIGHT).fit(logs, y, site)
    np.testing.assert_allclose(fitted.coef_, other.coef_, rtol=1e-9)
    np.testing.assert_allclose(fitted.predict(frame.assign(**{"years [at risk]": 2 * time})), 2 * fitted.predict(frame))
    weighted = FederatedPoissonRegressor("none", **TIGHT).fit(X, y / time, site, sample_weight=time)
    np.testing.assert_allclose(fitted.coef_, weighted.coef_, atol=1e-6)
    assert fitted.score(frame, y) > 0
    path = FederatedPoissonRegressor("l1", exposure=1).path(frame.to_numpy(), y, site, lambdas=5)
    assert path.nonzero[0] == 0
    assert path.nonzero[-1] == 3
    with pytest.raises(InputError, match="X has no column 'days', the offset or exposure"):
        FederatedPoissonRegressor(exposure="days").fit(frame, y, site)
    with pytest.raises(InputError, match="got both"):
        FederatedPoissonRegressor(exposure=0, offset=1).fit(frame, y, site)
    with pytest.raises(InputError, match="the exposure is -"):
        FederatedPoissonRegressor(exposure="b").fit(frame, y, site)
    with pytest.raises(InputError, match="one score for an offset, got logistic"):
        FederatedLogisticRegression(offset="a").fit(frame, np.arange(len(X)) % 3, site)


@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        (FederatedGammaRegressorCV, "gamma"),
        (FederatedNegativeBinomialRegressorCV, "negative-binomial"),
        (FederatedBinomialRegressorCV, "binomial"),
        (FederatedOrdinalRegressionCV, "ordinal"),
    ],
)
@pytest.mark.filterwarnings("ignore:lam_ =")
def test_lam_is_chosen(estimator, target, rows):
    X, y, site = rows
    y = np.stack([y["successes"], y["trials"]], 1) if target == "binomial" else y[target]
    grid = [1.0, 0.1, 0.03, 0.01]
    chosen = estimator("l1", lambdas=grid, cv=3).fit(X, y, site)
    plain = estimator.__mro__[2]("l1", chosen.lam_).fit(X, y, site)
    np.testing.assert_allclose(chosen.coef_, plain.coef_, atol=1e-4)
    assert np.isfinite(chosen.cv_mean_).all()
    by_bic = estimator("l1", lambdas=grid, select="bic").fit(X, y, site)
    assert by_bic.lam_ in grid


@pytest.mark.parametrize(
    ("estimator", "y", "message"),
    [
        (FederatedGammaRegressor(), [1.0, 0.0, 2.0, 3.0], "y is 0 in row 1 at site 'a'; a Gamma model needs numbers"),
        (FederatedNegativeBinomialRegressor(), [1, -1, 2, 3], "counts must be at least 0"),
        (
            FederatedBinomialRegressor(),
            [[1, 2], [3, 2], [0, 1], [1, 1]],
            "expected 0 <= successes <= trials, got 3 of 2",
        ),
        (FederatedBinomialRegressor(), [1, 2, 0, 1], "expected shares from 0 to 1, or the columns"),
        (FederatedBinomialRegressor(), [[1, 2, 3]] * 4, "successes and trials, got 3 columns"),
        (FederatedBinomialRegressor(), [[0, 2]] * 4, "all trials have the same outcome"),
        (FederatedOrdinalRegression(), ["a"] * 4, "y holds one class only, a"),
        (FederatedGLM("ordinal"), [0, 1, 2, 0], "use FederatedOrdinalRegression"),
        (FederatedCoxRegression(offset=0), [1.0, 2, 3, 4], "expected no offset with family cox"),
    ],
)
def test_what_does_not_fit_is_refused(estimator, y, message):
    with pytest.raises(InputError, match=message):
        estimator.fit(np.arange(8.0).reshape(4, 2), y, sites=["a", "a", "b", "b"])


def test_an_offset_may_be_the_only_column():
    y, time = np.array([1, 4, 2, 9]), np.array([[1.0], [2.0], [1.0], [4.0]])
    fitted = FederatedPoissonRegressor("none", exposure=0).fit(time, y, ["a", "a", "b", "b"])
    assert fitted.intercept_ == pytest.approx(np.log(16 / 8))
    assert FederatedLinearRegression(offset=0).fit(time, y, ["a", "a", "b", "b"]).intercept_ == pytest.approx(2.0)
    for family in ("negative-binomial", "huber"):  # which estimate a constant too
        both = [np.column_stack([time, column]) for column in (np.zeros(4), [1.0, 1.0, 2.0, 2.0])]
        alone, same, _ = (
            FederatedGLM(family, "l1", lam, offset=0, **TIGHT).fit(X, 5 * y, ["a", "a", "b", "b"])
            for X, lam in ((time, None), (both[0], None), (both[1], 1e3))
        )
        assert alone.intercept_ == pytest.approx(same.intercept_, rel=1e-6)


PARITY = {
    "gamma": (
        FederatedGammaRegressor,
        "d <- MASS::mcycle; d <- data.frame(y = -pmin(d$accel, -0.5), x1 = d$times, x2 = d$times^2 / 10, site = 1)",
        "glm(y ~ x1 + x2, Gamma(link = log), d, control = glm.control(epsilon = 1e-14, maxit = 100))",
    ),
    "negative-binomial": (
        FederatedNegativeBinomialRegressor,
        "q <- MASS::quine; d <- data.frame(y = q$Days, x1 = as.numeric(q$Eth == 'N'), x2 = as.numeric(q$Sex == 'M'), "
        "x3 = as.numeric(q$Age == 'F2'), x4 = as.numeric(q$Lrn == 'SL'), site = 1)",
        "MASS::glm.nb(y ~ x1 + x2 + x3 + x4, d, control = glm.control(epsilon = 1e-14, maxit = 200))",
    ),
    "poisson with exposure": (
        FederatedPoissonRegressor,
        "i <- MASS::Insurance; d <- data.frame(y = i$Claims, x1 = as.numeric(i$District == '4'), "
        "x2 = as.numeric(i$Group), x3 = as.numeric(i$Age), t = i$Holders, site = 1)",
        "glm(y ~ x1 + x2 + x3 + offset(log(t)), poisson, d, control = glm.control(epsilon = 1e-14))",
    ),
    "negative-binomial with exposure": (
        FederatedNegativeBinomialRegressor,
        "i <- MASS::Insurance; d <- data.frame(y = i$Claims, x1 = as.numeric(i$Group), t = i$Holders / 10, site = 1)",
        "MASS::glm.nb(y ~ x1 + offset(log(t)), d, control = glm.control(epsilon = 1e-14, maxit = 200))",
    ),
    "binomial": (
        FederatedBinomialRegressor,
        "e <- datasets::esoph; n <- e$ncases + e$ncontrols; "
        "d <- data.frame(y = e$ncases, n = n, x1 = as.numeric(e$agegp), x2 = as.numeric(e$alcgp), "
        "x3 = as.numeric(e$tobgp), site = 1)",
        "glm(cbind(y, n - y) ~ x1 + x2 + x3, binomial, d, control = glm.control(epsilon = 1e-14))",
    ),
    "ordinal": (
        FederatedOrdinalRegression,
        "h <- MASS::housing[rep(seq_len(72), MASS::housing$Freq), ]; d <- data.frame(y = as.numeric(h$Sat), "
        "x1 = as.numeric(h$Infl == 'Medium'), x2 = as.numeric(h$Infl == 'High'), x3 = as.numeric(h$Type == 'Terrace'), "
        "x4 = as.numeric(h$Cont == 'High'), site = 1)",
        "MASS::polr(factor(y) ~ x1 + x2 + x3 + x4, d, Hess = TRUE, control = list(reltol = 1e-15, maxit = 1000))",
    ),
}


TELL = """
cells <- function(n) paste0("\\"", n, "\\": [", paste(sprintf("%.17g", d[[n]]), collapse = ","), "]")
cat("{", paste(sapply(names(d), cells), collapse = ","), "}\\n")
for (k in 1:2) cat(sprintf("%.17g", coef(summary(m))[, k]), "\\n")
cat(if (is.null(m$theta)) 0 else sprintf("%.17g", m$theta), "\\n")
cat(sprintf("%.17g", logLik(m)), "\\n")"""
"""R code that prints the table, the estimates, their errors, theta, and the log likelihood."""


@pytest.mark.filterwarnings("ignore:lam_ = ")
def test_folds_of_ones_own_know_rows_without_trials(rows):
    X, y, site = rows
    trials, many = np.column_stack([y["successes"], y["trials"]]), np.flatnonzero(y["trials"] > 0)
    assert len(many) < len(X)
    fold = np.arange(len(X)) % 3
    pairs = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(3)]
    alone = [(np.flatnonzero(fold[many] != k), np.flatnonzero(fold[many] == k)) for k in range(3)]
    one = FederatedBinomialRegressorCV(lambdas=[0.1, 0.01], cv=pairs).fit(X, trials, site)
    other = FederatedBinomialRegressorCV(lambdas=[0.1, 0.01], cv=alone).fit(X[many], trials[many], site[many])
    np.testing.assert_allclose(one.cv_losses_, other.cv_losses_, rtol=1e-6)


def test_log_likelihoods_are_those_of_scipy(rows):
    X, y, site = rows
    many = y["trials"] > 0
    trials = np.column_stack([y["successes"], y["trials"]])
    for make, target, some in (
        (FederatedBinomialRegressor, trials, many),
        (FederatedNegativeBinomialRegressor, y["negative-binomial"], slice(None)),
        (FederatedPoissonRegressor, y["negative-binomial"], slice(None)),
    ):
        fitted = make("none", **TIGHT).fit(X[some], target[some], site[some])
        found, mean = fitted.inference(X[some], target[some], site[some]), fitted.predict(X[some])
        counts = target[some]
        if counts.ndim == 2:
            expected = stats.binom.logpmf(counts[:, 0], counts[:, 1], mean)
        elif "theta_" in vars(fitted):
            expected = stats.nbinom.logpmf(counts, fitted.theta_, 1 / (1 + mean / fitted.theta_))
        else:
            expected = stats.poisson.logpmf(counts, mean)
        assert found.log_likelihood == pytest.approx(expected.sum(), rel=1e-9)
        assert "Log-likelihood:" in found.summary()
    binomial = FederatedBinomialRegressor("none", **TIGHT).heterogeneity(X, trials, site)
    each = [FederatedBinomialRegressor("none", **TIGHT).fit(X[site == k], trials[site == k]) for k in range(4)]
    apart = sum(m.inference(X[site == k], trials[site == k]).log_likelihood for k, m in enumerate(each))
    assert binomial.ratio == pytest.approx(2 * (apart - binomial.joint.log_likelihood), rel=1e-6)
    gamma = FederatedGammaRegressor("none", **TIGHT)
    assert "likelihood ratio test: " in gamma.heterogeneity(X, y["gamma"], site).verdict()
    assert gamma.fit(X, y["gamma"], site).inference(X, y["gamma"], site).table().head[3] == "t"


def test_debiased_errors_of_a_gamma_model_have_its_dispersion(rows):
    X, y, site = rows
    lasso = FederatedGammaRegressor("l1", 1e-6, **TIGHT).fit(X, y["gamma"], site)
    found, plain = lasso.debiased(X, y["gamma"], site, nodewise=1e-9), lasso.inference(X, y["gamma"], site)
    np.testing.assert_allclose(found.estimate, plain.estimate[:3], atol=1e-4)
    np.testing.assert_allclose(found.error, plain.error[:3], rtol=0.1)  # by the observed Hessian, not the expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", PARITY)
def test_parity_with_r(kind):
    if shutil.which("Rscript") is None:
        pytest.skip("Rscript is not installed")
    estimator, data, model = PARITY[kind]
    lines = ['if (!requireNamespace("MASS", quietly = TRUE)) quit(status = 9)', data, f"m <- {model}", TELL]
    done = subprocess.run(["Rscript", "-e", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    if done.returncode == 9:
        pytest.skip("MASS is not installed")
    assert done.returncode == 0, done.stderr
    table, estimate, error, theta, likelihood = done.stdout.splitlines()
    d = {name: np.array(values) for name, values in json.loads(table).items()}
    estimate, error = np.array(estimate.split(), float), np.array(error.split(), float)
    X = pd.DataFrame({name: d[name] for name in d if name[0] in "xt"})
    y = np.stack([d["y"], d["n"]], 1) if "n" in d else d["y"]
    site = np.arange(len(X)) % 4
    fitted = estimator("none", exposure="t" if "t" in d else None, **TIGHT).fit(X, y, site)
    found = fitted.inference(X, y, site)
    order = [*range(len(estimate))] if kind == "ordinal" else [len(estimate) - 1, *range(len(estimate) - 1)]
    loose = 1e-5 if kind == "ordinal" else 1e-6  # R differentiates polr's Hessian numerically
    np.testing.assert_allclose(found.estimate[order], estimate, rtol=loose, atol=loose)
    np.testing.assert_allclose(found.error[order], error, rtol=loose)
    assert found.log_likelihood == pytest.approx(float(likelihood), rel=1e-8)
    np.testing.assert_allclose(np.r_[np.ravel(fitted.coef_)], found.estimate[: len(fitted.coef_)], atol=1e-6)
    if float(theta):
        assert fitted.theta_ == pytest.approx(float(theta), rel=1e-5)
