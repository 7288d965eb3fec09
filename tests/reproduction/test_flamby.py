"""FLamby's sets and protocol, each piece against a computation of its own; and the verdicts that follow."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from public_data import needs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fednmap.algorithms import SCAFFOLD, FedAvg, FedNMap, FedProx
from fednmap.data import load
from fednmap.data.heart_disease import held_out
from fednmap.estimators.survival import concordance_sums
from fednmap.names import InputError
from fednmap.problems import Cox
from fednmap.regularizers import Zero
from fednmap.simulation import simulate
from reproduction import flamby, flamby_trials
from reproduction.flamby_problem import HEART, TASKS, TCGA, UPDATES, Loaded, accuracy, concordance, cox_slope
from reproduction.flamby_published import PUBLISHED, SEEDS
from reproduction.reproduce import reproduce
from reproduction.store import Provenance
from reproduction.trials import Curve, Trial


def heart() -> None:
    needs("heart_disease", "processed.va.data")


def brca() -> Path:
    needs("tcga_brca", "train_test_split.csv")
    return needs("tcga_brca", "brca.csv")


# --- data


def test_hospitals_are_divided_as_in_flamby() -> None:
    heart()
    for variant in ("flamby", "flamby-pooled"):
        data = load(f"heart-disease:{variant}")
        assert data.clients is not None
        assert data.test_clients is not None
        assert data.x_train.shape == (486, 13)
        assert data.clients.bincount().tolist() == [199, 172, 30, 85]
        assert data.test_clients.bincount().tolist() == [104, 89, 16, 45]
        assert data.features == load("heart-disease").features
        for i in range(4) if variant == "flamby" else ():
            mine = data.x_train[data.clients == i]
            torch.testing.assert_close(mine.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    digest = "c787c57bdaac"
    assert load("heart-disease:flamby").digest.startswith(digest)


def test_hospitals_are_those_of_pandas_and_scikit_learn() -> None:
    """The steps of FLamby's documentation, written down once more with other tools."""
    folder = needs("heart_disease", "processed.va.data").parent
    pandas = pytest.importorskip("pandas")
    from sklearn.model_selection import train_test_split

    tables, test = [], []
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        table = pandas.read_csv(folder / f"processed.{name}.data", header=None, na_values="?")
        table = table.drop(columns=[10, 11, 12]).dropna().astype(float)
        sick = (table[13] > 0).astype(int)
        enough = sick.nunique() > 1 and sick.value_counts().min() > 2
        _, held = train_test_split(
            np.arange(len(table)),
            test_size=1 - 0.66,
            train_size=0.66,
            random_state=43,
            stratify=sick if enough else None,
        )
        tables.append(table)
        test.append(np.isin(np.arange(len(table)), held))
    whole = pandas.get_dummies(pandas.concat(tables, ignore_index=True), columns=[2, 6], drop_first=True)
    x = whole.drop(columns=[13]).to_numpy(dtype=np.float64)
    tested = np.concatenate(test)
    data, ends = load("heart-disease:flamby-pooled"), np.cumsum([0, *map(len, tables)])
    known = x[~tested]
    np.testing.assert_allclose(data.x_test, (x[tested] - known.mean(0)) / known.std(0, ddof=1), atol=2e-5)
    data = load("heart-disease:flamby")
    for i in range(4):
        mine, held = x[ends[i] : ends[i + 1]], test[i]
        known = mine[~held]
        expected = (mine[held] - known.mean(0)) / (known.std(0, ddof=1) + 1e-9)
        np.testing.assert_allclose(data.x_test[data.test_clients == i], expected, atol=2e-5)


def test_regions_are_those_of_flamby() -> None:
    brca()
    data = load("tcga-brca")
    assert data.clients is not None
    assert data.test_clients is not None
    assert data.x_train.shape == (866, 39)
    assert data.clients.bincount().tolist() == [248, 156, 164, 129, 129, 40]
    assert data.test_clients.bincount().tolist() == [63, 40, 42, 33, 33, 11]
    assert [int(data.y_test[data.test_clients == i, 1].sum()) for i in range(6)] == [14, 4, 8, 3, 2, 1]
    assert data.features[0] == "age_at_index"
    assert data.digest.startswith("f552a722a4f3")
    assert Cox([(data.x_train[data.clients == i], data.y_train[data.clients == i]) for i in range(6)]).n == 6


def test_changed_or_missing_regions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = brca()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDNMAP_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"brca.csv of tcga-brca is not here; read https://gdc"):
        load("tcga-brca")
    (tmp_path / "tcga_brca").mkdir()
    (tmp_path / "tcga_brca" / "brca.csv").write_bytes(original.read_bytes()[:-1])
    with pytest.raises(InputError, match="sha256"):
        load("tcga-brca")


@pytest.mark.parametrize("name", ["heart-disease:flambi", "heart-disease:", "tcga-brca:1"])
def test_other_words_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"flamby, flamby-pooled|takes nothing"):
        load(name)


def test_survival_times_are_not_trained_on() -> None:
    brca()
    from fednmap.runs.configuration import Config
    from fednmap.runs.experiment import prepare

    with pytest.raises(InputError, match="times and events"):
        prepare(Config.make(algorithms=("fednmap",), data="tcga-brca"))


@pytest.mark.parametrize(
    ("name", "counts"), [("heart", [40, 35, 6, 17]), ("tcga", [50, 32, 33, 26, 26, 8])], ids=["heart", "tcga"]
)
def test_rows_are_kept_back_in_every_centre(name: str, counts: list[int]) -> None:
    heart()
    brca()
    task = TASKS[name]
    data, back = task.loaded, task.kept_back()
    assert data.clients is not None
    assert data.clients[back].bincount().tolist() == counts
    assert torch.equal(back, held_out(task.stratum(data.y_train), data.clients, 0.2, 42))
    sizes = task.clients(back).sizes + task.clients(~back).sizes
    assert torch.equal(sizes, task.clients().sizes)


def test_one_region_has_no_metric_on_the_rows_kept_back() -> None:
    """Nobody there outlives its one death: the mean is over the other five."""
    brca()
    back, start = TCGA.clients(TCGA.kept_back()), Loaded(TCGA, 42).start
    each = [concordance(TCGA.scores(start, a), b).value for a, b in back]
    assert [int(b[:, 1].sum()) for _, b in back] == [9, 7, 3, 3, 1, 1]
    assert np.isnan(each).tolist() == [False] * 5 + [True]
    assert TCGA.mean_metric(start, back) == pytest.approx(np.mean(each[:5]))


# --- losses and metrics


def naive_cox(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean over all rows of event (log sum of exp over rows up to it, from the last time on, less its score)."""
    order = sorted(range(len(scores)), key=lambda j: -float(y[j, 0]))
    terms = [y[j, 1] * (torch.logsumexp(scores[order[: k + 1]], 0) - scores[j]) for k, j in enumerate(order)]
    return torch.stack(terms).mean()


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("missing", [0, 3])
def test_slope_of_the_cox_loss(size: float, missing: int) -> None:
    rng = torch.Generator().manual_seed(3)
    eta = size * torch.randn(5, 8, dtype=torch.float64, generator=rng)
    y = torch.stack([torch.randint(1, 6, (5, 8), generator=rng), torch.randint(0, 2, (5, 8), generator=rng)], -1)
    weight = torch.zeros(5, 8, dtype=torch.float64)
    weight[:, : 8 - missing] = 1 / (8 - missing)
    found = cox_slope(eta, y.double(), weight)
    for k in range(5):
        s = eta[k, : 8 - missing].clone().requires_grad_()
        (slope,) = torch.autograd.grad(naive_cox(s, y[k, : 8 - missing].double()), s)
        torch.testing.assert_close(found[k, : 8 - missing], slope)
        assert bool((found[k, 8 - missing :] == 0).all())


def test_concordance_and_its_error() -> None:
    rng = np.random.default_rng(0)
    time, event = rng.integers(1, 15, 30).astype(float), rng.integers(0, 2, 30).astype(float)
    scores = np.round(rng.normal(size=30), 1)
    y = np.column_stack([time, event])
    found = concordance(torch.from_numpy(scores), torch.from_numpy(y))
    right, total = concordance_sums(scores, y, np.ones(len(y)))[:2]
    assert found.value == pytest.approx(right / total)
    lifelines = pytest.importorskip("lifelines.utils")
    assert found.value == pytest.approx(lifelines.concordance_index(time, -scores, event))
    left = [np.delete(np.arange(30), i) for i in range(30)]
    without = np.array([lifelines.concordance_index(time[k], -scores[k], event[k]) for k in left])
    assert found.error == pytest.approx(np.sqrt(29 / 30 * ((without - without.mean()) ** 2).sum()))


def test_accuracy_and_its_error() -> None:
    found = accuracy(torch.tensor([-1.0, 2.0, 0.5, -0.1]), torch.tensor([0, 1, 0, 0]))
    assert found == (0.75, pytest.approx(np.sqrt(0.75 * 0.25 / 4)))


# --- the protocol


def as_in_torch(seed: int, rounds: int, mu: float = 0.0) -> torch.Tensor:
    """FedAvg, with mu FedProx, on the hospitals in plain torch: a model, an optimiser and a loader per centre."""
    data = load("heart-disease:flamby")
    assert data.clients is not None
    parts = [(data.x_train[data.clients == i], data.y_train[data.clients == i].float()) for i in range(4)]
    torch.manual_seed(seed)
    first = nn.Linear(13, 1)
    loaders = [DataLoader(TensorDataset(*part), batch_size=4, shuffle=True) for part in parts]
    epochs = [iter(loader) for loader in loaders]
    torch.manual_seed(seed)
    x = nn.utils.parameters_to_vector(first.parameters()).detach()
    for _ in range(rounds):
        mean = torch.zeros(14)
        for i, (rows, _) in enumerate(parts):
            model = copy.deepcopy(first)
            nn.utils.vector_to_parameters(x.clone(), model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), 0.001)
            for _ in range(100):
                try:
                    a, b = next(epochs[i])
                except StopIteration:
                    epochs[i] = iter(loaders[i])
                    a, b = next(epochs[i])
                optimiser.zero_grad()
                loss = nn.functional.binary_cross_entropy(torch.sigmoid(model(a)).squeeze(1), b)
                now = nn.utils.parameters_to_vector(model.parameters())
                (loss + mu / 2 * (now - x).square().sum()).backward()
                optimiser.step()
            mean += len(rows) / 486 * nn.utils.parameters_to_vector(model.parameters()).detach()
        x = mean
    return x


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_rounds_are_those_of_plain_torch(mu: float) -> None:
    heart()
    algorithm = FedProx(eta_a=0.001, Q=UPDATES, mu=mu) if mu else FedAvg(eta_a=0.001, Q=UPDATES)
    *_, last = simulate(algorithm, Loaded(HEART, 43), rounds=2)
    with torch.random.fork_rng(devices=[]):
        expected = as_in_torch(43, 2, mu)
    torch.testing.assert_close(algorithm.model(last.server), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["FedAvg", "SCAFFOLD", "FedYogi"])
def test_one_seed_is_the_published_number_to_the_digit(method: str) -> None:
    heart()
    eta_a, second = PUBLISHED["heart"][method][2:]
    last = flamby_trials.trained("heart", method, 2, eta_a, second or 1.0)[-1]
    for metric in ("mean", "pooled"):
        assert f"{100 * last[metric]:.2f}" == f"{getattr(PUBLISHED['heart'][method], metric)[2]:.2f}"


def test_fednmap_without_phi_is_scaffold_on_regions() -> None:
    brca()
    problem = Loaded(TCGA, 42)
    methods = SCAFFOLD(eta_a=0.01, eta_s=0.5, Q=UPDATES), FedNMap(Zero(), eta_a=0.01, eta_s=0.5, Q=UPDATES)
    rounds = [list(simulate(m, problem, rounds=2))[-1] for m in methods]
    a, b = (m.model(r.server) for m, r in zip(methods, rounds, strict=True))
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert rounds[0].bytes_up == 2 * rounds[1].bytes_up


@pytest.mark.parametrize("method", flamby_trials.KINDS)
def test_a_trial_is_kept_when_its_method_gains_a_parameter(method: str) -> None:
    """It is then at its default in both; a parameter that is another makes another trial."""
    now = flamby_trials.made_from("heart", "by-loss", method)
    assert not [name for name in now if "traits" in name]  # these follow from the parameters
    eta_a = f"{method}.eta_a"
    less = {name: v for name, v in now.items() if name != f"{method}.phi"}
    before, other = (Provenance.of(Trial({}, lambda path: [], v), {}) for v in (less, {**now, eta_a: "0.5"}))
    assert before.changed_settings(now) == ""
    assert other.changed_settings(now) == f"{eta_a} was '0.5' and is '1.0'"


def test_trials_that_are_kept_are_of_what_is_run_now() -> None:
    """Those of the repository: none is left out by itself when the code has changed and the numbers have not."""
    rows = flamby.HEART.store(Path(__file__).parents[2] / "docs" / "reproduction").rows()
    jobs = flamby_trials.jobs("heart", "paper", 5)
    assert len(rows) == len(jobs) == 150
    assert {rows[job.name].provenance.changed_settings(job.configuration) for job in jobs} == {""}


def test_published_numbers_have_all_seeds() -> None:
    for methods in PUBLISHED.values():
        assert all(len(p.mean) == len(p.pooled) == len(SEEDS) for p in methods.values())
    published = {m: np.mean(p.pooled) for m, p in PUBLISHED["heart"].items()}
    assert round(published["FedAvg"], 1) == 74.8
    assert flamby.best_published("heart", "pooled") == "Cyclic"
    assert flamby.best_published("tcga", "mean") in ("FedYogi", "FedAdam")


# --- verdicts


def test_a_difference_must_exceed_spread_and_test_error() -> None:
    a, b = flamby.Number((80.0, 81.0, 79.0), 0.5), flamby.Number((75.0, 76.0, 74.0), 0.5)
    assert flamby.is_better(flamby.difference(a, b)) is True
    assert flamby.is_better(flamby.difference(b, a)) is False
    assert flamby.is_better(flamby.difference(a._replace(error=6.0), b)) is None
    assert flamby.is_better(flamby.difference(flamby.Number((70.0, 90.0, 80.0)), b)) is None


def test_without_a_test_error_the_interval_is_welchs() -> None:
    from scipy import stats

    a, b = flamby.Number((80.0, 81.0, 79.0, 83.0)), flamby.Number((75.0, 79.0, 74.0))
    found, theirs = flamby.difference(a, b), stats.ttest_ind(a.values, b.values, equal_var=False)
    interval = theirs.confidence_interval()
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, theirs.pvalue))


def test_first_table_says_how_far_the_means_are_apart() -> None:
    """Within two standard errors may be many points."""
    moved = curves(0.0)
    for curve in moved:
        if curve.setting["part"] == "published":
            curve["pooled"][-1] -= 0.02
    claim = flamby.judge(moved, "heart").claims[0]
    assert claim.holds is True
    assert claim.effect == "5 of 10 numbers to the digit, means up to 2.0 points apart"


def test_seeds_are_compared_with_their_own_published_numbers() -> None:
    later = [c for c in curves(0.0) if c.setting["trial"] != 0]
    assert flamby.judge(later, "heart").claims[0].effect == "8 of 8 numbers to the digit, means up to 0.2 points apart"


def test_landing_is_not_judged_where_anything_would_land() -> None:
    scattered = curves(0.0)
    for curve in scattered:
        if curve.setting["part"] == "published":
            curve["pooled"][-1] += 0.1 * (-1) ** curve.setting["trial"]
    claim = flamby.judge(scattered, "heart").claims[0]
    assert claim.holds is None
    assert claim.effect.endswith("points apart, 12 allowed")
    for curve in scattered:
        curve["pooled"][-1] -= 0.2
    assert flamby.judge(scattered, "heart").claims[0].holds is False  # far off is far off


def curves(shift: float, error: float = 0.01) -> list[Curve]:
    """FedAvg as published, and all methods chosen by loss `shift` points above the published FedYogi."""
    made = []
    for k in range(5):
        for part, method in [("published", "FedAvg"), *(("by-loss", m) for m in flamby_trials.KINDS)]:
            base = PUBLISHED["heart"]["FedAvg" if part == "published" else "FedYogi"]
            numbers = {m: (getattr(base, m)[k] + shift * (part != "published")) / 100 for m in flamby.METRICS}
            columns = numbers | {f"{m}_error": error for m in flamby.METRICS} | {"round": 15.0, "bytes_up": 1.0}
            columns |= dict.fromkeys(("eta_a", "second", "validation_loss", "validation_metric"), 0.1)
            setting = {"set": "flamby-heart", "part": part, "method": method, "trial": k}
            made.append(Curve(setting, {name: np.array([v]) for name, v in columns.items()}))
    return made


@pytest.mark.parametrize(("shift", "error", "holds"), [(8.0, 0.01, True), (8.0, 0.1, None), (-8.0, 0.01, False)])
def test_verdict_on_the_best_published(shift: float, error: float, holds: bool | None) -> None:
    found = {c.claim: c.holds for c in flamby.judge(curves(shift, error), "heart").claims}
    assert found["FedAvg with the published steps lands on the published numbers"] is True
    assert found["FedNMap-l1, tuned by loss, is better than the best published federated method"] is holds
    assert found["FedNMap-l1 is better than FedAvg, both tuned by loss"] is None


@pytest.mark.slow
@pytest.mark.ci(turn=11)
def test_a_small_figure_is_run_once_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    brca()
    monkeypatch.setattr(flamby_trials, "QUICK", ("FedAvg", "Zhang-l1"))
    monkeypatch.setattr(flamby_trials, "AS_PUBLISHED", ("FedAvg",))
    monkeypatch.setattr(flamby_trials, "LOCAL", (0.001, 0.5, 0.01))
    lines: list[str] = []
    for trials in (1, 2):
        reproduce(flamby.TCGA, "quick", trials=trials, out=tmp_path, workers=1, report=lines.append)
    assert "flamby-tcga: 5 trials, 0 already there" in lines
    assert "flamby-tcga: 10 trials, 5 already there" in lines
    assert len(list((tmp_path / "runs").glob("*_search_*.json"))) == 2
    assert (tmp_path / "flamby-tcga" / "flamby-tcga.png").stat().st_size > 10_000
    rows = (tmp_path / "flamby-tcga" / "summary.csv").read_text().splitlines()
    assert rows[0].startswith("part,method,seeds,eta_a,second,pooled_mean")
    assert len(rows) == 1 + 5
