"""Before the first round: every site says what it has, and what does not fit together stops the run by name."""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Hashable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fednmap.flower.local import LocalProblem
from fednmap.flower.roster import exchange
from fednmap.names import InputError
from fednmap.runs.files import to_json, write_atomically

TEXT = 200  # characters of a name, a version or a reason, as they are repeated

Number = Annotated[int, Field(strict=True, ge=0)]
Word = Annotated[str, Field(strict=True), AfterValidator(lambda text: text[:TEXT])]

log = logging.getLogger("flwr")


class Site(BaseModel):
    """What a site says of itself: sizes, names and versions, nothing of the data's values.

    dimension: of the model.
    inputs:    shape of one sample.
    columns:   names of the features; () where the site names none.
    labels:    names of the classes, in the order of their numbers; () where the site names none.
    """

    model_config = ConfigDict(frozen=True)

    dimension: Number
    dtype: Word
    inputs: tuple[Number, ...]
    columns: tuple[Word, ...]
    labels: tuple[Word, ...]
    samples: Number
    test_samples: Number
    fednmap: Word
    torch: Word
    python: Word

    @classmethod
    def of(cls, local: LocalProblem) -> Site:
        own, torch_version, python = versions()
        return cls(
            dimension=len(local.start),
            dtype=str(local.start.dtype).removeprefix("torch."),
            inputs=tuple(local.problem.data.x.shape[1:]),
            columns=local.columns,
            labels=local.labels,
            samples=local.samples,
            test_samples=0 if local.test is None else len(local.test[1]),
            fednmap=own,
            torch=torch_version,
            python=python,
        )


class Sites:
    """Who has been asked what it has; what everybody must have is what most of those had who were asked first."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.expected: Site | None = None
        self.checked: dict[str, int] = {}
        """Sites that were asked, and the node that answered: another one may have other data."""
        self.unfit: set[str] = set()

    def check(self, nodes: Mapping[str, int], least: int, file: Path) -> Site:
        """Before the first round: what all have, also kept in `file`. What does not fit together stops the run."""
        sites, mistakes = self._ask(nodes)
        if sites:
            self.expected = usual(sites)
            mistakes |= mismatches(sites, self.expected)
        if mistakes:
            words = ". ".join(f"{name}: {what}" for name, what in mistakes.items())
            raise InputError(f"the sites do not fit together. {words}. Correct this and begin again")
        if len(sites) < least or self.expected is None:
            silent = ", ".join(name for name in nodes if name not in sites)
            raise TimeoutError(f"{silent}: no word within {self.deadline:g} s on what data is there")
        self.checked = {name: nodes[name] for name in sites}
        for name, site in sites.items():
            own, server = (site.torch, site.python), versions()[1:]
            note = "" if own == server else f"; the server has torch {server[0]}, Python {server[1]}"
            log.info("%s: %d samples, torch %s, Python %s%s", name, site.samples, *own, note)
        write_atomically(file, to_json({name: site.model_dump(mode="json") for name, site in sites.items()}))
        return self.expected

    def fitting(self, nodes: Mapping[str, int]) -> dict[str, int]:
        """Without nodes that joined since and do not fit; these are named once."""
        new = {name: node for name, node in nodes.items() if self.checked.get(name) != node}
        if new:
            sites, mistakes = self._ask(new)
            mistakes |= mismatches(sites, self.expected)
            for name, what in mistakes.items():
                log.warning("%s: left out: %s", name, what)
            self.unfit = (self.unfit - new.keys()) | mistakes.keys()
            self.checked |= {name: new[name] for name in sites.keys() | mistakes.keys()}
        return {name: node for name, node in nodes.items() if self.checked.get(name) == node and name not in self.unfit}

    def _ask(self, nodes: Mapping[str, int]) -> tuple[dict[str, Site], dict[str, str]]:
        """What sites say of themselves, and why some cannot."""
        found = exchange(self.grid, nodes, f"{MessageType.QUERY}.site", lambda _: RecordDict(), self.deadline)
        sites: dict[str, Site] = {}
        mistakes = dict(found.errors)
        for name, content in found.replies.items():
            try:
                record: Any = content["site"]
                if "failed" in record:
                    raise InputError(f"its data cannot be loaded ({record['failed']!s:.200})")
                sites[name] = Site.model_validate(dict(record))
            except ValidationError:
                mistakes[name] = "its report cannot be read; install the same fednmap as the server's"
            except (InputError, KeyError, TypeError) as error:
                mistakes[name] = str(error)
        return sites, mistakes


def versions() -> tuple[str, str, str]:
    """Of fednmap, torch and Python on this machine."""
    return version("fednmap"), str(torch.__version__), platform.python_version()


def mismatches(sites: Mapping[str, Site], expected: Site | None = None) -> dict[str, str]:
    """Site -> what of it does not fit: against `expected`, else against what most sites have.

    >>> sizes = {"dimension": 20, "dtype": "float32", "inputs": (20,), "samples": 100, "test_samples": 0}
    >>> a = Site(**sizes, columns=(), labels=(), fednmap="1.0", torch="2.9", python="3.11")
    >>> mismatches({"a": a, "b": a.model_copy(update={"dimension": 19, "inputs": (19,)}), "c": a}, a)
    {'b': 'samples have shape (19,), expected (20,); the model has 19 parameters, expected 20'}
    """
    due = usual(sites) if expected is None else expected
    found = {name: [*_differences(site, due)] for name, site in sites.items()}
    return {name: "; ".join(lines) for name, lines in found.items() if lines}


def usual(sites: Mapping[str, Site]) -> Site:
    """What most sites say, field by field; of equally many, the first. The version is this machine's."""

    def most(name: str) -> Any:
        said: list[Hashable] = [getattr(site, name) for site in sites.values()]
        return Counter(said).most_common(1)[0][0]

    return Site(**{name: most(name) for name in Site.model_fields} | {"fednmap": versions()[0]})


def _differences(site: Site, due: Site) -> list[str]:
    lines = []
    if site.fednmap != due.fednmap:
        lines.append(f"fednmap {site.fednmap}, expected {due.fednmap}")
    if site.columns != due.columns:
        lines.append(_names("columns", site.columns, due.columns))
    elif site.inputs != due.inputs:
        lines.append(f"samples have shape {site.inputs}, expected {due.inputs}")
    if site.labels != due.labels:
        lines.append(_names("labels", site.labels, due.labels))
    if site.dimension != due.dimension:
        lines.append(f"the model has {site.dimension} parameters, expected {due.dimension}")
    if site.dtype != due.dtype:
        lines.append(f"computes in {site.dtype}, expected {due.dtype}")
    return lines


def _names(what: str, given: tuple[str, ...], due: tuple[str, ...]) -> str:
    """Which are missing, which are not expected, or which stand in another place."""
    missing, extra = [n for n in due if n not in given], [n for n in given if n not in due]
    parts = [f"{words} {_few(names)}" for words, names in (("without", missing), ("with unknown", extra)) if names]
    if not parts:
        k = next((k for k, (a, b) in enumerate(zip(given, due, strict=False)) if a != b), min(len(given), len(due)))
        has, wants = (f"'{names[k]}'" if k < len(names) else "nothing" for names in (given, due))
        return f"{what} in another order: number {k} is {has}, expected {wants}"
    return f"{len(given)} {what} {' and '.join(parts)}, expected {len(due)}"


def _few(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
