"""Checkpoints: the state after a round, as safetensors with a JSON beside it that vouches for every byte.

No pickle: reading a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fednmap.core import Algorithm, Problem, State
from fednmap.names import InputError
from fednmap.runs.files import digest, from_json, sealed, to_json, unsealed, write_atomically
from fednmap.simulation import Record, Round
from fednmap.simulation.states import Clients

KEPT = 2


def write(folder: Path, round: Round, totals: Record, settings: dict[str, Any]) -> None:
    """The state after `round`; the last two are kept.

    totals:   bytes and seconds so far.
    settings: what the state depends on; a checkpoint is read with the same settings only.
    """
    tensors = {f"server.{name}": v for name, v in round.server._asdict().items()}
    tensors |= {f"clients.{name}": v for name, v in round.clients.tensors().items()}
    data = save({name: v.detach().cpu().contiguous() for name, v in tensors.items()})
    facts = {
        "round": round.t,
        "totals": totals,
        "settings": digest(settings),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # the JSON comes last: a checkpoint without one does not exist
    path = folder / f"round-{round.t:08d}.json"
    write_atomically(path.with_suffix(".safetensors"), data)
    write_atomically(path, to_json(sealed(facts)))
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def newest(
    folder: Path, algorithm: Algorithm, problem: Problem, start: Tensor, settings: dict[str, Any]
) -> tuple[Round | None, Record | None, list[str]]:
    """The newest intact checkpoint, and a line about each that had to be passed over."""
    refused: list[str] = []
    paths = _newest_first(folder)
    for k, path in enumerate(paths):
        try:
            return *_read(path, algorithm, problem, start, settings), refused
        except InputError as error:
            instead = "beginning at round 0" if path is paths[-1] else f"going on from {paths[k + 1].stem}"
            refused.append(f"checkpoint {folder.name}/{path.stem} is refused: {error}; {instead}")
    return None, None, refused


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.json"), reverse=True)


def _read(
    path: Path, algorithm: Algorithm, problem: Problem, start: Tensor, settings: dict[str, Any]
) -> tuple[Round, Record]:
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
    ids = tensors.get(
        "clients.ids", torch.zeros(0, device="cpu")
    )  # stays on the CPU: it says in which rows the states are
    first, client = algorithm.init(start)
    server, states = _part(tensors, "server", first), _part(tensors, "clients", client)
    if (
        any(v.shape != like.shape or v.dtype != like.dtype for v, like in zip(server, first, strict=True))
        or any(
            v.shape != (len(ids), *like.shape) or v.dtype != like.dtype for v, like in zip(states, client, strict=True)
        )
        or (len(ids) and int(ids.max()) >= problem.n)
    ):
        raise InputError("it does not fit the problem, whose data must have changed")
    clients = Clients(problem.n, client)
    clients.restore({"ids": ids} | {name: v.to(start.device) for name, v in states._asdict().items()})
    nobody = torch.arange(0, device="cpu")
    server = type(first)(*(v.to(start.device) for v in server))
    return Round(facts["round"], server, clients.snapshot(), nobody, nobody, 0, 0), facts["totals"]


def _part(tensors: dict[str, Tensor], part: str, like: State) -> State:
    """The state of that kind among the tensors."""
    names = [f"{part}.{name}" for name in like._fields]
    if not set(names) <= tensors.keys():
        raise InputError("it was made by another version of the method")
    return type(like)(*(tensors[name] for name in names))
