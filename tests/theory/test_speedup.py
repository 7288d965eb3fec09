"""The sweep's slope, interval, saturation and verdict on numbers whose answer is known; the commands end to end."""

import json

import numpy as np
import pytest

from fednmap.cli import app
from fednmap.commands.tune import take_auto
from fednmap.report.plots import speedup as plot
from fednmap.theory.scaling import fit_speedup


def noisy(slope, spread, seed=0):
    noise = np.random.default_rng(seed).normal(size=(100, 20)) * spread
    return lambda value, trial: float(value**slope * np.exp(noise[value, trial]))


def test_slope_and_students_interval_by_hand():
    # Two values: the slopes of the trials are -1 and -2, so mean -1.5, standard error 0.5, t(0.975, 1) = 12.7062.
    found = fit_speedup(lambda value, trial: value ** -(1.0 + trial), "n", [1, 10], trials=2)
    assert found.slope == pytest.approx(-1.5)
    assert (found.low, found.high) == pytest.approx((-1.5 - 0.5 * 12.7062, -1.5 + 0.5 * 12.7062), abs=1e-4)
    assert found.verdict.startswith("undecided")


@pytest.mark.parametrize(("slope", "verdict"), [(-1.0, "linear speedup is seen"), (-0.1, "linear speedup is not seen")])
def test_verdict(slope, verdict):
    found = fit_speedup(noisy(slope, 0.05), "q", [2, 4, 8, 16], trials=5)
    assert found.low < slope < found.high
    assert found.verdict == verdict
    assert found.lines(33.0)[-1] == "theory (rounds_to, constants 1): linear up to about Q = 33"


def test_the_interval_covers_the_true_slope_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        found = fit_speedup(noisy(-0.7, 0.3, seed), "n", [2, 4, 8, 16], trials=4)
        covered += found.low <= -0.7 <= found.high
    assert 0.88 <= covered / 200 <= 1.0


def test_saturation_is_where_every_later_step_is_flat():
    floor = fit_speedup(lambda value, trial: 1 / value + 0.1, "n", [1, 2, 4, 8, 32, 128, 512], trials=2)
    assert floor.saturates_at == 32
    assert fit_speedup(lambda value, trial: 1 / value, "n", [1, 2, 4], trials=2).saturates_at is None
    bump = {1: 1.0, 2: 1.0, 4: 0.1}  # a flat step in the middle is no saturation
    assert fit_speedup(lambda value, trial: bump[value], "n", [1, 2, 4], trials=2).saturates_at is None


def test_one_trial_gives_no_interval():
    found = fit_speedup(lambda value, trial: 1 / value, "n", [1, 2], trials=1)
    assert found.verdict.startswith("undecided")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", [1, 2], 2), "over is 'x'"),
        (("n", [4, 4], 2), "two different numbers"),
        (("n", [0, 4], 2), "1 or more"),
        (("n", [1, 4], 0), "trials is 0"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_speedup(lambda value, trial: 1.0, *arguments)


def test_a_run_that_exploded_is_an_error():
    with pytest.raises(ArithmeticError, match="smaller step sizes"):
        fit_speedup(lambda value, trial: float("inf"), "n", [1, 2], trials=1)


def test_the_plot_is_drawn(tmp_path):
    plot(fit_speedup(noisy(-1, 0.1), "n", [2, 4, 8], trials=3), tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")


def run(capsys, *arguments):
    app([str(a) for a in arguments], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


SMALL = ("--model", "logistic", "--penalty", "l1:0.01", "--clients", 4, "--local-steps", 2, "--batch-size", 8, "--json")


def test_tune_command_reports_both_pairs(capsys):
    found = run(capsys, "tune", *SMALL, "--rounds", 4)
    assert found["rounds_used"] <= found["budget"] == 64
    assert 0 < found["guaranteed"]["eta_a"] < found["eta_a"]
    assert not any(p["unstable"] for p in found["pilots"] if p["eta_a"] == found["eta_a"])
    fixed = run(capsys, "tune", *SMALL, "--rounds", 2, "--gamma", 0.5)
    assert {p["gamma"] for p in fixed["pilots"]} == {0.5}


def test_train_with_auto_writes_numbers(capsys, tmp_path):
    out = tmp_path / "run"
    arguments = ("--eta-a", "auto", "--gamma", "auto", "--rounds", 4, "--out", out, "--quiet")
    trained = run(capsys, "train", *SMALL, *arguments)
    found = run(capsys, "tune", *SMALL, "--rounds", 4, "--budget", 40)  # a tenth of the rounds, at least 40
    settings = (out / "run.toml").read_text()
    assert f"eta_a = {found['eta_a']}" in settings
    assert f"gamma = {found['gamma']}" in settings
    assert trained["stationarity"] > 0


def test_auto_is_for_fednmap():
    with pytest.raises(ValueError, match="auto finds FedNMap's step sizes; for fedavg give numbers"):
        app(["train", "--eta-a", "auto", "--algorithm", "fedavg", "--penalty", "none"], standalone_mode=False)


def test_only_the_word_auto_is_taken():
    assert take_auto({"eta_a": "auto", "gamma": 0.3, "data": "digits"}) == (
        {"gamma": 0.3, "data": "digits"},
        ("eta_a",),
    )


def test_speedup_command(capsys, tmp_path):
    out = tmp_path / "sweep"
    arguments = ("--over", "q", "--values", "1,2", "--trials", 2, "--rounds", 3, "--out", out)
    found = run(capsys, "speedup", *SMALL, *arguments)
    assert found["values"] == [1, 2]
    assert found["interval"][0] <= found["slope"] <= found["interval"][1]
    assert found["predicted_linear_until"] > 0
    assert (out / "speedup.png").is_file()
    stored = json.loads((out / "speedup.json").read_text())
    assert {name: stored[name] for name in found} == found
    with pytest.raises(ValueError, match="over is 'z'"):
        app(["speedup", "--over", "z"], standalone_mode=False)
    with pytest.raises(ValueError, match="whole numbers separated by commas"):
        app(["speedup", "--values", "a,b"], standalone_mode=False)
