"""Which clients are computed in one call, by which process, and how their sums are added.

Clients fall into sections by their number, a section is computed in groups, and a process has some of the sections. How
many sections and groups there are does not depend on the number of processes or threads: these would show in the bits.

The additions are those of a fixed binary tree over the sections: pairs of neighbours, pairs of pairs, and so on. A
process that has some sections in a row adds what belongs together there, and sends the few sums that are left: one,
where two or four processes share sections whose number is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from fednmap.simulation import distributed

FAIR = 4  # sections, where there is more than one group: two or four processes or threads then end together
FINER = (64, 32, 16, 8)  # sections for more processes, where they cost next to nothing
SAMPLED = 16  # at most so many where clients are drawn: some sections are then fuller than others
COST = 1.1  # more groups than with FAIR sections


class Group(NamedTuple):
    """Clients that are computed in one call."""

    section: int
    ids: Tensor
    last: bool
    """Whether it is the last group of its section."""


class Groups:
    """The sections of n clients, of which about `usual` take part in a round, in groups of at most `chunk`.

    >>> import torch
    >>> groups = Groups(10, 10, 2)
    >>> [(group.section, group.ids.tolist()) for group in groups(torch.tensor([0, 1, 2, 4, 9]))]
    [(0, [0, 1]), (0, [2]), (1, [4]), (2, []), (3, [9])]
    """

    def __init__(self, n: int, usual: int, chunk: int, sampled: bool = False) -> None:
        self.n, self.chunk = n, chunk
        self.sections = sections(usual, chunk, sampled or usual < n)
        self._mine = distributed.share(self.sections)
        self._everybody: list[Group] = []

    def mine(self, ids: Tensor) -> Tensor:
        """Return which of these clients this process computes and keeps, a bool for each."""
        section = ids * self.sections // self.n
        return (section >= self._mine.start) & (section < self._mine.stop)

    def __call__(self, ids: Tensor) -> list[Group]:
        """The groups of this process's sections, in order; a section without clients is one empty group."""
        if len(ids) == self.n and self._everybody:
            return self._everybody
        where, found = ids * self.sections // self.n, []
        for section in self._mine:
            inside = ids if self.sections == 1 else ids[where == section]
            count = max(1, -(-len(inside) // self.chunk))
            parts = inside.tensor_split(count) if count > 1 else (inside,)
            found += [Group(section, part, k == count - 1) for k, part in enumerate(parts)]
        self._everybody = found if len(ids) == self.n else self._everybody
        return found


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


@dataclass
class TreeSum:
    """The sum over `pieces` pieces, each some tensors like `like`; every process has the total.

    A process adds its own pieces, `distributed.share(pieces)`, in their order. What is added stays as it is.

    >>> import torch
    >>> tree = TreeSum(3, [torch.tensor(0.0)])
    >>> for piece in range(3):
    ...     tree.add(piece, [torch.tensor(1.0 + piece)])
    >>> tree.total()
    [tensor(6.)]
    """

    pieces: int
    like: Sequence[Tensor]
    alone: bool = False
    """Whether this process has all pieces, even in a process group."""
    nodes: list[tuple[int, int, list[Tensor]]] = field(default_factory=list)
    """Subtrees that wait for their neighbours: first piece, number of pieces, sum."""
    begun: list[Tensor] | None = None
    """The sum of a piece of which more is to come."""

    def add(self, piece: int, values: Sequence[Tensor], last: bool = True, count: int = 1) -> None:
        """Add `values` to those of `piece`; `last` says that the piece is complete.

        count: how many pieces they are the sum of, `piece` and those after it: a subtree.
        """
        total = list(values) if self.begun is None else [a + b for a, b in zip(self.begun, values, strict=True)]
        self.begun = None if last else total
        while last and self.nodes and self.nodes[-1][1] == count and self.nodes[-1][0] % (2 * count) == 0:
            piece, _, left = self.nodes.pop()
            count, total = 2 * count, [a + b for a, b in zip(left, total, strict=True)]
        if last:
            self.nodes.append((piece, count, total))

    def total(self) -> list[Tensor]:
        """Return the sum over all pieces, those of other processes included."""
        nodes = self.nodes if self.alone or distributed.size() == 1 else self._exchanged()
        total = nodes[-1][2]
        for *_, left in reversed(nodes[:-1]):  # subtrees without a neighbour
            total = [a + b for a, b in zip(left, total, strict=True)]
        return total

    def _exchanged(self) -> list[tuple[int, int, list[Tensor]]]:
        """The subtrees that are left when those of all processes are known."""
        shapes = []
        for rank in range(distributed.size()):
            theirs = TreeSum(self.pieces, [])
            for piece in distributed.share(self.pieces, rank):
                theirs.add(piece, [])
            shapes.append(theirs.nodes)
        sent = distributed.all_gather([values for *_, values in self.nodes], self.like, max(map(len, shapes)))
        whole = TreeSum(self.pieces, self.like)
        for nodes, received in zip(shapes, sent, strict=True):
            for (first, count, _), values in zip(nodes, received, strict=False):  # some processes send fewer
                whole.add(first, values, count=count)
        return whole.nodes
