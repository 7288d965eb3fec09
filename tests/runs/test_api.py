"""Runs of one's own methods, problems and models in Python, kept in run folders like those of the command."""

import json
import os
import signal
import sys

import pytest
import torch
from lasso import PHI, L
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap import Callback, Diverged, InputError, Tolerance, run, simulate
from fednmap import algorithms as A
from fednmap.core import Algorithm, FixedPoint, Traits
from fednmap.problems import LeastSquares, Network
from fednmap.regularizers import L1
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import RunFolder
from fednmap.simulation.participation import Cyclic, PoissonSampler, Trace
from fednmap.simulation.schedules import Cosine, InverseSqrt, StepDown
from fednmap.testing import heterogeneous

SIX = heterogeneous()
HOW = {"participation": 0.5, "drop": 0.2, "seed": 4}


def method(eta=0.02, Q=3):
    return A.FedNMap(PHI, eta_a=eta, Q=Q)


def kept(folder, rounds=60, **more):
    return run(method(), SIX, rounds=rounds, folder=folder, **HOW | more)


def test_a_folder_changes_nothing(tmp_path):
    plain, found = run(method(), SIX, rounds=60, **HOW), kept(tmp_path / "a")
    assert torch.equal(plain.x, found.x)
    assert [r["objective"] for r in plain.records] == [r["objective"] for r in found.records]
    assert (found.measure_gamma, found.totals["bytes_up"]) == (plain.measure_gamma, plain.totals["bytes_up"])
    again = kept(tmp_path / "a")
    assert torch.equal(again.x, plain.x)
    assert again.records == found.records
    (closing,) = RunFolder.open(tmp_path / "a").results()
    assert (closing["rounds"], closing["measure_gamma"]) == (60, found.measure_gamma)


class Broken(Exception):
    pass


@pytest.mark.parametrize("at", [10, 30, 50])
def test_what_broke_off_goes_on_to_the_same_bits(tmp_path, at):
    def break_off(record):
        if record["round"] >= at:
            raise Broken

    with pytest.raises(Broken):
        kept(tmp_path / "b", callbacks=break_off, checkpoint_every=7)
    found = kept(tmp_path / "b", checkpoint_every=7)
    plain = run(method(), SIX, rounds=60, **HOW)
    assert torch.equal(found.x, plain.x)
    assert found.column("objective") == plain.column("objective")


def test_ctrl_c_saves(tmp_path):
    def interrupt(record):
        if record["round"] == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="stopped and saved"):
        kept(tmp_path / "c", callbacks=interrupt)
    assert len(list((tmp_path / "c" / "checkpoints" / "fednmap-0").glob("*.json"))) == 1
    assert torch.equal(kept(tmp_path / "c").x, run(method(), SIX, rounds=60, **HOW).x)


def test_more_rounds_go_on_and_fewer_are_refused(tmp_path):
    kept(tmp_path / "d", rounds=30)
    assert torch.equal(kept(tmp_path / "d", rounds=50).x, run(method(), SIX, rounds=50, **HOW).x)
    assert RunFolder.open(tmp_path / "d").about().rounds == 50
    with pytest.raises(
        InputError, match=r"expected at least the 50 rounds that fednmap in .* has run, got rounds = 20"
    ):
        kept(tmp_path / "d", rounds=20)


def test_a_finished_run_that_suffices_says_why_it_does_not_go_on(tmp_path):
    kept(tmp_path / "g", rounds=60)
    again = kept(tmp_path / "g", rounds=100, stop=Tolerance(0.9))
    assert again.final["round"] == 60
    assert again.ended.startswith("converged: ")


def test_another_run_is_refused(tmp_path):
    kept(tmp_path / "e")
    for change in ({"seed": 5}, {"participation": 0.6}, {"start": torch.ones_like(SIX.start)}, {"every": 5}):
        with pytest.raises(InputError, match="holds another run"):
            kept(tmp_path / "e", **change)
    with pytest.raises(InputError, match="holds another run: algorithm"):
        run(method(eta=0.01), SIX, rounds=60, folder=tmp_path / "e", **HOW)
    others = LeastSquares([(a, -b) for a, b in SIX.data])  # with the same Hessian, and so the same yardstick
    with pytest.raises(InputError, match="the data of"):
        run(method(), others, rounds=60, folder=tmp_path / "e", **HOW)
    *_, third = simulate(method(), SIX, rounds=3, **HOW)
    for option in ({"after": third}, {"store": tmp_path / "store"}, {"history": False}, {"earlier": [{"round": 1.0}]}):
        with pytest.raises(InputError, match="do not go together"):
            kept(tmp_path / "e", **option)


def test_the_old_name_of_the_measuring_loop_still_works():
    with pytest.warns(DeprecationWarning, match=r"is now fednmap\.run"):
        from fednmap.simulation import run as old
    assert torch.equal(old(method(), SIX, rounds=5, **HOW).x, run(method(), SIX, rounds=5, **HOW).x)


def test_a_run_that_ended_early_is_finished_until_asked_for_more(tmp_path):
    first = run(method(), SIX, rounds=2000, folder=tmp_path / "f", stop=Tolerance(1e-4))
    assert "converged" in first.ended
    again = run(method(), SIX, rounds=2000, folder=tmp_path / "f", stop=Tolerance(1e-4))
    assert (again.ended, again.final["round"]) == (first.ended, first.final["round"])
    rounds = int(first.final["round"]) + 40
    more = run(method(), SIX, rounds=rounds, folder=tmp_path / "f")
    assert torch.equal(more.x, run(method(), SIX, rounds=rounds).x)


class Counting(Callback):
    def __init__(self, rounds):
        self.left = rounds

    def on_round(self, round, totals):
        self.left -= 1
        return self.left == 0


ENDING = {"Counting": lambda: Counting(20), "enough": lambda: enough(2), "<lambda>": lambda: lambda r: r["round"] > 19}


def enough(measurements):
    def enough(record):
        nonlocal measurements
        measurements -= record["round"] > 0
        return "seen enough" if measurements == 0 else None

    return enough


@pytest.mark.parametrize("name", ENDING)
def test_a_run_that_a_callback_ended_is_finished_until_asked_for_more(tmp_path, name):
    records = []

    def again(**more):
        return kept(tmp_path / "h", callbacks=[records.append, ENDING[name]()], **more)

    first, first_reason = again(), len(records)
    assert (first.final["round"], first.ended_by) == (20, name)
    second = again()
    assert (second.ended, second.ended_by, second.final["round"]) == (first.ended, name, 20)
    assert torch.equal(second.x, first.x)
    assert len(records) == first_reason  # nothing was run
    whole = kept(tmp_path / "h")  # nobody ends it now
    assert torch.equal(whole.x, run(method(), SIX, rounds=60, **HOW).x)
    assert (whole.ended, whole.ended_by) == ("", "")


def test_more_rounds_than_a_callback_ended_go_on(tmp_path):
    kept(tmp_path / "i", callbacks=Counting(20))
    assert kept(tmp_path / "i", rounds=70, callbacks=Counting(20)).final["round"] == 40
    assert kept(tmp_path / "i", rounds=70, callbacks=Counting(20)).final["round"] == 40


def test_a_run_that_diverged_says_so_again(tmp_path):
    for _ in range(2):
        with pytest.raises(Diverged) as caught:
            run(method(eta=1e3), SIX, rounds=500, folder=tmp_path / "g")
        assert caught.value.result.records[0]["round"] == 0


class Own(Algorithm):
    """Gradient descent of one's own, neither a dataclass nor known by a name."""

    traits = Traits(composite=True, up=1, down=1, prox="0 + 1", fixed_point=FixedPoint.EXACT, rate="-")

    def __init__(self, phi, step):
        self.phi, self.step = phi, step

    class Server(A.FedAvg.Server):
        pass

    class Client(A.FedAvg.Client):
        pass

    class Up(A.FedAvg.Up):
        pass

    def init(self, start):
        return self.Server(start), self.Client()

    def local(self, down, client, g):
        return self.Up(g(down.x, 0)), client

    def aggregate(self, server, up, share):
        return self.Server(self.phi.prox(server.x - self.step * up.change, self.step))

    def model(self, server):
        return server.x


def test_a_method_and_a_network_of_ones_own(tmp_path, command):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(9, 3), torch.randint(2, (9,))) for _ in range(3)]
    problem = Network(module, nn.functional.cross_entropy, data, batch_size=None)
    result = run(Own(L1(0.001), 0.5), problem, rounds=30, folder=tmp_path / "own", metrics={"norm": lambda x: x.norm()})
    assert result.final["objective"] < result.records[0]["objective"]
    assert torch.equal(torch.cat([p.flatten() for p in result.module().parameters()]), result.x)
    code, out, _ = command("show", str(tmp_path / "own"))
    assert code == 0
    assert "norm" in out
    assert "gamma =" in out
    code, _, err = command("train", "--resume", str(tmp_path / "own"))
    assert (code, err.count("\n")) == (2, 1)
    code, out, _ = command("export", str(tmp_path / "own"), "--json")
    assert (code, json.loads(out)["parameters"]) == (0, problem.dim)


def test_a_folder_of_the_command_is_not_taken(tmp_path, command):
    command("train", "--rounds", "1", "--clients", "2", "--model", "logistic", "--quiet", "--out", str(tmp_path / "x"))
    with pytest.raises(InputError, match="command line"):
        kept(tmp_path / "x")


def test_two_runs_do_not_share_a_folder(tmp_path):
    def second(record):
        with pytest.raises(InputError, match="in use"):
            kept(tmp_path / "h", rounds=3, every=5)

    kept(tmp_path / "h", rounds=3, every=5, callbacks=second)


def test_the_lasso_is_solved_in_a_folder(tmp_path):
    result = run(A.FedNMap(PHI, eta_a=0.5 / (3 * L), Q=3), LeastSquares(SIX.data), rounds=1500, folder=tmp_path / "i")
    assert result.final["stationarity"] < 1e-18


SMALL = [
    "--data",
    "digits",
    "--model",
    "mlp:4",
    "--clients",
    "6",
    "--local-steps",
    "2",
    "--eta-a",
    "0.1",
    "--eval-every",
    "3",
    "--seed",
    "2",
]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--schedule sqrt", {"eta_a": InverseSqrt(0.1)}),
        ("--schedule steps:0.5,2", {"eta_a": StepDown(0.1, 0.5, 2)}),
        ("--schedule cosine:0.01", {"eta_a": Cosine(0.1, 6, 0.01)}),
        ("--sampler cyclic --participation 0.34", {"sampler": Cyclic(0.34)}),
        (
            "--sampler poisson --participation 0.5 --schedule sqrt",
            {"sampler": PoissonSampler(0.5), "eta_a": InverseSqrt(0.1)},
        ),
        ("--sampler trace:who.txt", {"sampler": Trace([[0, 3], [], [5]])}),
    ],
)
def test_samplers_and_schedules_of_the_command_are_those_of_python(command, tmp_path, words, options):
    (tmp_path / "who.txt").write_text("0 3\n\n5\n")
    code, *_ = command("train", *SMALL, *words.split(), "--rounds", 6, "--out", "run")
    assert code == 0
    experiment = prepare(RunFolder.open(tmp_path / "run").config())
    algorithm = experiment.algorithm("fednmap")
    start = experiment.start(algorithm)
    found = run(algorithm, experiment.problem, rounds=6, every=3, start=start, seed=2, **options)
    kept_records = RunFolder.open(tmp_path / "run").records("fednmap", 0)
    assert [r["loss"] for r in kept_records] == found.column("loss")
    assert found.column("loss") != run(algorithm, experiment.problem, rounds=6, every=3, start=start, seed=2).column(
        "loss"
    )


def test_a_schedule_that_a_method_cannot_follow_is_refused_before_anything_runs(command, tmp_path):
    code, _, err = command(
        "compare", *SMALL, "--rounds", 3, "--algorithms", "fednmap,fast-fedda", "--schedule", "sqrt", "--out", "run"
    )
    assert code == 2
    assert "FastFedDA" in err
    assert "cannot follow a schedule" in err
    assert not (tmp_path / "run").exists()


def test_a_folder_tells_the_round_after_which_a_run_diverged(tmp_path):
    def after(**options):
        with pytest.raises(Diverged) as caught:
            run(A.FedAvg(eta_a=3.0, Q=1), heterogeneous(), rounds=600, every=100, **options)
        return caught.value.t, str(caught.value)

    alone = after()
    assert alone[0] % 100
    assert [after(folder=tmp_path / "run") for _ in range(2)] == [alone, alone]


def test_a_module_in_bfloat16_has_a_folder_too(tmp_path):
    rng = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 3, generator=rng).bfloat16(), torch.randint(0, 2, (8,), generator=rng)) for _ in range(3)]

    def problem():
        torch.manual_seed(0)
        return Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16(), cross_entropy, data)

    plain = run(method(), problem(), rounds=20, **HOW)
    run(method(), problem(), rounds=9, folder=tmp_path / "a", checkpoint_every=4, **HOW)
    found = run(method(), problem(), rounds=20, folder=tmp_path / "a", checkpoint_every=4, **HOW)
    assert found.x.dtype == torch.float32
    assert torch.equal(found.x, plain.x)
    again = run(method(), problem(), rounds=20, folder=tmp_path / "a", checkpoint_every=4, **HOW)
    assert torch.equal(again.x, plain.x)
    assert next(found.module().parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("folder", [None, "run"])
def test_a_run_whose_psi_ends_above_its_start_warns(tmp_path, folder, command):
    """psi grows by a step beyond 2 over the smoothness of f, and in few rounds nothing overflows."""
    where = folder and tmp_path / folder
    with pytest.warns(UserWarning, match="psi ended at .*, above its start of .*; use a smaller eta_a"):
        found = run(method(eta=20 / L, Q=1), SIX, rounds=6, folder=where)
    assert found.final["objective"] > found.records[0]["objective"]
    first, last = (f"{record['objective']:.4g}" for record in (found.records[0], found.final))
    assert found.warning.startswith(f"psi ended at {last}, above its start of {first}")
    if where:
        (closing,) = RunFolder.open(where).results()
        assert closing["warning"] == found.warning
        assert "psi ended at" in command("show", where)[1]
    assert run(method(), SIX, rounds=6).warning == ""


def test_the_start_is_known_to_a_run_that_goes_on_and_to_one_measured_on_fewer_rows():
    large = method(eta=20 / L, Q=1)
    *_, fourth = simulate(large, SIX, rounds=4)
    few = LeastSquares([(a[:1], b[:1]) for a, b in SIX.data])
    said = set()
    for options in ({}, {"after": fourth}, {"sample": few}):
        with pytest.warns(UserWarning, match="psi ended at"):
            said.add(run(large, SIX, rounds=6, **options).warning)
    assert len(said) == 1


def test_the_command_calls_no_run_learnt_whose_psi_rose(command, tmp_path):
    words = ("train", "--data", "sparse-regression", "--eta-a", 3e-2, "--rounds", 3, "--quiet", "--out")
    code, out, err = command(*words, tmp_path / "a")
    assert code == 0
    assert "fednmap (psi rose)" in out
    assert "result:" not in out
    assert "warning: fednmap: psi ended at" in err
    code, out, _ = command(*words, tmp_path / "b", "--json")
    assert "above its start" in json.loads(out)["warning"]


def test_what_was_made_in_python_is_shown_as_such(tmp_path, command, monkeypatch):
    """Neither a command that nobody typed, nor clients that there are not."""
    programs = {"train.py": "python train.py --fast", "/usr/bin/pytest": None, "flwr-serverapp": None}
    for program, made_by in programs.items():
        where = tmp_path / program.rpartition("/")[2]
        monkeypatch.setattr(sys, "argv", [program, "--fast"])
        kept(where, rounds=3)
        _, out, _ = command("show", where)
        assert (f"made by: {made_by}" in out) if made_by else ("made by" not in out)
    code, _, err = command("export", where, "--format", "onnx")
    assert code == 2
    assert "was made in Python and holds the parameters alone; use fednmap.models.export.write(" in err
    assert "clients" not in err
