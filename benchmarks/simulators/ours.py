"""The same job in fednmap: `ours.py ROUNDS METHOD THREADS`, FedAvg or FedNMap; under torchrun in several processes."""

import os
import sys

import torch
import torch.distributed as dist
from job import BATCH, CLASSES, CLIENTS, HIDDEN, INPUTS, RATE, STEPS, client, report
from torch import nn

from fednmap import simulate
from fednmap.algorithms import FedAvg, FedNMap
from fednmap.models import mlp
from fednmap.problems import Network
from fednmap.regularizers import L1

torch.set_num_threads(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
method = {"FedAvg": FedAvg(eta_a=RATE, Q=STEPS), "FedNMap": FedNMap(L1(1e-4), eta_a=RATE, Q=STEPS)}[sys.argv[2]]
data = [tuple(map(torch.from_numpy, client(i))) for i in range(CLIENTS)]
problem = Network(mlp(INPUTS, CLASSES, [HIDDEN]), nn.functional.cross_entropy, data, batch_size=BATCH)
rounds = simulate(method, problem, rounds=10**6, threads=int(sys.argv[3]))
report(lambda t: next(rounds))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
