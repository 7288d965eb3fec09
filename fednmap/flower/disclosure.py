"""What a site reveals is the site's decision: rules in the site's own file, checked at the site before a reply leaves.

The node names the file: `--node-config "client='basel' rules='/etc/fednmap/rules.toml'"`. No setting of a run changes
it. What breaks a rule is refused with a code, which the server learns; the details are in the site's own log.
"""

from __future__ import annotations

import hashlib
import logging
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fednmap.flower.local import LocalProblem
from fednmap.names import InputError
from fednmap.privacy import accounting
from fednmap.problems import GLM
from fednmap.runs.atomic_files import from_json, to_json, write_atomically
from fednmap.simulation import lock
from fednmap.tables import FederatedFormula, Table
from fednmap.tables.statistics import levels_of
from fednmap.tables.table import SiteError, is_words, missing

NO_MODEL = ("-rows", "-cells")
"""How marks of points end at which there is no model: rows are counted there."""
OTHER = "other"
"""The level that small levels are merged into."""

Floats = npt.NDArray[np.float64]

log = logging.getLogger("flwr")


class Rules(BaseModel):
    """The limits of a site; without a file there are none. The description of each field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-"), populate_by_name=True
    )

    min_rows: int = Field(0, ge=0, description="Fewest rows of a table, or samples, about which anything is said.")
    min_level_count: int = Field(0, ge=0, description="Fewest rows of a level or class that may be named.")
    small_levels: Literal["refuse", "merge"] = Field(
        "refuse", description="What happens to smaller levels: refuse, or merge into one called other."
    )
    max_parameters_per_row: float | None = Field(None, gt=0, description="Most parameters of a model per row.")
    columns: tuple[str, ...] | None = Field(None, description="The columns that may be used; default all.")
    questions: tuple[str, ...] | None = Field(
        None, description="What may be asked: site, columns, ranges, target, sums, train, ...; default all."
    )
    digits: int | None = Field(None, ge=1, le=15, description="Significant digits of extremes and quantiles.")
    min_cell: int = Field(1, ge=1, description="Counts of values below a cut are rounded to multiples of this.")
    min_effective_rows: float = Field(0.0, ge=0, description="Fewest rows that a gradient may rest on, see the page.")
    max_points: int | None = Field(None, ge=1, description="Most different models at which gradients are computed.")
    max_epsilon: float | None = Field(None, gt=0, description="Lifetime privacy budget; without noise all is refused.")
    delta: float = Field(1e-5, gt=0, lt=1, description="Of that budget.")
    study: str = Field("all", pattern=r"[A-Za-z0-9._-]{1,64}", description="Name of the budget and of the points.")

    @classmethod
    def read(cls, path: object) -> Rules:
        """The rules of a file, none without one; a file that cannot be read is refused, not ignored."""
        try:
            text = "" if path is None else Path(str(path)).expanduser().read_text(encoding="utf-8")
            return cls.model_validate(tomllib.loads(text))
        except (OSError, ValueError, ValidationError) as error:
            log.error("the rules of this site cannot be read: %s", error)
            raise SiteError("the rules of this site cannot be read", "rules") from None

    def asked(self, question: str) -> None:
        """Refuse a question that is not among the allowed ones."""
        if self.questions is not None and question not in self.questions:
            raise _refused("question", f"the question {question!r:.40} is not in {list(self.questions)}")

    def table(self, own: Table, goals: Sequence[str], used: Sequence[str], categorical: Sequence[str]) -> Table:
        """The table as it may be used, small levels merged; refused where it may not.

        used: the columns of the model; goals: those it predicts.
        """
        self._enough(own.rows)
        for name in (*goals, *used):
            if self.columns is not None and name not in self.columns:
                raise _refused("column", f"column {name!r} is not in {list(self.columns)}", name)
        changed = {}
        for name in (*goals, *used) if self.min_level_count else ():
            values, gaps = own[name], missing(own[name])
            named = is_words(values) or name in categorical
            if named or len(set(values[~gaps].tolist())) <= 2:  # two numbers are levels too
                words = levels_of(values)
            else:
                words = [None if gap else "" for gap in gaps]
            counts = Counter(words)
            small = {word for word, count in counts.items() if count < self.min_level_count}
            if not small:
                continue
            merged = sum(counts[word] for word in small) + counts.get(OTHER, 0) * (OTHER not in small)
            kept = named and name not in goals and None not in small and merged >= self.min_level_count
            if self.small_levels == "refuse" or not kept:
                raise _refused("level", f"{len(small)} levels of {name!r} have few rows", name)
            log.warning("%d levels of %r were merged into %r", len(small), name, OTHER)
            changed[name] = np.array([OTHER if word in small else word for word in words], object)
        return Table({**own.columns, **changed}, own.name)

    def part(self, own: Table, inside: Any, goals: Sequence[str], used: Sequence[str], words: Sequence[str]) -> Table:
        """Some rows of a table that may be used: these and the others must follow the rules by themselves."""
        strict = self.model_copy(update={"small_levels": "refuse"})
        for rows in (inside, ~inside):
            if rows.any():  # a site may be left out of a fold
                strict.table(own.some(rows), goals, used, words)
        return own.some(inside)

    def formula(self, encoder: FederatedFormula) -> None:
        """Refuse a formula whose numbers could single out rows: columns as they are, levels, means and quantiles of all
        sites cannot."""
        if (self.min_level_count or self.min_effective_rows) and (odd := encoder.with_numbers):
            raise _refused("formula", f"{odd[0]!r} has numbers that whoever submits the run has chosen")

    def matrix(self, X: Floats, names: Sequence[str]) -> None:
        """Refuse columns of a formula that rest on few rows: cells of interactions, and the tail of an exponential."""
        limit = max(self.min_level_count, self.min_effective_rows)
        for values, name in zip(X.T, names, strict=True):
            rows = effective_rows((values - np.median(values))[:, None])
            if rows < limit:
                raise _refused("few-rows", f"column {name!r} rests on {rows:.1f} rows, below {limit:g}", name)

    def _enough(self, rows: int) -> None:
        if rows < self.min_rows:
            raise _refused("rows", f"{rows} rows, and min-rows is {self.min_rows}")

    def model(self, parameters: int, rows: int) -> None:
        """Refuse a model that has too many parameters for so many rows."""
        most = self.max_parameters_per_row
        if most is not None and parameters > most * rows:
            raise _refused("parameters", f"{parameters} parameters for {rows} rows, and at most {most} per row")

    def coarse(self, question: dict[str, Any], own: Table) -> dict[str, Any]:
        """The question with cuts of few digits."""
        if self.digits is None or question["ask"] != "counts":
            return question
        steps = {name: self._grid(own[name]) for name in question["cuts"]}
        cuts = {name: [_rounded(v, steps[name], round) for v in found] for name, found in question["cuts"].items()}
        return question | {"cuts": cuts}

    def answer(self, question: dict[str, Any], said: dict[str, Any], own: Table) -> dict[str, Any]:
        """The answer with extremes of few digits and counts in steps."""
        if question["ask"] == "ranges" and self.digits is not None:
            steps = {name: self._grid(own[name]) for name in said}
            ends = {name: (_rounded(v[0], steps[name], math.floor), v[1]) for name, v in said.items()}
            return {name: [low, _rounded(high, steps[name], math.ceil)] for name, (low, high) in ends.items()}
        if question["ask"] == "counts":
            k = self.min_cell
            return {name: [k * round(count / k) for count in counts] for name, counts in said.items()}
        return said

    def _grid(self, values: Any) -> float:
        largest = float(np.nanmax(np.abs(values)))
        return float(10.0 ** (math.floor(math.log10(largest)) - (self.digits or 15) + 1)) if largest > 0 else 1.0

    def guarded(self, local: LocalProblem, folder: Path, client: str) -> LocalProblem:
        """The client's problem, which looks at every point before it answers there."""
        self._enough(local.samples)
        self.model(local.problem.dim, local.samples)
        if self.max_points is None and not self.min_effective_rows:
            return local
        place, weigh = self.place(folder, client), partial(weights, "slope", local.problem)
        return replace(local, look=lambda x: self.points("slope", x[None], weigh, place))

    def place(self, folder: Path, client: str) -> Path:
        """Return where a site keeps what it was asked about."""
        return folder / "points" / f"{client}-{self.study}"

    def points(
        self,
        kind: str,
        points: Tensor,
        weigh: Callable[[Tensor], Floats],
        place: Path,
        about: str = "",
        rows: str = "",
    ) -> None:
        """Refuse points at which an answer rests on few rows, or its change since an earlier point does.

        kind:  what rows are weighed by, of which answers are sums; "rows" of sums without a model.
        weigh: the weights of all rows at a point.
        about: what else makes a model of a point, such as its scaling.
        rows:  a name of the rows that are asked about, where these are not all.
        """
        if self.max_points is None and not self.min_effective_rows:
            return
        ending, of = "" if kind == "slope" else f"-{kind}", f"-{rows}" if rows else ""
        with _kept(place, "points") as seen:
            new: dict[str, Floats] = {}
            for x in points:
                mark = hashlib.sha256(x.detach().cpu().numpy().tobytes() + about.encode()).hexdigest()
                known = {other[: len(mark)] for other in [*seen, *new] if not other.endswith(NO_MODEL)}
                most = None if f"-{kind}" in NO_MODEL else self.max_points
                if most is not None and mark not in known and len(known) >= most:
                    raise _refused("points", f"{len(known)} points were answered, and max-points is {self.max_points}")
                now = weigh(x) if self.min_effective_rows else np.empty((0, 1))
                self._check_weights(now, list(new.values()), place, ending)
                if mark + of + ending not in seen:
                    new[mark + of + ending] = now
            if new and self.min_effective_rows:
                file, more = _weights_file(place, next(iter(new.values())), ending), np.stack(list(new.values()))
                np.save(data := BytesIO(), np.concatenate([np.load(file), more]) if file.exists() else more)
                write_atomically(file, data.getvalue())
            seen += new

    def cells(self, inside: Tensor, place: Path) -> None:
        """Refuse counts of cells (cells, rows) in which there are few rows, or few others than in an earlier cell."""
        sizes = inside.sum(1)
        if bool(((sizes > 0) & (sizes < self.min_cell)).any()):
            raise _refused("few-rows", f"a cell of predictions has fewer than {self.min_cell} rows")
        self.points("cells", inside, lambda x: np.asarray(x[:, None].numpy()), place)

    def same_rows(self, own: Table, folder: Path, client: str) -> None:
        """Refuse a table that differs in few rows from one that was answered about: sums of both would reveal these."""
        if not (limit := self.min_effective_rows):
            return
        columns = [own[name].tolist() for name in sorted(own.columns)]
        now = Counter(hashlib.sha256(repr(row).encode()).hexdigest()[:16] for row in zip(*columns, strict=True))
        with _kept(self.place(folder, client), "rows") as seen:
            for known in seen:
                before = Counter[str](known)
                change = max((now - before).total(), (before - now).total())
                if 0 < change < limit:
                    raise _refused("few-rows", f"{change} rows came or went since an earlier run, below {limit:g}")
            if now not in seen:
                seen.append(now)

    def _check_weights(self, now: Floats, new: Sequence[Floats], place: Path, ending: str) -> None:
        """Refuse weights of few rows, weights that differ in few rows from earlier ones, and tables that do."""
        if not (limit := self.min_effective_rows):
            return
        file = _weights_file(place, now, ending)
        before = np.load(file) if file.exists() else np.empty((0, *now.shape))
        least = min(effective_rows(now - other) for other in (np.zeros_like(now), *before, *new))
        sizes = {int(other.stem.partition("-")[0]) for other in place.glob("*-*.npy")} - {len(now)}
        least = min([least, *(abs(size - len(now)) for size in sizes)])  # rows that came or went
        if least < limit:
            raise _refused("few-rows", f"the point rests on {least:.1f} rows, below {limit:g}")

    def spend(self, noise: float | None, folder: Path, client: str) -> None:
        """Charge one noisy reply to the budget, before it leaves; refused where the budget does not suffice.

        Gaussian mechanisms compose to one: 1 / noise^2 adds up.
        """
        if self.max_epsilon is None:
            return
        if not noise:
            raise _refused("budget", "max-epsilon is set, and the run adds no noise")
        path, begun = folder / "budget" / f"{client}-{self.study}.json", folder / f".budget-{client}-{self.study}"
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock.exclusive(path.with_suffix(".lock")):
            try:
                before = float(from_json(path, dict)["spent"]) if path.exists() or begun.exists() else 0.0
                if not 0 <= before < math.inf:
                    raise ValueError(before)
            except (InputError, KeyError, TypeError, ValueError):
                raise _refused("budget", f"{path} cannot be read; put it back from a copy") from None
            after = before + 1 / noise**2
            epsilon = accounting.epsilon(after**-0.5, 1.0, 1, self.delta).pld
            if not epsilon <= self.max_epsilon:
                raise _refused("budget", f"this reply would make epsilon {epsilon:.3g}, above {self.max_epsilon:g}")
            write_atomically(path, to_json({"spent": after, "epsilon": epsilon, "delta": self.delta}))
            begun.touch()  # from now on a budget that is not there was lost, and is not a new one


@contextmanager
def _kept(place: Path, what: str) -> Iterator[list[Any]]:
    """A list in a folder of the site, to add to; one that was lost is not a new one."""
    place.mkdir(parents=True, exist_ok=True)
    with lock.exclusive(place / "lock"):
        path, begun = place / f"{what}.json", place.with_name(f".{place.name}{'' if what == 'points' else f'-{what}'}")
        seen = from_json(path, list) if path.exists() or begun.exists() else []
        before = len(seen)
        yield seen
        if len(seen) > before:
            write_atomically(path, to_json(seen))
            begun.touch()


def _weights_file(place: Path, now: Floats, ending: str) -> Path:
    """Where the weights of so many rows at earlier points are."""
    return place / f"{len(now)}-{now.shape[1]}{ending}.npy"


def weights(kind: str, problem: Any, x: Tensor) -> Floats:
    """What every row counts in an answer at x: the slope of its loss in a gradient, its curvature in a Hessian."""
    if not isinstance(problem, GLM):
        raise _refused("few-rows", f"min-effective-rows needs a linear model, and this is a {type(problem).__name__}")
    parts = {"curvature": problem.family.curvature, "information": problem.family.information}
    found = parts.get(kind, problem.family.slope)(*problem.rows_at(x))
    each = np.asarray(found.detach().cpu().double().reshape(len(found), -1).numpy())
    return np.square(each) if kind == "square" else each


def effective_rows(r: Floats) -> float:
    """(sum |r|)^2 / sum r^2: as many as there are rows where all weigh the same, 1 where one does; inf of nothing.

    >>> effective_rows(np.array([[1.0], [-1.0], [0.0]])), effective_rows(np.zeros((3, 1)))
    (2.0, inf)
    """
    size = np.abs(r).max(initial=0.0)
    if not size > 0:
        return math.inf
    each = np.linalg.norm(r / size, axis=1)
    return float(each.sum() ** 2 / np.square(each).sum())


def _rounded(value: float, step: float, way: Any) -> float:
    return float(way(value / step) * step)


def _refused(code: str, why: str, column: str = "") -> SiteError:
    """The error of a rule; its words stay at the site."""
    log.warning("refused by the rules of this site (%s): %s", code, why)
    return SiteError(f"refused by the site's rules: {code}", f"rule-{code}", column)
