"""Messages between neighbours: sum_j W_ij m_j for every node, in one process or across several."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import State
from fednmap.decentralized.topologies import Lossy, Topology
from fednmap.decentralized.weights import smallest_eigenvalue
from fednmap.simulation import distributed
from fednmap.simulation.threads import one_thread

SPARSE = 0.1  # share of the entries below which a matrix is kept as its nonzeros
ROUNDING = 1e-12  # an eigenvalue so little below 0 is 0
FEW = 128  # nodes for which it is not worth it


class Mixing:
    """The mixing matrix of each round, applied to stacked messages (k, p) of this process's nodes.

    positive: use (I + W)/2 where W has eigenvalues below 0, or changes from round to round.
    """

    def __init__(self, topology: Topology, *, drop: float = 0.0, seed: int = 0, positive: bool = False) -> None:
        self.sound, self.topology = topology, Lossy(topology, drop, seed) if drop != 0 else topology
        changes = not self.topology.static
        self.lazy = positive and (changes or smallest_eigenvalue(topology.weights(0)) < -ROUNDING)
        self._used: Tensor | None = None
        self._links: int | None = None

    def weights(self, t: int) -> Tensor:
        """W of round t, as it is used."""
        W = self.topology.weights(t)
        return (torch.eye(len(W), dtype=W.dtype, device="cpu") + W) / 2 if self.lazy else W

    def links(self, t: int) -> int:
        """Along how many links, each direction for itself, something is sent in round t, whether it arrives or not."""
        if self._links is None or not self.sound.static:
            W = self.sound.weights(t)
            self._links = int((W != 0).sum() - (W.diagonal() != 0).sum())
        return self._links

    def __call__(self, t: int, messages: State) -> State:
        """The mixed messages of this process's nodes."""
        if self._used is None or not self.topology.static:
            self._used = _as_used(self.weights(t), messages)
        W = self._used
        if distributed.size() == 1:
            with one_thread():
                return type(messages)(*(W @ v for v in messages))
        return _across(W, messages)


def _as_used(W: Tensor, messages: State) -> Tensor:
    """In the messages' precision and place; as its nonzeros where they are few."""
    like: Tensor = messages[0]
    W = W.to(like.device, like.dtype)
    if distributed.size() == 1 and len(W) >= FEW and float((W != 0).sum()) < SPARSE * W.numel():
        W = W.to_sparse_coo().coalesce()
    return W


def _across(W: Tensor, messages: State) -> State:
    """Node i lives in process i mod size. Each process sends every other the messages that its nodes need, and no more.

    All know W, hence what comes from where: one send and one receive for each pair of processes that are neighbours.
    """
    size, rank = distributed.size(), distributed.rank()
    width = [v.shape[-1] for v in messages]
    rows = torch.cat(list(messages), -1)

    def needed(by: int, of: int) -> Tensor:
        """Which nodes of process `of` some node of process `by` receives from, by their place among those of `of`."""
        return (W[by::size, of::size] != 0).any(0).nonzero().squeeze(1)

    others = [other for other in range(size) if other != rank]
    out = {other: rows[needed(other, rank)] for other in others}
    into = {other: rows.new_empty(len(needed(rank, other)), rows.shape[-1]) for other in others}
    distributed.swap(out, into)
    mixed = W[rank::size, rank::size] @ rows
    for other in others:
        mixed += W[rank::size, other::size][:, needed(rank, other)] @ into[other]
    return type(messages)(*mixed.split(width, -1))
