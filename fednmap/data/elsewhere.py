"""Data that nobody but its owner can load."""

from __future__ import annotations

from fednmap.data.dataset import Dataset
from fednmap.names import InputError


def stays_with_clients() -> Dataset:
    """Data that stays with the clients of a federation; `fednmap flower new` shows how they load it."""
    raise InputError("the data of this run stays with its clients; run it with Flower, see `fednmap flower new --help`")
