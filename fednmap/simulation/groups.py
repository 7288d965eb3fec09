"""Which clients are computed in one call, by which process, and how their sums are added.

Clients fall into sections by their number, a section is computed in groups, and a process has some of the sections. How
many sections and groups there are does not depend on the number of processes or threads: these would show in the bits.

The additions are those of a fixed binary tree over the sections: pairs of neighbours, pairs of pairs, and so on. A
process that has some sections in a row adds what belongs together there, and sends the few sums that are left: one,
where two or four processes share sections whose number is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from fednmap.simulation import distributed

FAIR = 4  # sections, where there is more than one group: two or four processes or threads then end together
FINER = (64, 32, 16, 8)  # sections for more processes, where they cost next to nothing
SAMPLED = 16  # at most so many where clients are drawn: some sections are then fuller than others
COST = 1.1  # more groups than with FAIR sections


class Groups:
    """The sections of n clients, of which about `usual` take part in a round, in groups of at most `chunk`.

    >>> groups = Groups(10, 10, 2)
    >>> [(section, ids.tolist()) for section, ids in groups(torch.tensor([0, 1, 2, 4, 9]))]
    [(0, [0, 1]), (0, [2]), (1, [4]), (2, []), (3, [9])]
    """

    def __init__(self, n: int, usual: int, chunk: int, sampled: bool = False) -> None:
        self.n, self.chunk = n, chunk
        self.sections = sections(usual, chunk, sampled or usual < n)
        self._mine = distributed.share(self.sections)
        self._everybody: list[tuple[int, Tensor]] | None = None

    def mine(self, ids: Tensor) -> Tensor:
        """Which of these clients this process computes and keeps, a bool for each."""
        where = self._section(ids)
        return (where >= self._mine.start) & (where < self._mine.stop)

    def __call__(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        """This process's sections in their order, each with a group of clients; several times if these are many."""
        if len(ids) == self.n:  # all of them, and these are always the same
            self._everybody = self._everybody or self._cut(ids)
            return self._everybody
        return self._cut(ids)

    def _cut(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        where = self._section(ids)
        found = []
        for section in self._mine:
            inside = ids if self.sections == 1 else ids[where == section]
            groups = max(1, -(-len(inside) // self.chunk))
            found += [(section, group) for group in (inside.tensor_split(groups) if groups > 1 else (inside,))]
        return found

    def _section(self, ids: Tensor) -> Tensor:
        return ids * self.sections // self.n


def sections(clients: int, chunk: int, sampled: bool) -> int:
    """As many as can be had at next to no cost, since more groups than needed are slower.

    Processes beyond that have nothing to do: their number must not show in the bits.
    """
    if clients <= chunk:
        return 1
    least = min(clients, FAIR)
    for finer in FINER:
        fits = finer <= (min(clients, SAMPLED) if sampled else clients)
        if fits and _groups(clients, finer, chunk, sampled) <= COST * _groups(clients, least, chunk, sampled):
            return finer
    return least


def _groups(clients: int, count: int, chunk: int, sampled: bool) -> int:
    """In so many sections: exactly where everybody takes part, else as if each were the fullest."""
    if sampled:
        return count * math.ceil(math.ceil(clients / count) / chunk)
    starts = [-(-clients * section // count) for section in range(count + 1)]
    return sum(-(-(end - start) // chunk) for start, end in pairwise(starts))


class Tally:
    """The sum over `pieces` pieces, each some tensors like `like`; every process has the total.

    A process adds its own pieces, `distributed.share(pieces)`, in their order. What is added stays as it is.

    >>> import torch
    >>> tally = Tally(3, [torch.tensor(0.0)])
    >>> for piece in range(3):
    ...     tally.add(piece, [torch.tensor(1.0 + piece)])
    >>> tally.total()
    [tensor(6.)]
    """

    def __init__(self, pieces: int, like: Sequence[Tensor], *, here: bool = False) -> None:
        """here: all of them are this process's, also in a process group."""
        self._like, self._pieces, self._shared = like, pieces, not here and distributed.size() > 1
        self._nodes: list[tuple[int, int, list[Tensor]]] = []  # first piece, how many, their sum

    def add(self, piece: int, values: Sequence[Tensor]) -> None:
        """`values` to those of `piece`, the last one or a later one."""
        if self._nodes and self._nodes[-1][:2] == (piece, 1):
            self._nodes[-1] = (piece, 1, _sum(self._nodes[-1][2], values))
            return
        self._merge()
        self._nodes.append((piece, 1, list(values)))

    def total(self) -> list[Tensor]:
        self._merge()
        if self._shared:
            self._exchange()
        while len(self._nodes) > 1:  # what no pair is left for
            self._join()
        return self._nodes[0][2]

    def _merge(self) -> None:
        """Sums of pieces that belong together become one."""
        while len(self._nodes) > 1 and _pair(*(node[:2] for node in self._nodes[-2:])):
            self._join()

    def _join(self) -> None:
        (first, count, total), (_, more, values) = self._nodes[-2:]
        self._nodes[-2:] = [(first, count + more, _sum(total, values))]

    def _exchange(self) -> None:
        """Everybody's sums in place of one's own."""
        ranks = [_nodes(distributed.share(self._pieces, rank)) for rank in range(distributed.size())]
        sent = distributed.all_gather([values for *_, values in self._nodes], self._like, max(map(len, ranks)))
        self._nodes = []
        for nodes, received in zip(ranks, sent, strict=True):
            for (first, count), values in zip(nodes, received, strict=False):  # some have sent fewer
                self._nodes.append((first, count, values))
                self._merge()


def _sum(total: Iterable[Tensor], values: Iterable[Tensor]) -> list[Tensor]:
    """In new tensors: those of a single piece belong to whoever has computed them."""
    return [a + b for a, b in zip(total, values, strict=True)]


def _pair(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two neighbouring sums are the halves of one in the tree."""
    return a[1] == b[1] and a[0] % (2 * a[1]) == 0


def _nodes(pieces: range) -> list[tuple[int, int]]:
    """What is left of pieces in a row, when all that belongs together is added: (first, how many)."""
    found: list[tuple[int, int]] = []
    for piece in pieces:
        found.append((piece, 1))
        while len(found) > 1 and _pair(*found[-2:]):
            found[-2:] = [(found[-2][0], 2 * found[-2][1])]
    return found
