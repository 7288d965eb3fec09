"""Threads never show in the bits, and leave nothing behind: neither work that goes on nor torch's settings."""

import math
import os
import signal
import threading
import time
import traceback

import pytest
import torch
from methods import MAKE
from small import outcome
from torch import nn

from fednmap import algorithms as A
from fednmap import run, simulate
from fednmap.core import ProblemInfo
from fednmap.data.clients import ClientData
from fednmap.models import cnn, mlp
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Logistic, Network, Pooled
from fednmap.regularizers import L1, Zero
from fednmap.runs.folder import RunFolder
from fednmap.simulation import distributed, threads
from fednmap.simulation.client_groups import FAIR, Groups, TreeSum
from fednmap.simulation.states import Clients
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool

CROSS_ENTROPY = nn.functional.cross_entropy
HISTORIES = [{}, {"participation": 0.7, "drop": 0.3}]
WEIGHTS = [(i + 1) / 66 for i in range(11)]


def pictures(shape, n=11):
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(9 + i, *shape, generator=rng), torch.arange(9 + i) % 3) for i in range(n)]


def regression(weights=None, batch_size=5):
    pairs = [(a, a.sum(1) + y) for a, y in pictures((30,))]
    return LeastSquares(pairs, batch_size=batch_size, weights=weights)


def network(module=None, shape=(30,), weights=None):
    torch.manual_seed(0)
    return Network(module or mlp(30, 3, (16,)), CROSS_ENTROPY, pictures(shape), batch_size=5, weights=weights)


PROBLEMS = {
    "dense": network,
    "dense, weighted": lambda: network(weights=WEIGHTS),
    "convolutions": lambda: network(cnn((1, 8, 8), 3), (1, 8, 8)),
    "autograd": lambda: network(nn.Sequential(nn.Linear(30, 8), nn.Softplus(), nn.Linear(8, 3))),
    "batch norm": lambda: network(nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))),
    "exact": lambda: network().exact(),
    "logistic": lambda: Logistic(pictures((30,)), batch_size=5),
}


def bits(round):
    return [*round.server, *round.clients.tensors().values()]


def last(algorithm, problem, **options):
    *_, end = simulate(algorithm, problem, rounds=3, chunk=2, **options)
    return bits(end)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("history", HISTORIES, ids=["everybody", "sampled and lossy"])
@pytest.mark.parametrize("name", MAKE)
def test_every_method_has_the_same_bits_on_any_number_of_threads(name, history, weights):
    composite = MAKE[name](Zero(), 1.0, 1).traits.composite
    Q = 1 if name == "EControlDA" else 3
    method, problem = MAKE[name](L1(0.01) if composite else Zero(), 40.0, Q), regression(weights)
    if method.traits.hessians:
        problem = regression(weights, batch_size=None)
    if method.traits.central:
        problem = Pooled(problem)
    if method.traits.full_participation:
        history = {}
    one, *others = (last(method, problem, threads=k, **history) for k in (1, 2, 3))
    assert all(bool(v.isfinite().all()) for v in one)
    assert all(same(one, other) for other in others)


@pytest.mark.parametrize("name", PROBLEMS)
def test_rounds_and_measurements_of_every_problem(name, monkeypatch):
    monkeypatch.setattr("fednmap.problems.finite_sum.CHUNK_BYTES", 4 * 30 * 35)  # several pieces, the last one smaller
    problem, method = PROBLEMS[name](), A.FedNMap(L1(1e-3), eta_a=0.05, Q=3)
    options = {"rounds": 2, "every": 1, "chunk": 2, "participation": 0.8, "measure_gamma": 1.0}
    results = [run(method, problem, threads=k, **options) for k in (1, 2, 3)]
    columns = ("objective", "loss", "stationarity", "hoyer")
    assert problem.pieces > 3
    for other in results[1:]:
        assert same(bits(results[0].last), bits(other.last))
        assert all(results[0].column(c) == other.column(c) for c in columns)
    assert results[0].final["loss"] == pytest.approx(float(problem.loss(results[0].x)), rel=1e-5)


class Watched:
    """A regression whose oracle tells of each group of clients before it answers."""

    concurrent = True

    def __init__(self, told):
        inner = regression()
        self.n, self.dim, self.start = inner.n, inner.dim, inner.start
        self.loss, self.gradient = inner.loss, inner.gradient
        self.inner, self.told = inner, told

    def info(self):
        return ProblemInfo(start=self.start, concurrent=self.concurrent)

    def oracle(self, clients, t):
        self.told(clients.tolist())
        return self.inner.oracle(clients, t)


def test_sums_are_taken_in_order_whoever_is_slow():
    method = A.FedAvg(eta_a=0.01, Q=2)
    slow = Watched(lambda clients: time.sleep(0.1 if 0 in clients else 0))
    assert same(last(method, slow, threads=1), last(method, slow, threads=3))


def test_two_groups_are_computed_at_the_same_time():
    meeting = threading.Barrier(2, timeout=30)
    list(simulate(A.FedAvg(eta_a=0.01, Q=2), Watched(lambda _: meeting.wait()), rounds=2, chunk=3, threads=2))


def test_a_problem_that_does_not_say_it_may_be_is_computed_here_one_group_after_another():
    seen = []
    problem = Watched(lambda _: seen.append(threading.current_thread()))
    problem.concurrent = False
    list(simulate(A.FedAvg(eta_a=0.01, Q=2), problem, rounds=2, chunk=3, threads=2))
    assert set(seen) == {threading.current_thread()}


def test_an_error_in_one_group_ends_the_round_with_its_traceback():
    calls = []

    def fail(clients):
        calls.append(clients)
        if 4 in clients:
            raise RuntimeError("client 4 is broken")

    running = simulate(A.FedAvg(eta_a=0.01, Q=2), Watched(fail), rounds=2, chunk=1, threads=2)
    with pytest.raises(RuntimeError, match="client 4") as caught:
        next(running)
    assert "in fail" in "".join(traceback.format_exception(caught.value))
    done = len(calls)
    time.sleep(0.05)
    assert len(calls) == done < 11
    assert next(running, None) is None


def test_ctrl_c_ends_the_round_and_its_threads():
    calls = []

    def interrupt(clients):
        calls.append(clients)
        time.sleep(0.02)
        if calls.count([2]) == 1 and clients == [2]:
            os.kill(os.getpid(), signal.SIGINT)

    running = simulate(A.FedAvg(eta_a=0.01, Q=2), Watched(interrupt), rounds=50, chunk=1, threads=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is born deaf to it
    try:
        with pytest.raises(KeyboardInterrupt):
            list(running)
    finally:
        signal.signal(signal.SIGINT, before)
    done = len(calls)
    time.sleep(0.1)
    assert len(calls) == done < 50


def test_torch_keeps_its_own_threads():
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inside = Watched(lambda _: found.append(torch.get_num_threads()))
        running = simulate(A.FedAvg(eta_a=0.01, Q=2), inside, rounds=2, chunk=3, threads=2)
        next(running)
        fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
        assert found == [1, 1, 1, 1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_of_a_round_is_left_to_several_threads_of_torch(monkeypatch):
    """They stay awake for some ms after they were used, on cores that the round's own threads want."""
    found, before = [], torch.get_num_threads()

    class Seen(A.FedAvg):
        def aggregate(self, *given):
            found.append(("aggregate", torch.get_num_threads()))
            return super().aggregate(*given)

    def watch(kind, name):
        called = getattr(kind, name)

        def seen(self, *given):
            found.append((name, torch.get_num_threads()))
            return called(self, *given)

        monkeypatch.setattr(kind, name, seen)

    for kind, name in ((Clients, "replace"), (TreeSum, "add"), (TreeSum, "total")):
        watch(kind, name)
    torch.set_num_threads(2)
    try:
        problem = regression()
        for _ in simulate(Seen(eta_a=0.01, Q=2), problem, rounds=2, chunk=3, threads=2):
            pass
        assert "total" in dict(found)
        monkeypatch.setattr("fednmap.problems.finite_sum.CHUNK_BYTES", 4 * 30 * 35)
        divided(network(), ThreadPool(2)).gradient(network().start)
    finally:
        torch.set_num_threads(before)
    assert {name for name, _ in found} == {"aggregate", "replace", "add", "total"}
    assert {count for _, count in found} == {1}


def test_threads_end_with_the_run():
    before = set(threading.enumerate())
    running = simulate(A.FedAvg(eta_a=0.01, Q=2), regression(), rounds=3, chunk=1, threads=3)
    next(running)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    running.close()
    for thread in started:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("clients", "usual", "chunk"), [(10, 10, 5), (20, 20, 1), (7, 7, 2), (100, 9, 2), (50, 50, 50)]
)
def test_groups_do_not_know_how_many_processes_there_are(clients, usual, chunk, monkeypatch):
    """Every client falls to one process, in the group in which one process alone has it."""
    everybody = torch.arange(clients)
    alone = [(section, ids.tolist()) for section, ids, _ in Groups(clients, usual, chunk)(everybody)]
    for processes in (2, 3, 5, 8, 70):
        monkeypatch.setattr(distributed, "size", lambda processes=processes: processes)
        found = []
        for rank in range(processes):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            groups = Groups(clients, usual, chunk)
            mine = groups(everybody)
            assert everybody[groups.mine(everybody)].tolist() == [i for group in mine for i in group.ids.tolist()]
            found += [(section, ids.tolist()) for section, ids, _ in mine]
        assert found == alone


@pytest.mark.parametrize(("clients", "chunk", "due"), [(10, 5, 4), (10, 1, 8), (20, 1, 16), (100, 1, 64), (100, 7, 16)])
def test_there_are_sections_for_many_processes_where_they_are_free(clients, chunk, due):
    groups = Groups(clients, clients, chunk)
    assert groups.sections == due
    assert len(groups(torch.arange(clients))) <= max(FAIR, 1.1 * FAIR * math.ceil(clients / FAIR / chunk))


@pytest.mark.parametrize(("clients", "chunk"), [(1, 5), (5, 5), (6, 5), (50, 10), (50, 13), (50, 1), (7, 2), (1000, 3)])
def test_groups_are_small_enough_and_not_more_than_needed(clients, chunk):
    for present in (torch.arange(clients), torch.arange(0, clients, 3), torch.arange(clients)[:0]):
        groups = Groups(clients, clients, chunk)
        found = groups(present)
        assert torch.equal(torch.cat([group.ids for group in found]), present)
        assert max(len(group.ids) for group in found) <= chunk
        assert [group.section for group in found if group.last] == list(range(groups.sections))
        assert sorted({group.section for group in found}) == list(range(groups.sections))
    assert groups.sections == 1 if clients <= chunk else groups.sections >= min(clients, FAIR)
    # a multiple of FAIR where there are enough clients, and hardly more than there must be
    assert len(groups(torch.arange(clients))) <= 1.1 * FAIR * math.ceil(math.ceil(clients / FAIR) / chunk)


def test_grad_mode_is_the_callers():
    found = []
    with torch.no_grad(), ThreadPool(2).map_in_order(lambda _: torch.is_grad_enabled(), range(4)) as results:
        found += results
    with ThreadPool(2).map_in_order(lambda _: torch.is_grad_enabled(), range(2)) as results:
        found += results
    assert found == [False] * 4 + [True] * 2


def test_the_command_writes_the_same_bits(command, tmp_path, monkeypatch):
    monkeypatch.setattr("fednmap.problems.finite_sum.CHUNK_BYTES", 4 * 64 * 100)
    monkeypatch.setattr(threads, "_limit", None)
    words = ("--model", "mlp:8", "--rounds", 3, "--local-steps", 2, "--eval-every", 1, "--chunk", 2, "--quiet")
    for k in (1, 3):
        assert command("train", *words, "--threads", k, "--out", tmp_path / str(k))[0] == 0
    assert threads.current_limit() == 3
    assert outcome(RunFolder(tmp_path / "1")) == outcome(RunFolder(tmp_path / "3"))
    code, _, err = command("train", *words, "--threads", 0)
    assert (code, "threads is 0" in err) == (2, True)


def test_how_many_threads(monkeypatch):
    monkeypatch.setattr(threads, "_limit", None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.default() == threads.cores() >= 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.default() == 3
    threads.limit(5)
    assert ThreadPool().threads == 5
    for refused in (lambda: threads.limit(0), lambda: ThreadPool(-1)):
        with pytest.raises(InputError, match="at least 1"):
            refused()


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_gradient_that_was_handed_out_stays(name):
    """Memory is used again inside a gradient, never the gradient itself: a method may keep it."""
    problem = PROBLEMS[name]()
    stack = torch.arange(4)
    x = problem.start + torch.randn(4, problem.dim)
    kept = [problem.oracle(stack, 0)(x, 0), problem.oracle(stack, 0)(x[0], 0), problem.gradient(x[0])]
    copies = [v.clone() for v in kept]
    for t in range(2):
        problem.oracle(stack, t)(x + 1, 1), problem.oracle(stack[:2], t)(x[:2] + 1, 1), problem.gradient(x[1])
    assert same(kept, copies)
    assert len({v.untyped_storage().data_ptr() for v in kept}) == len(kept)
    assert same([problem.oracle(stack, 0)(x, 0)], kept[:1])


def test_copies_of_a_network_work_in_threads():
    """Each thread has a module of its own, also of a problem that was copied."""
    data = ClientData.of(pictures((1, 8, 8)))
    torch.manual_seed(0)
    problem = Network(cnn((1, 8, 8), 3), CROSS_ENTROPY, data, batch_size=None)
    expected, found = problem.gradient(problem.start), []
    worker = threading.Thread(target=lambda: found.append(problem.alone(2).gradient(problem.start)))
    worker.start()
    worker.join()
    assert torch.equal(problem.gradient(problem.start), expected)
    assert torch.equal(found[0], problem.alone(2).gradient(problem.start))
