"""Every way of running follows the same trajectory: chunks, a store on disk, layouts, processes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MethodType

import pytest
import torch
from small import begin
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from fednmap import algorithms as A
from fednmap import run, simulate
from fednmap.models import cnn, mlp, mobilenet_v3_small
from fednmap.names import InputError
from fednmap.problems import Logistic, Network, finite_sum
from fednmap.problems.kernels import DenseKernel, VmapKernel
from fednmap.problems.kernels.dense import dense_layers
from fednmap.regularizers import L1
from fednmap.runs.workers import check_workers, group
from fednmap.simulation.loop import clients_per_group
from fednmap.simulation.states import Clients

CROSS_ENTROPY = nn.functional.cross_entropy
TESTS = str(Path(__file__).parents[1])


def pictures(n=6, shape=(5,), classes=3, dtype=torch.float64, samples=20):
    rng = torch.Generator().manual_seed(0)
    sizes = [samples + i for i in range(n)]
    return [
        (torch.rand(m, *shape, generator=rng, dtype=dtype), torch.randint(classes, (m,), generator=rng)) for m in sizes
    ]


def network(batch_size=4, hidden=(7,), activation="sigmoid"):
    torch.manual_seed(0)
    return Network(mlp(5, 3, hidden, activation).double(), CROSS_ENTROPY, pictures(), batch_size=batch_size)


def method(Q=3):
    return A.FedNMap(L1(0.01), eta_a=0.1, Q=Q)


def end(algorithm, problem, rounds=4, **options):
    *_, last = simulate(algorithm, problem, rounds=rounds, **options)
    return last


def plain_gradient(module, x, a, b):
    """The gradient as torch's own autograd gives it for one client."""
    nn.utils.vector_to_parameters(x, module.parameters())
    loss = CROSS_ENTROPY(module(a), b)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters())))


@pytest.mark.parametrize("activation", ["sigmoid", "relu", "tanh"])
@pytest.mark.parametrize("hidden", [(7,), (7, 4)])
def test_written_out_gradients_are_autograds(hidden, activation):
    torch.manual_seed(0)
    module = mlp(5, 3, hidden, activation).double()
    problem = Network(module, CROSS_ENTROPY, pictures(), batch_size=4)
    assert isinstance(problem._kernel, DenseKernel)
    x = torch.randn(2, problem.dim, dtype=torch.float64)
    a, b = torch.rand(2, 4, 5, dtype=torch.float64), torch.tensor([[0, 1, 2, 0], [1, 1, 2, 0]])
    expected = torch.stack([plain_gradient(module, x[i], a[i], b[i]) for i in range(2)])
    torch.testing.assert_close(problem.batch_gradient(x, a, b, 0.25), expected, rtol=1e-12, atol=1e-14)
    common = torch.stack([plain_gradient(module, x[0], a[i], b[i]) for i in range(2)])
    torch.testing.assert_close(problem.batch_gradient(x[0], a, b, 0.25), common, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(problem.batch_gradient(x[0], a[0], b[0], 0.25), expected[0], rtol=1e-12, atol=1e-14)


def test_written_out_gradients_leave_the_point_alone():
    problem = network()
    x = problem.start.clone().expand(6, -1).contiguous()
    kept = x.clone()
    problem.oracle(torch.arange(6), 0)(x, 0)
    assert torch.equal(x, kept)
    assert not x.requires_grad


@pytest.mark.parametrize("batch_size", [4, None])
def test_written_out_and_stacked_autograd_agree(batch_size):
    problem, other = network(batch_size), network(batch_size)
    other._kernel = VmapKernel(other._function)
    x = torch.randn(6, problem.dim, dtype=torch.float64)
    for clients, point in [(torch.arange(6), x), (torch.arange(6), x[0]), (torch.tensor(2), x[0])]:
        torch.testing.assert_close(problem.oracle(clients, 1)(point, 2), other.oracle(clients, 1)(point, 2))
    torch.testing.assert_close(problem.gradient(x[0]), other.gradient(x[0]))


def other_modules():
    shared = nn.Linear(5, 5)
    hooked = nn.Sequential(nn.Linear(5, 3))
    hooked[0].register_forward_hook(lambda layer, given, out: 2 * out)
    patched = nn.Sequential(nn.Linear(5, 3))
    patched[0].forward = MethodType(lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias), patched[0])
    return {
        "normalised": nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        "used twice": nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(5, 3)),
        "hooked": hooked,
        "patched": patched,
        "parametrized": nn.Sequential(register_parametrization(nn.Linear(5, 3), "weight", nn.Tanh())),
    }


@pytest.mark.parametrize("name", other_modules())
def test_what_is_not_a_plain_chain_keeps_autograd(name):
    torch.manual_seed(0)
    module = other_modules()[name].double()
    assert dense_layers(module, torch.zeros(5)) is None
    problem = Network(module, CROSS_ENTROPY, pictures(), batch_size=4)
    g = problem.oracle(torch.arange(6), 0)
    one = torch.stack([problem.oracle(torch.tensor(i), 0)(problem.start, 0) for i in range(6)])
    torch.testing.assert_close(g(problem.start, 0), one)


def test_pictures_that_nobody_flattens_keep_autograd():
    assert dense_layers(nn.Linear(5, 3), torch.zeros(4, 5)) is None


PROBLEMS = {
    "network": network,
    "exact gradients": lambda: network(None),
    "logistic": lambda: Logistic(pictures(), batch_size=3),
    "weighted": lambda: Logistic(pictures(), batch_size=3, weights=[0.3, 0.1, 0.1, 0.2, 0.2, 0.1]),
    "convolutions": lambda: conv_problem(),
}


def conv_problem():
    torch.manual_seed(0)
    return Network(cnn((1, 8, 8), 3).double(), CROSS_ENTROPY, pictures(shape=(1, 8, 8)), batch_size=4)


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_chunk_gives_the_same_trajectory(name):
    problem = PROBLEMS[name]()
    runs = [end(method(), problem, participation=0.8, chunk=chunk) for chunk in (None, 1, 2, 4, 100)]
    for other in runs[1:]:
        for mine, theirs in zip(runs[0].server, other.server, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_the_same_seed_gives_the_same_bits():
    first, second = (end(method(), network(), rounds=6, participation=0.5, seed=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.server, second.server, strict=True))


def test_the_grouping_is_a_rule():
    """Nothing that was timed may decide it, or the same seed would not give the same bits."""
    small, large = network(), Network(mlp(784, 10), CROSS_ENTROPY, pictures(shape=(784,), dtype=torch.float32))
    assert clients_per_group(small, small.start) > 100
    assert 2 <= clients_per_group(large, large.start) <= 100
    assert clients_per_group(conv_problem(), small.start) == 1


def test_mobilenet_alone_and_in_a_stack():
    torch.manual_seed(0)
    data = pictures(n=2, shape=(3, 32, 32), dtype=torch.float64, samples=6)
    problem = Network(mobilenet_v3_small(3, norm="group").double(), CROSS_ENTROPY, data, batch_size=3)
    ids = torch.arange(2)
    stacked = problem.oracle(ids, 0)(problem.start, 0)
    for i in ids:
        torch.testing.assert_close(problem.oracle(i.reshape(1), 0)(problem.start, 0)[0], stacked[i])


def test_one_client_gradients_follow_the_point():
    """The module's parameters are views of x: another x must not see the old values, nor the start change."""
    problem = conv_problem()
    g, start = problem.oracle(torch.tensor([0]), 0), problem.start.clone()
    first, moved = g(problem.start, 0), g(problem.start + 1, 0)
    assert not torch.allclose(first, moved)
    assert torch.equal(first, g(problem.start, 0))
    assert torch.equal(problem.start, start)


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"participation": 0.7, "drop": 0.3}])
def test_a_store_on_disk_changes_nothing(tmp_path, options):
    problem = network()
    memory, disk = (end(method(), problem, rounds=8, store=where, **options) for where in (None, tmp_path / "states"))
    assert all(torch.equal(a, b) for a, b in zip(memory.server, disk.server, strict=True))
    kept, on_disk = memory.clients.tensors(), disk.clients.tensors()
    assert all(torch.equal(kept[name], on_disk[name]) for name in kept)
    assert (tmp_path / "states" / "h-0.0.bin").stat().st_size >= 4 * problem.dim * 8


def test_a_second_run_in_the_same_store_begins_anew(tmp_path):
    first, second = (end(method(), network(), store=tmp_path) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.server, second.server, strict=True))


def test_copied_states_stay_when_rounds_go_on():
    rounds = simulate(method(), network(), rounds=3)
    states = next(rounds).clients[torch.arange(6)]
    kept = states.h.clone()
    list(rounds)
    assert torch.equal(states.h, kept)


def test_a_million_clients_keep_only_who_took_part():
    clients = Clients(1_000_000, method().Client(torch.zeros(3)))
    for start in (0, 999_000):
        ids = torch.arange(start, start + 100)
        clients[ids] = method().Client(torch.full((100, 3), float(start + 1)))
    assert len(clients) == 200
    assert clients[torch.tensor([5, 500, 999_050])].h[:, 0].tolist() == [1.0, 0.0, 999_001.0]


def test_parts_of_the_data_sum_to_all_of_it(monkeypatch):
    monkeypatch.setattr("fednmap.problems.finite_sum.CHUNK_BYTES", 5 * 8 * 10)
    problem = network()
    parts = [problem.part(rank, 3) for rank in range(3)]
    torch.testing.assert_close(sum(p.loss(problem.start) for p in parts), problem.loss(problem.start))
    torch.testing.assert_close(sum(p.gradient(problem.start) for p in parts), problem.gradient(problem.start))
    assert all(not torch.allclose(p.loss(problem.start), problem.loss(problem.start)) for p in parts)


WORKER = """
import sys, torch, torch.distributed as dist
sys.path[:0] = {tests!r}
import test_execution as T
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://{store}", rank=int(sys.argv[1]), world_size={size})
torch.save(T.scenarios(), "{out}" + sys.argv[1])
dist.destroy_process_group()
"""


def scenarios():
    """What every process of a group computes, and what one process alone does."""
    found = {}
    for name, options in itertools.product(
        ["network", "weighted", "convolutions"],
        [{"chunk": 3}, {"participation": 0.5, "drop": 0.3, "chunk": 2}, {"participation": 0.01}],
    ):
        problem = PROBLEMS[name]()
        problem.batch_size = 4
        last = end(method(), problem, rounds=6, seed=2, **options)
        found[f"{name} {options}"] = [*last.server, *last.clients.tensors().values()]
    finite_sum.CHUNK_BYTES = 5 * 8 * 10  # the sums over all data in several pieces
    result = run(method(), network(), rounds=3, every=1)
    found["measured"] = [torch.tensor(result.column(c)) for c in ("objective", "stationarity")]
    return found


@pytest.mark.slow
@pytest.mark.ci(turn=6)
@pytest.mark.parametrize("size", [2, 3])
def test_processes_have_the_bits_of_one(size, tmp_path, monkeypatch):
    code = WORKER.format(
        tests=[os.path.dirname(__file__), TESTS], store=tmp_path / "store", out=tmp_path / "out-", size=size
    )
    monkeypatch.setattr(finite_sum, "CHUNK_BYTES", finite_sum.CHUNK_BYTES)  # as it was, afterwards
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([sys.executable, "-c", code, str(rank)], env=environment) for rank in range(size)]
    assert [worker.wait(timeout=240) for worker in workers] == [0] * size
    alone, *both = scenarios(), *(torch.load(tmp_path / f"out-{rank}") for rank in range(size))
    for name, expected in alone.items():
        order = both[0][name][2].argsort() if name != "measured" else None  # rank 0 holds the clients of all, by rank
        for k, value in enumerate(expected):
            mine = both[0][name][k]
            if order is not None and k >= 2:
                mine = mine[order]
            assert torch.equal(mine, value), f"{name}: not the bits of one process"
        shared = slice(0, 2)
        for a, b in zip(both[0][name][shared], both[1][name][shared], strict=True):
            assert torch.equal(a, b), f"{name}: the processes' servers differ"


TRAIN = ["train", "--model", "mlp:8", "--dtype", "float64", "--participation", "0.6", "--drop", "0.1", "--quiet"]
TRAIN += ["--checkpoint-every", "5", "--eval-every", "1000", "--json"]


def command(*arguments, launcher=(), **environment):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    launcher = launcher or (sys.executable,)
    return subprocess.Popen(
        [*launcher, "-m", "fednmap", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def closing(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_the_command_with_workers_and_under_torchrun(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    rounds = ("--rounds", "12")
    one = closing(command(*TRAIN, *rounds, "--out", str(tmp_path / "one")))
    for name, more in {"workers": {"arguments": ("--workers", "2")}, "torchrun": {"launcher": torchrun}}.items():
        arguments = more.get("arguments", ())
        both = closing(
            command(*TRAIN, *rounds, *arguments, "--out", str(tmp_path / name), launcher=more.get("launcher", ()))
        )
        for key in ("objective", "stationarity", "hoyer"):
            assert both[key] == pytest.approx(one[key], rel=1e-10), (name, key)
        assert both["bytes_up"] == one["bytes_up"]


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_and_it_can_be_resumed(tmp_path):
    folder, rounds = tmp_path / "run", ("--rounds", "400")
    process = command(*TRAIN, *rounds, "--workers", "2", "--out", str(folder))
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    worker = next(pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(int(worker), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out == ""
    assert "SIGKILL" in err
    assert f"--resume {folder}" in err
    assert "Traceback" not in err
    resumed = closing(command("train", "--resume", str(folder), "--workers", "2", "--json", "--quiet"))
    alone = closing(command(*TRAIN, *rounds, "--out", str(tmp_path / "alone")))
    for key in ("objective", "stationarity"):
        assert resumed[key] == pytest.approx(alone[key], rel=1e-10)


def test_workers_that_make_no_sense_are_refused(monkeypatch):
    with pytest.raises(InputError, match="workers is 0"), group(0):
        pass
    check_workers(20, 20)
    with pytest.raises(InputError, match="21 processes cannot share 20 clients; use 20 or fewer"):
        check_workers(21, 20)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InputError, match="3 processes cannot share 2 clients"):
        check_workers(1, 2)
    with pytest.raises(InputError, match="torchrun has started the processes already"):
        check_workers(2, 20)


def test_more_workers_than_clients_start_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr("fednmap.runs.workers.start_processes", pytest.fail)
    code, out, err = command("train", "--clients", 5, "--workers", 100, "--out", "run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "100 processes cannot share 5 clients" in err
    assert not (tmp_path / "run").exists()
    begin(tmp_path / "begun", rounds=2)
    code, _, err = command("train", "--resume", "begun", "--workers", 11)
    assert (code, err.count("\n")) == (2, 1)


def workers_that(act, folder):
    """An environment in which every worker process begins with these words."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import os, sys, time\nif '--multiprocessing-fork' in sys.orig_argv:\n    {act}\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def children(process):
    """The worker processes of a process."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if "--multiprocessing-fork" in Path(f"/proc/{pid}/cmdline").read_text()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LATE = """
import time
from fednmap.runs import workers
workers._join = lambda *given: time.sleep(300)  # in this process alone
with workers.group(2):
    pass
"""


def test_a_worker_that_dies_before_the_meeting_ends_the_command(tmp_path):
    environment = workers_that("os._exit(3)", tmp_path / "site")
    process = command(*TRAIN, "--workers", "2", "--out", str(tmp_path / "run"), **environment)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, out) == (1, "")
    assert "failed with exit code 3" in err
    assert f"--resume {tmp_path / 'run'} --workers 2" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 2


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to look at processes")
def test_workers_end_with_a_parent_that_was_killed_before_the_meeting():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    parent = subprocess.Popen([sys.executable, "-c", LATE], env=environment, stdout=subprocess.DEVNULL)
    workers = []
    try:
        until(lambda: parent.poll() is not None or children(parent))
        workers = children(parent)
        time.sleep(3)  # it may be waiting for its parent by now, or still be starting: it must end in any case
        parent.kill()
        parent.wait()
        assert len(workers) == 1
        until(lambda: not any(map(is_alive, workers)))
    finally:
        parent.kill()
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)
