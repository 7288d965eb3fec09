"""Path, choice of lam and standard errors between machines have the estimator's numbers: what exists in one process."""

import json

import numpy as np
import polars as pl
import pytest

pytest.importorskip("flwr")

from hospital_files import write_hospitals
from table_fits import fit, pooled

from fednmap import InputError
from fednmap.estimators import folder as kept
from fednmap.estimators.linear_models import FederatedCoxRegression, FederatedGLM
from fednmap.estimators.model_selection import FederatedCoxRegressionCV, FederatedGLMCV

SICK = {"target": "outcome", "exclude": "time,event"}
TIMES = {"time": "time", "event": "event", "exclude": "outcome"}
TIGHT = 1e-10
PLAIN = {
    "gaussian": ({"target": "time", "exclude": "event,outcome"}, ["time"], ["event", "outcome"]),
    "logistic": (SICK, ["outcome"], ["time", "event"]),
    "poisson": ({"target": "event", "exclude": "time,outcome"}, ["event"], ["time", "outcome"]),
    "cox": (TIMES, ["time", "event"], ["outcome"]),
}


@pytest.fixture
def hospitals(tmp_path):
    """Without gaps: estimators take numbers."""
    folder = write_hospitals(tmp_path / "hospitals")
    for path in folder.iterdir():
        pl.read_csv(path).with_columns(pl.col("pressure").fill_null(130.0)).write_csv(path)
    return folder


def data(hospitals, family):
    X, y, where, names = pooled(hospitals, *PLAIN[family][1:])
    frame = pl.DataFrame(dict(zip(names, X.T, strict=True)))
    y = (y == "sick").astype(float) if family == "logistic" else y.astype(float)
    return frame, y, where


def csv(run, name):
    return pl.read_csv(run / name)


def close(a, b):
    assert np.abs(np.asarray(a, float) - np.asarray(b, float)).max() <= 1e-8


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize("family", PLAIN)
def test_a_path_is_the_estimators(hospitals, family, secagg):
    _, run = fit(
        hospitals,
        family=family,
        penalty="l1",
        lam=0.02,
        path=True,
        tol_absolute=TIGHT,
        **PLAIN[family][0],
        secagg=secagg,
    )
    X, y, where = data(hospitals, family)
    alone = (
        FederatedCoxRegression("l1", 0.02, tol=TIGHT)
        if family == "cox"
        else FederatedGLM(family, "l1", 0.02, tol=TIGHT)
    ).fit(X, y, where)
    found, path = csv(run, "path.csv"), alone.path(X, y, where)
    assert found.columns == ["lam", *X.columns]
    close(found["lam"], path.lambdas)
    close(found[:, 1:], path.coefs[:, 0])
    close(kept.load(run).coef, np.atleast_2d(alone.coef_))


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize("cov_type", ["nonrobust", "HC0", "cluster"])
@pytest.mark.parametrize("family", PLAIN)
def test_standard_errors_are_the_estimators(hospitals, family, cov_type, secagg):
    settings = {"family": family, "penalty": "none", "cov_type": cov_type, "tol_absolute": TIGHT} | PLAIN[family][0]
    X, y, where = data(hospitals, family)
    if secagg and cov_type == "cluster":
        with pytest.raises(InputError, match="needs the gradients of single sites"):
            fit(hospitals, secagg=True, **settings)
        return
    if (family, cov_type) == ("cox", "HC0"):
        return
    _, run = fit(hospitals, secagg=secagg, **settings)
    alone = (
        FederatedCoxRegression("none", tol=TIGHT) if family == "cox" else FederatedGLM(family, "none", tol=TIGHT)
    ).fit(X, y, where)
    errors, found = alone.inference(X, y, where, cov_type=cov_type), csv(run, "coefficients.csv")
    close(found["standard error"], errors.error)
    close(found["coefficient"], errors.estimate)
    assert (run / "summary.txt").read_text() == errors.summary() + "\n"


@pytest.mark.parametrize("secagg", [False, True])
@pytest.mark.parametrize(("cv", "select"), [("4", "min"), ("leave-one-site-out", "1se"), (None, "bic")])
@pytest.mark.parametrize("family", PLAIN)
def test_the_choice_of_lam_is_the_estimators(hospitals, family, cv, select, secagg):
    settings = {"family": family, "penalty": "l1", "select": select, "tol_absolute": TIGHT} | PLAIN[family][0]
    settings |= {} if cv is None else {"cv": cv}
    if secagg and cv == "leave-one-site-out":
        with pytest.raises(InputError, match="tells the losses of single sites"):
            fit(hospitals, secagg=True, **settings)
        return
    _, run = fit(hospitals, secagg=secagg, **settings)
    X, y, where = data(hospitals, family)
    how = {"select": select, "tol": TIGHT, "cv": int(cv) if cv and cv.isdecimal() else cv}
    kind = FederatedCoxRegressionCV("l1", **how) if family == "cox" else FederatedGLMCV(family, "l1", **how)
    alone, found = kind.fit(X, y, where), csv(run, "cv.csv")
    close(found["lam"], alone.lambdas_)
    if cv is None:
        close(found["bic"] / 100, alone.criterion_ / 100)
    else:
        close(found["mean"], alone.cv_mean_)
        close(found["se"], alone.cv_se_)
    assert json.loads((run / "model.json").read_text())["lam"] == pytest.approx(alone.lam_, rel=1e-9)
    close(kept.load(run).coef, np.atleast_2d(alone.coef_))
