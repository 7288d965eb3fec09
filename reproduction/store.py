"""The tables of a figure's trials. This is the only place that reads or writes them.

FOLDER/trials.csv         a row per finished trial: name, settings, provenance, final numbers, configuration as JSON
FOLDER/histories.csv.gz   a row per measurement, with the name of its trial; not for figures that need only the last one

A finished trial is added under a lock that all processes of OUT share, and each file is replaced as a whole. A killed
run loses at most the trials that were running. Rows are sorted by name: the bytes do not depend on the order in which
trials ended.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fednmap
from fednmap.names import InputError, current
from fednmap.runs.atomic_files import clear_errors, digest, write_atomically
from fednmap.runs.configuration import Config
from fednmap.runs.folder import VERSIONS
from fednmap.simulation import Record, lock
from reproduction.trials import Curve, Trial, final_values

ROOMS = ("algorithms", "core.py", "data", "measure.py", "models", "problems", "regularizers", "runs", "simulation")
"""The parts of `fednmap` that a trial's numbers depend on; what a file of `reproduction` adds is not among them."""


def code_digest() -> str:
    """Return the first digits of the SHA-256 of these parts' sources, which trials of one state of the code share."""
    package = Path(fednmap.__file__).parent
    files = sorted(
        file for room in ROOMS for file in (package / room, *(package / room).rglob("*.py")) if file.is_file()
    )
    return digest({file.relative_to(package).as_posix(): file.read_text(encoding="utf-8") for file in files})[:12]


CODE = code_digest()  # of the sources that this process has loaded


class Provenance(NamedTuple):
    """Where a trial's numbers come from, as its row says it."""

    seed: str
    code_digest: str
    configuration_digest: str
    data_digest: str
    """Empty without data."""
    fednmap: str
    torch: str
    numpy: str
    configuration: str
    """JSON; the last column of the table."""

    @classmethod
    def of(cls, job: Trial, environment: Mapping[str, str]) -> Provenance:
        """Describe a trial that has just been run; environment: versions and the digest of the data."""
        configuration = dict(job.configuration)
        return cls(
            seed=str(configuration.get("seed", job.setting.get("trial", ""))),
            code_digest=CODE,
            configuration_digest=digest(configuration),
            data_digest=environment.get("data") or "",
            **{name: environment.get(name, "") for name in VERSIONS},
            configuration=json.dumps(configuration),
        )

    def changed_settings(self, configuration: Mapping[str, Any]) -> str:
        """Say which settings are others in this configuration; one that only one side names has its default."""
        given = (json.loads(self.configuration), configuration)
        was, now = ({**_defaults(), **current(v, Config.RENAMED, None)} for v in given)
        changed = [name for name in was if name in now and was[name] != now[name]]
        return ", ".join(f"{name} was {was[name]!r} and is {now[name]!r}" for name in changed)


@cache
def _defaults() -> dict[str, Any]:
    return Config.make().model_dump(mode="json", exclude={"checkpoint_every"})


class Row(NamedTuple):
    """A row of trials.csv, as text."""

    setting: dict[str, str]
    provenance: Provenance
    final: dict[str, str]


Columns = dict[str, list[str]]
"""What a trial measured, as text: column -> its values."""


@dataclass(frozen=True)
class Store:
    """The tables in a figure's folder.

    histories: whether the measurements of all rounds are kept, or only the last one, as the final numbers.
    final:     the final numbers of a trial, from its history.
    """

    folder: Path
    histories: bool = True
    final: Callable[[Curve], Mapping[str, float]] = final_values

    @property
    def table(self) -> Path:
        return self.folder / "trials.csv"

    @property
    def history_table(self) -> Path:
        return self.folder / "histories.csv.gz"

    def rows(self) -> dict[str, Row]:
        """Read trials.csv: name -> row; nothing where there is no file."""
        return _read_rows(self.table)

    def curves(self, jobs: Iterable[Trial]) -> list[Curve]:
        """Read what these trials measured; each must be there."""
        rows, histories = self.rows(), _read_histories(self.history_table) if self.histories else {}
        found = []
        for job in jobs:
            columns = histories.get(job.name) if self.histories else {k: [v] for k, v in rows[job.name].final.items()}
            if columns is None:
                raise InputError(
                    f"expected the measurements of {job.name} in {self.history_table}, got none; do restore the file, "
                    f"or remove the trial's row from {self.table.name} to run it again"
                )
            numbers = {name: np.array([float(v) for v in values]) for name, values in columns.items()}
            found.append(Curve(job.setting, numbers, rows[job.name].provenance.code_digest))
        return found

    def add(self, job: Trial, records: Sequence[Record], provenance: Provenance) -> None:
        """Add a finished trial, in the place of one of the same name."""
        kept = list(records) if self.histories else list(records[-1:])
        columns = {name: [f"{record[name]:.6g}" for record in kept] for name in kept[0]}
        curve = Curve(job.setting, {name: np.array([float(v) for v in values]) for name, values in columns.items()})
        numbers = self.final(curve) if self.histories else {name: curve[name][-1] for name in columns}
        final = {name: f"{value:.6g}" for name, value in numbers.items()}
        row = Row({name: str(value) for name, value in job.setting.items()}, provenance, final)
        with self._changing() as (rows, histories):
            rows[job.name] = row
            histories[job.name] = columns

    def copy(self, other: Store, names: Iterable[str]) -> None:
        """Take over finished trials of another figure that keeps as much of them."""
        rows, histories = other.rows(), _read_histories(other.history_table)
        with self._changing() as (mine, my_histories):
            for name in names:
                mine[name] = rows[name]
                my_histories[name] = histories[name]

    @contextmanager
    def _changing(self) -> Iterator[tuple[dict[str, Row], dict[str, Columns]]]:
        """Hand out both tables, and write them when the block ends, alone among all processes."""
        with clear_errors(self.folder):
            runs = self.folder.parent / "runs"
            for folder in (runs, self.folder):
                folder.mkdir(parents=True, exist_ok=True)
            with lock.exclusive(runs / ".tables"):
                rows, histories = self.rows(), _read_histories(self.history_table)
                yield rows, histories
                if self.histories:  # first, as a row says that its history is there
                    known = {name: columns for name, columns in histories.items() if name in rows}
                    write_atomically(self.history_table, _zipped(_history_text(known)))
                write_atomically(self.table, _table_text(rows).encode())


def _read_rows(path: Path) -> dict[str, Row]:
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        head = next(lines, [])
        first = head.index("seed") if "seed" in head else len(head)
        *known, last = Provenance._fields
        if head[:1] != ["name"] or head[-1:] != [last] or head[first : first + len(known)] != known:
            raise InputError(f"expected {path} to have the columns {', '.join(known)}, {last}; do restore the file")
        found = {}
        for line in lines:
            if len(line) != len(head) or not _is_object(line[-1]):
                raise InputError(
                    f"expected {len(head)} columns and a configuration as JSON in line {lines.line_num} of {path}; "
                    "do restore the file, or remove the line to run that trial again"
                )
            given, said, final = line[1:first], line[first : first + len(known)], line[first + len(known) : -1]
            found[line[0]] = Row(
                {k: v for k, v in zip(head[1:first], given, strict=True) if v},
                Provenance._make([*said, line[-1]]),
                {k: v for k, v in zip(head[first + len(known) : -1], final, strict=True) if v},
            )
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _table_text(rows: Mapping[str, Row]) -> str:
    rows = {name: rows[name] for name in sorted(rows, key=_natural)}
    settings = list(dict.fromkeys(name for row in rows.values() for name in row.setting))
    final = list(dict.fromkeys(name for row in rows.values() for name in row.final))
    *known, last = Provenance._fields
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *settings, *known, *final, last])
    for name, row in rows.items():
        *said, configuration = row.provenance
        given = (row.setting.get(k, "") for k in settings)
        writer.writerow([name, *given, *said, *(row.final.get(k, "") for k in final), configuration])
    return text.getvalue()


def _read_histories(path: Path) -> dict[str, Columns]:
    if not path.is_file():
        return {}
    found: dict[str, list[list[str]]] = {}
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            head = next(lines, [""])[1:]
            for name, *values in lines:
                found.setdefault(name, []).append(values)
        columns = {name: zip(head, zip(*rows, strict=True), strict=True) for name, rows in found.items()}
        return {name: {k: list(v) for k, v in pairs if any(v)} for name, pairs in columns.items()}
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"expected a table in {path}, got a damaged file ({error}); do restore it") from None


def _history_text(histories: Mapping[str, Columns]) -> str:
    histories = {name: histories[name] for name in sorted(histories, key=_natural)}
    names = list(dict.fromkeys(column for columns in histories.values() for column in columns))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *names])
    for trial, columns in histories.items():
        empty = [""] * len(columns["round"])
        values = (columns.get(name, empty) for name in names)
        writer.writerows([trial, *line] for line in zip(*values, strict=True))
    return text.getvalue()


def _zipped(text: str) -> bytes:
    """Compress to bytes that depend on the text alone."""
    file = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as packed:
        packed.write(text.encode())
    return file.getvalue()


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Sort n20 before n100."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if k % 2 else (1, 0.0, part) for k, part in enumerate(parts)]
