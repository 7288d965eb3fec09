"""What the clients say of a model: each for itself, or all together where the server sees sums alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fednmap.flower import wire
from fednmap.flower.plan import Measured, Point
from fednmap.flower.roster import exchange
from fednmap.flower.secure import SecureSum
from fednmap.names import InputError
from fednmap.simulation.loop import mean
from fednmap.simulation.quantised import Quantised

EVERYBODY = "*"  # stands for the client's name where only the sum over clients is known


class Measurement(NamedTuple):
    """Numbers by client, or of all of them together; how many were measured, their mean loss and gradient.

    accuracy: mean over the clients that have test samples; NaN if no client has any.
    """

    told: dict[str, dict[str, float]]
    clients: int
    loss: float
    gradient: Tensor | None
    accuracy: float = math.nan
    wire_up: int = 0
    wire_down: int = 0


NOTHING = Measurement({}, 0, math.nan, None)


def told(
    grid: Grid,
    nodes: Mapping[str, int],
    x: Tensor,
    exactly: bool,
    deadline: float,
    counts: Mapping[str, float],
) -> Measurement:
    """What each client says of the model x.

    exactly: whether they also send the exact gradient.
    counts:  what a client counts, relative to the others.
    """
    message = _model(x)
    found = exchange(grid, nodes, MessageType.EVALUATE, lambda _: message, deadline)
    gradients: dict[str, Point] = {}
    if exactly:
        gradients = found.read(lambda content: wire.unpack(content.get("gradient"), Point(x)), "measurement")
        found.replies = {name: found.replies[name] for name in gradients}
    said = found.read(lambda content: _numbers(content["about"]), "measurement")

    def average(key: str) -> float:
        having = [name for name in said if key in said[name]]
        total = sum(counts[name] for name in having)
        return sum(counts[name] * said[name][key] for name in having) / total if having else math.nan

    gradient = mean([gradients[name] for name in said], [counts[name] for name in said]).x if exactly and said else None
    wires = found.wire_up, found.wire_down
    return Measurement(said, len(said), average("loss"), gradient, average("accuracy"), *wires)


def summed(secure: SecureSum, nodes: Mapping[str, int], x: Tensor, exactly: bool, ticket: str) -> Measurement:
    """What they say together."""
    message = _model(x)
    like = Measured(x.new_zeros(3, dtype=torch.float64), x if exactly else x[:0])
    grid = Quantised(len(secure.names))
    found = secure(nodes, MessageType.EVALUATE, lambda _: message, ticket, like, grid, 2)
    wires = found.found.wire_up, found.found.wire_down
    if not found.names:
        return Measurement({}, 0, math.nan, None, math.nan, *wires)
    loss, accuracy, measured = found.mean.numbers.tolist()
    accuracy = accuracy / measured if measured else math.nan
    said = {"loss": loss} | ({"accuracy": accuracy} if measured else {})
    gradient = found.mean.gradient if exactly else None
    return Measurement({EVERYBODY: said}, len(found.names), loss, gradient, accuracy, *wires)


def _model(x: Tensor) -> RecordDict:
    return RecordDict({"model": wire.pack(Point(x))})


def _numbers(record: Any) -> dict[str, float]:
    if not isinstance(record, MetricRecord):
        raise InputError("expected the numbers of a measurement")
    values = {key: float(record[key]) for key in ("loss", "samples", "accuracy") if key in record}  # type: ignore[arg-type]
    if not math.isfinite(values.get("loss", math.nan)):
        raise InputError(f"numbers {values}; expected a finite loss")
    return {key: v for key, v in values.items() if math.isfinite(v)}  # accuracy on no samples is NaN
