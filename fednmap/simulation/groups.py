"""Which clients are computed side by side, and by which process.

Clients fall into sections by their number, a section is computed in groups, and a process has some of the sections. How
many sections and groups there are does not depend on the number of processes or threads: these would show in the bits.
"""

from __future__ import annotations

import math
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
