"""`fednmap train --async`: settings, resume, the picture, refusals in one line."""

import json

import pytest
from small import SMALL

from fednmap import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare

TIMED = ["--async", "window:2", "--delays", "pareto:1.2", "--slowdown", "lognormal:1"]
QUICK = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_train_reports_virtual_time_and_resumes_to_the_same_bits(command, tmp_path):
    options = [*QUICK, *TIMED, "--json", "--quiet"]
    code, out, err = command("train", *options, "--rounds", "12", "--out", "whole")
    assert (code, err) == (0, "")
    whole = json.loads(out)
    assert whole["virtual_time"] > 12
    assert whole["staleness_max"] >= 1
    assert whole["counted_least"] < whole["counted_most"] <= 12
    assert "virtual_time" in (tmp_path / "whole" / "metrics.csv").read_text()
    assert (tmp_path / "whole" / "plot.png").stat().st_size > 0
    assert command("train", *options, "--rounds", "5", "--checkpoint-every", "2", "--out", "part")[0] == 0
    settings = tmp_path / "part" / "run.toml"
    settings.write_text(settings.read_text().replace("rounds = 5\n", "rounds = 12\n"))
    code, out, err = command("train", "--resume", "part", "--json", "--quiet")
    assert code == 0
    part = json.loads(out)
    assert {k: part[k] for k in ("objective", "virtual_time", "counted_least", "bytes_up")} == {
        k: whole[k] for k in ("objective", "virtual_time", "counted_least", "bytes_up")
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"asynchronous": "window"},
            "asynchronous: expected all, buffer:K, window:TIME or deadline:TIME, got",
        ),
        ({"asynchronous": "all", "delays": "paretto"}, "delays: unknown delays 'paretto'; did you mean 'pareto'"),
        ({"asynchronous": "all", "delays": "lognormal:1000"}, r"delays: expected .*lognormal\[:SIGMA\] \(up to 10\)"),
        ({"asynchronous": "all", "delays": "pareto:1e-9"}, r"delays: expected .*pareto\[:EXPONENT\] \(above 0.1\)"),
        ({"asynchronous": "all", "slowdown": "lognormal:1e300"}, "slowdown: expected a slowdown"),
        ({"asynchronous": "all", "slowdown": "x"}, "slowdown: expected a slowdown"),
        ({"delays": "pareto:1.2"}, "delays is pareto:1.2: only for asynchronous runs"),
        ({"staleness": 3}, "staleness is 3: only for asynchronous runs"),
        ({"asynchronous": "all", "secagg": True}, "secure aggregation, privacy and robust rules"),
        ({"asynchronous": "all", "dp_clip": 1.0}, "secure aggregation, privacy and robust rules"),
        ({"asynchronous": "all", "aggregate": "median"}, "secure aggregation, privacy and robust rules"),
        ({"asynchronous": "all", "sampler": "cyclic"}, "leave sampler out"),
        ({"asynchronous": "all", "topology": "ring", "algorithms": ("norm-ed",)}, "leave one out"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(InputError, match=words) as error:
        Config.make(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithms": ("scaffold",), "penalty": "none"}, "the uplink of SCAFFOLD does not determine"),
        ({"algorithms": ("fednmap",), "memory": 5}, "FedNMapMemory"),
    ],
)
def test_methods_that_do_not_go_with_it(settings, words):
    with pytest.raises(InputError, match=words):
        prepare(Config.make(asynchronous="all", model="logistic", clients=4, batch_size=0, **settings))


def test_another_trace_is_another_run(tmp_path):
    trace = tmp_path / "trace.txt"
    digests = []
    for text in ("1 2 3", "1 2 4"):
        trace.write_text(text)
        config = Config.make(asynchronous="window:2", delays=f"trace:{trace}", model="logistic", clients=4)
        digests.append(prepare(config).digest)
    assert digests[0] != digests[1]


def test_workers_are_refused(command, tmp_path):
    code, _, err = command("train", *QUICK, *TIMED, "--workers", "2")
    assert (code, err) == (
        2,
        "fednmap: --async has one virtual clock in one process; leave --workers and torchrun out\n",
    )
    assert not (tmp_path / "runs").exists()
