"""The contract every method meets, with a server or on a graph, checked by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednmap.core import Algorithm, FixedPoint, Regularizer, State, nbytes, next_broadcast, oracle_of, pack, unpack
from fednmap.decentralized import Complete, Decentralized, DecentralizedAlgorithm, Matchings, Ring, Topology, Weights
from fednmap.decentralized.on_graph import Mixing
from fednmap.names import InputError
from fednmap.problems import LeastSquares, Pooled
from fednmap.regularizers import L1, Zero
from fednmap.simulation import simulate
from fednmap.simulation.loop import mean
from fednmap.simulation.participation import Uniform, take_part
from fednmap.simulation.uplink import Federation, Rounding, Stage, Uplinks

Make = Callable[[Regularizer, float, int], Algorithm]
"""make(phi, L, Q): the method with step sizes that suit smoothness L and Q local steps."""
MakeOnGraph = Callable[[Regularizer, float], DecentralizedAlgorithm]
"""make(phi, L): the method with step sizes that suit smoothness L."""


class Report(NamedTuple):
    """Distances |x - x*| / |x*| where the method ended on the heterogeneous lasso (or least squares, without phi)."""

    full: float
    sampled: float | None
    lossy: float | None


def heterogeneous(n: int = 6, samples: int = 20, dim: int = 8, seed: int = 0) -> LeastSquares:
    """Return strongly convex least squares in float64 whose clients differ in features and solutions.

    >>> heterogeneous().dim
    8
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    common = normal(dim) * (torch.arange(dim) < dim // 2)
    data = []
    for _ in range(n):
        a = normal(samples, dim) * (0.5 + torch.rand(dim, generator=rng, dtype=torch.float64))
        data.append((a, a @ (common + 0.5 * normal(dim)) + 0.1 * normal(samples)))
    return LeastSquares(data)


def smoothness(problem: LeastSquares) -> float:
    """Return the largest smoothness constant of any client."""
    return max(float(torch.linalg.matrix_norm(a, 2) ** 2 / len(a)) for a, _ in problem.data)


SETTINGS = {
    "uplink": "shortened uplinks",
    "participation": "half of the clients sampled",
    "drop": "30 % of the replies lost",
}
"""What `_reached` does to a method, by the option of `simulate`."""


def optimum(problem: LeastSquares, phi: Regularizer, steps: int = 20_000) -> Tensor:
    """Return argmin f + phi by proximal gradient steps, to rounding."""
    x, step = problem.start, 1 / smoothness(problem)
    for _ in range(steps):
        new = phi.prox(x - step * problem.gradient(x), step)
        if torch.equal(new, x):
            break
        x = new
    return x


def check_algorithm(make: Make, *, rounds: int = 1500, tolerance: float = 1e-10) -> Report:
    """Raise AssertionError where the method breaks the contract; else return how far from the optimum it ends.

    `simulate` must give what a plain loop over single clients gives: in chunks, in threads, sampled, with lost replies.
    Methods whose traits promise an exact fixed point must reach it, also with half of the clients sampled and with
    30 % of the replies lost unless they need everybody. For a biased one the distance is only reported. A method with
    client state and `state_after_sending` must also be exact after rounds in which its uplinks were shortened.
    """
    with torch.device("cpu"):
        return _check(make, rounds, tolerance)


def _check(make: Make, rounds: int, tolerance: float) -> Report:
    Q = 1 if _only_one_step(make) else 5
    phi = L1(0.2) if make(Zero(), 1.0, Q).traits.composite else Zero()
    problem = heterogeneous()
    algorithm = make(phi, smoothness(problem), Q)
    name = type(algorithm).__name__
    kind = algorithm.traits.fixed_point
    assert isinstance(kind, FixedPoint), f"{name}: traits.fixed_point is {kind!r}; say a member of FixedPoint"
    _check_messages(algorithm, problem, name)
    _check_following(algorithm, problem, name)
    _check_one_by_one(algorithm, Pooled(problem) if algorithm.traits.central else problem, name)
    if algorithm.traits.central:
        return Report(_reached(algorithm, Pooled(problem), problem, phi, rounds, tolerance, name), None, None)
    _check_stacking(algorithm, problem, name)
    can_change = _check_state_after_sending(algorithm, problem, name)
    _check_permutation(algorithm, problem, name)
    _check_identical(algorithm, problem, name)
    _check_knowledge(make(phi, smoothness(problem), 1), problem, name)
    full = _reached(algorithm, problem, problem, phi, rounds, tolerance, name)
    if can_change:
        _reached(algorithm, problem, problem, phi, 2 * rounds, tolerance, name, uplink=_Shortened())
    if algorithm.traits.full_participation:
        _check_refusal(algorithm, problem, name)
        return Report(full, None, None)
    sampled = _reached(algorithm, problem, problem, phi, 2 * rounds, tolerance, name, participation=0.5)
    lossy = _reached(algorithm, problem, problem, phi, 2 * rounds, tolerance, name, drop=0.3)
    return Report(full, sampled, lossy)


def _only_one_step(make: Make) -> bool:
    try:
        make(Zero(), 1.0, 5)
    except ValueError:
        return True
    return False


def _copies(state: State) -> list[Tensor]:
    return [v.clone() for v in state]


def _same(a: State, b: State) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def _close(a: State, b: State) -> bool:
    return all(torch.allclose(u, v, rtol=1e-11, atol=1e-11) for u, v in zip(a, b, strict=True))


def _warm(algorithm: Algorithm, problem: LeastSquares, rounds: int = 3) -> tuple[State, State]:
    """Server and clients after a few rounds, so that nothing is zero any more."""
    *_, last = simulate(algorithm, problem, rounds=rounds, start=torch.ones_like(problem.start))
    return last.server, last.clients[torch.arange(problem.n)]


def _check_messages(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """Uplink and downlink as large as declared; a packed uplink comes back as it was; calls leave inputs alone."""
    server, client = algorithm.init(problem.start + 1)
    down = algorithm.broadcast(server)
    oracle = oracle_of(algorithm, problem, torch.tensor(0), 0)
    kept = [_copies(s) for s in (server, client, down)]
    up, _ = algorithm.local(down, client, oracle)
    vector = problem.start.numel() * problem.start.element_size()
    sent = nbytes(up) / vector
    declared = algorithm.traits.up + algorithm.traits.hessians * (problem.dim + 1) / 2
    assert sent == declared, f"{name}: sends {sent:g} vectors, its traits say {declared}"
    received, declared = nbytes(down) / vector, algorithm.traits.down
    assert received == declared, f"{name}: receives {received:g} vectors, its traits say {declared}"
    packed = pack(algorithm, up)
    assert _same(unpack(algorithm, packed, up), up), f"{name}: unpack(pack(up)) differs from up"
    assert nbytes(packed) <= nbytes(up) or packed is up, f"{name}: the packed uplink is larger than the dense one"
    again, _ = algorithm.local(down, client, oracle)
    assert _same(up, again), f"{name}: the same local call gives another result"
    after = algorithm.aggregate(server, up, 1.0)
    assert _same(after, algorithm.aggregate(server, up, 1.0)), f"{name}: the same aggregate gives another result"
    algorithm.model(after)
    for state, before in zip((server, client, down), kept, strict=True):
        assert _same(state, before), f"{name}: a call changed its {type(state).__name__} input in place"


def _check_following(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """The next broadcast follows from the one before and the mean uplink, to the bit, where the traits say so."""
    if not algorithm.traits.broadcast_follows:
        return
    server, client = algorithm.init(problem.start + 1)
    for t, share in enumerate((1.0, 0.5, 1 / 3)):
        down = algorithm.broadcast(server)
        up, client = algorithm.local(down, client, oracle_of(algorithm, problem, torch.tensor(0), t))
        server = algorithm.aggregate(server, up, share)
        same = _same(next_broadcast(algorithm, down, up, share), algorithm.broadcast(server))
        assert same, f"{name}: the next broadcast does not follow from the broadcast before and the mean uplink"


def _check_stacking(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """A stack of clients gives what the clients give one by one."""
    server, clients = _warm(algorithm, problem)
    down, everybody = algorithm.broadcast(server), torch.arange(problem.n)
    up, new = algorithm.local(down, clients, oracle_of(algorithm, problem, everybody, 7))
    for i in everybody:
        client = type(clients)(*(v[i] for v in clients))
        up_i, new_i = algorithm.local(down, client, oracle_of(algorithm, problem, i, 7))
        row = [v.expand(problem.n, *v.shape[-1:])[i] for v in up]
        assert _close(row, up_i), f"{name}: client {int(i)} sends something else in a stack than alone"
        assert _close([v[i] for v in new], new_i), f"{name}: client {int(i)} keeps something else in a stack than alone"


def _check_one_by_one(algorithm: Algorithm, problem: LeastSquares | Pooled, name: str) -> None:
    """`simulate` gives the server and the client states of the plain loop."""
    everybody, start = torch.arange(problem.n), torch.ones(problem.dim, dtype=torch.float64)
    how: list[dict[str, float]] = [{}, {"chunk": 1}, {"chunk": 2, "threads": 2}]
    if not algorithm.traits.full_participation and not algorithm.traits.central:
        how += [{"participation": 0.5}, {"drop": 0.3}]
    for options in how:
        *_, last = simulate(algorithm, problem, rounds=5, start=start, **options)  # type: ignore[arg-type]
        server, clients = _plain_loop(
            algorithm, problem, 5, options.get("participation", 1.0), options.get("drop", 0.0)
        )
        same = _close(last.server, server)
        assert same, f"{name}: simulate({options or ''}) gives another server than a loop over single clients"
        stacked = [torch.stack(values) for values in zip(*clients, strict=True)]
        same = _close(last.clients[everybody], stacked)
        assert same, f"{name}: simulate({options or ''}) gives other client states than a loop over single clients"


def _plain_loop(
    algorithm: Algorithm, problem: LeastSquares | Pooled, rounds: int, participation: float = 1.0, drop: float = 0.0
) -> tuple[State, list[State]]:
    """The server's state and the clients' after a run of single clients, one after another; states are values."""
    server, client = algorithm.init(torch.ones(problem.dim, dtype=torch.float64))
    clients = [client] * problem.n
    for t in range(rounds):
        down = algorithm.broadcast(server)
        counted = take_part(problem.n, t, sampler=Uniform(participation), drop=drop, seed=0).counted.tolist()
        replies = [
            algorithm.local(down, clients[i], oracle_of(algorithm, problem, torch.tensor(i), t)) for i in counted
        ]
        if replies:
            server = algorithm.aggregate(server, mean([up for up, _ in replies]), len(counted) / problem.n)
        for i, (_, new) in zip(counted, replies, strict=True):
            clients[i] = new
    return server, clients


class _Shortened(Stage):
    """Half of every uplink in the first rounds: a state that is not built from what was sent is wrong for ever."""

    alters_state = True

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        if uplinks.t >= 20:
            return uplinks
        sent = type(uplinks.sent)(*(v / 2 for v in uplinks.sent))
        return uplinks._replace(sent=sent, known=sent)


def _check_state_after_sending(algorithm: Algorithm, problem: LeastSquares, name: str) -> bool:
    """A client's state follows from what it sent: the mean of the states stays the server's.

    Returns whether the method has client state and its uplinks may be changed.
    """
    server, clients = _warm(algorithm, problem)
    down, everybody = algorithm.broadcast(server), torch.arange(problem.n)
    up, new = algorithm.local(down, clients, oracle_of(algorithm, problem, everybody, 7))
    try:
        same = algorithm.state_after_sending(down, clients, up, up)
    except InputError:  # it says that it cannot
        return False
    assert _close(same, new), f"{name}: state_after_sending(sent = up) is not the state that local returned"
    sent = type(up)(*(0.5 * v.round(decimals=1) for v in up))  # as clipped and rounded
    states = algorithm.state_after_sending(down, clients, up, sent)
    after = algorithm.aggregate(server, type(sent)(*(v.mean(0) if v.ndim > 1 else v for v in sent)), 1.0)
    if (field := algorithm.traits.control_variate) is not None:
        mean, expected = getattr(states, field).mean(0), getattr(after, field)
        assert _close([mean], [expected]), f"{name}: the mean of the clients' {field} is not the server's {field}"
    return bool(clients)


def _check_permutation(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """The order of the clients does not matter."""
    order = torch.arange(problem.n).flip(0)
    shuffled = LeastSquares([problem.data[int(i)] for i in order])
    assert _close(_warm(algorithm, problem)[0], _warm(algorithm, shuffled)[0]), f"{name}: depends on the clients' order"


def _check_identical(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """Clients with the same data act as one."""
    one, many = LeastSquares([problem.data[0]]), LeastSquares([problem.data[0]] * 3)
    assert _close(_warm(algorithm, one)[0], _warm(algorithm, many)[0]), f"{name}: three equal clients differ from one"


def _check_knowledge(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    """Check `known_gradient`: the model before the round, and grad f there."""
    server, _ = algorithm.init(torch.ones_like(problem.start))
    for last in simulate(algorithm, problem, rounds=3, start=torch.ones_like(problem.start)):
        known = algorithm.known_gradient(server, last.server)
        if known is not None:
            x = algorithm.model(server)
            assert torch.equal(known[0], x), f"{name}: known_gradient names another model than the one before the round"
            assert _close(known[1:], [problem.gradient(x)]), f"{name}: known_gradient is not the gradient of f"
        server = last.server


def _check_refusal(algorithm: Algorithm, problem: LeastSquares, name: str) -> None:
    for options in ({"participation": 0.5}, {"drop": 0.3}):
        try:
            simulate(algorithm, problem, rounds=1, **options)  # type: ignore[arg-type]
        except ValueError:
            continue
        raise AssertionError(f"{name}: needs every client, yet runs with {options}")


def _reached(
    algorithm: Algorithm,
    problem: LeastSquares | Pooled,
    objective: LeastSquares,
    phi: Regularizer,
    rounds: int,
    tolerance: float,
    name: str,
    **options: Any,
) -> float:
    """Distance to the optimum after `rounds`; exact methods must arrive, and h must stay the mean of the h_i."""
    best, exact = optimum(objective, phi), algorithm.traits.fixed_point is FixedPoint.EXACT
    for last in simulate(algorithm, problem, rounds=rounds, **options):
        distance = float((algorithm.model(last.server) - best).norm() / best.norm())
        if exact and distance < tolerance / 100:
            break
    if exact:
        assert distance < tolerance, (
            f"{name}: its traits say FixedPoint.EXACT, and it ends {distance:.1e} from the optimum with "
            f"{', '.join(SETTINGS[key] for key in options) or 'all clients'}; correct the method, or say BIASED"
        )
    if (field := algorithm.traits.control_variate) is not None:
        mean = getattr(last.clients[torch.arange(problem.n)], field).mean(0)
        gap = float((mean - getattr(last.server, field)).abs().max())
        assert gap < 1e-9, f"{name}: the server's {field} is {gap:.1e} away from the mean of the clients' {field}"
    return distance


class GraphReport(NamedTuple):
    """Distances |x_i - x*| / |x*| of the worst node where the method ended on the heterogeneous lasso."""

    ring: float
    complete: float
    pairs: float | None
    """On random matchings; None for methods that want a graph that stays."""


def check_decentralized(make: MakeOnGraph, *, rounds: int = 1500, tolerance: float = 1e-10) -> GraphReport:
    """Raise AssertionError where the method breaks the contract; else return how far from the optimum it ends.

    A stack of nodes must give what they give one by one, and `simulate` what a plain loop over single nodes gives;
    calls are pure; a message is as large as declared; nodes numbered otherwise on the same graph end up the same; nodes
    that are alike act as one that is alone. A method whose traits promise an exact fixed point must rest there, and
    reach it on a ring, on the complete graph and, if it promises that, on a graph that is another one in every round.
    """
    with torch.device("cpu"):
        phi = L1(0.2) if make(Zero(), 1.0).traits.composite else Zero()
        problem = heterogeneous(8)
        method = make(phi, smoothness(problem))
        name, said = type(method).__name__, method.traits
        assert isinstance(said.fixed_point, FixedPoint), f"{name}: traits.fixed_point is {said.fixed_point!r}"
        _check_node_message(method, problem, name)
        _check_nodes_stacked(method, problem, name)
        _check_nodes_one_by_one(method, problem, name)
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


def _check_node_message(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
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


def _check_nodes_stacked(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
    states = _after(method, problem, Ring(problem.n), 3)
    message, kept = method.message(states, problem.oracle(torch.arange(problem.n), 3))
    new = method.update(kept, message)
    for i in range(problem.n):
        alone = method.message(type(states)(*(v[i] for v in states)), problem.oracle(torch.tensor(i), 3))
        assert _close([v[i] for v in message], alone[0]), f"{name}: node {i} sends something else in a stack than alone"
        after = method.update(alone[1], alone[0])
        assert _close([v[i] for v in new], after), f"{name}: node {i} keeps something else in a stack than alone"


def _check_nodes_one_by_one(method: DecentralizedAlgorithm, problem: LeastSquares, name: str) -> None:
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
