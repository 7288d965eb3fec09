"""Checkpoints: the state after a round, as safetensors with a JSON beside it that vouches for every byte.

No pickle: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import Algorithm, Problem, State
from fednmap.names import InputError
from fednmap.runs.files import from_json, to_json, write_atomically
from fednmap.simulation import Record, Round
from fednmap.simulation.states import Clients

KEPT = 2

T = TypeVar("T")


class Kept(NamedTuple):
    """The server's half of a checkpoint: all of it where clients keep their own states."""

    t: int
    server: State
    totals: dict[str, Any]


def write(folder: Path, round: Round, totals: Record, settings: dict[str, Any]) -> None:
    """The state after `round`, of server and clients; see `keep`."""
    keep(folder, Kept(round.t, round.server, totals), settings, round.clients.tensors())


def keep(folder: Path, kept: Kept, settings: dict[str, Any], clients: Mapping[str, Tensor] | None = None) -> None:
    """The state after round kept.t; the last two are kept.

    settings: what the state depends on; a checkpoint is read with the same settings only.
    clients:  the clients' states and whose they are; None where they keep them themselves.
    """
    tensors = {f"server.{name}": v for name, v in kept.server._asdict().items()}
    tensors |= {f"clients.{name}": v for name, v in (clients or {}).items()}
    data = save({name: v.detach().cpu().contiguous() for name, v in tensors.items()})
    facts = {
        "round": kept.t,
        "totals": kept.totals,
        "settings": digest(settings),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # the JSON comes last: a checkpoint without one does not exist
    path = folder / f"round-{kept.t:08d}.json"
    write_atomically(path.with_suffix(".safetensors"), data)
    write_atomically(path, to_json(facts | {"check": digest(facts)}))
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def newest(
    folder: Path, algorithm: Algorithm, problem: Problem, start: Tensor, settings: dict[str, Any]
) -> tuple[Round | None, Record | None, list[str]]:
    """The newest intact checkpoint, and a line about each that had to be passed over."""
    found, refused = _newest(folder, lambda path: _read(path, algorithm, problem, start, settings))
    return *(found or (None, None)), refused


def newest_server(
    folder: Path, algorithm: Algorithm, start: Tensor, settings: dict[str, Any]
) -> tuple[Kept | None, list[str]]:
    """As `newest`, where clients keep their own states."""
    return _newest(folder, lambda path: _server(path, algorithm.init(start)[0], settings)[0])


def _newest(folder: Path, read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    refused: list[str] = []
    paths = _newest_first(folder)
    for k, path in enumerate(paths):
        try:
            return read(path), refused
        except (ValueError, KeyError, TypeError, OSError, SafetensorError, RuntimeError, IndexError) as error:
            instead = "beginning at round 0" if path is paths[-1] else f"going on from {paths[k + 1].stem}"
            refused.append(f"checkpoint {folder.name}/{path.stem} is refused: {error}; {instead}")
    return None, refused


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def _read(
    path: Path, algorithm: Algorithm, problem: Problem, start: Tensor, settings: dict[str, Any]
) -> tuple[Round, Record]:
    """Server and clients."""
    first, client = algorithm.init(start)
    kept, tensors = _server(path, first, settings)
    clients = Clients(problem.n, client)
    clients.restore({name.removeprefix("clients."): v for name, v in tensors.items() if name.startswith("clients.")})
    nobody = torch.arange(0)
    return Round(kept.t, kept.server, clients.snapshot(), nobody, nobody, 0, 0), kept.totals


def _server(path: Path, first: State, settings: dict[str, Any]) -> tuple[Kept, dict[str, Tensor]]:
    """The server's half, like its state `first`, and all tensors."""
    facts = from_json(path, dict)
    if facts.pop("check", None) != digest(facts) or path.stem != f"round-{facts['round']:08d}":
        raise InputError("its JSON was changed or cut short")
    if facts["settings"] != digest(settings):
        raise InputError("it was made with other settings")
    try:
        data = path.with_suffix(".safetensors").read_bytes()
    except OSError as error:
        raise InputError(f"its tensors cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise InputError("its tensors were changed or cut short")
    device = next(iter(first)).device
    tensors = {name: v.to(device) for name, v in load(data).items()}
    server = type(first)(**{name: tensors[f"server.{name}"] for name in first._fields})
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(server, first, strict=True)):
        raise InputError("it does not fit the problem, whose data must have changed")
    return Kept(facts["round"], server, facts["totals"]), tensors
