"""A client's half of a round: the one function that the simulator and the Flower client call."""

from __future__ import annotations

from torch import Tensor

from fednmap.core import Algorithm, Oracle, State
from fednmap.simulation.uplink import Federation, Pipeline, Uplinks


def client_round(
    algorithm: Algorithm,
    pipeline: Pipeline,
    federation: Federation,
    t: int,
    ids: Tensor,
    down: State,
    client: State,
    g: Oracle,
) -> tuple[State, State]:
    """Run round t of one client (0-d `ids`), or of a stack of clients; return what is sent and the new state.

    The local steps are the method's. The pipeline's stages then change the uplink, and the new state is built from what
    was sent, so that the client and the server agree on it.
    """
    up, state = algorithm.local(down, client, g)
    if not pipeline.stages:
        return up, state
    done = pipeline.apply(federation, Uplinks(t, ids, up, up))
    if done.known is not up:
        state = algorithm.state_after_sending(down, client, up, done.known)
    return done.sent, state
