"""The contract every method on a graph meets, checked by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fednmap.core import FixedPoint, Regularizer, State, nbytes
from fednmap.decentralized import Complete, Decentralized, DecentralizedAlgorithm, Matchings, Ring, Topology, Weights
from fednmap.decentralized.on_graph import Mixing
from fednmap.problems import LeastSquares
from fednmap.regularizers import L1, Zero
from fednmap.simulation import simulate
from fednmap.testing.algorithm import _close, _copies, _same, heterogeneous, optimum, smoothness

Make = Callable[[Regularizer, float], DecentralizedAlgorithm]
"""make(phi, L): the method with step sizes that suit smoothness L."""


class GraphReport(NamedTuple):
    """Distances |x_i - x*| / |x*| of the worst node where the method ended on the heterogeneous lasso."""

    ring: float
    complete: float
    pairs: float | None
    """On random matchings; None for methods that want a graph that stays."""


def check_decentralized(make: Make, *, rounds: int = 1500, tolerance: float = 1e-10) -> GraphReport:
    """Raise AssertionError where the method breaks the contract; otherwise say how far from the optimum it ends.

    Asked for: a stack of nodes gives what they give one by one, and `simulate` what a plain loop over single nodes
    gives; calls are pure; a message is as large as declared; nodes numbered otherwise on the same graph end up the
    same; nodes that are alike act as one that is alone. A method whose traits promise an exact fixed point must rest
    there, and reach it on a ring, on the complete graph and, if it promises that, on a graph that is another one in
    every round.
    """
    with torch.device("cpu"):
        phi = L1(0.2) if make(Zero(), 1.0).traits.composite else Zero()
        problem = heterogeneous(8)
        method = make(phi, smoothness(problem))
        name, said = type(method).__name__, method.traits
        assert isinstance(said.fixed_point, FixedPoint), f"{name}: traits.fixed_point is {said.fixed_point!r}"
        _check_message(method, problem, name)
        _check_stacking(method, problem, name)
        _check_one_by_one(method, problem, name)
        _check_relabelled(method, problem, name)
        _check_alike(method, problem, name)
        best, exact = optimum(problem, phi, 4000), said.fixed_point is FixedPoint.EXACT
        found: list[float | None] = []
        for graph in (Ring(8), Complete(8), Matchings(8) if said.changing else None):
            if graph is None:
                found.append(None)
                continue
            states = _after(method, problem, graph, rounds)
            x = method.model(method.iterate(states))
            distance = float((x - best).norm(dim=-1).max() / best.norm())
            where = type(graph).__name__
            assert not exact or distance < tolerance, f"{name}: on {where} a node ends {distance:.1e} from the optimum"
            _check_mean(method, problem, states, name) if exact else None
            found.append(distance)
        return GraphReport(*found)  # type: ignore[arg-type]


def _after(
    method: DecentralizedAlgorithm, problem: LeastSquares, graph: Topology, rounds: int, **options: Any
) -> State:
    """The nodes' states after some rounds."""
    start = torch.ones_like(problem.start)
    *_, last = simulate(Decentralized(method, graph), problem, rounds=rounds, start=start, **options)
    return last.clients[torch.arange(problem.n)]


def _check_message(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    states = _after(method, problem, Ring(problem.n), 3)
    g, before = problem.oracle(torch.arange(problem.n), 3), _copies(states)
    message, kept = method.message(states, g)
    held = [_copies(message), _copies(kept)]
    vectors = nbytes(message) / (problem.n * problem.start.numel() * problem.start.element_size())
    assert vectors == method.traits.vectors, (
        f"{name}: sends {vectors:g} vectors, its traits say {method.traits.vectors}"
    )
    again = method.message(states, g)
    assert _same(again[0], held[0]), f"{name}: message is not pure"
    new, twice = method.update(kept, message), method.update(kept, message)
    assert _same(new, twice), f"{name}: update is not pure"
    for state, copy in ((states, before), (message, held[0]), (kept, held[1])):
        assert _same(state, copy), f"{name}: a call changed its {type(state).__name__} in place"


def _check_stacking(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    states = _after(method, problem, Ring(problem.n), 3)
    message, kept = method.message(states, problem.oracle(torch.arange(problem.n), 3))
    new = method.update(kept, message)
    for i in range(problem.n):
        alone = method.message(type(states)(*(v[i] for v in states)), problem.oracle(torch.tensor(i), 3))
        assert _close([v[i] for v in message], alone[0]), f"{name}: node {i} sends something else in a stack than alone"
        after = method.update(alone[1], alone[0])
        assert _close([v[i] for v in new], after), f"{name}: node {i} keeps something else in a stack than alone"


def _check_one_by_one(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    """`simulate` gives the states of a plain loop over single nodes, whose states are values."""
    W, nodes = Mixing(Ring(problem.n), positive=method.traits.positive).weights(0), torch.arange(problem.n)
    states = [method.init(torch.ones_like(problem.start))] * problem.n
    for t in range(5):
        sent = [method.message(states[i], problem.oracle(i, t)) for i in nodes]
        mixed = [W.to(problem.start) @ torch.stack(field) for field in zip(*(m for m, _ in sent), strict=True)]
        states = [method.update(sent[i][1], type(sent[i][0])(*(v[i] for v in mixed))) for i in nodes]
    expected = [torch.stack(field) for field in zip(*states, strict=True)]
    for options in ({}, {"chunk": 1}, {"chunk": 3, "threads": 2}):
        same = _close(_after(method, problem, Ring(problem.n), 5, **options), expected)
        assert same, f"{name}: simulate({options or ''}) gives other states than a loop over single nodes"


def _check_relabelled(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    """The same graph with its nodes in another order."""
    order = torch.randperm(problem.n, generator=torch.Generator().manual_seed(1))
    W = Ring(problem.n).weights(0)
    there = _after(method, problem, Weights(W), 5)
    shuffled = LeastSquares([problem.data[int(i)] for i in order])
    here = _after(method, shuffled, Weights(W[order][:, order]), 5)
    assert _close([v[order] for v in there], here), f"{name}: depends on how the nodes are numbered"


def _check_alike(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    """Nodes with the same data stay together, and do what one that is alone does."""
    one, many = LeastSquares([problem.data[0]]), LeastSquares([problem.data[0]] * 4)
    alone, together = _after(method, one, Ring(1), 5), _after(method, many, Ring(4), 5)
    assert _close([v.expand(4, -1) for v in alone], together), f"{name}: four nodes that are alike differ from one"


def _check_mean(method: DecentralizedAlgorithm, problem: LeastSquares, states: State, name: str) -> None:
    """At the optimum a round changes nothing, whatever doubly stochastic W it mixes with."""
    g, W = problem.oracle(torch.arange(problem.n), 0), Complete(problem.n).weights(0)
    message, kept = method.message(states, g)
    new = method.update(kept, type(message)(*(W @ v for v in message)))
    moved = float((method.iterate(new) - method.iterate(states)).norm())
    assert moved < 1e-8, f"{name}: does not rest at the optimum when W changes, it moves by {moved:.1e}"
