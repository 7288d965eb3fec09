"""What is measured of a model."""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fednmap import run
from fednmap.algorithms import FedNMap
from fednmap.measure import hoyer, residual
from fednmap.names import InputError
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1
from fednmap.report.progress import Warnings
from fednmap.runs.configuration import Config
from fednmap.runs.execution import execute
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import RunFolder
from fednmap.simulation.callbacks import Callback, Patience, listeners

ENTRIES = st.lists(st.floats(-1, 1, width=32).map(lambda u: 0.0 if abs(u) < 1e-3 else u), min_size=1, max_size=30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(entries=ENTRIES, exponent=st.integers(-30, 30))
def test_hoyer_is_between_0_and_1_and_does_not_depend_on_the_scale(dtype, entries, exponent):
    x = torch.tensor(entries, dtype=dtype)
    at_one, scaled = float(hoyer(x)), float(hoyer(x * 10.0**exponent))
    assert 0 <= scaled <= 1
    assert abs(at_one - scaled) < 1e-4


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1.0, 1e30, 3e38])
def test_hoyer_at_its_ends(scale):
    equal, single = torch.full((1000,), scale), torch.zeros(1000)
    single[7] = -scale
    assert float(hoyer(equal)) == pytest.approx(0, abs=1e-5)
    assert float(hoyer(single)) == 1
    assert float(hoyer(torch.zeros(1000))) == 1


def test_hoyer_by_hand():
    assert float(hoyer(torch.tensor([3.0, 0.0, -4.0, 0.0]))) == pytest.approx(2 - 7 / 5)


def test_hoyer_of_what_is_not_finite_is_not_a_number():
    assert math.isnan(float(hoyer(torch.tensor([1.0, math.nan, 0.0]))))
    assert math.isnan(float(hoyer(torch.tensor([1.0, math.inf, 0.0]))))


@pytest.mark.parametrize(("size", "gamma"), [(1e4, 1e-8), (1e9, 1.0), (1.0, 1e-9)])
def test_the_residual_of_float32_is_not_lost_in_the_difference(size, gamma):
    """Far from 0 the residual of |.|_1 is gradient + sign(x), whatever gamma."""
    x, gradient = size * torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.3, 0.7, -5.0])
    found = residual(x, gradient, L1(0.1), gamma)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gradient + 0.1 * x.sign(), rtol=1e-3, atol=0)


def test_a_sample_is_measured_in_between_and_everything_at_the_end(tmp_path):
    config = Config.make(data="digits", model="logistic", clients=5, rounds=6, eval_every=2, eval_samples=200, seed=3)
    experiment = prepare(config)
    assert experiment.sample is not None
    sizes = experiment.sample.data.sizes
    assert abs(int(sizes.sum()) - 200) <= 5
    assert int(sizes.min()) >= 1
    folder = RunFolder.create(tmp_path / "few", config, "train")
    execute(config, folder, Warnings(Console(file=io.StringIO())))
    few = folder.records("fednmap", 0)
    whole = config.model_copy(update={"eval_samples": None})
    other = RunFolder.create(tmp_path / "all", whole, "train")
    execute(whole, other, Warnings(Console(file=io.StringIO())))
    every = other.records("fednmap", 0)
    assert [r["round"] for r in few] == [r["round"] for r in every] == [0, 2, 4, 6]
    assert few[-1]["loss"] == every[-1]["loss"]  # the run is the same, and all samples are measured after it
    assert few[-1]["stationarity"] == every[-1]["stationarity"]
    assert all(a["hoyer"] == b["hoyer"] for a, b in zip(few, every, strict=True))
    assert all(a["loss"] != b["loss"] for a, b in zip(few[1:-1], every[1:-1], strict=True))
    x = torch.randn(experiment.problem.dim, generator=torch.Generator().manual_seed(0))
    rows = [experiment.problem.data[i] for i in range(5)]
    kept = [experiment.sample.data[i] for i in range(5)]
    for (a, _), (b, _) in zip(rows, kept, strict=True):
        assert torch.equal(a[torch.arange(len(b)) * len(a) // len(b)], b)
    assert float(experiment.sample.loss(x)) == pytest.approx(float(experiment.problem.loss(x)), rel=0.2)


class AfterThree(Callback):
    def on_round(self, round, totals):
        return "three are enough" if round.t == 2 else None


@pytest.mark.parametrize("options", [{"stop": Patience(1, least=10.0)}, {"callbacks": AfterThree()}])
def test_a_run_that_ends_early_is_measured_on_everything_too(options):
    experiment = prepare(Config.make(data="digits", model="logistic", clients=5, eval_samples=200, seed=3))
    told, algorithm = [], FedNMap(L1(0.001), eta_a=0.1)
    options = {"callbacks": [], **options}
    options["callbacks"] = [*listeners(options["callbacks"]), *listeners(told.append)]
    end = run(algorithm, experiment.problem, rounds=20, every=2, sample=experiment.sample, **options)
    assert end.ended
    assert 0 < end.final["round"] < 20
    assert end.final["loss"] == pytest.approx(float(experiment.problem.loss(end.x)), rel=1e-6)
    assert told == end.records
    assert len({r["round"] for r in told}) == len(told)


def test_a_sample_and_a_tolerance_do_not_go_together():
    with pytest.raises(InputError, match="eval_samples is 20, and tol is judged on all samples"):
        Config.make(eval_samples=20, tol=1e-3)


def test_clients_weigh_in_a_sample_what_they_weigh_in_all(tmp_path):
    """At least one row is taken of every client, however few it has."""
    sizes = [900, *[5] * 20]
    lines = [f"{i},{(7 * k + i) % 11},{k % 3 + i}" for i, size in enumerate(sizes) for k in range(size)]
    (tmp_path / "table.csv").write_text("\n".join(["site,a,y", *lines]) + "\n")
    source = f"csv:{tmp_path / 'table.csv'},target=y,client=site,regression=true"
    config = Config.make(data=source, model="least-squares", partition="natural", weights="samples", eval_samples=50)
    experiment = prepare(config)
    assert experiment.sample is not None
    assert len(experiment.sample.data.x) < 100
    assert torch.equal(experiment.sample.weights, experiment.problem.weights)


@pytest.mark.parametrize("sample", [3, LeastSquares([(torch.ones(4, 2), torch.ones(4))])])
def test_a_sample_that_is_no_such_problem_is_refused(sample):
    problem = LeastSquares([(torch.ones(4, 3), torch.ones(4))])
    with pytest.raises(InputError, match=r"^expected sample to be a problem of 3 parameters, got [^\n]*$"):
        run(FedNMap(L1(0.1), eta_a=0.1), problem, rounds=1, sample=sample)
