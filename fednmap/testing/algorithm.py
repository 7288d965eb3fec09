"""The contract every method meets, with a server or on a graph, checked by running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import chain
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
Findings = Iterator[tuple[bool, str]]
"""Whether each promise is kept, and what to say if it is not."""


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
    """Return the largest smoothness constant of any client.

    >>> smoothness(LeastSquares([(torch.eye(2), torch.ones(2)), (2 * torch.eye(2), torch.ones(2))]))
    2.0
    """
    return max(float(torch.linalg.matrix_norm(a, 2) ** 2 / len(a)) for a, _ in problem.data)


SETTINGS = {
    "uplink": "shortened uplinks",
    "participation": "half of the clients sampled",
    "drop": "30 % of the replies lost",
}
"""What `_reached` does to a method, by the option of `simulate`."""


def optimum(problem: LeastSquares, phi: Regularizer, steps: int = 20_000) -> Tensor:
    """Return the minimiser of f + phi by proximal gradient steps, to rounding.

    >>> optimum(LeastSquares([(torch.eye(2), torch.tensor([3.0, 0.5]))]), L1(0.5))
    tensor([2., 0.])
    """
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

    >>> from fednmap.algorithms import FedNMap
    >>> check_algorithm(lambda phi, L, Q: FedNMap(phi, eta_a=0.5 / (L * Q), Q=Q, gamma=1 / L)).full < 1e-10
    True
    """
    with torch.device("cpu"):
        Q, problem = 5, heterogeneous()
        try:
            make(Zero(), 1.0, Q)
        except ValueError:  # it takes one local step
            Q = 1
        phi, L = L1(0.2) if make(Zero(), 1.0, Q).traits.composite else Zero(), smoothness(problem)
        algorithm = make(phi, L, Q)
        traits, whole = algorithm.traits, Pooled(problem) if algorithm.traits.central else problem
        _require(algorithm, _fixed_point(traits.fixed_point), _messages(algorithm, problem))
        _require(algorithm, _one_by_one(algorithm, whole))
        if traits.central:
            return Report(_reached(algorithm, whole, problem, phi, rounds, tolerance), None, None)
        has_state = _has_state_after_sending(algorithm, problem)
        _require(algorithm, _stacked(algorithm, problem), _symmetric(algorithm, problem))
        _require(algorithm, _known_gradient(make(phi, L, 1), problem))
        full = _reached(algorithm, problem, problem, phi, rounds, tolerance)
        if has_state:
            _reached(algorithm, problem, problem, phi, 2 * rounds, tolerance, uplink=_Shortened())
        fewer: tuple[dict[str, float], ...] = {"participation": 0.5}, {"drop": 0.3}
        if traits.full_participation:
            _require(algorithm, _refusals(algorithm, problem, fewer))
            return Report(full, None, None)
        return Report(
            full, *(_reached(algorithm, problem, problem, phi, 2 * rounds, tolerance, **how) for how in fewer)
        )


def _require(method: Algorithm | DecentralizedAlgorithm, *findings: Findings) -> None:
    for kept, otherwise in chain(*findings):
        assert kept, f"{type(method).__name__}: {otherwise}"


def _fixed_point(kind: object) -> Findings:
    yield isinstance(kind, FixedPoint), f"traits.fixed_point is {kind!r}; say a member of FixedPoint"


def _same(a: State, b: State) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def _close(a: State, b: State) -> bool:
    return all(torch.allclose(u, v, rtol=1e-11, atol=1e-11) for u, v in zip(a, b, strict=True))


def _warm(algorithm: Algorithm, problem: LeastSquares, rounds: int = 3) -> tuple[State, State]:
    """Server and clients after a few rounds, so that nothing is zero any more."""
    *_, last = simulate(algorithm, problem, rounds=rounds, start=torch.ones_like(problem.start))
    return last.server, last.clients[torch.arange(problem.n)]


def _messages(algorithm: Algorithm, problem: LeastSquares) -> Findings:
    """Messages are as large as declared, can be packed, and follow from each other; calls are pure."""
    server, client = algorithm.init(problem.start + 1)
    down, traits = algorithm.broadcast(server), algorithm.traits
    oracle = oracle_of(algorithm, problem, torch.tensor(0), 0)
    copies = [deepcopy(state) for state in (server, client, down)]
    up, _ = algorithm.local(down, client, oracle)
    declared = traits.up + traits.hessians * (problem.dim + 1) / 2, traits.down
    for does, message, vectors in zip(("sends", "receives"), (up, down), declared, strict=True):
        found = nbytes(message) / nbytes((problem.start,))
        yield found == vectors, f"{does} {found:g} vectors, its traits say {vectors}"
    packed = pack(algorithm, up)
    yield _same(unpack(algorithm, packed, up), up), "unpack(pack(up)) differs from up"
    yield nbytes(packed) <= nbytes(up) or packed is up, "the packed uplink is larger than the dense one"
    yield _same(up, algorithm.local(down, client, oracle)[0]), "the same local call gives another result"
    after = algorithm.aggregate(server, up, 1.0)
    yield _same(after, algorithm.aggregate(server, up, 1.0)), "the same aggregate gives another result"
    algorithm.model(after)
    for state, before in zip((server, client, down), copies, strict=True):
        yield _same(state, before), f"a call changed its {type(state).__name__} input in place"
    for t, share in enumerate((1.0, 0.5, 1 / 3) if traits.broadcast_follows else ()):
        down = algorithm.broadcast(server)
        up, client = algorithm.local(down, client, oracle_of(algorithm, problem, torch.tensor(0), t))
        server = algorithm.aggregate(server, up, share)
        same = _same(next_broadcast(algorithm, down, up, share), algorithm.broadcast(server))
        yield same, "the next broadcast does not follow from the broadcast before and the mean uplink"


def _stacked(algorithm: Algorithm, problem: LeastSquares) -> Findings:
    """A stack of clients gives what the clients give one by one."""
    server, clients = _warm(algorithm, problem)
    down, everybody = algorithm.broadcast(server), torch.arange(problem.n)
    up, new = algorithm.local(down, clients, oracle_of(algorithm, problem, everybody, 7))
    for i in everybody:
        client = type(clients)(*(v[i] for v in clients))
        up_i, new_i = algorithm.local(down, client, oracle_of(algorithm, problem, i, 7))
        row = [v.expand(problem.n, *v.shape[-1:])[i] for v in up]
        yield _close(row, up_i), f"client {int(i)} sends something else in a stack than alone"
        yield _close([v[i] for v in new], new_i), f"client {int(i)} keeps something else in a stack than alone"


def _one_by_one(algorithm: Algorithm, problem: LeastSquares | Pooled) -> Findings:
    """`simulate` gives the server and the client states of a plain loop over single clients; states are values."""
    n, start = problem.n, torch.ones(problem.dim, dtype=torch.float64)
    how: list[dict[str, Any]] = [{}, {"chunk": 1}, {"chunk": 2, "threads": 2}]
    if not algorithm.traits.full_participation and not algorithm.traits.central:
        how += [{"participation": 0.5}, {"drop": 0.3}]
    for options in how:
        *_, last = simulate(algorithm, problem, rounds=5, start=start, **options)
        server, client = algorithm.init(start)
        clients = [client] * n
        sampler, drop = Uniform(options.get("participation", 1.0)), options.get("drop", 0.0)
        for t in range(5):
            down, counted = algorithm.broadcast(server), take_part(n, t, sampler=sampler, drop=drop, seed=0).counted
            replies = {int(i): algorithm.local(down, clients[i], oracle_of(algorithm, problem, i, t)) for i in counted}
            if replies:
                server = algorithm.aggregate(server, mean([up for up, _ in replies.values()]), len(replies) / n)
            clients = [replies[i][1] if i in replies else client for i, client in enumerate(clients)]
        gives = f"simulate({options or ''}) gives"
        yield _close(last.server, server), f"{gives} another server than a loop over single clients"
        states = [torch.stack(values) for values in zip(*clients, strict=True)]
        same = _close(last.clients[torch.arange(n)], states)
        yield same, f"{gives} other client states than a loop over single clients"


class _Shortened(Stage):
    """Half of every uplink in the first rounds: a state that is not built from what was sent is wrong for ever."""

    alters_state = True

    def apply(self, federation: Federation, uplinks: Uplinks, rounding: Rounding) -> Uplinks:
        if uplinks.t >= 20:
            return uplinks
        sent = type(uplinks.sent)(*(v / 2 for v in uplinks.sent))
        return uplinks._replace(sent=sent, known=sent)


def _has_state_after_sending(algorithm: Algorithm, problem: LeastSquares) -> bool:
    """Check that states follow from what was sent; return whether there are some and uplinks may be changed."""
    server, clients = _warm(algorithm, problem)
    down, everybody = algorithm.broadcast(server), torch.arange(problem.n)
    up, new = algorithm.local(down, clients, oracle_of(algorithm, problem, everybody, 7))
    try:
        same = algorithm.state_after_sending(down, clients, up, up)
    except InputError:  # it says that it cannot
        return False

    def findings() -> Findings:
        yield _close(same, new), "state_after_sending(sent = up) is not the state that local returned"
        sent = type(up)(*(0.5 * v.round(decimals=1) for v in up))  # as clipped and rounded
        states = algorithm.state_after_sending(down, clients, up, sent)
        after = algorithm.aggregate(server, type(sent)(*(v.mean(0) if v.ndim > 1 else v for v in sent)), 1.0)
        if (field := algorithm.traits.control_variate) is not None:
            mean, expected = getattr(states, field).mean(0), getattr(after, field)
            yield _close([mean], [expected]), f"the mean of the clients' {field} is not the server's {field}"

    _require(algorithm, findings())
    return bool(clients)


def _symmetric(algorithm: Algorithm, problem: LeastSquares) -> Findings:
    """The order of the clients does not matter, and clients with the same data act as one."""

    def server(clients: list[int]) -> State:
        return _warm(algorithm, LeastSquares([problem.data[i] for i in clients]))[0]

    order = list(range(problem.n))
    yield _close(server(order), server(order[::-1])), "depends on the clients' order"
    yield _close(server([0]), server([0, 0, 0])), "three equal clients differ from one"


def _known_gradient(algorithm: Algorithm, problem: LeastSquares) -> Findings:
    """`known_gradient` is the model before the round, and grad f there."""
    server, _ = algorithm.init(torch.ones_like(problem.start))
    for last in simulate(algorithm, problem, rounds=3, start=torch.ones_like(problem.start)):
        known = algorithm.known_gradient(server, last.server)
        if known is not None:
            x = algorithm.model(server)
            yield torch.equal(known[0], x), "known_gradient names another model than the one before the round"
            yield _close(known[1:], [problem.gradient(x)]), "known_gradient is not the gradient of f"
        server = last.server


def _refusals(algorithm: Algorithm, problem: LeastSquares, fewer: Iterable[dict[str, Any]]) -> Findings:
    for options in fewer:
        try:
            simulate(algorithm, problem, rounds=1, **options)
        except ValueError:
            continue
        yield False, f"needs every client, yet runs with {options}"


def _reached(
    algorithm: Algorithm,
    problem: LeastSquares | Pooled,
    objective: LeastSquares,
    phi: Regularizer,
    rounds: int,
    tolerance: float,
    **options: Any,
) -> float:
    """Distance to the optimum after `rounds`; exact methods must arrive, and h must stay the mean of the h_i."""
    best, exact = optimum(objective, phi), algorithm.traits.fixed_point is FixedPoint.EXACT
    for last in simulate(algorithm, problem, rounds=rounds, **options):
        distance = float((algorithm.model(last.server) - best).norm() / best.norm())
        if exact and distance < tolerance / 100:
            break

    def findings() -> Findings:
        where = ", ".join(SETTINGS[key] for key in options) or "all clients"
        ends = f"its traits say FixedPoint.EXACT, and it ends {distance:.1e} from the optimum with {where}"
        yield distance < tolerance or not exact, f"{ends}; correct the method, or say BIASED"
        if (field := algorithm.traits.control_variate) is not None:
            mean = getattr(last.clients[torch.arange(problem.n)], field).mean(0)
            gap = float((mean - getattr(last.server, field)).abs().max())
            yield gap < 1e-9, f"the server's {field} is {gap:.1e} away from the mean of the clients' {field}"

    _require(algorithm, findings())
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

    >>> from fednmap.decentralized import NormED
    >>> check_decentralized(lambda phi, L: NormED(phi, 0.2 / L, 1 / L)).ring < 1e-10
    True
    """
    with torch.device("cpu"):
        phi = L1(0.2) if make(Zero(), 1.0).traits.composite else Zero()
        problem = heterogeneous(8)
        method = make(phi, smoothness(problem))
        traits = method.traits
        _require(method, _fixed_point(traits.fixed_point), _node(method, problem))
        _require(method, _nodes_one_by_one(method, problem), _nodes_symmetric(method, problem))
        best, exact = optimum(problem, phi, 4000), traits.fixed_point is FixedPoint.EXACT
        graphs: list[Topology] = [Ring(8), Complete(8), *([Matchings(8)] if traits.changing else [])]
        found: list[float | None] = [None] * 3
        for k, graph in enumerate(graphs):
            states = _after(method, problem, graph, rounds)
            distance = float((method.model(method.iterate(states)) - best).norm(dim=-1).max() / best.norm())
            ends = f"on {type(graph).__name__} a node ends {distance:.1e} from the optimum"
            _require(method, iter([(distance < tolerance, ends)]) if exact else iter(()))
            _require(method, _rests(method, problem, states) if exact else iter(()))
            found[k] = distance
        return GraphReport(*found)  # type: ignore[arg-type]


def _after(
    method: DecentralizedAlgorithm, problem: LeastSquares, graph: Topology, rounds: int, **options: Any
) -> State:
    """The nodes' states after some rounds."""
    start = torch.ones_like(problem.start)
    *_, last = simulate(Decentralized(method, graph), problem, rounds=rounds, start=start, **options)
    return last.clients[torch.arange(problem.n)]


def _node(method: DecentralizedAlgorithm, problem: LeastSquares) -> Findings:
    """A message is as large as declared, calls are pure, and a stack of nodes gives what they give one by one."""
    states = _after(method, problem, Ring(problem.n), 3)
    g, before = problem.oracle(torch.arange(problem.n), 3), deepcopy(states)
    message, kept = method.message(states, g)
    copies = deepcopy((message, kept))
    vectors = nbytes(message) / (problem.n * nbytes((problem.start,)))
    yield vectors == method.traits.vectors, f"sends {vectors:g} vectors, its traits say {method.traits.vectors}"
    yield _same(method.message(states, g)[0], copies[0]), "message is not pure"
    new = method.update(kept, message)
    yield _same(new, method.update(kept, message)), "update is not pure"
    for state, copy in zip((states, message, kept), (before, *copies), strict=True):
        yield _same(state, copy), f"a call changed its {type(state).__name__} in place"
    for i in range(problem.n):
        alone = method.message(type(states)(*(v[i] for v in states)), problem.oracle(torch.tensor(i), 3))
        yield _close([v[i] for v in message], alone[0]), f"node {i} sends something else in a stack than alone"
        after = method.update(alone[1], alone[0])
        yield _close([v[i] for v in new], after), f"node {i} keeps something else in a stack than alone"


def _nodes_one_by_one(method: DecentralizedAlgorithm, problem: LeastSquares) -> Findings:
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
        yield same, f"simulate({options or ''}) gives other states than a loop over single nodes"


def _nodes_symmetric(method: DecentralizedAlgorithm, problem: LeastSquares) -> Findings:
    """Nodes may be numbered otherwise; nodes with the same data stay together, and do what one that is alone does."""
    order = torch.randperm(problem.n, generator=torch.Generator().manual_seed(1))
    W, shuffled = Ring(problem.n).weights(0), LeastSquares([problem.data[int(i)] for i in order])
    there, here = _after(method, problem, Weights(W), 5), _after(method, shuffled, Weights(W[order][:, order]), 5)
    yield _close([v[order] for v in there], here), "depends on how the nodes are numbered"
    one, many = LeastSquares([problem.data[0]]), LeastSquares([problem.data[0]] * 4)
    alone, together = _after(method, one, Ring(1), 5), _after(method, many, Ring(4), 5)
    yield _close([v.expand(4, -1) for v in alone], together), "four nodes that are alike differ from one"


def _rests(method: DecentralizedAlgorithm, problem: LeastSquares, states: State) -> Findings:
    """At the optimum a round changes nothing, whatever doubly stochastic W it mixes with."""
    g, W = problem.oracle(torch.arange(problem.n), 0), Complete(problem.n).weights(0)
    message, kept = method.message(states, g)
    new = method.update(kept, type(message)(*(W @ v for v in message)))
    moved = float((method.iterate(new) - method.iterate(states)).norm())
    yield moved < 1e-8, f"does not rest at the optimum when W changes, it moves by {moved:.1e}"
