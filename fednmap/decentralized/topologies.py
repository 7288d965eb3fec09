"""Communication graphs of n nodes and their mixing matrices: doubly stochastic, so that the mean stays."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednmap.names import InputError, called, look_up, parted
from fednmap.regularizers.parameters import integer

Edge = tuple[int, int]
Nodes = NDArray[np.int64]

DRAWS = 1000  # of a random graph, until one is connected
CLOSE = 1e-6  # how far from 1 a row or column of a matrix that is given may sum
MIXES = 1e-9  # a smaller spectral gap is none


class Topology(ABC):
    """n nodes and, for every round t, a doubly stochastic matrix W: node i takes $W_{ij}$ of what node j sends.

    It is 0 where j sends nothing to i. The matrix is in float64 and on the CPU.
    """

    n: int
    symmetric: bool = True
    """W = W^T in every round: links carry as much in both directions."""
    static: bool = True
    """W is the same in every round."""

    @abstractmethod
    def weights(self, t: int) -> Tensor:
        """Return W of round t, (n, n)."""


@dataclass(frozen=True)
class _Numbered(Topology):
    """A topology that is made for any number of nodes."""

    n: int

    def __post_init__(self) -> None:
        integer(self, "n", 1)


class Graph(_Numbered):
    """Links in both directions, always the same, with Metropolis weights."""

    @abstractmethod
    def linked(self, i: Nodes, j: Nodes) -> Any:
        """Return which nodes i and j, i < j, are neighbours."""

    def edges(self) -> list[Edge]:
        """Return each link once."""
        i, j = np.triu_indices(self.n, 1)
        there = self.linked(i, j)
        return list(zip(i[there].tolist(), j[there].tolist(), strict=True))

    def weights(self, t: int) -> Tensor:
        return metropolis(self.n, self.edges())


@dataclass(frozen=True)
class Ring(Graph):
    """Each node and the next, the last and the first. Gap $O(1/n^2)$.

    >>> Ring(4).edges()
    [(0, 1), (0, 3), (1, 2), (2, 3)]
    """

    def linked(self, i: Nodes, j: Nodes) -> Any:
        return np.isin(j - i, (1, self.n - 1))


@dataclass(frozen=True)
class Grid(Graph):
    """Rows and columns, neighbours left, right, above and below; as square as n allows unless rows are given.

    Gap O(1/n).

    >>> Grid(4).edges()
    [(0, 1), (0, 2), (1, 3), (2, 3)]
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.rows
        if rows is not None and (not isinstance(rows, int) or not 1 <= rows <= self.n or self.n % rows):
            raise InputError(
                f"{type(self).__name__}: rows is {rows!r}, which does not divide n = {self.n}; leave it out"
            )

    def linked(self, i: Nodes, j: Nodes) -> Any:
        rows = self.rows or next(k for k in range(math.isqrt(self.n), 0, -1) if self.n % k == 0)
        columns = self.n // rows
        down, across = j // columns - i // columns, abs(j % columns - i % columns)
        return self._next(down, rows) & (across == 0) | (down == 0) & self._next(across, columns)

    def _next(self, apart: Nodes, length: int) -> Any:
        """Whether places so far apart, of a row or column of this length, are neighbours."""
        return apart == 1


class Torus(Grid):
    """A grid whose opposite borders are neighbours. Gap O(1/n).

    >>> len(Torus(9).edges())
    18
    """

    def _next(self, apart: Nodes, length: int) -> Any:
        return (apart == 1) | (apart == length - 1) & (apart > 0)


@dataclass(frozen=True)
class Star(Graph):
    """Node 0 and each of the others: a server's graph. Gap O(1/n).

    >>> Star(4).edges()
    [(0, 1), (0, 2), (0, 3)]
    """

    def linked(self, i: Nodes, j: Nodes) -> Any:
        return i == 0


@dataclass(frozen=True)
class Complete(Graph):
    """All pairs of nodes: $W_{ij} = 1/n$, and all agree after one round. Gap 1.

    >>> Complete(3).edges()
    [(0, 1), (0, 2), (1, 2)]
    """

    def linked(self, i: Nodes, j: Nodes) -> Any:
        return i < j


@dataclass(frozen=True)
class ErdosRenyi(Graph):
    """Each pair with probability p, by default 2 log(n) / n, drawn from `seed` until connected.

    >>> ErdosRenyi(4, 0.5, seed=7).edges() == ErdosRenyi(4, 0.5, seed=7).edges()
    True
    """

    p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(self, "seed", 0)
        if self.p is not None and not (isinstance(self.p, int | float) and 0 < self.p <= 1):
            raise InputError(f"ErdosRenyi: p is {self.p!r}; the probability of a link must be in (0, 1]")
        self.edges()

    def linked(self, i: Nodes, j: Nodes) -> Any:
        p = min(1.0, 2 * math.log(max(2, self.n)) / self.n) if self.p is None else self.p
        there, pairs = np.zeros((self.n, self.n), dtype=bool), np.tril_indices(self.n, -1)
        for k in range(DRAWS):
            there[pairs] = np.random.default_rng((self.seed, k)).random(len(i)) < p
            if not _unreached(there).any():
                return there[j, i]
        raise InputError(f"ErdosRenyi: none of {DRAWS} graphs of {self.n} nodes with p = {p:g} is connected; use more")


@dataclass(frozen=True)
class UndirectedExponential(Graph):
    """Each node and those 1, 2, 4, ... places on, in both directions. Gap O(1/log n).

    >>> len(UndirectedExponential(8).edges())
    20
    """

    def linked(self, i: Nodes, j: Nodes) -> Any:
        return np.isin(j - i, _hops(self.n)) | np.isin(self.n - j + i, _hops(self.n))


@dataclass(frozen=True)
class Exponential(_Numbered):
    r"""A directed graph: each node receives from those 1, 2, 4, ... places on. Gap $O(1/\log n)$.

    $W_{ij} = 1 / (1 + \text{number of hops})$ for $j = i, i + 1, i + 2, i + 4, \dots \bmod n$: doubly stochastic, as
    each node sends to as many as it receives from, but not symmetric. Reference: Ying, Yuan, Chen, Hu, Pan and Yin,
    Exponential Graph is Provably Efficient for Decentralized Deep Training, 2021.

    >>> Exponential(4).weights(0)[0].tolist() == [1 / 3, 1 / 3, 1 / 3, 0]
    True
    """

    symmetric = False

    def weights(self, t: int) -> Tensor:
        hops = [0, *_hops(self.n)]
        return torch.stack([_shift(self.n, hop) for hop in hops]).sum(0) / len(hops)


@dataclass(frozen=True)
class OnePeer(_Numbered):
    r"""One neighbour in each round t, $2^{t \bmod \log_2 n}$ places on, whose message counts half.

    After $\log_2 n$ rounds, n a power of two, all nodes hold the exact mean: one message per node and round. Not
    symmetric, and another W in every round. Reference: as for Exponential.

    >>> OnePeer(4).weights(1)[0].tolist()
    [0.5, 0.0, 0.5, 0.0]
    """

    symmetric = False
    static = False

    def weights(self, t: int) -> Tensor:
        hops = _hops(self.n) or [0]
        return (_shift(self.n, 0) + _shift(self.n, hops[t % len(hops)])) / 2


@dataclass(frozen=True)
class Matchings(_Numbered):
    """In round t the nodes meet in random pairs, drawn from (seed, t), and take half of each other's.

    Reference: Boyd, Ghosh, Prabhakar and Shah, Randomized Gossip Algorithms, 2006.

    >>> Matchings(4).weights(0).diagonal().tolist()
    [0.5, 0.5, 0.5, 0.5]
    """

    seed: int = 0
    static = False

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(self, "seed", 0)

    def weights(self, t: int) -> Tensor:
        order = np.random.default_rng((self.seed, t)).permutation(self.n).tolist()
        W = torch.eye(self.n, dtype=torch.float64, device="cpu")
        for i, j in zip(order[::2], order[1::2], strict=False):
            W[i, i] = W[j, j] = W[i, j] = W[j, i] = 0.5
        return W


@dataclass(frozen=True)
class Weights(Topology):
    """Your own mixing matrix: doubly stochastic, connected, at least 0.

    >>> Weights(torch.tensor([[0.5, 0.5], [0.5, 0.5]])).n
    2
    """

    W: Tensor
    n: int = field(init=False)
    symmetric: bool = field(init=False)

    def __post_init__(self) -> None:
        W = doubly_stochastic(torch.as_tensor(self.W).to("cpu", torch.float64), "W")
        object.__setattr__(self, "W", W)
        object.__setattr__(self, "n", len(W))
        object.__setattr__(self, "symmetric", bool(torch.equal(W, W.T)))

    def weights(self, t: int) -> Tensor:
        return self.W


@dataclass(frozen=True)
class Sequence(Topology):
    """Several topologies in turn: that of round t is number t mod their count.

    >>> Sequence((Ring(8), Complete(8))).static
    False
    """

    parts: tuple[Topology, ...]
    n: int = field(init=False)
    symmetric: bool = field(init=False)
    static = False

    def __post_init__(self) -> None:
        sizes = sorted({part.n for part in self.parts})
        if len(sizes) != 1:
            raise InputError(f"Sequence: its topologies have {sizes} nodes; give one or more, all of the same n")
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "n", sizes[0])
        object.__setattr__(self, "symmetric", all(part.symmetric for part in self.parts))

    def weights(self, t: int) -> Tensor:
        part = self.parts[t % len(self.parts)]
        return part.weights(t // len(self.parts))


@dataclass(frozen=True)
class Lossy(Topology):
    """A topology some of whose links fail: in round t each, both ways, with probability `drop`, drawn from (seed, t).

    Both ends see that nothing came and keep the weight for what is their own, so that W stays doubly stochastic. That
    needs links that carry as much in both directions.

    >>> bool((Lossy(Ring(8), 0.5).weights(0).sum(0) == 1).all())
    True
    """

    sound: Topology
    drop: float
    seed: int = 0
    n: int = field(init=False)
    static = False

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise InputError(f"drop is {self.drop!r}; the probability that a link fails must be in [0, 1)")
        if not self.sound.symmetric:
            raise InputError(
                f"links of {type(self.sound).__name__} lead one way: if one fails its ends cannot make up for it; "
                "use drop=0, or a topology with links in both directions, such as exponential-undirected"
            )
        object.__setattr__(self, "n", self.sound.n)

    def weights(self, t: int) -> Tensor:
        W = self.sound.weights(t).clone()
        lost = np.triu(np.random.default_rng((self.seed, t)).random((self.n, self.n)) < self.drop, 1)
        W[torch.from_numpy(lost | lost.T)] = 0.0
        return W + torch.diag(1 - W.sum(1))


def from_file(n: int, path: str) -> Topology:
    """Return the topology in a file: lines `i j`, a link of nodes from 0, or n lines of n weights.

    Other files raise InputError.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "links.txt")
    ...     _ = file.write_text("0 1\\n1 2\\n")
    ...     from_file(3, str(file)).symmetric
    True
    """
    what, rows = f"topology file:{path}", []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{what}: cannot be read, {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{what}: is not text") from None
    for number, line in enumerate(lines, 1):
        words = re.findall(r"[^\s,;]+", line.partition("#")[0])
        try:
            rows += [[float(word) for word in words]] if words else []
        except ValueError:
            raise InputError(f"{what}: line {number} is {line[:40]!r}; expected numbers") from None
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        raise InputError(f"{what}: its lines hold {lengths or 'no'} numbers; all must hold 2, or {n}")
    if lengths == [2] and all(v == int(v) for row in rows for v in row if math.isfinite(v)):
        for v in (v for row in rows for v in row if not 0 <= v < n):
            raise InputError(f"{what}: names node {v:g}, and there are {n} nodes, 0 to {n - 1}")
        W = metropolis(n, [(int(i), int(j)) for i, j in rows if i != j])
        connected(W, what)
        return Weights(W)
    if (len(rows), lengths[0]) != (n, n):
        found = f"{len(rows)} lines of {lengths[0]} numbers"
        raise InputError(f"{what}: holds {found}, and there are {n} nodes; give links, or {n} lines of {n}")
    return Weights(doubly_stochastic(torch.tensor(rows, dtype=torch.float64, device="cpu"), what))


TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "ring": Ring,
    "grid": Grid,
    "torus": Torus,
    "star": Star,
    "complete": Complete,
    "erdos-renyi": ErdosRenyi,
    "exponential": Exponential,
    "exponential-undirected": UndirectedExponential,
    "one-peer": OnePeer,
    "matchings": Matchings,
    "file": from_file,
}


def topology_of(spec: str, n: int) -> Topology:
    """Return the topology of n nodes that is written as NAME[:ARGUMENTS], file:PATH, or your own class.

    >>> topology_of("torus:3", 12), topology_of("erdos-renyi:0.5,7", 4)
    (Torus(n=12, rows=3), ErdosRenyi(n=4, p=0.5, seed=7))
    """
    make, argument = check_name(spec)
    return from_file(n, argument) if make is from_file else called(spec, make, (n,), argument)


def check_name(spec: str) -> tuple[Callable[..., Topology], str]:
    """Return what makes the topology of that name, and its arguments; raise InputError if there is none."""
    name, argument = parted(spec.strip(), TOPOLOGIES)
    make = look_up("topology", name, TOPOLOGIES, Topology)
    if make is from_file and not argument:
        raise InputError("topology 'file' needs a path; use file:PATH, of links or of weights")
    return make, argument


def fingerprint(spec: str) -> str:
    """Return a digest of the topology's file; empty for those that are not read from one."""
    make, argument = check_name(spec)
    if make is not from_file:
        return ""
    try:
        return hashlib.sha256(Path(argument).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"topology {spec}: cannot be read, {error.strerror}") from None


def metropolis(n: int, edges: Iterable[Edge]) -> Tensor:
    r"""Return $W_{ij} = 1 / (1 + \max(\deg i, \deg j))$ for neighbours, the rest of each row on its diagonal.

    Symmetric and doubly stochastic, with a positive diagonal: all eigenvalues but one lie within (-1, 1) if the graph
    is connected. Reference: Xiao, Boyd and Kim, Distributed average consensus with least-mean-square deviation, 2007.

    >>> metropolis(3, [(0, 1), (1, 2)])[1].tolist() == [1 / 3, 1 - 2 / 3, 1 / 3]
    True
    """
    W = torch.zeros(n, n, dtype=torch.float64, device="cpu")
    i, j = torch.tensor(list(edges), dtype=torch.int64, device="cpu").reshape(-1, 2).T
    W[i, j] = W[j, i] = 1.0
    degree = W.sum(1)
    W = W / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return W + torch.diag(1 - W.sum(1))


def connected(W: Tensor, what: str) -> None:
    """Raise InputError unless the graph is connected."""
    if (apart := _unreached(W.numpy() != 0)).any():
        raise InputError(
            f"expected a connected graph, got {what} without a path from node 0 to node {apart.argmax()}, only to "
            f"{(~apart).sum()} of {len(W)} nodes; add links"
        )


def _unreached(links: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which nodes no path leads to from node 0, whatever the direction of the links."""
    from scipy.sparse.csgraph import connected_components  # `fednmap --help` loads nothing heavy

    apart: NDArray[np.bool_] = connected_components(links, directed=False)[1] > 0
    return apart


def doubly_stochastic(W: Tensor, what: str) -> Tensor:
    """W with its rounding mended, if it is square, at least 0, sums to 1 along rows and columns, and mixes."""
    check_sums(W, what)
    symmetric = bool((W - W.T).abs().max() <= CLOSE)
    for _ in range(50):
        W = W / W.sum(1, keepdim=True)
        W = W / W.sum(0)
    W = (W + W.T) / 2 if symmetric else W
    connected(W, what)
    if spectral_gap(W) < MIXES:
        raise InputError(
            f"{what} has another eigenvalue of modulus 1 and never mixes; give nodes a weight on the diagonal"
        )
    return W


def check_sums(W: Tensor, what: str) -> None:
    """Square, at least 0, and every row and column sums to 1."""
    if W.ndim != 2 or W.shape[0] != W.shape[1] or not len(W):
        raise InputError(f"{what} has shape {tuple(W.shape)}; a mixing matrix is square, a row for each node")
    if not bool((W.isfinite() & (W >= 0)).all()):
        raise InputError(f"{what} holds a weight below 0 or none at all; all must be finite and at least 0")
    for name, sums in (("row", W.sum(1)), ("column", W.sum(0))):
        worst = int((sums - 1).abs().argmax())
        if abs(float(sums[worst]) - 1) > CLOSE:
            raise InputError(
                f"{what}: {name} {worst} sums to {float(sums[worst]):.6g}; W must be doubly stochastic, every row and "
                "column summing to 1; give an edge list for Metropolis weights"
            )


def spectral_gap(W: Tensor) -> float:
    """Return 1 - lambda, lambda the second largest modulus among the eigenvalues of W: 1 if one round makes all agree.

    >>> round(spectral_gap(metropolis(4, [(0, 1), (1, 2), (2, 3), (3, 0)])), 6)
    0.666667
    """
    if len(W) == 1:
        return 1.0
    sizes = torch.linalg.eigvals(W).abs().sort(descending=True).values
    return 1.0 - float(sizes[1])


def _hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [2**k for k in range((n - 1).bit_length())]


def _shift(n: int, hop: int) -> Tensor:
    """The permutation by which node i receives from node i + hop mod n."""
    return torch.eye(n, dtype=torch.float64, device="cpu").roll(hop, 1)
