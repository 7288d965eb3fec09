"""Checkpoints: the state after a round, as safetensors and a JSON file with its digest.

No pickle: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import Algorithm, State
from fednmap.names import InputError
from fednmap.runs.atomic_files import add_checksum, clear_errors, digest, from_json, to_json, verified, write_atomically
from fednmap.simulation import Round
from fednmap.simulation.states import Clients

KEEP_LAST = 2
"""Checkpoints of a method that are not deleted."""

MISFIT = "it does not fit the problem, whose data must have changed"


class Checkpoint(NamedTuple):
    """The state after round t; `clients` is None where clients store their states themselves."""

    t: int
    server: State
    totals: dict[str, Any]
    clients: Clients | None = None

    def as_round(self) -> Round:
        """Return the round that a simulation continues from."""
        assert self.clients is not None  # a simulation keeps them
        nobody = torch.arange(0, device="cpu")
        return Round(self.t, self.server, self.clients.snapshot(), nobody, nobody, 0, 0)


Measured = Callable[[int], dict[str, Any]]
"""The number and digest of a job's first rows of metrics.csv; see `RunFolder.measured`."""


def write(
    folder: Path,
    kept: Checkpoint,
    settings: dict[str, Any],
    clients: Mapping[str, Tensor] | None = None,
    measured: dict[str, Any] | None = None,
) -> None:
    """Write the state after round kept.t; delete all but the last two, and later ones, which will be run again.

    settings: what the state depends on; a checkpoint is read with the same settings only.
    clients:  the clients' states and their numbers; None where clients store them themselves.
    measured: the number and digest of the measurements so far, which a reader compares with metrics.csv.
    """
    tensors = {f"server.{name}": v for name, v in kept.server._asdict().items()}
    tensors |= {f"clients.{name}": v for name, v in (clients or {}).items()}
    seen: set[int] = set()
    for name, v in tensors.items():  # the format wants each in its own memory, and a method may use one tensor twice
        v = v.detach().cpu().contiguous()
        where = v.untyped_storage().data_ptr()
        tensors[name] = v.clone() if where in seen else v
        seen.add(where)
    data = save(tensors)
    facts = {
        "job": folder.name,
        "round": kept.t,
        "measured": measured,
        "totals": kept.totals,
        "settings": digest(settings),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    path = folder / f"round-{kept.t:08d}.json"
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # the JSON comes last: a checkpoint without one does not exist
        write_atomically(path.with_suffix(".safetensors"), data)
        write_atomically(path, to_json(add_checksum(facts)))
        found = _newest_first(folder)
        later = [other for other in found if other.name > path.name]
        for old in (*later, *found[len(later) + KEEP_LAST :]):
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)


def newest(
    folder: Path,
    algorithm: Algorithm,
    start: Tensor,
    settings: dict[str, Any],
    clients: int | None = None,
    measured: Measured | None = None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, and a line about each that was refused.

    clients:  their number; None where they store their states themselves.
    measured: says what metrics.csv holds; None where it is not compared.
    """
    refused: list[str] = []
    paths, (server, client) = _newest_first(folder), algorithm.init(start)
    for k, path in enumerate(paths):
        try:
            facts, tensors = _read(path, settings, measured)
            kept = Checkpoint(facts["round"], _state(tensors, "server", server), facts["totals"])
            if clients is None:
                return kept, refused
            ids = tensors.get("clients.ids", torch.zeros(0, dtype=torch.int64, device="cpu"))  # stays on the CPU
            if len(ids) and int(ids.max()) >= clients:
                raise InputError(MISFIT)
            states = Clients(clients, client)
            states.restore({"ids": ids} | _state(tensors, "clients", client, (len(ids),))._asdict())
            return kept._replace(clients=states), refused
        except InputError as error:
            instead = "beginning at round 0" if path is paths[-1] else f"going on from {paths[k + 1].stem}"
            refused.append(f"checkpoint {folder.name}/{path.stem} is refused: {error}; {instead}")
    return None, refused


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def drop(folder: Path, done: int) -> None:
    """Delete the checkpoints after `done` rounds or more, so that these rounds are run again."""
    with clear_errors(folder):
        for path in _newest_first(folder):
            if not path.stem[6:].isdecimal() or int(path.stem[6:]) + 1 >= done:
                path.unlink()


def _read(path: Path, settings: dict[str, Any], measured: Measured | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what the JSON file says and the tensors, both as they were written; else raise InputError."""
    found = from_json(path, dict)
    facts = verified(found) if "check" in found else None
    if facts is None or path.stem != f"round-{facts['round']:08d}":
        raise InputError("its JSON was changed or cut short")
    if facts.get("job", path.parent.name) != path.parent.name:
        raise InputError(f"it is one of {facts['job']}")
    if facts["settings"] != digest(settings):
        raise InputError("it was made with other settings")
    rows = facts.get("measured")
    if measured is not None and rows and measured(rows["rows"]) != rows:
        raise InputError("metrics.csv does not hold the measurements before it")
    try:
        data = path.with_suffix(".safetensors").read_bytes()
    except OSError as error:
        raise InputError(f"its tensors cannot be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != facts["sha256"]:
        raise InputError("its tensors were changed or cut short")
    return facts, load(data)


def _state(tensors: dict[str, Tensor], part: str, like: State, stacked: tuple[int, ...] = ()) -> State:
    """Return the state with this kind of tensors, behind the axes `stacked`, and on their devices."""
    names = [f"{part}.{name}" for name in like._fields]
    if not set(names) <= tensors.keys():
        raise InputError("it was made by another version of the method")
    pairs = [(tensors[name], expected) for name, expected in zip(names, like, strict=True)]
    if any(v.shape != (*stacked, *expected.shape) or v.dtype != expected.dtype for v, expected in pairs):
        raise InputError(MISFIT)
    return type(like)(*(v.to(expected.device) for v, expected in pairs))
