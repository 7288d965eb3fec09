"""Rounds on a device that there is not, in a process of its own: prints what each case copied back, as JSON."""

import copy
import json
import sys
import warnings

import torch
from far import copied, moved, sent
from methods import MAKE
from torch import nn
from torch.nn.functional import cross_entropy

from fednmap import regularizers as R
from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.models import cnn
from fednmap.problems import LeastSquares, Logistic, Network

ROUNDS, Q = 3, 3


class Items(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def table():
    return [(torch.randn(9, 5), torch.randint(0, 3, (9,))) for _ in range(4)]


def pictures():
    return [(torch.rand(9, 1, 8, 8), torch.randint(0, 3, (9,))) for _ in range(4)]


MODULES = {
    "dense": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), table),
    "vmap": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), table),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 3)), table),
    "batch norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), table),
    "convolutions": (lambda: cnn((1, 8, 8), 3), pictures),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(4, 5), nn.Flatten(), nn.Linear(10, 4)),
        lambda: [(torch.randint(0, 4, (9, 2)), torch.randint(0, 4, (9,))) for _ in range(4)],
    ),
}


def networks(where):
    def case(module, data, **options):
        torch.manual_seed(0)
        module, data = module(), data()
        near = Network(copy.deepcopy(module), cross_entropy, data, batch_size=4, **options)
        held = [tuple(map(sent, pair)) for pair in data] if where == "device" else data
        held = [Items(*pair) for pair in data] if where == "data set" else held
        return (
            near,
            Network(moved(module), cross_entropy, held, batch_size=4, **options),
            FedNMap(R.L1(1e-3), eta_a=0.1, Q=Q),
        )

    return {f"{name}, data on the {where}": lambda m=m, d=d: case(m, d) for name, (m, d) in MODULES.items()}


def options():
    def case(**given):
        torch.manual_seed(0)
        module, data = MODULES["vmap"][0](), table()
        given |= {"batch_size": 4}
        near = Network(copy.deepcopy(module), cross_entropy, data, **given)
        return near, Network(moved(module), cross_entropy, data, **given), FedNMap(R.L1(1e-3), eta_a=0.1, Q=Q)

    return {"clipped, accumulated": lambda: case(clip_norm=0.1, accumulate=2)}


def linear(method, phi=None):
    torch.manual_seed(0)
    data = [(torch.randn(9, 6), torch.randn(9)) for _ in range(4)]
    problems = [LeastSquares(d) for d in (data, [tuple(map(sent, pair)) for pair in data])]
    smooth = method in (
        "SCAFFOLD",
        "FedAvg",
        "FedAvgM",
        "FedAdam",
        "FedYogi",
        "FedAdagrad",
        "FedProx",
        "FedPD",
        "Scaffnew",
        "PrunedFedAvg",
    )
    phi = R.Zero() if smooth else R.L1(0.01) if phi is None else phi
    return *problems, MAKE[method](phi, 4.0, Q)


def logistic():
    torch.manual_seed(0)
    data = table()
    return *(Logistic(d, batch_size=4) for d in (data, [tuple(map(sent, p)) for p in data])), FedNMap(
        R.L1(0.01), eta_a=0.1
    )


PENALTIES = {
    "ElasticNet": lambda: R.ElasticNet(0.1, 0.1),
    "GroupLasso": lambda: R.GroupLasso(0.1, [[0, 5], [1], [2, 3, 4]]),
    "SparseGroupLasso": lambda: R.SparseGroupLasso(0.1, 0.1, 2),
    "L2": lambda: R.L2(0.1),
    "LInf": lambda: R.LInf(0.1),
    "Slope": lambda: R.Slope(0.1, 0.5),
    "TotalVariation": lambda: R.TotalVariation(0.1),
    "Nuclear": lambda: R.Nuclear(0.1, (2, 3)),
    "Box": lambda: R.Box(-1.0, 1.0),
    "L1Ball": lambda: R.L1Ball(1.0),
    "L2Ball": lambda: R.L2Ball(1.0),
    "LInfBall": lambda: R.LInfBall(1.0),
    "Simplex": lambda: R.Simplex(1.0),
    "MCP": lambda: R.MCP(0.1, 3.0),
    "SCAD": lambda: R.SCAD(0.1, 3.7),
    "LogSum": lambda: R.LogSum(0.1, 1.0),
    "TransformedL1": lambda: R.TransformedL1(0.1, 1.0),
    "Halfspace": lambda: R.Halfspace(torch.ones(6), 1.0),
}


def tried(make):
    try:
        near, far, method = make()
        *_, expected = simulate(method, near, rounds=ROUNDS)
        copied.clear()
        *_, last = simulate(method, far, rounds=ROUNDS)
        found = dict(copied)
        wanted = method.model(expected.server)
        found["difference"] = float((method.model(last.server).near - wanted).abs().max())
        found["loss"] = abs(float(far.loss(sent(wanted))) - float(near.loss(wanted)))
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    skip = {"EControlDA", "ProxSGD", "NormalMapSGD"}  # with other arguments
    cases = networks("device") | networks("host") | networks("data set") | options() | {"logistic": logistic}
    cases |= {f"method {name}": lambda name=name: linear(name) for name in MAKE if name not in skip}
    cases |= {f"penalty {name}": lambda make=make: linear("FedNMap", make()) for name, make in PENALTIES.items()}
    words = sys.argv[1:] or [""]
    json.dump({k: tried(make) for k, make in cases.items() if any(word in k for word in words)}, sys.stdout)


if __name__ == "__main__":
    main()
