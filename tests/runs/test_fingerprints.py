"""A run in a folder goes on with what it began with: a change of anything that decides its numbers is noticed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fednmap import InputError, Tolerance, run
from fednmap import algorithms as A
from fednmap.core import Algorithm, info_of
from fednmap.problems import Logistic, Network, Pooled
from fednmap.regularizers import L1, Masked, PerLayer, Zero
from fednmap.runs.fingerprints import described, identity
from fednmap.simulation import TimeLimit
from fednmap.simulation.participation import Cyclic, Weighted
from fednmap.simulation.schedules import Cosine

G = torch.Generator().manual_seed(0)
X = [torch.randn(12, 4, generator=G) for _ in range(3)]
LABELS = [torch.arange(12) % 3 for _ in range(3)]
MASK = torch.arange(3000) % 2 == 0


def network(activation=nn.ReLU, loss=nn.functional.cross_entropy, **more):
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 3), activation(), nn.Linear(3, 3))
    return Network(module, loss, list(zip(X, LABELS, strict=True)), **more)


def smoothed(outputs, targets, by=0.1):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=by)


def fednmap(phi=None):
    return A.FedNMap(phi or L1(1e-3), eta_a=0.05, Q=2)


class Bowl:
    """A problem of one's own, without a word about itself."""

    n, dim = 2, 3

    def __init__(self, middle):
        self.middle = middle

    def oracle(self, clients, t):
        return lambda x, q: (x - self.middle) + torch.zeros(*clients.shape, 3)

    def loss(self, x):
        return (x - self.middle).square().sum() / 2

    def gradient(self, x):
        return x - self.middle


class Descent(Algorithm):
    """A method of one's own that is not a data class."""

    traits, Server, Client, Up = A.FedAvg.traits, A.FedAvg.Server, A.FedAvg.Client, A.FedAvg.Up

    def __init__(self, eta):
        self.eta, self.phi = eta, Zero()

    def init(self, start):
        return self.Server(start), self.Client()

    def local(self, down, client, g):
        return self.Up(-self.eta * g(down.x, 0)), client

    def aggregate(self, server, up, share):
        return self.Server(server.x + up.change)

    def model(self, server):
        return server.x


def constant(value):
    return lambda t: value


def with_pixel(data, value):
    x = data.clone()
    x[1500] = value
    return x


BEGAN = {"algorithm": fednmap, "problem": network}
CHANGES = {
    "batch size": ({"problem": network}, {"problem": lambda: network(batch_size=8)}),
    "seed of the minibatches": ({"problem": network}, {"problem": lambda: network(seed=1)}),
    "weights of clients": ({"problem": network}, {"problem": lambda: network(weights=[0.5, 0.25, 0.25])}),
    "activation": ({"problem": network}, {"problem": lambda: network(nn.Tanh)}),
    "loss": ({"problem": network}, {"problem": lambda: network(loss=smoothed)}),
    "number in the loss": (
        {"problem": lambda: network(loss=partial(smoothed, by=0.1))},
        {"problem": lambda: network(loss=partial(smoothed, by=0.2))},
    ),
    "mask": (
        {"algorithm": lambda: fednmap(Masked(L1(0.1), MASK[:27])), "measure_gamma": 1.0},
        {"algorithm": lambda: fednmap(Masked(L1(0.1), ~MASK[:27])), "measure_gamma": 1.0},
    ),
    "sampler": ({"sampler": lambda n, t, rng: [0]}, {"sampler": lambda n, t, rng: [1]}),
    "schedule": ({"eta_a": lambda t: 0.05}, {"eta_a": lambda t: 0.01}),
    "what a schedule encloses": ({"eta_a": constant(0.05)}, {"eta_a": constant(0.01)}),
    "a metric more": ({}, {"metrics": {"size": torch.linalg.vector_norm}}),
    "another metric": ({"metrics": {"size": lambda x: x.norm()}}, {"metrics": {"size": lambda x: x.abs().max()}}),
    "problem of one's own": ({"problem": lambda: Bowl(1.0)}, {"problem": lambda: Bowl(2.0)}),
    "method of one's own": ({"algorithm": lambda: Descent(0.1)}, {"algorithm": lambda: Descent(0.2)}),
}


def kept(folder, algorithm=fednmap, problem=network, rounds=4, **options):
    return run(algorithm(), problem(), rounds=rounds, folder=folder, **options)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_the_same_is_not(tmp_path, change):
    began, changed = CHANGES[change]
    first = kept(tmp_path / "run", **began)
    assert torch.equal(kept(tmp_path / "run", **began).x, first.x)
    with pytest.raises(InputError, match="holds another run"):
        kept(tmp_path / "run", **changed)


def test_digests_of_what_repr_cuts_short():
    assert repr(with_pixel(X[0].repeat(1000, 1), 1.0)) == repr(with_pixel(X[0].repeat(1000, 1), 2.0))
    assert identity(with_pixel(X[0].repeat(1000, 1), 1.0)) != identity(with_pixel(X[0].repeat(1000, 1), 2.0))
    odds = np.ones(3000)
    other = odds.copy()
    other[1500] = 2
    assert described(Weighted(odds, 0.5)) != described(Weighted(other, 0.5))
    assert described(Weighted(odds, 0.5)) == described(Weighted(odds.copy(), 0.5))


STEPS, WEIGHT = [0.1, 0.05], 2.0


def listed(t):
    return STEPS[t]


def nested(x):
    return sum(WEIGHT * v for v in x)


@pytest.mark.parametrize(
    ("value", "name", "other"), [(listed, "STEPS", [0.1, 0.01]), (nested, "WEIGHT", 1.0)], ids=["list", "nested"]
)
def test_what_a_function_has_from_its_module_counts(monkeypatch, value, name, other):
    before = identity(value)
    assert identity(value) == before
    monkeypatch.setitem(globals(), name, other)
    assert identity(value) != before


LAZY = """
from functools import cached_property

class Lazy:
    @cached_property
    def weight(self):
        return {}
"""


def imported(path, name, text):
    (path / f"{name}.py").write_text(text)
    return import_module(name)


def test_the_code_of_a_class_counts_and_what_it_has_computed_does_not(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    three, four, same = (imported(tmp_path, f"lazy{k}", LAZY.format(v)).Lazy() for k, v in enumerate("343"))
    before = identity(three)
    assert three.weight == 3
    assert identity(three) == before == identity(same) != identity(four)
    assert identity(three, "v1") == identity(four, "v1") != identity(three, "v2")


def test_two_functions_on_one_line_are_told_apart():
    one, other = (lambda x: x.norm(1)), (lambda x: x.norm(2))
    assert identity(one) != identity(other)


def test_code_without_a_source_needs_a_tag(tmp_path):
    made = eval("lambda x: float(x[0])")
    with pytest.raises(InputError, match="tag="):
        kept(tmp_path / "run", metrics={"first": made})
    first = kept(tmp_path / "run", metrics={"first": made}, tag="v1")
    assert torch.equal(kept(tmp_path / "run", metrics={"first": made}, tag="v1").x, first.x)
    for tag in ("v2", None):
        with pytest.raises(InputError, match=r"holds another run|tag="):
            kept(tmp_path / "run", metrics={"first": made}, tag=tag)


def test_what_repr_says_in_full_stays_as_it_is():
    assert described(Cyclic(0.5)) == "Cyclic(share=0.5)"
    assert described(Cosine(0.1, 50)) == "Cosine(first=0.1, rounds=50, last=0.0)"
    assert described(fednmap()) == repr(fednmap())
    assert described(0.5) == 0.5
    assert described(None) is None


@dataclass
class Circle:
    inner: object = None


def test_what_holds_itself_has_a_digest():
    circle = Circle()
    circle.inner = [circle, {"set": {"b", "a"}}, torch.float32, np.float64(1.0), print, Circle]
    assert identity(circle) == identity(circle)


TESTS = str(Path(__file__).parents[1])
PRINTS = (
    "import test_fingerprints as t; print(t.identity([t.network().made_of(), t.Descent(0.1), t.smoothed, {'a', 'b'}]))"
)


def test_the_digest_is_the_same_in_another_process():
    here = identity([network().made_of(), Descent(0.1), smoothed, {"a", "b"}])
    where = os.pathsep.join([os.path.dirname(__file__), TESTS, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": where}
    there = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, env=environment, check=True)
    assert there.stdout.strip() == here


def pooled():
    return Pooled(Logistic(list(zip(X, LABELS, strict=True)), batch_size=3))


@pytest.mark.parametrize("make", [network, pooled])
def test_running_does_not_change_what_a_problem_is(make):
    problem = make()
    before = identity(info_of(problem).made_of())
    run(A.ProxSGD(L1(0.1)) if problem.n == 1 else fednmap(), problem, rounds=2)
    assert identity(info_of(problem).made_of()) == before == identity(info_of(make()).made_of())


def test_regularizers_by_layer_are_told_apart():
    layer = nn.Linear(3, 2)
    one, two = (described(fednmap(PerLayer({"weight": L1(v)}, layer))) for v in (0.1, 0.2))
    assert one != two


def test_another_reason_to_stop_goes_on(tmp_path):
    problem = lambda: Bowl(1.0)  # noqa: E731
    first = kept(tmp_path / "run", problem=problem, rounds=500, stop=Tolerance(1e-2))
    again = kept(tmp_path / "run", problem=problem, rounds=500, stop=Tolerance(1e-2))
    assert (again.final, again.ended) == (first.final, first.ended)
    assert kept(tmp_path / "run", problem=problem, rounds=500, stop=[Tolerance(1e-2)]).final == first.final
    tighter = kept(tmp_path / "run", problem=problem, rounds=500, stop=Tolerance(1e-5))
    alone = run(fednmap(), problem(), rounds=500, stop=Tolerance(1e-5))
    assert torch.equal(tighter.x, alone.x)
    assert tighter.final["round"] == alone.final["round"] > first.final["round"]


def test_a_time_limit_stays_reached(tmp_path):
    first = kept(tmp_path / "run", stop=TimeLimit(1e-9), rounds=50)
    assert first.final["round"] == 1
    assert kept(tmp_path / "run", stop=TimeLimit(1e-9), rounds=50).final == first.final
    assert kept(tmp_path / "run", stop=TimeLimit(1e9), rounds=5).final["round"] == 5


@pytest.mark.parametrize(
    "mistake", [{"every": 0}, {"participation": 2}, {"metrics": [len]}, {"eta_a": Cosine}], ids=str
)
def test_what_is_refused_leaves_no_folder(tmp_path, mistake):
    with pytest.raises(InputError):
        kept(tmp_path / "run", **mistake)
    assert kept(tmp_path / "run").final["round"] == 4
