"""Checkpoints: the state after a round, as safetensors with a JSON beside it that vouches for every byte.

No pickle: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import Algorithm, Problem, State
from fednmap.names import InputError
from fednmap.runs.files import digest, from_json, sealed, to_json, unsealed, write_atomically
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
    """The state after round kept.t; the last two are kept. Later ones are of a trajectory that was given up.

    settings: what the state depends on; a checkpoint is read with the same settings only.
    clients:  the clients' states and whose they are; None where they keep them themselves.
    """
    tensors = {f"server.{name}": v.clone() for name, v in kept.server._asdict().items()}  # some may be one tensor
    tensors |= {f"clients.{name}": v for name, v in (clients or {}).items()}
    data = save(_apart(tensors))
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
    write_atomically(path, to_json(sealed(facts)))
    found = _newest_first(folder)
    given_up = [later for later in found if later.name > path.name]
    for old in (*given_up, *found[len(given_up) + KEPT :]):
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own, as the file format asks for; a method may keep one tensor in two places."""
    seen: set[int] = set()
    found = {}
    for name, v in tensors.items():
        v = v.detach().cpu().contiguous()
        where = v.untyped_storage().data_ptr()
        found[name] = v.clone() if where in seen else v
        seen.add(where)
    return found


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
        except InputError as error:
            instead = "beginning at round 0" if path is paths[-1] else f"going on from {paths[k + 1].stem}"
            refused.append(f"checkpoint {folder.name}/{path.stem} is refused: {error}; {instead}")
    return None, refused


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def _read(
    path: Path, algorithm: Algorithm, problem: Problem, start: Tensor, settings: dict[str, Any]
) -> tuple[Round, Record]:
    """Server and clients."""
    first, client = algorithm.init(start)
    kept, tensors = _server(path, first, settings)
    ids = tensors.get("clients.ids", torch.zeros(0, dtype=torch.int64, device="cpu"))  # stays on the CPU
    states = _part(tensors, "clients", client)
    if not _alike(states, client, (len(ids),)) or (len(ids) and int(ids.max()) >= problem.n):
        raise InputError("it does not fit the problem, whose data must have changed")
    clients = Clients(problem.n, client)
    clients.restore({"ids": ids} | {name: v.to(start.device) for name, v in states._asdict().items()})
    nobody = torch.arange(0, device="cpu")
    return Round(kept.t, kept.server, clients.snapshot(), nobody, nobody, 0, 0), kept.totals


def _server(path: Path, first: State, settings: dict[str, Any]) -> tuple[Kept, dict[str, Tensor]]:
    """The server's half, like its state `first`, and all tensors."""
    found = from_json(path, dict)
    facts = unsealed(found) if "check" in found else None
    if facts is None or path.stem != f"round-{facts['round']:08d}":
        raise InputError("its JSON was changed or cut short")
    if facts["settings"] != digest(settings):
        raise InputError("it was made with other settings")
    try:
        data = path.with_suffix(".safetensors").read_bytes()
    except OSError as error:
        raise InputError(f"its tensors cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise InputError("its tensors were changed or cut short")
    tensors = load(data)
    server = _part(tensors, "server", first)
    if not _alike(server, first):
        raise InputError("it does not fit the problem, whose data must have changed")
    server = type(first)(*(v.to(like.device) for v, like in zip(server, first, strict=True)))
    return Kept(facts["round"], server, facts["totals"]), tensors


def _part(tensors: dict[str, Tensor], part: str, like: State) -> State:
    """The state of that kind among the tensors."""
    names = [f"{part}.{name}" for name in like._fields]
    if not set(names) <= tensors.keys():
        raise InputError("it was made by another version of the method")
    return type(like)(*(tensors[name] for name in names))


def _alike(state: State, like: State, stacked: tuple[int, ...] = ()) -> bool:
    """Whether the tensors have these shapes, behind the axes `stacked`, and these types."""
    return all(v.shape == (*stacked, *due.shape) and v.dtype == due.dtype for v, due in zip(state, like, strict=True))
