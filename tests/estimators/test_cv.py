"""The choice of lam: folds as scikit-learn makes them, losses and standard errors as glmnet has them, the grid."""

import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from scipy.special import xlogy
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss, mean_poisson_deviance
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    RepeatedKFold,
    ShuffleSplit,
    StratifiedKFold,
    TimeSeriesSplit,
)

from fednmap import InputError
from fednmap.estimators import (
    FederatedCoxRegression,
    FederatedCoxRegressionCV,
    FederatedGLM,
    FederatedGLMCV,
    FederatedLasso,
    FederatedLassoCV,
    FederatedLogisticRegression,
    FederatedLogisticRegressionCV,
)
from fednmap.regularizers import L1, GroupLasso, Separable, Zero

TIGHT = {"tol": 1e-10, "max_rounds": 3000}
AT_AN_END = "lam_ = .* of the grid"
RNG = np.random.default_rng(0)
N, P, K = 120, 5, 4
X = RNG.normal(size=(N, P)) @ (np.eye(P) + 0.3) + 2
SCORE = X @ [0.5, -0.4, 0.2, 0.0, 0.0]
SITES = np.array(["a", "b", "c"])[np.arange(N) % 3]
FOLD = RNG.permutation(np.repeat(np.arange(K), [18, 26, 34, 42]))  # of different sizes
PAIRS = [(np.flatnonzero(k != FOLD), np.flatnonzero(k == FOLD)) for k in range(K)]
TIMES = np.column_stack([RNG.exponential(np.exp(-SCORE)), RNG.random(N) < np.where(FOLD == 0, 0.3, 0.8)])
TARGETS = {
    "gaussian": SCORE + RNG.normal(size=N),
    "binary": np.where(SCORE + RNG.logistic(size=N) > SCORE.mean(), "yes", "no"),
    "classes": np.digitize(SCORE + 0.5 * RNG.normal(size=N), np.quantile(SCORE, [0.3, 0.6])),
    "poisson": RNG.poisson(np.exp(SCORE)).astype(float),
    "huber": SCORE + RNG.standard_t(2, N),
    "cox": TIMES,
}
LAMBDAS = [0.2, 0.05, 0.01]


def alone_and_chosen(family, **options):
    """The estimator at one lam, and the one that chooses."""
    if family == "cox":
        return (lambda lam: FederatedCoxRegression("l1", lam, **TIGHT)), FederatedCoxRegressionCV(**options, **TIGHT)
    name = "logistic" if family in ("binary", "classes") else family
    return (lambda lam: FederatedGLM(name, "l1", lam, **TIGHT)), FederatedGLMCV(name, **options, **TIGHT)


def log_partial_likelihood(scores, y, weight):
    """By Breslow's rule, which is Efron's without ties, term by term."""
    time, event = y[:, 0], y[:, 1] == 1
    risk = [np.log(np.sum((weight * np.exp(scores))[time >= t])) for t in time]
    return np.sum(weight * event * (scores - risk))


def held_out(family, model, train, test, weight):
    """The loss of a fold by the textbook."""
    y, w = TARGETS[family], weight[test]
    if family == "cox":
        both = np.concatenate([train, test])
        scores = X @ model.coef_
        added = [log_partial_likelihood(scores[rows], y[rows], weight[rows]) for rows in (both, train)]
        return (added[1] - added[0]) / w.sum()
    if family in ("binary", "classes"):
        return log_loss(y[test], model.predict_proba(X[test]), sample_weight=w, labels=model.classes_)
    predicted = model.predict(X[test])
    if family == "poisson":
        return mean_poisson_deviance(y[test], predicted, sample_weight=w) / 2
    r = np.abs(y[test] - predicted)
    if family == "gaussian":
        return np.average(r**2, weights=w) / 2
    u, s = r / model.scale_, model.scale_
    return np.average(s + s * np.where(u < 1.35, u**2, 2 * 1.35 * u - 1.35**2), weights=w)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.filterwarnings(f"ignore:{AT_AN_END}")
def test_losses_and_standard_errors_are_those_of_the_textbook(family, weighted):
    """Half the mean deviance of each fold; the mean and its error over folds weigh them by their rows (a Cox model's
    error by their events), as cv.glmnet does."""
    y, weight = TARGETS[family], 1.0 + (np.arange(N) % 2 if weighted else np.zeros(N))
    alone, chosen = alone_and_chosen(family, lambdas=LAMBDAS, cv=PAIRS)
    chosen.fit(X, y, sample_weight=weight)
    losses = np.zeros((K, len(LAMBDAS)))
    for k, (train, test) in enumerate(PAIRS):
        for j, lam in enumerate(LAMBDAS):
            model = alone(lam).fit(X[train], y[train], sample_weight=weight[train])
            losses[k, j] = held_out(family, model, train, test, weight)
    assert chosen.cv_losses_ == pytest.approx(losses, rel=1e-6)
    shares = np.bincount(FOLD, weight) / weight.sum()
    mean = shares @ losses
    counts = np.bincount(FOLD, weight * y[:, 1]) / (weight @ y[:, 1]) if family == "cox" else shares
    error = np.sqrt(counts @ np.square(losses * (shares / counts)[:, None] - mean) / (K - 1))
    assert chosen.cv_mean_ == pytest.approx(mean, rel=1e-6)
    assert chosen.cv_se_ == pytest.approx(error, rel=1e-5)


def test_a_poisson_loss_is_half_the_deviance_everywhere():
    y = TARGETS["poisson"]
    fitted = FederatedGLM("poisson", "none", **TIGHT).fit(X, y, SITES)
    for site in fitted.site_report_:
        mine = site["site"] == SITES
        assert site["loss"] == pytest.approx(mean_poisson_deviance(y[mine], fitted.predict(X[mine])) / 2)
    rate = fitted.predict(X)
    assert fitted.objective_ == pytest.approx(np.mean(xlogy(y, y / rate) - y + rate))


GLMNET = """
library(glmnet)
given <- commandArgs(TRUE)
d <- read.csv(given[1]); x <- as.matrix(d[, grep("^x", names(d))]); family <- given[2]
y <- if (family == "cox") survival::Surv(d$y, d$event) else if (grepl("nomial", family)) factor(d$y) else d$y
lambda <- as.numeric(strsplit(given[3], ",")[[1]])
found <- cv.glmnet(x, y, weights = d$weight, lambda = lambda, family = family, foldid = d$fold, grouped = TRUE,
                   thresh = 1e-14, maxit = 1e7, type.measure = if (family == "gaussian") "mse" else "deviance")
one <- function(v) paste(format(v, digits = 15), collapse = ",")
cat(sprintf('{"cvm": [%s], "cvsd": [%s], "min": %s, "one": %s}', one(found$cvm), one(found$cvsd),
            one(found$lambda.min), one(found$lambda.1se)))
"""


def glmnet(family, folder, y, weight, lambdas):
    """cv.glmnet on the folds of this file."""
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    (folder / "cv.R").write_text(GLMNET)
    target = y if y.ndim == 2 else y[:, None]
    head = [f"x{j}" for j in range(P)] + ["weight", "fold", "y", "event"][: 3 + (y.ndim == 2)]
    lines = [",".join(map(str, (*row, w, k + 1, *t))) for row, w, k, t in zip(X, weight, FOLD, target, strict=True)]
    (folder / "rows.csv").write_text("\n".join([",".join(head), *lines]))
    steps = ",".join(f"{lam:.17g}" for lam in lambdas)
    command = ["Rscript", str(folder / "cv.R"), str(folder / "rows.csv"), family, steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "there is no package called" in done.stderr:
        pytest.skip("glmnet is not installed")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("family", ["gaussian", "binary", "classes", "poisson", "cox"])
@pytest.mark.filterwarnings(f"ignore:{AT_AN_END}")
def test_the_choice_is_that_of_glmnet(family, weighted, tmp_path):
    """Its cvm is the deviance, ours half of it; for Cox's model per event, ours per row."""
    if weighted and family == "cox":
        pytest.skip("glmnet divides weights by their mean in all rows, and again in those without a fold")
    y, weight = TARGETS[family], 1.0 + (np.arange(N) % 2 if weighted else np.zeros(N))
    lambdas = np.geomspace(0.5, 0.005, 30)
    _, chosen = alone_and_chosen(family, lambdas=lambdas, cv=PAIRS, select="1se")
    chosen.fit(X, y, sample_weight=weight)
    found = glmnet({"binary": "binomial", "classes": "multinomial"}.get(family, family), tmp_path, y, weight, lambdas)
    unit = 2 * weight.sum() / (weight @ y[:, 1]) if family == "cox" else 2
    assert unit * chosen.cv_mean_ == pytest.approx(found["cvm"], rel=1e-6)
    assert unit * chosen.cv_se_ == pytest.approx(found["cvsd"], rel=1e-6)
    assert chosen.lam_min_ == pytest.approx(found["min"])
    assert chosen.lam_ == chosen.lam_1se_ == pytest.approx(found["one"])


def masks(pairs):
    return [(np.isin(np.arange(N), train), np.isin(np.arange(N), test).tolist()) for train, test in pairs]


SPLITTERS = {
    "KFold": (KFold(3, shuffle=True, random_state=1), None),
    "StratifiedKFold": (StratifiedKFold(3), None),
    "GroupKFold": (GroupKFold(2), None),
    "LeaveOneGroupOut": (LeaveOneGroupOut(), None),
    "RepeatedKFold": (RepeatedKFold(n_splits=2, n_repeats=2, random_state=0), None),
    "ShuffleSplit": (ShuffleSplit(2, test_size=20, train_size=50, random_state=0), None),
    "TimeSeriesSplit": (TimeSeriesSplit(3), None),
    "pairs": (PAIRS, PAIRS),
    "masks": (masks(PAIRS), PAIRS),
    "rows twice": ([(np.r_[0:60, 0:30], np.r_[60:N])], [(np.r_[0:60, 0:30], np.r_[60:N])]),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.filterwarnings(f"ignore:{AT_AN_END}")
def test_folds_as_scikit_learn_makes_them(name, sparse):
    """Every fold is a fit to its training rows, which stay at their sites; rows of weight 0 are as if left out."""
    cv, pairs = SPLITTERS[name]
    y, weight = TARGETS["binary"], 1.0 * (np.arange(N) % 7 > 0)
    pairs = list(cv.split(X, y, SITES if "Group" in name else None)) if pairs is None else pairs
    table = csr_array(X) if sparse else X
    chosen = FederatedLogisticRegressionCV(lambdas=[0.1, 0.05, 0.01], cv=cv, **TIGHT)
    chosen.fit(table, y, SITES, weight)
    assert chosen.folds_ == tuple(f"fold {k + 1}" for k in range(len(pairs)))
    shares = np.array([weight[test].sum() for _, test in pairs])
    assert chosen.cv_mean_ == pytest.approx(shares / shares.sum() @ chosen.cv_losses_)
    for losses, (train, test) in zip(chosen.cv_losses_, pairs, strict=True):
        model = FederatedLogisticRegression("l1", 0.05, **TIGHT).fit(X[train], y[train], SITES[train], weight[train])
        said = log_loss(y[test], model.predict_proba(X[test]), sample_weight=weight[test])
        assert losses[1] == pytest.approx(said, rel=1e-6)


@pytest.mark.filterwarnings(f"ignore:{AT_AN_END}")
def test_the_groups_of_a_splitter_are_the_sites():
    given = {"lambdas": LAMBDAS, "tol": 1e-9}
    y = TARGETS["gaussian"]
    by_site = FederatedLassoCV(cv="leave-one-site-out", **given).fit(X, y, SITES)
    assert np.array_equal(
        by_site.cv_losses_, FederatedLassoCV(cv=LeaveOneGroupOut(), **given).fit(X, y, SITES).cv_losses_
    )
    assert FederatedLassoCV(cv=None, **given).fit(X, y, SITES).cv_losses_.shape == (5, 3)


@pytest.mark.filterwarnings(f"ignore:{AT_AN_END}")
def test_a_cox_model_takes_splits_that_leave_rows_out():
    cv = [(np.arange(40, 100), np.arange(30))]
    chosen = FederatedCoxRegressionCV(lambdas=[0.05, 0.01], cv=cv, **TIGHT).fit(X, TIMES)
    model = FederatedCoxRegression("l1", 0.05, **TIGHT).fit(X[40:100], TIMES[40:100])
    assert chosen.cv_losses_[0, 0] == pytest.approx(held_out("cox", model, *cv[0], np.ones(N)), rel=1e-6)


REFUSED = {
    "a word": ("five", "cv is 'five'.*; give a number of folds, at least 2, 'leave-one-site-out', a scikit-learn"),
    "one fold": (1, "cv is 1; give a number of folds"),
    "a truth": (True, "cv is True; give a number of folds"),
    "a number": (2.5, "cv is 2.5, which does not split these 120 rows: .*; give a number of folds"),
    "rows that are not there": ([([0, 1], [500])], "does not split these 120 rows: index 500 is out of bounds.*; give"),
    "no pairs": ([(np.arange(9),)], "does not split these 120 rows: not enough values to unpack.*; give"),
    "numbers as classes": (StratifiedKFold(3), "does not split these 120 rows: Supported target types are.*; give"),
    "one site": (LeaveOneGroupOut(), "does not split these 120 rows: The 'groups' parameter should not be None.*sites"),
    "nothing": (iter(()), "holds no fold; an iterator can be used once: give a list"),
    "nothing to hold out": ([(np.arange(9), np.arange(0))], "fold 1 of cv has no row of positive weight to train on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folds_that_are_none(name):
    cv, message = REFUSED[name]
    with pytest.raises(InputError, match=message) as caught:
        FederatedLassoCV(cv=cv).fit(X, TARGETS["gaussian"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unit", [1.0, 1e6])
def test_a_ridge_path_reaches_from_nothing_to_least_squares(unit):
    """Whatever the unit of y: lam competes with the curvature of f, which y has no part in."""
    y = unit * TARGETS["gaussian"]
    path = FederatedGLM("gaussian", "ridge").path(X, y, SITES)
    free = FederatedGLM("gaussian", "none").fit(X, y, SITES).coef_
    assert np.abs(path.coefs[0]).max() < 0.01 * np.abs(free).max()
    assert path.coefs[-1, 0] == pytest.approx(free, abs=1e-2 * np.abs(free).max())
    assert path.lambdas == pytest.approx(FederatedGLM("gaussian", "ridge").path(X, TARGETS["gaussian"], SITES).lambdas)


@pytest.mark.slow
@pytest.mark.ci(turn=10)
@pytest.mark.parametrize("family", ["gaussian", "binary", "poisson", "huber"])
def test_the_best_ridge_lies_inside_its_grid(family):
    X, y = load_diabetes(return_X_y=True)
    y = {"binary": np.where(y > 140, "high", "low"), "poisson": np.rint(y / 10)}.get(family, y)
    _, chosen = alone_and_chosen(family, penalty="ridge", lambdas=15, cv=KFold(3, shuffle=True, random_state=0))
    chosen.set_params(tol=1e-6).fit(X, y)
    assert chosen.lambdas_[-1] < chosen.lam_ < chosen.lambdas_[0]


def test_an_end_of_the_grid_is_said():
    y = TARGETS["gaussian"]
    noise = np.random.default_rng(5).normal(size=N)
    with pytest.warns(UserWarning, match=r"lam_ = 0.1 is the smallest .* below it; widen .*\(0.2, 0.001, 22\)"):
        FederatedLassoCV(lambdas=[0.2, 0.1]).fit(X, y, SITES)
    with pytest.warns(UserWarning, match=r"lam_ = 0.01 is the largest .* above it; widen .*\(1, 0.001, 22\)"):
        FederatedLassoCV(lambdas=[0.01, 0.001]).fit(X, noise, SITES)
    with pytest.warns(UserWarning, match=r"lam_ = 0.01 is the smallest"):
        FederatedLassoCV(lambdas=[2.0, 0.01], select="bic").fit(X, y, SITES)
    FederatedLassoCV(lambdas=[0.1]).fit(X, y, SITES)  # one value is no grid,
    FederatedLassoCV(lambdas=[1.0, 0.0]).fit(X, y, SITES)  # nothing is below 0,
    assert not FederatedLassoCV(lambdas=20, select="1se").fit(X, noise, SITES).coef_.any()  # nor above no column


FREE = {
    "l1": L1(torch.tensor([0.0, 1.0, 2.0, 0.0, 0.5])),
    "groups": GroupLasso(torch.tensor([0.0, 1.0, 2.0, 0.5]), [[0, 3], [1], [2], [4]]),
    "separable": Separable([(slice(0, 2), Zero()), (slice(2, P), L1(1.0))]),
}


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("family", ["gaussian", "binary", "huber"])
def test_a_path_with_columns_that_are_not_penalised(name, family):
    """It begins where the first penalised column enters the model of the others."""
    penalty, y = FREE[name], TARGETS[family]
    free = np.array([0, 1] if name == "separable" else [0, 3])
    kind = "logistic" if family == "binary" else family
    path = FederatedGLM(kind, penalty, **TIGHT).path(X, y, SITES, lambdas=4)
    null = FederatedGLM(kind, "none", **TIGHT).fit(X[:, free], y, SITES)
    rest = np.setdiff1d(np.arange(P), free)
    assert path.coefs[0, 0, free] == pytest.approx(np.ravel(null.coef_), abs=1e-6)
    assert path.coefs[0, 0, rest] == pytest.approx(0, abs=1e-6)
    below = FederatedGLM(kind, penalty, 0.98 * path.lambdas[0], **TIGHT).fit(X, y, SITES)
    assert np.ravel(below.coef_)[rest].any()
    above = FederatedGLM(kind, penalty, 1.0001 * path.lambdas[0], **TIGHT).fit(X, y, SITES)
    assert not np.ravel(above.coef_)[rest].any()


def test_lam_is_chosen_with_columns_that_are_not_penalised():
    chosen = FederatedGLMCV("gaussian", FREE["l1"], lambdas=8, cv=3, tol=1e-8).fit(
        X, np.random.default_rng(5).normal(size=N), SITES
    )
    assert chosen.coef_[[0, 3]].all()


def test_folds_that_did_not_converge_are_said():
    y = TARGETS["binary"]
    with pytest.warns(ConvergenceWarning) as caught:
        FederatedLogisticRegressionCV(lambdas=LAMBDAS, cv=PAIRS, tol=1e-12, max_rounds=3).fit(X, y, SITES)
    said = [str(warning.message) for warning in caught]
    assert said[0].startswith(
        "4 of 4 folds have models that did not converge and are used as they are; raise max_rounds"
    )
    with pytest.warns(ConvergenceWarning) as caught:
        FederatedLogisticRegressionCV(lambdas=LAMBDAS, select="bic", tol=1e-12, max_rounds=3).fit(X, y, SITES)
    assert any("2 of 3 models of the path did not converge" in str(warning.message) for warning in caught)


def test_draws_that_did_not_converge_are_said():
    y = TARGETS["binary"]
    with pytest.warns(ConvergenceWarning, match="10 of 10 draws did not converge and are used as they are; raise"):
        FederatedLogisticRegression("l1", tol=1e-12, max_rounds=3).bootstrap(X, y, SITES, times=10)
    with pytest.warns(ConvergenceWarning, match="after 3 rounds"):
        FederatedLasso(tol=1e-12, max_rounds=3).fit(X, TARGETS["gaussian"], SITES)
