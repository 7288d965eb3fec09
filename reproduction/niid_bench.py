"""SCAFFOLD as NIID-Bench has run it, in our own words: three departures from the published method.

Li, Diao, Chen and He, Federated Learning on Non-IID Data Silos: An Experimental Study, ICDE 2022; repository
Xtra-Computing/NIID-Bench, experiments.py. Its tables report SCAFFOLD at chance, 10.0 %, on CIFAR-10 with 100 parties of
whom 10 % are sampled, in every partition; with 10 parties who all take part it is within 2 points of the best or the
best itself, but for parties of unlike sizes (62.4 %, FedAvg 72.0 %).

1. The controls of server and clients begin as the weights w of a network drawn at random, not as zero (its issue 8).
2. Until 17 August 2022, so also when the tables were made (its README has these rows since January 2021), the server
   moved its control by the mean of the changes of those sampled, not by their sum over the number of all parties (its
   issue 12, commit 66095cc). With everybody present both are the same. With a share s sampled, each client's first
   change takes w / (s n) from the server's control where w / n is due: when all have been heard it is off by (1 - 1/s)
   w, for ever, and every local step moves along w: the model grows without bound. Either departure alone leaves no such
   drift along w.
3. Momentum acts on the gradients and not on the correction, and the model is a mean weighted by samples while the
   control is a plain one: with exact gradients the method settles, if it does, where psi is not stationary.

Here also: a client's control changes when it has trained, whether or not its reply arrives; that program has no losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import Problem
from fednmap.simulation.participation import Uniform, take_part


class Heard(NamedTuple):
    """After a round: the model, and the bytes that the participants have sent in it."""

    t: int
    x: Tensor
    bytes_up: int


def scaffold(
    problem: Problem,
    start: Tensor,
    *,
    eta_a: float,
    Q: int,
    rounds: int,
    control: Tensor,
    weights: Tensor,
    momentum: float = 0.9,
    over_sampled: bool = True,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
) -> Iterator[Heard]:
    """The rounds of that program, with Q local steps for everybody.

    control:      where all controls begin.
    weights:      of the clients in the mean of the models.
    over_sampled: whether the server's control moves by the mean over those heard, as until August 2022, or by their sum
                  over the number of clients.
    """
    n, x, c = problem.n, start, control
    controls = control.expand(n, -1).clone()
    for t in range(rounds):
        participants, counted = take_part(n, t, sampler=Uniform(participation), drop=drop, seed=seed)
        g, d = problem.oracle(participants, t), c - controls[participants]
        y, v = x.expand(len(participants), -1), torch.zeros_like(d)
        for q in range(Q):
            v = momentum * v + g(y, q)
            y = y - eta_a * (v + d)
        new = (x - y) / (eta_a * Q) - d
        changes, arrived = new - controls[participants], torch.isin(participants, counted)
        controls[participants] = new
        if bool(arrived.any()):
            share = weights[counted].to(x)
            x = (share / share.sum()) @ y[arrived]
            c = c + changes[arrived].sum(0) / (len(counted) if over_sampled else n)
        yield Heard(t, x, len(participants) * 2 * x.numel() * x.element_size())
