"""The round loop on one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, Problem, State, nbytes
from fednmap.simulation.participation import draw
from fednmap.simulation.store import Clients


class Round(NamedTuple):
    """What is known after round t; the model is `algorithm.model(round.server)`."""

    t: int
    server: State
    clients: Clients
    participants: Tensor
    counted: Tensor
    bytes_up: int
    bytes_down: int


class Diverged(ArithmeticError):
    """The server's state is no longer finite."""

    def __init__(self, t: int) -> None:
        super().__init__(f"the iterate is no longer finite after round {t}; use a smaller eta_a (or eta_s)")
        self.t = t
        self.result: Any = None


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    start: Tensor | None = None,
    participation: float = 1.0,
    loss: float = 0.0,
    seed: int = 0,
    chunk: int | None = None,
    after: Round | None = None,
) -> Iterator[Round]:
    """Run `rounds` rounds and yield a Round after each.

    start:         where to begin, of length problem.dim; decides dtype and device. Default: problem.start, else zeros.
    participation: share of the clients drawn in each round.
    loss:          probability that a participant's reply is lost; it then leaves no trace on the server or the client.
    seed:          decides who takes part and whose reply is lost; the minibatches belong to the problem.
    chunk:         clients run side by side; any value gives the same trajectory, to the order of floating-point sums.
    after:         a round of an earlier call with the same arguments, to go on from: rounds after.t + 1 .. rounds - 1.
    """
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}; it must be at least 0")
    if not 0 < participation <= 1:
        raise ValueError(f"participation is {participation}; it must be in (0, 1]")
    if not 0 <= loss < 1:
        raise ValueError(f"loss is {loss}; the probability of a lost reply must be in [0, 1)")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    if algorithm.traits.full_participation and (participation < 1 or loss > 0):
        name = type(algorithm).__name__
        raise ValueError(f"{name} needs every client in every round; use participation=1 and loss=0, or FedNMap")
    if algorithm.traits.central and problem.n != 1:
        name = type(algorithm).__name__
        raise ValueError(f"{name} is a central method, given {problem.n} clients; use problems.Pooled(problem)")
    server, initial = algorithm.init(first_point(problem, start))
    clients = Clients(problem.n, initial)
    first, (up, down) = 0, message_bytes(algorithm, server, initial)
    if after is not None:
        first, server, clients = after.t + 1, after.server, after.clients
    weights = _weights(problem)

    def loop() -> Iterator[Round]:
        nonlocal server
        for t in range(first, rounds):
            participants, counted = draw(problem.n, t, participation=participation, loss=loss, seed=seed)
            if float(weights[counted].sum()) > 0:  # nobody replied, or only clients that weigh nothing: no news
                server = _step(algorithm, problem, t, server, clients, counted, weights, chunk or len(counted))
            k = len(participants)
            yield Round(t, server, clients, participants, counted, k * up, k * down)

    return loop()


def first_point(problem: Problem, start: Tensor | None) -> Tensor:
    """`start` if given and fitting, else the problem's own, else zeros."""
    if start is None:
        start = getattr(problem, "start", None)
    if start is None:
        return torch.zeros(problem.dim)
    if start.shape != (problem.dim,):
        raise ValueError(f"start has shape {tuple(start.shape)}; this problem needs a vector of length {problem.dim}")
    if not start.is_floating_point():
        raise ValueError(f"start holds {start.dtype}; use float32 or float64")
    return start.detach()


def _step(
    algorithm: Algorithm,
    problem: Problem,
    t: int,
    server: State,
    clients: Clients,
    counted: Tensor,
    weights: Tensor,
    chunk: int,
) -> State:
    """One round: the server's new state; the clients' states are replaced in `clients`.

    What a lost reply held is never used, so only the clients that are counted are computed.
    """
    down = algorithm.broadcast(server)
    sums: list[State] = []
    for ids in counted.split(chunk):
        up, new = algorithm.local(down, clients[ids], problem.oracle(ids, t))
        clients[ids] = new
        sums.append(_weighted_sum(up, weights[ids]))
    received = float(weights[counted].sum())
    mean = type(sums[0])(*(sum(field) / received for field in zip(*sums, strict=True)))
    server = algorithm.aggregate(server, mean, received / float(weights.sum()))
    if not all(bool(torch.isfinite(v.sum())) for v in server):
        raise Diverged(t)
    return server


def message_bytes(algorithm: Algorithm, server: State, client: State) -> tuple[int, int]:
    """Bytes one client sends and receives in a round, from the messages of a dry run without data."""
    down = algorithm.broadcast(server)
    up, _ = algorithm.local(down, client, lambda x, q: torch.zeros_like(x))
    return nbytes(algorithm.pack(up)), nbytes(down)


def _weighted_sum(up: State, weights: Tensor) -> State:
    """The sum over a stack of clients; a field that is the same for all of them may come unstacked."""
    stacked = (v.expand(len(weights), *v.shape[-1:]) for v in up)
    return type(up)(*(torch.tensordot(weights.to(v), v, dims=([0], [0])) for v in stacked))


def _weights(problem: Problem) -> Tensor:
    weights = getattr(problem, "weights", None)
    return (
        torch.ones(problem.n, dtype=torch.float64) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    )
