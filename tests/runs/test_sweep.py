"""Sweeps: a folder of ordinary runs that goes on from whatever happened to it, to the same bits."""

import json
import multiprocessing
import shutil
import signal
import time

import pytest
import torch
from small import Heard, outcome, small

from fednmap.names import InputError
from fednmap.report.plots import speedup as plot
from fednmap.report.progress import Lines
from fednmap.runs.atomic_files import locked
from fednmap.runs.configuration import Config
from fednmap.runs.execution import Reporter
from fednmap.runs.folder import RunFolder
from fednmap.runs.sweep import Sweep, varied
from fednmap.theory.scaling import fit_speedup

WORDS = [
    *("speedup", "--values", "2,4", "--trials", 2, "--rounds", 12, "--model", "logistic", "--local-steps", 2),
    *("--batch-size", 4, "--checkpoint-every", 4, "--json", "--quiet"),
]


def begun(path, over="n", **given) -> Sweep:
    given = {"rounds": 12, "trials": 2, "eval_last": 3, "clients": 4, "measure_gamma": 1.0} | given
    return Sweep.create(path, small(**given), over, (2, 4))


def ran(sweep, reporter) -> list:
    return sweep.run(sweep.folder.config(), reporter)


def results(sweep) -> list:
    return [outcome(part) for part in sweep.parts()]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"set": {"fednmap.Q": 5}}, "set keeps fednmap.Q"),
        ({"set": {"fednmap.eta_a": 0.01}}, "set keeps fednmap.eta_a"),
        ({"schedule": "cosine:0.01"}, "the last step of cosine:0.01 is the same for all Q"),
    ],
)
def test_what_would_not_be_varied_is_refused(tmp_path, given, why):
    """A sweep over q whose Q or eta_a Q is not what it says measures no speedup."""
    with pytest.raises(InputError, match=why):
        varied(small(**given), "q", 4)
    assert varied(small(**given), "n", 4).clients == 4


class Fall(Heard):
    """Ends the process's work after so many rounds in all, with nothing saved on the way out."""

    def __init__(self, rounds):
        super().__init__()
        self.left = rounds

    def on_round(self, round, totals):
        self.left -= 1
        if not self.left:
            raise SystemExit


@pytest.mark.parametrize("over", ["n", "q"])
def test_a_sweep_goes_on_to_the_same_bits(tmp_path, over):
    whole = begun(tmp_path / "whole", over)
    reached = ran(whole, Heard())
    sweep = begun(tmp_path / "parts", over)
    done = []
    for rounds in (3, 11, 7, 17):
        first_reason = Fall(rounds)
        with pytest.raises(SystemExit):
            ran(sweep, first_reason)
        done.append(first_reason.done)
    assert done == [[0], [0], [8, 0], [0, 0]]  # rounds from which the runs went on; finished ones are not run again
    first_reason = Heard()
    assert ran(Sweep.open(sweep.folder.path), first_reason) == reached
    assert first_reason.done == [4, 0]
    assert results(sweep) == results(whole)


def test_what_is_reached_is_the_mean_over_the_closing_rounds(tmp_path):
    sweep = begun(tmp_path / "sweep", eval_every=3)
    reached = ran(sweep, Heard())
    records = sweep.part(4).records("fednmap", 1)
    assert [r["round"] for r in records] == [0, 3, 6, 9, 10, 11, 12]
    assert reached[1][1] == pytest.approx(sum(r["stationarity"] for r in records[-3:]) / 3, rel=1e-12)


def test_values_share_the_effective_step_and_the_measure(tmp_path):
    sweep = begun(tmp_path / "sweep", "q", eta_a=0.3)
    ran(sweep, Heard())
    two, four = sweep.part(2).config(), sweep.part(4).config()
    assert two.eta_a * two.local_steps == pytest.approx(four.eta_a * four.local_steps)
    assert two.measure_gamma == four.measure_gamma == 1.0


class Slow(Reporter):
    def on_round(self, round, totals):
        time.sleep(0.004)


def work(path):
    torch.set_num_threads(1)
    ran(Sweep.open(path), Slow())


def test_kill_minus_nine(tmp_path):
    whole, sweep = begun(tmp_path / "whole"), begun(tmp_path / "killed")
    reached = ran(whole, Heard())
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["fednmap.runs.sweep", "pytest", "sklearn.datasets"])
    for value in (2, 4):
        process = processes.Process(target=work, args=(sweep.folder.path,))
        process.start()
        states = sweep.part(value).path / "checkpoints" / "fednmap-1"
        while process.is_alive() and not list(states.glob("round-00000003.json")):
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert sweep.state() == f"stopped, {value // 4} of 2 values done"
    first_reason = Heard()
    assert ran(sweep, first_reason) == reached
    assert len(first_reason.done) == 1
    assert first_reason.done[0] >= 4
    assert results(sweep) == results(whole)


def test_ctrl_c_and_the_end(command, monkeypatch, tmp_path):
    whole = json.loads(command(*WORDS, "--out", "whole")[1])

    def stop(self, record):
        if record["round"] == 10:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Lines, "on_record", stop)
        code, out, err = command(*WORDS[:-1], "--out", "my sweep")
    assert (code, out) == (130, "")
    assert err == "stopped and saved; continue with\n  fednmap speedup --resume 'my sweep'\n"
    code, out, err = command("show", "my sweep")
    assert code == 0
    assert "state: stopped, 0 of 2 values done" in out
    code, out, err = command("speedup", "--resume", "my sweep", "--json", "--quiet")
    assert (code, json.loads(out), err) == (0, whole, "")
    before = {p: p.read_bytes() for p in (tmp_path / "my sweep").rglob("*") if p.is_file()}
    code, out, err = command("speedup", "--resume", "my sweep", "--json", "--quiet")
    assert (code, json.loads(out), err) == (0, whole, "")
    assert {p: p.read_bytes() for p in (tmp_path / "my sweep").rglob("*") if p.is_file()} == before
    code, out, _ = command("speedup", "--resume", "my sweep", "--quiet")
    assert "n = 4     |F_nat|^2 = " in out
    assert f"slope of log |F_nat|^2 against log n: {whole['slope']:.3f}" in out


def test_looking_at_a_sweep(command, tmp_path):
    assert command(*WORDS, "--out", "runs/sweep")[0] == 0
    code, out, _ = command("show", "runs/sweep")
    assert code == 0
    assert "sweep: n=2, n=4\nstate: finished\n" in out
    assert "n=4: fednmap" in out
    assert "linear speedup is" in out or "undecided" in out
    code, out, _ = command("show", "--list")
    assert "speedup over n" in out
    assert "finished" in out
    assert "n=4" in command("show", "--list", "runs/sweep")[1]
    assert command("report", "runs/sweep", "-o", "page.html")[0] == 0
    assert command("train", "--config", "runs/sweep/run.toml", "--rounds", 2, "--out", "one", "--quiet")[0] == 0
    assert command("train", "--config", "runs/sweep/n=4/run.toml", "--out", "again", "--quiet")[0] == 0
    assert outcome(RunFolder(tmp_path / "again")) == outcome(RunFolder(tmp_path / "runs/sweep/n=4"))


def test_a_sweep_can_be_made_longer_and_wider(command, tmp_path):
    assert command(*WORDS, "--out", "sweep")[0] == 0
    whole = json.loads(command(*WORDS, "--values", "2,4,8", "--rounds", 16, "--trials", 3, "--out", "whole")[1])
    for name in ("run.toml", "speedup.toml"):
        (tmp_path / "sweep" / name).write_text((tmp_path / "whole" / name).read_text())
    assert json.loads(command("speedup", "--resume", "sweep", "--json", "--quiet")[1]) == whole


def test_a_configuration_goes_before_the_defaults_of_the_command(command, tmp_path):
    (tmp_path / "base.toml").write_text("rounds = 3\ntrials = 1\nmodel = 'logistic'\n")
    code, _, _ = command("speedup", "--config", "base.toml", "--values", "2,4", "--out", "sweep", "--quiet")
    config = Config.read(tmp_path / "sweep" / "n=2" / "run.toml")
    assert code == 0
    assert (config.rounds, config.trials, config.eval_last, config.clients) == (3, 1, 5, 2)
    words = ("--config", "base.toml", "--trials", 3, "--values", "2,4", "--out", "more", "--quiet")
    assert command("speedup", *words)[0] == 0
    assert Config.read(tmp_path / "more" / "run.toml").trials == 3  # said, though it is what the command has by itself


def test_mistakes_are_told_in_one_line(command, tmp_path):
    sweep = begun(tmp_path / "sweep")
    (tmp_path / "few.toml").write_text("eval_samples = 30\n")
    cases = [
        ((*WORDS, "--config", "few.toml", "--out", "new"), "eval_samples is 30, and a sweep compares |F_nat|^2 of all"),
        (("speedup", "--resume", "nowhere"), "nowhere is not a sweep: it has no speedup.toml"),
        (("speedup", "--resume", "sweep", "--rounds", 3), "--resume takes the settings of its folder"),
        (("speedup", "--resume", "sweep", "--over", "q"), "--resume takes the settings of its folder"),
        (("train", "--resume", "sweep"), "sweep is a sweep; continue it with fednmap speedup --resume sweep"),
        ((*WORDS, "--out", "sweep"), "sweep is not empty; choose another folder"),
        ((*WORDS, "--values", "4", "--out", "new"), "a slope needs two different numbers"),
        ((*WORDS, "--values", "2,2000", "--out", "new"), "every client needs a sample"),
        ((*WORDS, "--data", "synthetic:1,1", "--out", "new"), "brings its own 30 clients; use --partition iid"),
    ]
    for words, message in cases:
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    with locked(sweep.folder.path):
        code, _, err = command("speedup", "--resume", "sweep")
        assert "in use by another run" in err
    for text in (
        "",
        "over = 3\n",
        "over = 'n'\nvalues = 4\n",
        "over = 'n'\nvalues = ['a']\n",
        "[",
        "over = 'z'\nvalues=[1,2]",
    ):
        (sweep.folder.path / "speedup.toml").write_text(text)
        code, _, err = command("speedup", "--resume", "sweep")
        assert (code, err.count("\n")) == (2, 1)
        assert "speedup.toml was changed or cut short" in err
        assert "damaged" in command("show", "--list", tmp_path)[1]


def test_an_edited_configuration_is_refused(command, tmp_path):
    sweep = begun(tmp_path / "sweep")
    ran(sweep, Heard())
    path = sweep.folder.path / "run.toml"
    path.write_text(path.read_text().replace("eta_a = 0.2", "eta_a = 0.3"))
    code, _, err = command("speedup", "--resume", "sweep")
    assert code == 2
    assert "eta_a is 0.3 and was 0.2" in err


def test_a_run_of_the_sweep_that_diverges_is_named(command):
    words = (*WORDS, "--penalty", "none", "--eta-a", "1e30", "--model", "mlp:3:relu", "--out", "sweep")
    for again in (words, ("speedup", "--resume", "sweep", "--quiet")):
        code, out, err = command(*again)
        assert (code, out) == (1, "")
        assert "sweep/n=2: the iterate is no longer finite" in err.splitlines()[-1]


@pytest.mark.parametrize("trials", [1, 2])
def test_one_trial_and_trials_that_agree_have_an_outcome_and_a_picture(command, tmp_path, trials):
    # with exact gradients and all clients a trial differs from another by nothing
    words = (*WORDS, "--trials", trials, "--batch-size", 0, "--data", "sparse-regression", "--model", "least-squares")
    words = (*words, "--eta-a", 0.001, "--partition", "iid")
    code, out, err = command(*words, "--out", "sweep")
    assert (code, err) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (found["interval"] is None) == (trials == 1)
    assert (tmp_path / "sweep" / "speedup.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command("speedup", "--resume", "sweep", "--quiet")
    assert code == 0
    assert ("one trial, so without an interval" in out) == (trials == 1)


@pytest.mark.parametrize("spread", [0.0, 1e-17, 0.5])
def test_bars_of_trials_that_agree(tmp_path, spread):
    found = fit_speedup(lambda n, trial: (0.1 + spread * trial) / n, "n", [3, 7, 11], trials=3)
    plot(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_a_picture_that_fails_loses_nothing(command, monkeypatch, tmp_path):
    def fail(found, path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fednmap.commands.speedup.plot", fail)
        code, out, err = command(*WORDS, "--out", "sweep")
    assert code == 1
    assert "No space left on device" in err
    whole = json.loads(out)
    code, out, err = command("speedup", "--resume", "sweep", "--json", "--quiet")
    assert (code, json.loads(out), err) == (0, whole, "")
    assert (tmp_path / "sweep" / "speedup.png").exists()


def test_a_damaged_outcome_is_made_again_and_a_damaged_part_too(command, tmp_path):
    assert command(*WORDS, "--out", "sweep")[0] == 0
    path = tmp_path / "sweep" / "speedup.json"
    text = path.read_text()
    for damaged in (text.replace('"verdict": "', '"verdict": "x'), text[:40]):
        path.write_text(damaged)
        assert command("speedup", "--resume", "sweep", "--quiet")[0] == 0
        assert path.read_text() == text
    metrics = tmp_path / "sweep" / "n=4" / "metrics.csv"
    whole = metrics.read_text()
    for cut in (400, whole.index(",".join(["fednmap", "0", "12", "objective"]))):
        metrics.write_text(whole[:cut])
        code, _, err = command("speedup", "--resume", "sweep", "--quiet")
        assert (code, path.read_text()) == (0, text)
        assert "metrics.csv was changed or cut short: the measurements of fednmap-0 are not those that" in err
        assert "fednmap-0 is run again from its last intact checkpoint" in err
    shutil.rmtree(metrics.parent)
    code, out, _ = command("speedup", "--resume", "sweep", "--json", "--quiet")
    assert (code, json.loads(out)) == (0, json.loads(text))


def test_a_sweep_is_looked_at_without_looking_names_up(tmp_path):
    sweep = begun(tmp_path / "sweep")
    ran(sweep, Heard())
    path = sweep.folder.path / "run.toml"
    path.write_text(path.read_text().replace('"digits"', '"my:own"').replace('"fednmap"', '"a.b:Mine"'))
    assert Sweep.open(sweep.folder.path).state() == "stopped, 2 of 2 values done"
