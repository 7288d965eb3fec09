"""Before the first round: every site says what it has, and what does not fit together stops the run by name."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from fednmap.flower.local import LocalProblem
from fednmap.names import InputError

TEXT = 200  # characters of a name, a version or a reason, as they are repeated


class Site(NamedTuple):
    """What a site says of itself: sizes, names and versions, nothing of the data's values.

    dimension: of the model.
    inputs:    shape of one sample.
    columns:   names of the features; () where the site names none.
    labels:    names of the classes, in the order of their numbers; () where the site names none.
    """

    dimension: int
    dtype: str
    inputs: tuple[int, ...]
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    samples: int
    test_samples: int
    fednmap: str
    torch: str
    python: str

    @classmethod
    def of(cls, local: LocalProblem) -> Site:
        return cls(
            len(local.start),
            str(local.start.dtype).removeprefix("torch."),
            tuple(local.problem.data.x.shape[1:]),
            local.columns,
            local.labels,
            local.samples,
            0 if local.test is None else len(local.test[1]),
            *versions(),
        )

    def record(self) -> dict[str, Any]:
        """As it travels: numbers, words and lists of them."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self._asdict().items()}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Site:
        """What arrived, refused unless it has the fields and kinds that are due."""
        try:
            given = {name: kind(record[name]) for name, kind in KINDS.items()}
        except (KeyError, TypeError, ValueError):
            raise InputError("its report cannot be read; install the same fednmap as the server's") from None
        return cls(**given)


def versions() -> tuple[str, str, str]:
    """Of fednmap, torch and Python on this machine."""
    return version("fednmap"), str(torch.__version__), platform.python_version()


def mismatches(sites: Mapping[str, Site], expected: Site | None = None) -> dict[str, str]:
    """Site -> what of it does not fit: against `expected`, else against what most sites have.

    >>> a = Site(20, "float32", (20,), (), (), 100, 0, "1.0", "2.9", "3.11")
    >>> mismatches({"a": a, "b": a._replace(dimension=19, inputs=(19,)), "c": a})
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

    return Site(**{name: most(name) for name in Site._fields})._replace(fednmap=versions()[0])


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


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value[:TEXT]


def _many(kind: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda values: tuple(kind(v) for v in list(values))


KINDS: dict[str, Callable[[Any], Any]] = {
    "dimension": _number,
    "dtype": _word,
    "inputs": _many(_number),
    "columns": _many(_word),
    "labels": _many(_word),
    "samples": _number,
    "test_samples": _number,
    "fednmap": _word,
    "torch": _word,
    "python": _word,
}
