"""Federations of real processes on loopback: the trajectory of the simulator, faults, keys, and nothing left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from safetensors.torch import load_file

from fednmap import simulate
from fednmap.flower.identity import make
from fednmap.flower.launch import GUARDED, Launcher, free_port
from fednmap.flower.local_federation import write_trial
from fednmap.flower.new import write
from fednmap.flower.plan import plan_from
from fednmap.flower.settings import FederationSettings, run_settings
from fednmap.flower.state_store import Store
from fednmap.runs import checkpoints
from fednmap.runs.configuration import Config
from fednmap.runs.execution import settings as settings_of
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import Job, RunFolder
from fednmap.testing import optimum

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
    federation = FederationSettings(names=NAMES, run_folder=folder / "run", measure_stationarity=True)
    process = launcher.run(write_trial(folder / "app", run_settings(config, federation)))
    process.wait(PATIENCE)
    assert status(folder / "run").get("finished"), launcher.log("run")
    results = json.loads((folder / "run" / "results.json").read_text())
    experiment = prepare(config)
    algorithm = experiment.algorithm(config.algorithms[0])
    start = experiment.start(algorithm)
    *_, end = simulate(
        algorithm,
        experiment.problem,
        rounds=results[0]["rounds"],
        start=start,
        seed=config.seed,
        participation=config.participation,
    )
    x = load_file(folder / "run" / "models" / f"{config.algorithms[0]}-0.safetensors")
    x = x["x"] if "x" in x else experiment.problem.flat(x)  # a file has the parameters in the order of their names
    return x, algorithm.model(end.server), results[0]


OTHERS = [
    pytest.param(method, rounds, marks=[pytest.mark.slow, pytest.mark.ci(turn=turn)])
    for turn, method, rounds in ((0, "fednmap", 10), (3, "zhang", 3), (4, "scaffold", 3))
]


@pytest.mark.parametrize(("method", "rounds"), [("fednmap", 3), *OTHERS])
def test_trajectory_is_the_simulators(running, tmp_path, method, rounds):
    reg = "none" if method == "scaffold" else "elastic-net:0.001,0.01"
    x, simulated, result = run(running, tmp_path, algorithms=(method,), rounds=rounds, penalty=reg)
    assert float((x - simulated).abs().max()) < 1e-10
    vectors = 2 if method == "scaffold" else 1
    assert result["bytes_up"] == rounds * 3 * vectors * 640 * 8
    down = 3 * 2 * rounds if method == "scaffold" else 3 * (rounds + 1)  # two vectors once, then the mean uplink
    assert result["bytes_down"] == down * 640 * 8
    assert (result["wire_down"] - result["bytes_down"]) / (
        3 * rounds
    ) < 2600  # equal arrays, as at the start, travel once
    header = (result["wire_up"] - result["bytes_up"]) / (3 * rounds)
    assert 0 < header < 1200 + 500 * vectors


@pytest.mark.slow
@pytest.mark.ci(turn=0)
def test_with_memory_it_ends_when_it_is_done_where_the_simulator_is(running, tmp_path):
    """Exact gradients and one local step: the server knows |F_nat| after every round, and seldom asks for it."""
    settings = {"local_steps": 1, "batch_size": 0, "eta_a": 2.0, "gamma": 20.0, "penalty": "l1:0.01"}
    settings |= {"set": {"fednmap.memory": 8}, "rounds": 60, "eval_every": 60, "tol": 3e-2}
    x, simulated, result = run(running, tmp_path, **settings)
    assert result["ended"].startswith("converged: |F_nat| ")
    assert result["rounds"] < 60
    assert float((x - simulated).abs().max()) < 1e-8
    assert result["bytes_down"] == 2 * result["bytes_up"] == 2 * 3 * result["rounds"] * 640 * 8
    first, *others = RunFolder.open(tmp_path / "run").records("fednmap", 0)
    limit = 3e-2**2 * first["stationarity"]
    assert others[-1]["round"] == result["rounds"]  # a model that passes is followed by one that may not
    assert [r["stationarity"] <= limit for r in others] == [False] * (len(others) - 1) + [True]
    assert len(others) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.ci(turn=k)) for k, m in enumerate(("fednmap", "zhang", "scaffold"), start=1)],
)
def test_float32_trajectory_is_the_simulators(running, tmp_path, method):
    settings = {"dtype": "float32", "algorithms": (method,), "rounds": 10, "participation": 0.67}
    settings |= {"model": "mlp:16", "penalty": "none" if method == "scaffold" else "l1:0.001"}
    x, simulated, _ = run(running, tmp_path, **settings)
    assert float((x - simulated).abs().max()) < 1e-4


CLIENT = '''
import time
from pathlib import Path

import torch
from flwr.app import Context

from fednmap.flower.client import client_app
from fednmap.flower.local import LocalProblem
from fednmap.flower.settings import read
from test_flower_quadratic import problem


class Faulty(LocalProblem):
    """From round 1 on client 1 hangs, client 2 sends NaN and client 3 is late, each once; client 0 waits for them."""

    def oracle(self, client, t):
        g, flag = super().oracle(client, t), Path(FLAGS) / str(client)
        if t == 0 or flag.exists():
            return g
        if client == 0:
            wait_for(lambda: all((Path(FLAGS) / i).exists() for i in "123"))
        flag.touch()
        if client == 1:
            time.sleep(600)
        if client == 2:
            return lambda x, q: g(x, q) * torch.nan
        if client == 3:
            wait_for(lambda: "client-3: no reply within" in Path(SAID).read_text())
        return g


def wait_for(condition):
    while not condition():
        time.sleep(0.1)


def load(context: Context) -> LocalProblem:
    _, federation = read(context.run_config)
    return Faulty(problem().alone(federation.names.index(context.node_config["client"])))


app = client_app(load)
'''

SERVER = """
from fednmap.flower.server import server_app

app = server_app()
"""

QUADRATIC = '''
"""Four clients with nearly equal curvature and very different minimisers."""

import torch

from fednmap.problems import LeastSquares


def problem():
    rng = torch.Generator().manual_seed(1)
    data = []
    for i in range(4):
        a = torch.linalg.qr(torch.randn(9, 6, generator=rng, dtype=torch.float64))[0] * 3 * (1 + 0.02 * i)
        data.append((a, a @ (torch.randn(6, generator=rng, dtype=torch.float64) + i)))
    return LeastSquares(data)
'''


def flwr(launcher, *arguments):
    """What Flower's own command prints."""
    environment = launcher._environment("cli")
    done = subprocess.run(["flwr", *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def tls(keys):
    """Options of a SuperLink with the certificates that `make` has written."""
    files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
    return [*(word for option, name in files.items() for word in (option, str(keys / name))), "--enable-supernode-auth"]


def wait_for(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.2)


def status(folder):
    path = folder / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.slow
@pytest.mark.ci(turn=2)
def test_after_all_faults_the_optimum_is_reached_and_the_states_agree(tmp_path, monkeypatch):
    """A node killed in the middle of a round and restarted, one that sends NaN, one that is late, the server killed."""
    names = ("client-0", "client-1", "client-2", "client-3")
    folder, flags, library = tmp_path / "run", tmp_path / "flags", tmp_path / "library"
    flags.mkdir()
    library.mkdir()
    (library / "test_flower_quadratic.py").write_text(QUADRATIC)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")]))
    settings = {"data": "own", "model": "least-squares", "batch_size": 0, "penalty": "l1:0.3", "dtype": "float64"}
    settings |= {"eta_a": 0.9, "local_steps": 1, "gamma": 1.0, "clients": 4, "rounds": 12, "eval_every": 12}
    config = Config.make(**settings)
    federation = FederationSettings(names=names, run_folder=folder, deadline=10.0, min_clients=1, attempts=60)
    app = write_trial(tmp_path / "app", run_settings(config, federation))
    client = CLIENT.replace("FLAGS", repr(str(flags))).replace("SAID", repr(str(folder / "server.log")))
    (app / "fednmap_trial" / "client_app.py").write_text(client)
    (app / "fednmap_trial" / "server_app.py").write_text(SERVER)
    with Launcher(tmp_path / "flower") as launcher:
        launcher.superlink()
        for name in names:
            launcher.supernode(name, tmp_path / "states")
        launcher.run(app)
        wait_for((flags / "1").exists, "client-1 to be in the middle of its round")
        launcher.kill("client-1")
        launcher.supernode("client-1", tmp_path / "states")
        wait_for(lambda: status(folder).get("done", 0) >= 2, "round 2")
        os.kill(status(folder)["pid"], signal.SIGKILL)
        launcher.kill("run")
        launcher.run(app, resume=True, deadline=300.0, min_clients=4).wait(PATIENCE)
        assert status(folder).get("finished"), launcher.log("run")
    said = (folder / "server.log").read_text()
    assert "client-2: reply left out: y holds NaN or infinity" in said
    assert "client-3: no reply within 10 s" in said
    # Flower tells of a killed node by an error, or not at all, by when it is asked
    assert "client-1: no reply within 10 s" in said or "client-1: error" in said
    assert "continuing after round" in said
    assert_optimal(tmp_path, config, names)


def assert_optimal(tmp_path, config, names):
    """The model is the optimum, and the server's h the mean of what the clients have on their disks."""
    space = {}
    exec(QUADRATIC, space)
    problem = space["problem"]()
    plan = plan_from(config, problem.start)
    algorithm, folder = plan.algorithm, RunFolder.open(tmp_path / "run")
    kept, _ = checkpoints.newest(folder.checkpoints(Job("fednmap", 0)), algorithm, plan.start, settings_of(config))
    counted = kept.totals["counted"]
    assert float((algorithm.model(kept.server) - optimum(problem, plan.phi)).norm()) < 1e-8
    assert all(ticket.startswith(f"{config.rounds - 1:08d}-") for ticket in counted.values())
    run_id = json.loads((folder.path / "federation.json").read_text())["run"]
    initial = algorithm.init(plan.start)[1]
    states = [Store(tmp_path / "states", run_id, n).current(counted[n], initial).h for n in names]
    assert float((kept.server.h - torch.stack(states).mean(0)).norm()) < 1e-12


@pytest.mark.slow
@pytest.mark.ci(turn=1)
def test_over_tls_registered_nodes_work_and_an_unregistered_key_is_refused(tmp_path):
    make(tmp_path / "keys", ["client-0", "client-1", "stranger"], "127.0.0.1")
    keys = tmp_path / "keys"
    config = Config.make(data="digits", model="logistic", clients=2, rounds=2, eval_every=2, dtype="float64")
    federation = FederationSettings(names=("client-0", "client-1"), run_folder=tmp_path / "run")
    with Launcher(tmp_path / "flower", authority=keys / "ca.crt") as launcher:
        launcher.superlink(*tls(keys))
        for name in ("client-0", "client-1"):
            flwr(launcher, "supernode", "register", str(keys / f"{name}.pub"), "fednmap")
            launcher.supernode(name, tmp_path / "states", keys / name)
        launcher.supernode("stranger", tmp_path / "states", keys / "stranger")
        process = launcher.run(write_trial(tmp_path / "app", run_settings(config, federation)))
        process.wait(PATIENCE)
        assert status(tmp_path / "run").get("finished"), launcher.log("run")
        assert launcher.processes["stranger"].wait(60) != 0
        listed = flwr(launcher, "supernode", "list", "fednmap", "--format", "json")
        assert "No SuperNode found with the given public key" in launcher.log("superlink")
        assert "Failed to initialize the connection" in launcher.log("stranger")
    assert listed.count('"online"') == 2
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results[0]["rounds"] == 2
    for secret in ("ca.key", "server.key", "client-0"):
        assert (keys / secret).stat().st_mode & 0o077 == 0


def test_everything_ends_even_if_the_launcher_is_killed(tmp_path):
    script = f"""
import time
from pathlib import Path
from fednmap.flower.launch import Launcher
with Launcher(Path({str(tmp_path)!r})) as launcher:
    for name in ("one", "two"):
        print(launcher.start(name, ["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert living_groups() >= set(pids)
        parent.kill()
    wait_for(lambda: not living_groups() & set(pids), "the end of all")


def living_groups():
    """Process groups with a process that is no zombie."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            found |= {int(group)} if state != "Z" else set()
    return found


@pytest.mark.slow
@pytest.mark.ci(turn=4)
def test_the_template_runs_as_it_is(running, tmp_path):
    """Three made-up clients; the server holds no data and finds the three features that matter."""
    write(tmp_path / "my-federation")
    process = running.run(tmp_path / "my-federation", run_folder=str(tmp_path / "run"), rounds=5, penalty="l1:0.05")
    process.wait(PATIENCE)
    assert status(tmp_path / "run").get("finished"), running.log("run")
    x = load_file(tmp_path / "run" / "models" / "fednmap-0.safetensors")["x"]
    assert x.nonzero().squeeze(1).tolist() == [0, 1, 2]
    clients = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    accuracies = [c["accuracy"] for c in clients if c["round"] == 5]
    assert min(accuracies) > 0.8
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results[0]["test_accuracy"] == pytest.approx(sum(accuracies) / 3)


@pytest.mark.slow
@pytest.mark.ci(turn=3)
@pytest.mark.parametrize("template", ["plain", "tables"])
def test_up_runs_an_app_of_ones_own_in_one_command(tmp_path, template):
    app, loads = tmp_path / "my-federation", tmp_path / "loads"
    write(app, template)
    module = app / "my_federation" / "client_app.py"
    count = f"    print(context.node_config['client'], file=open({str(loads)!r}, 'a'))\n"
    head, line, rest = module.read_text().partition('    """\n' if template == "plain" else "    return")
    module.write_text(head + (line + count if template == "plain" else count + line) + rest)
    up = [sys.executable, "-m", "fednmap", "flower", "up", "--app", str(app), "--quiet"]
    done = subprocess.run(up, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    folder = app / "runs" / "my-federation"
    assert status(folder)["finished"]
    assert sorted(loads.read_text().split()) == [f"client-{i}" for i in range(3)]  # once per node and run
    assert (folder / ("coefficients.csv" if template == "tables" else "plot.png")).exists()
    again = subprocess.run(up, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode != 0
    assert "exists; choose another folder with --out" in again.stderr


def commands(readme, heading):
    """The commands under a heading, block by block."""
    section = readme.split(f"\n## {heading}")[1].split("\n## ")[0]
    return [textwrap.dedent(block) for block in re.findall(r"^ *```sh\n(.*?)```", section, re.DOTALL | re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.ci(turn=5)
def test_the_templates_commands_for_real_machines_work_as_written(tmp_path):
    """Keys, TLS, registration and a run; afterwards the folder is shown and its model exported."""
    app = tmp_path / "my-federation"
    write(app)
    keys = app / "keys"
    with Launcher(tmp_path / "flower", authority=keys / "ca.crt") as launcher:
        here = {"SERVER": "127.0.0.1", "0.0.0.0": "127.0.0.1", "18000": str(launcher.port)}

        def start(name, script, place=app, **more):
            for word, stands_for in (here | more).items():
                script = script.replace(word, stands_for)
            return launcher.start(name, ["bash", "-c", f"set -e; cd '{place}'; {script}"])

        made, server, admin, node, begin = commands((app / "README.md").read_text(), "Real machines")
        assert start("keys", made).wait(PATIENCE) == 0, launcher.log("keys")
        start("superlink", server)
        wait_for(launcher._healthy, "the SuperLink")
        assert start("admin", admin).wait(PATIENCE) == 0, launcher.log("admin")
        for name in NAMES:
            place = tmp_path / name
            place.mkdir()
            for file in ("ca.crt", name):
                shutil.copy(keys / file, place)
            port = f"--port {free_port()} --superlink"
            start(name, node, place, **{"client-0": name, "/var/lib/fednmap": str(place), "--superlink": port})
        process = start("run", begin.replace("--stream", "--stream -c rounds=2"))
        process.wait(PATIENCE)
        folder = app / "runs" / "my-federation"
        assert status(folder).get("finished"), launcher.log("run") + launcher.log("superlink")
    for words in (["show"], ["export"], ["report"]):
        done = subprocess.run(
            [sys.executable, "-m", "fednmap", *words, str(folder)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert "x" in load_file(folder / "fednmap-0.safetensors")


@pytest.mark.slow
@pytest.mark.ci(turn=6)
def test_up_leaves_a_run_folder_that_can_be_continued_and_no_process(tmp_path):
    command = [sys.executable, "-m", "fednmap", "flower", "up"]
    options = ["--clients", "2", "--rounds", "3", "--model", "logistic", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3
    assert "round 3/3" in done.stderr
    with subprocess.Popen([*command, *options[:-2], str(tmp_path / "b")], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "round 1/3" in line:
                break
        process.terminate()
        process.stderr.read()
        assert process.wait(60) == 130
    again = subprocess.run([*command, "--resume", str(tmp_path / "b"), "--json"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["objective"] == pytest.approx(json.loads(done.stdout)["objective"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.ci(turn=7)
def test_with_secure_aggregation_the_trajectory_is_the_simulators(running, tmp_path):
    """Real processes: keys, shares, masks and their end travel as messages; a second run sees fresh ones."""
    from fednmap.simulation.quantised import Quantised

    config = Config.make(
        data="digits", model="logistic", clients=3, local_steps=5, eval_every=4, rounds=4, dtype="float64", secagg=True
    )
    federation = FederationSettings(names=NAMES, run_folder=tmp_path / "run", measure_stationarity=True)
    running.run(write_trial(tmp_path / "app", run_settings(config, federation))).wait(PATIENCE)
    assert status(tmp_path / "run").get("finished"), running.log("run")
    experiment = prepare(config)
    algorithm = experiment.algorithm("fednmap")
    start, grid = experiment.start(algorithm), Quantised(3)
    *_, end = simulate(algorithm, experiment.problem, rounds=4, start=start, seed=config.seed, uplink=grid)
    *_, clear = simulate(algorithm, experiment.problem, rounds=4, start=start, seed=config.seed)
    x = load_file(tmp_path / "run" / "models" / "fednmap-0.safetensors")["x"]
    assert float((x - algorithm.model(end.server)).abs().max()) < 1e-12
    assert float((x - algorithm.model(clear.server)).abs().max()) < 100 * grid.step
    result = json.loads((tmp_path / "run" / "results.json").read_text())[0]
    assert result["took_part"] == dict.fromkeys(NAMES, 4)
    assert result["bytes_up"] == 4 * 3 * (640 + 1) * 8
    assert result["loss"] == pytest.approx(float(experiment.problem.loss(x)), rel=1e-9)


@pytest.mark.slow
@pytest.mark.ci(turn=8)
def test_over_tls_a_registered_node_cannot_take_anothers_name(tmp_path):
    make(tmp_path / "keys", ["client-0", "client-1", "mallory"], "127.0.0.1")
    keys, names = tmp_path / "keys", ("client-0", "client-1")
    config = Config.make(data="digits", model="logistic", clients=2, rounds=2, eval_every=2)
    federation = FederationSettings(
        names=names, run_folder=tmp_path / "run", clients_file=keys / "clients.toml", deadline=60, min_clients=1
    )
    with Launcher(tmp_path / "flower", authority=keys / "ca.crt") as launcher:
        launcher.superlink(*tls(keys))
        for client, key in (("client-0", "client-0"), ("client-1", "mallory")):
            flwr(launcher, "supernode", "register", str(keys / f"{key}.pub"), "fednmap")
            launcher.supernode(client, tmp_path / "states", keys / key)
        launcher.run(write_trial(tmp_path / "app", run_settings(config, federation))).wait(PATIENCE)
        assert status(tmp_path / "run").get("finished"), launcher.log("run")
    assert "refused: it calls itself client-1, whose key is SHA256:" in (tmp_path / "run" / "server.log").read_text()
    result = json.loads((tmp_path / "run" / "results.json").read_text())[0]
    assert result["took_part"] == {"client-0": 2, "client-1": 0}


@pytest.mark.slow
@pytest.mark.ci(turn=9)
def test_a_port_that_somebody_else_has_taken_is_not_taken_for_ones_own(tmp_path):
    """Not even if a SuperLink answers there."""
    with Launcher(tmp_path / "a") as first, Launcher(tmp_path / "b") as second:
        first.superlink()
        second.port = first.port
        second.superlink()
        assert second.port != first.port
        assert not first.ended() + second.ended()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which root alone may")
def test_ports_refuse_other_users_of_the_machine(tmp_path):
    """The SuperLink's, by which apps are submitted, and a node's, by which its messages are taken."""

    def status(port, request, user):
        script = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{request} HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"
        done = subprocess.run(["bash", "-c", script], user=user, cwd="/", capture_output=True, text=True, check=True)
        return int(done.stdout.split()[1])

    with Launcher(tmp_path / "flower") as launcher:
        launcher.superlink()
        port = free_port()
        node = [*GUARDED, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{launcher.port}"]
        launcher.start("node", [*node, "--port", str(port), "--isolation", "process", "--host", "127.0.0.1"])
        wait_for(lambda: "Uvicorn running" in launcher.log("node"), "the node")
        for request in ("GET /health", "POST /any"):
            for where in (launcher.port, port):
                assert status(where, request, user=65534) == 403
                assert status(where, request, user=0) in (200, 404)
        assert "refused a connection of another user" in launcher.log("superlink")


@pytest.mark.slow
@pytest.mark.ci(turn=9)
def test_nodes_register_again_with_a_superlink_that_was_killed(tmp_path):
    with Launcher(tmp_path / "flower") as launcher:
        launcher.superlink()
        launcher.supernode("client-0", tmp_path / "states")

        def online():
            return '"online"' in flwr(launcher, "supernode", "list", "fednmap", "--format", "json")

        wait_for(online, "the node")
        launcher.kill("superlink")
        launcher.superlink()
        wait_for(online, "the node to come back by itself")
        assert "Registering again" in launcher.log("client-0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "secagg",
    [pytest.param([], marks=pytest.mark.ci(turn=10)), pytest.param(["--secagg"], marks=pytest.mark.ci(turn=11))],
)
def test_a_run_under_fire_ends_at_the_optimum(tmp_path, secagg):
    """A few faults of each kind; tests/fault_run.py alone makes more of them."""
    from fault_run import main

    few = ["--superlink", "1", "--server", "1", "--nodes", "2", "--up", "1", "--delays", "2"]
    found = main([str(tmp_path / "run"), *few, *secagg])
    assert found["orphans"] == 0
    assert found["from the optimum"] < 1e-8
    assert found["from the simulation"] < 1e-8
    assert found["h from the mean of h_i"] < 1e-12
    assert found["counted"] == found["rounds"] == 60
