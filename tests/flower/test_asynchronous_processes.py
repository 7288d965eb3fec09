"""An asynchronous federation of real processes on loopback: one node is 20 times as slow, and everything is killed."""

import json
import os
import signal
import time

import pytest
import torch

pytest.importorskip("flwr")

from fednmap.flower.launch import Launcher
from fednmap.flower.local_federation import write_trial
from fednmap.flower.plan import plan_from
from fednmap.flower.settings import FederationSettings, run_settings
from fednmap.flower.state_store import Store
from fednmap.runs import checkpoints
from fednmap.runs.configuration import Config
from fednmap.runs.execution import settings as settings_of
from fednmap.runs.folder import Job, RunFolder
from fednmap.testing import optimum

NAMES = tuple(f"client-{i}" for i in range(5))
SLOW = NAMES[4]
PATIENCE = 1500  # seconds; generous, because the machine may be busy

PROBLEM = '''
"""Five clients with different minimisers; the last one also has another curvature."""

import torch

from fednmap.problems import LeastSquares


def problem():
    rng = torch.Generator().manual_seed(1)
    data = []
    for i, scale in enumerate((3.0, 3.06, 3.12, 3.18, 1.0)):
        a = torch.linalg.qr(torch.randn(9, 6, generator=rng, dtype=torch.float64))[0] * scale
        data.append((a, a @ (torch.randn(6, generator=rng, dtype=torch.float64) + i)))
    return LeastSquares(data)
'''

CLIENT = """
import time

from fednmap.flower.client import client_app
from fednmap.flower.local import LocalProblem
from fednmap.flower.settings import read
from test_flower_five import problem


class Slow(LocalProblem):
    def oracle(self, client, t):
        time.sleep(10.0 if client == 4 else 0.5)
        return super().oracle(client, t)


def load(context):
    _, federation = read(context.run_config)
    return Slow(problem().alone(federation.names.index(context.node_config["client"])))


app = client_app(load)
"""

SERVER = """
from fednmap.flower.server import server_app

app = server_app()
"""


class Trial:
    """The federation in a folder, its processes, and what is on its disks."""

    def __init__(self, folder, monkeypatch, tolerance):
        self.folder, self.run, library = folder, folder / "run", folder / "library"
        library.mkdir()
        (library / "test_flower_five.py").write_text(PROBLEM)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
        given = {"data": "own", "model": "least-squares", "batch_size": 0, "penalty": "l1:0.3", "dtype": "float64"}
        given |= {"eta_a": 0.45, "local_steps": 1, "asynchronous": "buffer:4", "clients": 5, "tol_absolute": tolerance}
        self.config = Config.make(**given, rounds=2000, eval_every=10)
        federation = FederationSettings(names=NAMES, run_folder=self.run, deadline=120.0, measure_stationarity=True)
        self.app = write_trial(folder / "app", run_settings(self.config, federation))
        (self.app / "fednmap_trial" / "client_app.py").write_text(CLIENT)
        (self.app / "fednmap_trial" / "server_app.py").write_text(SERVER)
        space = {}
        exec(PROBLEM, space)
        self.problem = space["problem"]()
        self.plan = plan_from(self.config, self.problem.start)
        self.launcher = Launcher(folder / "flower")

    def start(self, resume):
        self.launcher.superlink()
        for name in NAMES:
            self.node(name)
        return self.launcher.run(self.app, resume=resume)

    def node(self, name):
        self.launcher.supernode(name, self.folder / "states")

    def status(self):
        path = self.run / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def wait_for(self, condition, what):
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}: {self.launcher.log('run')[-2000:]}"
            time.sleep(0.2)

    def more_rounds(self, count):
        due = self.status().get("done", 0) + count
        self.wait_for(lambda: self.status().get("done", 0) >= due, f"round {due}")

    def kept(self):
        folder = RunFolder.open(self.run).checkpoints(Job("fednmap", 0))
        return checkpoints.newest(folder, self.plan.algorithm, self.plan.start, settings_of(self.config))[0]

    def drift(self):
        """|h - mean h_i| / |h|, from the disks of server and clients."""
        kept = self.kept()
        run_id = json.loads((self.run / "federation.json").read_text())["run"]
        own = torch.zeros_like(kept.server.h)
        for name, ticket in kept.totals["counted"].items():
            own += Store(self.folder / "states", run_id, name)._read(ticket)["h"] / 5 if ticket else 0
        return float((kept.server.h - own).norm() / kept.server.h.norm())


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed",
    [pytest.param(False, marks=pytest.mark.ci(turn=10)), pytest.param(True, marks=pytest.mark.ci(turn=4))],
    ids=["undisturbed", "killed"],
)
def test_one_node_20_times_as_slow_and_the_answer_is_the_optimum(tmp_path, monkeypatch, killed):
    trial = Trial(tmp_path, monkeypatch, 1e-4 if killed else 1e-7)
    with trial.launcher as launcher:
        process = trial.start(resume=False)
        if killed:
            trial.more_rounds(4)
            launcher.kill(SLOW)  # in the middle of its job, most likely
            trial.node(SLOW)
            launcher.kill("client-1")
            trial.node("client-1")
            trial.more_rounds(4)
            os.kill(trial.status()["pid"], signal.SIGKILL)
            launcher.kill("run")
            assert trial.drift() < 1e-12
            process = launcher.run(trial.app, resume=True)
            trial.more_rounds(4)
            launcher.kill("superlink")
            for name in (*NAMES, "run"):
                launcher.kill(name)
            trial.wait_for(lambda: not os.path.exists(f"/proc/{trial.status()['pid']}"), "the end of the server")
            assert trial.drift() < 1e-12
            process = trial.start(resume=True)
        process.wait(PATIENCE)
        assert trial.status().get("finished"), launcher.log("run")[-3000:]
    (result,) = json.loads((trial.run / "results.json").read_text())
    x = trial.plan.algorithm.model(trial.kept().server)
    distance = float((x - optimum(trial.problem, trial.plan.phi)).norm())
    print({k: result[k] for k in ("rounds", "seconds", "staleness_max", "took_part")}, distance, trial.drift())
    assert result["ended"].startswith("converged")
    assert distance < (1e-3 if killed else 1e-6)
    assert trial.drift() < 1e-12
    counted = result["took_part"]
    assert 0 < counted[SLOW] < min(counted[name] for name in NAMES[:4])
    assert result["staleness_max"] >= 2
