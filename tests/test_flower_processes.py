"""Federations of real processes on loopback: the trajectory of the simulator, faults, keys, and nothing left behind."""

import json

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file

from fednmap import simulate
from fednmap.config import Config
from fednmap.experiment import prepare
from fednmap.flower.app import run_settings, write_trial
from fednmap.flower.launch import Launcher
from fednmap.flower.settings import Federation

NAMES = ("client-0", "client-1", "client-2")
PATIENCE = 900  # seconds; generous, because the machine may be busy


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A SuperLink and three nodes."""
    with Launcher(tmp_path_factory.mktemp("flower")) as launcher:
        launcher.superlink()
        for name in NAMES:
            launcher.supernode(name, launcher.folder / "states")
        yield launcher


def run(launcher, folder, **settings):
    """A run on the nodes of `launcher`, and the same in the simulator: both models and the closing numbers."""
    given = {
        "data": "digits",
        "model": "logistic",
        "clients": 3,
        "local_steps": 5,
        "eval_every": 10,
        "dtype": "float64",
    }
    config = Config.make(**(given | settings))
    federation = Federation(names=NAMES, run_folder=folder / "run", measure_stationarity=True)
    process = launcher.run(write_trial(folder / "app", run_settings(config, federation)))
    assert process.wait(PATIENCE) == 0, launcher.log("run")
    results = json.loads((folder / "run" / "results.json").read_text())
    experiment = prepare(config)
    algorithm = experiment.algorithm(config.algorithms[0])
    start = experiment.start(algorithm)
    *_, end = simulate(
        algorithm,
        experiment.problem,
        rounds=config.rounds,
        start=start,
        seed=config.seed,
        participation=config.participation,
    )
    x = load_file(folder / "run" / "models" / f"{config.algorithms[0]}-0.safetensors")
    x = x["x"] if "x" in x else torch.cat([v.flatten() for v in x.values()])
    return x, algorithm.model(end.server), results[0]


@pytest.mark.parametrize(("method", "rounds"), [("fednmap", 10), ("zhang", 3), ("scaffold", 3)])
def test_trajectory_is_the_simulators(running, tmp_path, method, rounds):
    reg = "none" if method == "scaffold" else "elastic-net:0.001,0.01"
    x, simulated, result = run(running, tmp_path, algorithms=(method,), rounds=rounds, reg=reg)
    assert float((x - simulated).abs().max()) < 1e-10
    vectors = 2 if method == "scaffold" else 1
    assert result["bytes_up"] == rounds * 3 * vectors * 640 * 8
    header = (result["wire_up"] - result["bytes_up"]) / (3 * rounds)
    assert 0 < header < 1200 + 500 * vectors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fednmap", "zhang", "scaffold"])
def test_float32_trajectory_is_the_simulators(running, tmp_path, method):
    settings = {"dtype": "float32", "algorithms": (method,), "rounds": 10, "participation": 0.67}
    settings |= {"model": "mlp:16", "reg": "none" if method == "scaffold" else "l1:0.001"}
    x, simulated, _ = run(running, tmp_path, **settings)
    assert float((x - simulated).abs().max()) < 1e-4
