"""Cox models with strata and with rows of an interval of time, against R's survival and against their definition."""

import json
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
import torch

from fednmap import InputError
from fednmap.estimators import FederatedCoxRegression, FederatedCoxRegressionCV
from fednmap.problems import Cox

RNG = np.random.default_rng(0)
N = 120
X = RNG.normal(size=(N, 3))
START = RNG.integers(0, 5, N).astype(float)
TIME = START + RNG.integers(1, 8, N)
EVENT = (RNG.random(N) < 0.6).astype(float)
STRATUM = RNG.integers(0, 3, N)
SITE = np.arange(N) % 2


def by_definition(x, rows, ties):
    """-log partial likelihood of some rows, term by term."""
    eta, total = X[rows] @ x, 0.0
    for t in np.unique(TIME[rows][EVENT[rows] == 1]):
        at_risk = (START[rows] < t) & (t <= TIME[rows])
        died = (TIME[rows] == t) & (EVENT[rows] == 1)
        many = int(died.sum())
        for k in range(many):
            share = k / many if ties == "efron" else 0.0
            total += np.log(np.exp(eta[at_risk]).sum() - share * np.exp(eta[died]).sum())
        total -= eta[died].sum()
    return total


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_the_loss_and_its_derivatives_are_those_of_the_definition(ties):
    data = []
    for site in (0, 1):
        rows = site == SITE
        y = np.column_stack([TIME, EVENT, START, STRATUM])[rows]
        data.append((torch.from_numpy(X[rows]), torch.from_numpy(y)))
    f = Cox(data, ties=ties)
    x = torch.tensor([0.5, -1.0, 0.3], dtype=torch.float64)
    parts = [(i == SITE) & (s == STRATUM) for i in (0, 1) for s in (0, 1, 2)]
    assert float(f.loss(x)) == pytest.approx(sum(by_definition(x.numpy(), rows, ties) for rows in parts) / N, rel=1e-12)
    h = 1e-6
    slope = [(f.loss(x + h * e) - f.loss(x - h * e)) / (2 * h) for e in torch.eye(3, dtype=torch.float64)]
    assert f.gradient(x).numpy() == pytest.approx(np.array(slope), abs=1e-8)
    curve = torch.stack([(f.gradient(x + h * e) - f.gradient(x - h * e)) / (2 * h) for e in torch.eye(3).double()])
    assert f.hessian(x).numpy() == pytest.approx(curve.numpy(), abs=1e-8)


def test_strata_are_sites_of_one_site():
    frame = pd.DataFrame(X, columns=list("abc")).assign(ward=np.array(["x", "y", "z"])[STRATUM])
    y = np.column_stack([TIME, EVENT])
    model = FederatedCoxRegression(strata="ward", tol=1e-10).fit(frame, y)
    sites = FederatedCoxRegression(tol=1e-10).fit(X, y, STRATUM)
    assert model.coef_ == pytest.approx(sites.coef_, abs=1e-9)
    by_number = FederatedCoxRegression(strata=3, tol=1e-10).fit(np.column_stack([X, STRATUM]), y)
    assert by_number.coef_ == pytest.approx(sites.coef_, abs=1e-9)
    own, other = model.inference(frame, y), sites.inference(X, y, STRATUM)
    assert own.names == ("a", "b", "c")
    assert own.error == pytest.approx(other.error, rel=1e-9)
    assert model.score(frame, y) == pytest.approx(sites.score(X, y, STRATUM))
    assert [stratum for _, stratum in model.baseline_] == ["x", "y", "z"]
    row = frame.iloc[:1]
    name = str(STRATUM[0])
    assert model.predict_survival(row, [3, 6]) == pytest.approx(sites.predict_survival(X[:1], [3, 6], site=name))


@pytest.mark.filterwarnings("ignore:lam_ =")
def test_intervals_of_one_row_are_that_row():
    """A row that is cut into intervals counts as before; one that starts at 0 as one without a start."""
    y = np.column_stack([TIME, EVENT])
    whole = FederatedCoxRegression(tol=1e-10).fit(X, y, SITE)
    late = FederatedCoxRegression(tol=1e-10).fit(X, np.column_stack([np.zeros(N), TIME, EVENT]), SITE)
    assert late.coef_ == pytest.approx(whole.coef_, abs=1e-9)
    cut = TIME / 2
    first, second = np.column_stack([0 * cut, cut, 0 * cut]), np.column_stack([cut, TIME, EVENT])
    both = np.concatenate([first, second])
    model = FederatedCoxRegression(tol=1e-10).fit(np.concatenate([X, X]), both, np.tile(SITE, 2))
    assert model.coef_ == pytest.approx(whole.coef_, abs=1e-9)
    assert model.score(np.concatenate([X, X]), both, np.tile(SITE, 2)) == pytest.approx(whole.score(X, y, SITE))
    chosen = FederatedCoxRegressionCV(lambdas=4, cv=3).fit(np.concatenate([X, X]), both, np.tile(SITE, 2))
    assert np.isfinite(chosen.cv_mean_).all()


def test_far_scores_keep_their_digits():
    """Those not at risk yet are subtracted, which loses digits where their hazards are much larger."""
    f = Cox([(torch.from_numpy(X), torch.from_numpy(np.column_stack([TIME, EVENT, START])))])
    x = np.full(3, 4.0)
    assert float(f.loss(torch.from_numpy(x))) == pytest.approx(
        by_definition(x, np.full(N, True), "efron") / N, rel=1e-9
    )


@pytest.mark.parametrize(
    ("y", "given", "words"),
    [
        (np.column_stack([TIME, TIME, EVENT]), {}, "expected start < time"),
        (np.column_stack([TIME] * 4), {}, "or three, start, stop and event"),
        (np.column_stack([TIME, EVENT]), {"strata": "ward"}, "give one by name or number"),
        (np.column_stack([TIME, EVENT]), {"strata": 3}, "give one by name or number"),
    ],
)
def test_what_is_no_interval_and_no_stratum_is_refused(y, given, words):
    with pytest.raises(InputError, match=words):
        FederatedCoxRegression(**given).fit(X, y, SITE)


MODELS = {
    "lung": ("lung", "Surv(time, status) ~ age + ph.ecog + strata(sex)", ["time", "status"], "sex"),
    "veteran": ("veteran", "Surv(time, status) ~ karno + age + strata(celltype)", ["time", "status"], "celltype"),
    "ovarian": ("ovarian", "Surv(futime, fustat) ~ age + rx", ["futime", "fustat"], None),
    "heart": ("heart", "Surv(start, stop, event) ~ age + year + surgery", ["start", "stop", "event"], None),
    "cgd": (
        "cgd",
        "Surv(tstart, tstop, status) ~ age + weight + inherit + strata(sex)",
        ["tstart", "tstop", "status"],
        "sex",
    ),
}
SURVIVAL = """
library(survival)
given <- commandArgs(TRUE); d <- get(given[1]); f <- as.formula(given[2]); keep <- all.vars(f)
d <- d[complete.cases(d[, keep]), ]; d$site <- seq_len(nrow(d)) %% 3
for (k in keep) if (is.factor(d[[k]]) && nlevels(d[[k]]) == 2 && !grepl(k, given[4])) d[[k]] <- as.numeric(d[[k]])
if (given[1] == "lung") d$status <- d$status - 1
fit <- coxph(update(f, . ~ . + strata(site)), data = d, ties = given[3], eps = 1e-12, iter.max = 50)
write.csv(d[, c(keep, "site")], given[5], row.names = FALSE)
n <- function(v) paste(format(v, digits = 16), collapse = ",")
cat(sprintf('{"names": ["%s"], "coef": [%s], "error": [%s], "loglik": %s}', paste(names(coef(fit)), collapse = '","'),
            n(coef(fit)), n(sqrt(diag(vcov(fit)))), n(fit$loglik[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("name", MODELS)
def test_coefficients_and_errors_are_those_of_coxph(name, ties, tmp_path):
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    data, formula, times, strata = MODELS[name]
    words = [data, formula, ties, strata or "-", str(tmp_path / "rows.csv")]
    done = subprocess.run(["Rscript", "-e", SURVIVAL, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told, rows = json.loads(done.stdout), pd.read_csv(tmp_path / "rows.csv")
    frame = rows[told["names"] + ([strata] if strata else [])]
    y, model = rows[times].to_numpy(float), FederatedCoxRegression(ties=ties, strata=strata, tol=1e-11)
    found = model.fit(frame, y, rows["site"]).inference(frame, y, rows["site"])
    assert model.coef_ == pytest.approx(told["coef"], abs=1e-6)
    assert found.estimate == pytest.approx(told["coef"], abs=1e-6)
    assert found.error == pytest.approx(told["error"], abs=1e-6)
    assert found.log_likelihood == pytest.approx(told["loglik"], rel=1e-8)
