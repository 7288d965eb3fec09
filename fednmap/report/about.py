"""What a folder's run.toml says, as it stands there: nothing is looked up, so names of another day stay readable."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any, NamedTuple

from fednmap.names import InputError
from fednmap.runs.folder import RunFolder


class About(NamedTuple):
    """The settings that a reader of tables and pages needs; None where run.toml does not say."""

    data: str | None = None
    model: str | None = None
    reg: str | None = None
    clients: int | None = None
    rounds: int | None = None
    trials: int | None = None
    algorithms: tuple[str, ...] = ()
    measure_gamma: float | None = None


def about(folder: RunFolder) -> About:
    values = settings(folder)
    known = {name: values[name] for name in About._fields if name in values}
    return About(**known | {"algorithms": tuple(map(str, known.get("algorithms", ())))})


def settings(folder: RunFolder) -> dict[str, Any]:
    """All of run.toml."""
    path = folder.path / "run.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not valid TOML; put it back as the run wrote it") from None


def about_line(said: About) -> str:
    """The problem in a line."""
    words = [str(word) for word in (said.data, said.model, said.reg) if word is not None]
    words += [f"{n} {what}" for n, what in ((said.clients, "clients"), (said.rounds, "rounds")) if n is not None]
    return ", ".join(words)


def gamma_line(results: Iterable[dict[str, Any]], gamma: float | None) -> str:
    """The gamma with which |F_nat|^2 was measured, in words: as the results say, else `gamma`; nothing if unknown."""
    gammas = [r.get("measure_gamma") or gamma for r in results if r.get("stationarity") is not None]
    known = list(dict.fromkeys(f"{value:g}" for value in gammas if value is not None))
    return f"|F_nat|^2 with gamma = {', '.join(known)}" if known else ""
