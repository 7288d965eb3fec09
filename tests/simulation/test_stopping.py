"""When a run ends before its rounds are done: by a tolerance, judged without measuring where the method knows, by
patience, by time; in Python, on the command line, in worker processes and between machines."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from lasso import PHI, L
from methods import MAKE

from fednmap import Callback, InputError, Patience, TimeLimit, Tolerance, run, simulate
from fednmap import algorithms as A
from fednmap.measure import natural_residual, problem_gamma
from fednmap.problems import LeastSquares
from fednmap.regularizers import Zero
from fednmap.runs.folder import RunFolder
from fednmap.testing import heterogeneous

SIX = heterogeneous()
KNOWING = ("FedNMap", "Zhang", "FedCanon", "SCAFFOLD")


def method(Q=1, name="FedNMap"):
    return MAKE[name](PHI if A.ALGORITHMS[name.lower()].traits.composite else Zero(), L, Q)


class Residuals(Callback):
    """Hears |F_nat| where it is known for nothing."""

    wants_residual = True

    def __init__(self, ask=False):
        self.first_reason, self.ask = [], ask

    def on_residual(self, residual):
        self.first_reason.append(residual)
        return self.ask


@pytest.mark.parametrize("name", MAKE)
def test_what_a_round_tells_is_the_gradient_of_f(name):
    algorithm = MAKE[name](Zero(), L, 1)
    problem = LeastSquares([SIX.data[0]]) if algorithm.traits.central else SIX
    server, told = algorithm.init(torch.ones_like(problem.start))[0], 0
    for last in simulate(algorithm, problem, rounds=5, start=torch.ones_like(problem.start)):
        if (known := algorithm.known_gradient(server, last.server)) is not None:
            x, gradient = known
            assert torch.equal(x, algorithm.model(server))
            assert torch.allclose(gradient, problem.gradient(x), rtol=0, atol=1e-12)
            told += 1
        server = last.server
    assert told == (5 if name in (*KNOWING, "FedNewton") else 0)


def test_the_residual_is_heard_every_round_and_is_that_of_the_model_before():
    hears = Residuals()
    result = run(method(), SIX, rounds=12, every=1, stop=hears)
    due = [r["stationarity"] ** 0.5 for r in result.records[:-1]]
    assert hears.first_reason == pytest.approx(due, rel=1e-9)
    gamma = problem_gamma(SIX, PHI, SIX.start)
    start = method().model(method().init(SIX.start)[0])
    assert hears.first_reason[0] == pytest.approx(float(natural_residual(SIX, PHI, start, gamma).norm()), rel=1e-9)


NOISY = LeastSquares([SIX.data[i] for i in range(SIX.n)], batch_size=4)


@pytest.mark.parametrize(
    ("algorithm", "problem", "options"),
    [
        (method(Q=2), SIX, {}),
        (method(), NOISY, {}),
        (method(), SIX, {"participation": 0.5}),
        (method(), SIX, {"sampler": lambda n, t, rng: range(n - 1)}),
    ],
    ids=["local steps", "minibatches", "sampling", "somebody is never there"],
)
def test_nothing_is_known_where_the_round_does_not_tell(algorithm, problem, options):
    hears = Residuals()
    run(algorithm, problem, rounds=10, stop=hears, **options)
    assert hears.first_reason == []


def test_with_lost_replies_it_is_known_after_the_rounds_that_lost_none():
    hears = Residuals()
    rounds = list(simulate(method(), SIX, rounds=40, drop=0.2, seed=1))
    run(method(), SIX, rounds=40, drop=0.2, seed=1, stop=hears)
    whole = sum(len(r.counted) == SIX.n for r in rounds)
    assert 0 < whole < 40
    assert len(hears.first_reason) == whole


class Counted(LeastSquares):
    passes = 0

    def value_and_gradient(self, x):
        self.passes += 1
        return super().value_and_gradient(x)


@pytest.mark.parametrize("name", KNOWING)
def test_a_run_ends_within_a_round_of_its_tolerance_and_measures_twice(name):
    algorithm, problem = method(name=name), Counted([SIX.data[i] for i in range(SIX.n)])
    limit = 1e-3 if name == "FedCanon" else 1e-7
    first = run(algorithm, SIX, rounds=3000, every=1, measure_gamma=0.1, stop=Tolerance(limit)).final["round"]
    result = run(algorithm, problem, rounds=3000, every=10_000, measure_gamma=0.1, stop=Tolerance(limit))
    assert result.final["round"] == first + 1
    assert result.final["stationarity"] <= limit**2 * result.records[0]["stationarity"]
    assert (result.column("round"), problem.passes) == ([0, first + 1], 2)
    assert result.ended.startswith("converged: |F_nat| ")


def test_the_tolerance_is_relative_or_absolute():
    plain = run(method(), SIX, rounds=400, every=1).column("stationarity")
    first = plain[0] ** 0.5
    for stop, limit in (
        (Tolerance(1e-5), 1e-5 * first),
        (Tolerance(absolute=1e-5), 1e-5),
        (Tolerance(1e-9, absolute=1e-4), 1e-4),
        (Tolerance(1e-4, absolute=1e-9), 1e-4 * first),
    ):
        result = run(method(), SIX, rounds=400, every=1, stop=stop)
        residuals = [v**0.5 for v in result.column("stationarity")]
        assert residuals[-1] <= limit < residuals[-2]
        assert torch.equal(result.x, run(method(), SIX, rounds=int(result.final["round"])).x)


def test_a_model_that_is_good_from_the_start_is_not_trained():
    result = run(method(), SIX, rounds=50, stop=Tolerance(absolute=1e9))
    assert (result.final["round"], result.last) == (0, None)
    assert "converged" in result.ended


def test_a_method_that_is_wrong_about_its_gradient_does_not_end_the_run():
    class Boastful(A.FedNMap):
        def known_gradient(self, before, after):
            return torch.zeros_like(after.h), torch.zeros_like(after.h)

    result = run(Boastful(PHI, eta_a=0.5 / L, Q=1, gamma=1 / L), SIX, rounds=20, every=100, stop=Tolerance(1e-8))
    assert result.ended == ""
    assert len(result.records) == 21  # it is measured because it seemed good, and goes on


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tolerance(0), "above 0"),
        (lambda: Tolerance(-1e-3), "above 0"),
        (lambda: Tolerance(float("nan")), "above 0"),
        (lambda: Tolerance(1.0), "below 1"),
        (lambda: Tolerance(absolute=0), "above 0"),
        (lambda: Tolerance(), "needs a number"),
        (lambda: run(method(), SIX, rounds=1, stop=Patience(3, "los")), "Patience needs 'los'"),
        (lambda: TimeLimit(float("inf")), "above 0"),
    ],
)
def test_bad_input_is_one_line(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_in_python_a_folder_goes_on_when_the_tolerance_is_smaller(tmp_path):
    def at(tol, **more):
        return run(method(), SIX, rounds=500, folder=tmp_path / "a", stop=Tolerance(tol), **more)

    first = at(1e-3)
    again = at(1e-3, callbacks=lambda record: pytest.fail("it was finished"))
    assert (again.ended, again.final["round"]) == (first.ended, first.final["round"])
    finer = at(1e-6)
    plain = run(method(), SIX, rounds=500, stop=Tolerance(1e-6))
    assert finer.final["round"] == plain.final["round"] > first.final["round"]
    assert torch.equal(finer.x, plain.x)


CLI = ["--data", "digits", "--model", "linear", "--clients", 5, "--dtype", "float64", "--batch-size", 0, "--quiet"]
CLI += ["--local-steps", 1, "--eta-a", 0.5, "--penalty", "elastic-net:0.01,0.1", "--rounds", 400, "--eval-every", 100]


def results(path):
    return RunFolder.open(path).results()


def edited(folder, **values):
    toml = (folder / "run.toml").read_text()
    for key, value in values.items():
        toml, found = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", toml)
        assert found == 1
    (folder / "run.toml").write_text(toml)


def test_on_the_command_line_a_run_says_why_it_ended(command, tmp_path):
    code, out, _ = command("train", *CLI, "--tol", 1e-3, "--out", "a", "--json")
    closing = json.loads(out)
    assert code == 0
    assert closing["ended"].startswith("converged: |F_nat| ")
    assert closing["rounds"] < 400
    assert closing["rounds"] % 100  # known without waiting for a measurement
    for words in (["show", "a"], ["train", "--resume", "a"]):
        shown = " ".join(command(*words)[1].split())
        assert f"fednmap: {closing['rounds']} rounds, {closing['ended']}" in shown
    pytest.importorskip("plotly")
    command("report", "a", "-o", "page.html")
    assert closing["ended"] in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_on_the_command_line_an_ended_run_is_finished_until_asked_for_more(command, tmp_path):
    command("train", *CLI, "--tol", 1e-2, "--out", "a")
    (first,) = results(tmp_path / "a")
    command("train", "--resume", "a", "--quiet")
    assert results(tmp_path / "a") == [first]
    edited(tmp_path / "a", tol=1e-3)
    command("train", "--resume", "a", "--quiet")
    command("train", *CLI, "--tol", 1e-3, "--out", "b")
    (finer,), (plain,) = results(tmp_path / "a"), results(tmp_path / "b")
    assert finer["rounds"] == plain["rounds"] > first["rounds"]
    assert finer["model_sha256"] == plain["model_sha256"]
    edited(tmp_path / "a", tol=0.9)
    command("train", "--resume", "a", "--quiet")  # what was done stays done
    assert results(tmp_path / "a") == [finer]


def test_patience_and_time_on_the_command_line(command, tmp_path):
    words = [*CLI, "--eval-every", 2]
    code, out, _ = command("compare", "--algorithms", "fednmap,fedavg", *words, "--patience", 2, "--out", "a", "--json")
    assert code == 0
    for closing in json.loads(out)["results"]:
        assert "no progress: objective has not fallen in 2 measurements" in closing["ended"]
        assert closing["rounds"] < 400
    code, out, _ = command("train", *words, "--time-limit", 1e-6, "--out", "b", "--json")
    assert json.loads(out)["ended"] == "time limit of 1e-06 s reached"
    code, out, _ = command("train", *words, "--rounds", 2, "--tol", 1e-9, "--out", "c", "--json")
    assert json.loads(out)["ended"] == "all rounds done"
    assert "rounds done" not in command("show", "c")[1]
    edited(tmp_path / "c", rounds=40, tol=0.999)  # which is met by what was done
    assert json.loads(command("train", "--resume", "c", "--json")[1])["ended"].startswith("converged: ")


@pytest.mark.parametrize(
    ("words", "due"),
    [
        (["--tol", 0], "tol is 0.0; it must be a number, above 0 and below 1"),
        (["--tol", -1], "tol is -1.0"),
        (["--tol", 1], "tol is 1.0"),
        (["--tol-absolute", 0], "tol_absolute is 0.0; it must be a number, above 0"),
        (["--patience", 0], "patience is 0; it must be a whole number, at least 1"),
        (["--time-limit", -2], "time_limit is -2.0; it must be a number, above 0"),
    ],
)
def test_bad_input_on_the_command_line_is_one_line(command, words, due):
    code, _, err = command("train", *words, "--out", "x")
    assert code == 2
    assert due in err
    assert len(err.splitlines()) == 1


def test_a_sweep_has_no_early_end(command, tmp_path):
    (tmp_path / "run.toml").write_text("tol = 1e-3\n")
    code, _, err = command("speedup", "--config", "run.toml")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "a sweep compares what equal rounds reach, and tol would end some early" in err


@pytest.mark.slow
def test_worker_processes_end_together_and_go_on_together(tmp_path, command):
    def train(*words):
        line = [sys.executable, "-m", "fednmap", "train", *map(str, words), "--workers", "2"]
        subprocess.run(line, cwd=tmp_path, check=True, timeout=240)

    command("train", *CLI, "--tol", 1e-3, "--out", "alone")
    train(*CLI, "--tol", 1e-2, "--out", "two")
    assert "converged" in results(tmp_path / "two")[0]["ended"]
    edited(tmp_path / "two", tol=1e-3)
    train("--resume", "two", "--quiet")
    (two,), (alone,) = results(tmp_path / "two"), results(tmp_path / "alone")
    assert two["rounds"] == alone["rounds"]
    assert two["objective"] == pytest.approx(alone["objective"], rel=1e-12)


def test_what_could_not_be_measured_is_not_convergence():
    tolerance = Tolerance(1e-3, absolute=1e-3)
    assert tolerance.on_record({"stationarity": math.inf, "objective": 1e30}) is None
    assert tolerance.on_record({"stationarity": math.nan, "objective": 1.0}) is None
    assert tolerance.on_record({"stationarity": 4.0, "objective": 1.0}) is None
    assert tolerance.on_record({"stationarity": 1e-20, "objective": 0.5}).startswith("converged")
    patience = Patience(3)
    assert not any(patience.on_record({"objective": value}) for value in (math.nan, 8.0, 4.0, 2.0, 1.0, 0.5))


def test_earlier_records_of_another_run_are_refused():
    problem = heterogeneous()
    one, other = (A.FedNMap(PHI, eta_a=eta_a, Q=1) for eta_a in (0.1 / L, 0.01 / L))
    mine, strange = (run(method, problem, rounds=4, every=2) for method in (one, other))
    with pytest.raises(InputError, match="give the records of the same run"):
        run(one, problem, rounds=6, after=mine.last, earlier=strange.records)
    assert run(one, problem, rounds=6, after=mine.last, earlier=mine.records).final["round"] == 6
