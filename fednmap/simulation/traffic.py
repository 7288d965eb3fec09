"""What the messages of a round weigh: who must be sent what the server broadcasts, and who can follow it."""

from __future__ import annotations

import torch
from torch import Tensor

from fednmap.core import Algorithm, State, nbytes, pack
from fednmap.simulation.uplink import Pipeline


class Traffic:
    """Bytes of one client's messages in a round.

    A client that was counted in the last round that moved the server holds what it was sent then. Where the method can
    follow from there (`Traits.broadcast_follows`), it is sent the mean uplink of that round and not the broadcast.
    """

    def __init__(self, algorithm: Algorithm, server: State, message: State, pipeline: Pipeline | None = None) -> None:
        """message: an uplink, whose shapes count."""
        down, pipeline = algorithm.broadcast(server), pipeline or Pipeline()
        self.up = pipeline.nbytes(pack(algorithm, message), message)
        self.down, self.following = nbytes(down), nbytes(message)
        self.follows = algorithm.traits.broadcast_follows and self.following < self.down
        """Whether following is possible, and saves something."""

    def received(self, participants: Tensor, holders: Tensor) -> int:
        """Bytes that all participants receive, of whom those among `holders` can follow."""
        if not self.follows or not len(holders):
            following = 0
        elif torch.equal(participants, holders):  # the usual case, with everybody there
            following = len(participants)
        else:
            following = int(torch.isin(participants, holders).sum())
        return following * self.following + (len(participants) - following) * self.down
