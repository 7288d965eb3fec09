"""FedNMap with memory follows one trajectory however it is run: what the server remembers is part of its state."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from lasso import PHI, L
from small import outcome

from fednmap import run, simulate
from fednmap.algorithms import FedNMapMemory
from fednmap.problems import LeastSquares
from fednmap.runs.folder import RunFolder
from fednmap.testing import heterogeneous

SIX = heterogeneous()
LOSSY = {"drop": 0.3, "seed": 2}
SAMPLED = {"participation": 0.5, "seed": 4}


def method(**more):
    return FedNMapMemory(PHI, **{"eta_a": 0.5 / L, "Q": 1, "gamma": 1 / L, "memory": 5} | more)


def last(algorithm, problem, **options):
    *_, end = simulate(algorithm, problem, **options)
    return end


def same(a, b):
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("how", [{}, LOSSY, SAMPLED], ids=["everybody", "lossy", "sampled"])
@pytest.mark.parametrize("Q", [1, 5])
def test_h_stays_the_mean_of_the_clients(how, Q):
    algorithm = method(Q=Q, eta_a=0.5 / (L * Q))
    for now in simulate(algorithm, SIX, rounds=150, **how):
        assert float((now.clients[torch.arange(6)].h.mean(0) - now.server.h).abs().max()) < 1e-12


@pytest.mark.parametrize("how", [{}, LOSSY, SAMPLED], ids=["everybody", "lossy", "sampled"])
def test_going_on_a_store_on_disk_and_threads_give_the_same_bits(tmp_path, how):
    whole = list(simulate(method(), SIX, rounds=25, **how))
    for at in (0, 1, 9, 17):
        assert same(last(method(), SIX, rounds=25, after=whole[at], **how).server, whole[-1].server)
    assert same(last(method(), SIX, rounds=25, store=tmp_path / "s", **how).server, whole[-1].server)
    for threads in (1, 2):
        assert same(last(method(), SIX, rounds=25, threads=threads, **how).server, whole[-1].server)
    chunked = last(method(), SIX, rounds=6, chunk=2, **how).server
    assert torch.allclose(chunked.z, whole[5].server.z, rtol=0, atol=1e-10)  # other sums, other roundings


def test_the_number_of_torchs_threads_does_not_show(tmp_path):
    """The server's small products are taken as one thread takes them."""
    wide = LeastSquares([(torch.randn(8, 30_000, generator=g), torch.randn(8, generator=g)) for g in generators(3)])
    algorithm = FedNMapMemory(PHI, eta_a=1e-4, Q=1, gamma=1e-3, memory=5)
    had, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ends.append(last(algorithm, wide, rounds=8).server)
    finally:
        torch.set_num_threads(had)
    assert same(*ends)


def generators(n):
    return [torch.Generator().manual_seed(i) for i in range(n)]


def test_a_folder_goes_on_to_the_same_bits(tmp_path):
    def stop_at(t):
        return lambda record: record["round"] >= t and (_ for _ in ()).throw(KeyError("broken off"))

    options = {"rounds": 40, "every": 4, "checkpoint_every": 3, **LOSSY}
    with pytest.raises(KeyError):
        run(method(), SIX, folder=tmp_path / "a", callbacks=stop_at(20), **options)
    found = run(method(), SIX, folder=tmp_path / "a", **options)
    plain = run(method(), SIX, **{k: v for k, v in options.items() if k != "checkpoint_every"})
    assert torch.equal(found.x, plain.x)
    assert found.column("objective") == plain.column("objective")


TRAIN = [
    "train",
    "--data",
    "digits",
    "--model",
    "logistic",
    "--clients",
    "10",
    "--batch-size",
    "0",
    "--local-steps",
    "1",
]
TRAIN += [
    "--penalty",
    "l1:0.001",
    "--eta-a",
    "4",
    "--gamma",
    "40",
    "--set",
    "fednmap.memory=8",
    "--rounds",
    "60",
    "--quiet",
]
TRAIN += ["--checkpoint-every", "3", "--eval-every", "4", "--dtype", "float64"]


def start(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "fednmap", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--drop", "0.3", "--participation", "0.8")], ids=["everybody", "lossy"])
def test_kill_minus_nine_and_resume_to_the_same_bits(tmp_path, how):
    killed, at = 0, 0
    process = start(*TRAIN, *how, "--out", tmp_path / "killed")
    while killed < 2:
        wait_for_checkpoint(tmp_path / "killed", process, at + 6)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        killed, at = killed + 1, newest(tmp_path / "killed")
        process = start("train", "--resume", tmp_path / "killed", "--quiet")
    ended(process)
    ended(start(*TRAIN, *how, "--out", tmp_path / "whole"))
    assert 6 <= at < 60
    assert outcome(RunFolder.open(tmp_path / "killed")) == outcome(RunFolder.open(tmp_path / "whole"))


def newest(folder):
    return max((int(p.stem[6:]) for p in folder.glob("checkpoints/*/round-*.json")), default=0)


def wait_for_checkpoint(folder, process, at):
    end = time.monotonic() + 240
    while newest(folder) < at:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
def test_worker_processes_follow_the_same_trajectory(tmp_path):
    few = [*TRAIN, "--rounds", "15", "--json"]
    one = json.loads(ended(start(*few, "--out", tmp_path / "one")))
    two = json.loads(ended(start(*few, "--workers", "2", "--out", tmp_path / "two")))
    for key in ("objective", "stationarity"):
        assert two[key] == pytest.approx(one[key], rel=1e-8)
    assert (two["bytes_up"], two["bytes_down"]) == (one["bytes_up"], one["bytes_down"])
    assert one["bytes_down"] == 2 * one["bytes_up"]  # z is no plain step: both vectors are sent
