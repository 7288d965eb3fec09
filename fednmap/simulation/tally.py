"""Sums over pieces of work that have the same bits whoever has computed which piece.

The additions are those of a fixed binary tree over the pieces: pairs of neighbours, pairs of pairs, and so on. A
process that has some pieces in a row adds what belongs together there, and sends the few sums that are left: one, where
two or four processes share pieces whose number is a power of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fednmap.simulation import distributed


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
