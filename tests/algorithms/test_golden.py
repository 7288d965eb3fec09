"""Our methods against iterates of official code: recorded on a tiny least-squares problem, see `golden/README.md`.

A test says how the settings of that code are ours. Where that code and the paper differ, the test is that our method,
or the paper's box in `boxes.py` that is our method, with the difference put in has the recorded iterates, and without
it has not.
"""

import json
from pathlib import Path

import boxes
import pytest
import torch
from lasso import gap, models

from fednmap import algorithms as A
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1

CLOSE = 1e-6


class Golden:
    """A recorded run."""

    def __init__(self, name):
        self.told = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
        self.settings = self.told["settings"]
        clients = [(self._tensor(client["A"]), self._tensor(client["b"])) for client in self.told["clients"]]
        self.problem, self.start = LeastSquares(clients), self._tensor(self.settings["start"])

    @staticmethod
    def _tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    def iterates(self, which="iterates"):
        found = [self._tensor(x) for x in self.told[which]]
        assert gap(found[:-1], found[1:]) > 1e-2  # it moves
        return found

    def ours(self, algorithm, **options):
        return models(algorithm, self.problem, rounds=len(self.told["iterates"]), start=self.start, **options)

    def g(self, i, t, q, x):
        return self.problem.oracle(torch.tensor(i), t)(x, q)


def test_fedda():
    golden = Golden("fedda")
    s = golden.settings
    algorithm = A.FedDA(L1(s["lambd"]), eta_a=s["client_lr"], eta_s=s["server_lr"], Q=s["steps"])
    assert gap(golden.ours(algorithm), golden.iterates()) < CLOSE


@pytest.mark.parametrize(("which", "server_only"), [("iterates", False), ("server_only", True)])
def test_fedmid(which, server_only):
    golden = Golden("fedmid")
    s = golden.settings
    steps = {"eta_a": s["client_lr"], "eta_s": s["server_lr"], "Q": s["steps"]}
    algorithm = A.FedMiD(L1(s["lambd"]), **steps, server_only=server_only)
    assert gap(golden.ours(algorithm), golden.iterates(which)) < CLOSE


def feddr(s):
    """Its eta is our r; an epoch of one batch is a local step."""
    steps = {"eta_a": s["learning_rate"], "Q": s["num_epochs"], "r": s["eta"], "alpha": s["alpha"]}
    return A.FedDR(L1(s["reg_coeff"]), **steps)


def test_feddr():
    golden = Golden("feddr")
    assert gap(golden.ours(feddr(golden.settings)), golden.iterates()) < CLOSE


def test_feddr_with_two_of_three_clients():
    """A client that is chosen for the first time takes the server's model there for its x_i, in the paper x^0."""
    golden = Golden("feddr")
    algorithm, chosen = feddr(golden.settings), golden.told["selected"]
    server, first = algorithm.init(golden.start)
    clients, found, seen = [first] * 3, [], set()
    for t, ids in enumerate(chosen):
        down, changes = algorithm.broadcast(server), []
        for i in ids:
            client = clients[i] if i in seen else clients[i]._replace(x=down.xbar)
            up, clients[i] = algorithm.local(down, client, golden.problem.oracle(torch.tensor(i), t))
            changes.append(up.change)
            seen.add(i)
        server = algorithm.aggregate(server, algorithm.Up(sum(changes) / len(ids)), len(ids) / 3)
        found.append(algorithm.model(server))
    assert gap(found, golden.iterates("sampled")) < CLOSE
    as_published = golden.ours(algorithm, sampler=lambda n, t, rng: torch.tensor(chosen[t]))
    assert chosen[0] == [1, 2]
    assert 0 in chosen[1]
    assert gap(as_published[:1], golden.iterates("sampled")[:1]) < CLOSE
    assert gap(as_published[1:2], golden.iterates("sampled")[1:2]) > 1e-3


def test_fedpd():
    """Its mu is our 1 / r."""
    golden = Golden("fedpd")
    s = golden.settings
    assert gap(golden.ours(A.FedPD(eta_a=s["lr"], Q=s["freq"], r=1 / s["mu"])), golden.iterates()) < CLOSE


def test_fedpd_in_matlab():
    """Its stepsize is our eta_a and r; it sends x_i + r lambda_i with the lambda_i from before the round."""
    golden = Golden("fedpd_matlab")
    r, Q, T = golden.settings["stepsize"], golden.settings["localiter"], len(golden.told["iterates"])
    ours = golden.ours(A.FedPD(eta_a=r, Q=Q, r=r))
    as_published, before = (
        list(boxes.fedpd(golden.g, 3, golden.start, T, a=r, Q=Q, r=r, before=before)) for before in (False, True)
    )
    assert gap(as_published, ours) < CLOSE
    assert gap(before, golden.iterates()) < CLOSE
    assert gap(ours, golden.iterates()) > 1e-2


def test_fast_fedda():
    """In each round it adds two iterates to W between which no gradient is taken: the mean of the clients' last ones,
    and the server's w; the weights of the paper's argmin count as many iterates as gradients."""
    golden = Golden("fast_fedda")
    s = golden.settings
    T, options = len(golden.told["iterates"]), {"Q": s["K"], "mu": s["mu"], "gamma": s["gamma"]}
    as_published, released = (
        list(boxes.fast_fedda(golden.g, 3, golden.start, T, boxes.soft(s["lambda"]), **options, released=released))
        for released in (False, True)
    )
    ours = golden.ours(A.FastFedDA(L1(s["lambda"]), **options))
    assert gap(as_published, ours) < CLOSE
    assert gap(released, golden.iterates()) < CLOSE
    assert gap(ours, golden.iterates()) > 1e-2


def test_proxskip():
    """Its lr is our eta_a, 1 / it_local our p; it draws the numbers of steps from another stream, so they are given."""
    golden = Golden("proxskip")
    algorithm = A.Scaffnew(eta_a=golden.settings["lr"], Q=golden.settings["it_local"])
    server, first = algorithm.init(golden.start)
    clients, found = [first] * 3, []
    for t, steps in enumerate(golden.told["steps"]):
        down = algorithm.broadcast(server)._replace(steps=torch.tensor(steps))
        ups = []
        for i in range(3):
            up, clients[i] = algorithm.local(down, clients[i], golden.problem.oracle(torch.tensor(i), t))
            ups.append(up.xhat)
        server = algorithm.aggregate(server, algorithm.Up(sum(ups) / 3), 1.0)
        found.append(algorithm.model(server))
    assert gap(found, golden.iterates()) < CLOSE


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "golden").glob("*.json")), ids=lambda p: p.stem)
def test_where_it_comes_from_is_told(path):
    told = json.loads(path.read_text())
    assert told["repository"].startswith("github.com/")
    assert len(told["commit"]) == 40
    assert all(told[key] for key in ("file", "functions", "software", "driven"))
