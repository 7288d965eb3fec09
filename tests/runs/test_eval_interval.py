"""`--eval-every auto`: measurements that take a tenth of the time."""

import pytest
from click.testing import CliRunner

from fednmap.cli import app
from fednmap.commands.tune import every
from fednmap.report.closing import cost_lines
from fednmap.runs.configuration import Config


@pytest.mark.parametrize("measurement", [0.01, 0.3, 1.0, 7.0, 40.0])
def test_a_measurement_takes_at_most_a_tenth_and_is_not_rarer_than_it_must_be(measurement):
    k = every(measurement, 1.0, 10**6)
    assert measurement <= 0.1 * (k + measurement) * (1 + 1e-9)
    assert k == 1 or measurement > 0.1 * (k / 2.5 + measurement)
    assert every(measurement, 1.0, 3) <= 3


def test_auto_becomes_a_number_of_the_run(tmp_path):
    out = tmp_path / "run"
    options = ["--rounds", "12", "--clients", "3", "--model", "logistic", "--eval-every", "auto", "--quiet"]
    ended = CliRunner().invoke(app, ["train", "--out", str(out), *options])
    assert ended.exit_code == 0, ended.output
    assert Config.read(out / "run.toml").eval_every in (1, 2, 5, 10, 12)


def test_no_more_rounds_are_tried_than_the_run_has(tmp_path):
    """Beyond them a cosine has no step left."""
    options = ["--rounds", "3", "--schedule", "cosine", "--clients", "3", "--model", "logistic", "--eval-every", "auto"]
    ended = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), "--quiet", *options])
    assert ended.exit_code == 0, ended.output


def test_a_method_that_diverges_at_once_is_still_reported_by_the_run(tmp_path):
    options = [
        "--algorithm",
        "fedavg",
        "--rounds",
        "5",
        "--clients",
        "3",
        "--eta-a",
        "1e30",
        "--model",
        "mlp:64",
        "--eval-every",
        "auto",
        "--quiet",
    ]
    ended = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), *options])
    assert ended.exit_code == 1
    assert "diverged" in str(ended.exception) + ended.output


def test_the_share_is_said():
    results = [
        {"method": "a", "seconds": 8.0, "eval_seconds": 2.0},
        {"method": "b", "seconds": 2.0, "eval_seconds": 1.0},
    ]
    assert cost_lines(results) == ["measuring: 30 % of the time"]
    assert cost_lines([{"rounds": 3}]) == []
