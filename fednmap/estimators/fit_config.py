"""What is to be fitted to tables: target, family, penalty; and how a site's table becomes targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, field_validator

from fednmap.estimators.family_problems import FAMILIES, CoxResponse, family
from fednmap.estimators.linear_models import FederatedCoxRegression, FederatedGLM, FederatedOrdinalRegression
from fednmap.estimators.model_selection import (
    SELECT,
    FederatedCoxRegressionCV,
    FederatedGLMCV,
    FederatedOrdinalRegressionCV,
)
from fednmap.estimators.penalties import PENALTIES, WITHOUT_WEIGHT, penalty_name, settled_lam
from fednmap.estimators.rows import Floats
from fednmap.names import InputError, choose, is_number
from fednmap.problems.families import Response
from fednmap.runs.configuration import Settings
from fednmap.tables import FederatedFormula, FederatedPreprocessor, Table, as_word
from fednmap.tables.table import Column, SiteError, is_words, missing, refuse_dates

KINDS = {"poisson": "counts", "negative-binomial": "counts", "binomial": "successes", "gamma": "a Gamma target"}
"""What the numbers of a target are called, of which none may be below 0."""
POSITIVE = ("exposures", KINDS["gamma"])


class FitConfig(Settings):
    """The settings of a fit to tables; the description of each is its help text."""

    RENAMED = {  # noqa: RUF012
        "drop_columns": "exclude",
        "max_rounds": "rounds",
        "tol": "tol_absolute",
    }
    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str = Field(
        "logistic",
        description="gaussian, logistic, binomial, ordinal, poisson, negative-binomial, gamma, huber or cox.",
    )
    target: str | None = Field(None, description="The column to predict; for a Cox model time and event.")
    formula: str | None = Field(None, description="Such as 'y ~ age * sex + bs(bmi, 4)'; rows with gaps are left out.")
    positive: str | None = Field(
        None, description="The label whose probability is modelled, of two; default: the last by name."
    )
    time: str | None = Field(None, description="Cox: the column of times.")
    event: str | None = Field(None, description="Cox: the column of events, 1 or 0.")
    entry: str | None = Field(None, description="Cox: the column where a row's time at risk starts; it ends at --time.")
    strata: str | None = Field(None, description="Cox: a column; rows of one stratum alone are compared.")
    trials_column: str | None = Field(None, description="Binomial: the column of trials; the target has the successes.")
    order: str | None = Field(None, description="Ordinal: the labels, lowest first, separated by commas.")
    offset: str | None = Field(None, description="A column that is added to every score.")
    exposure: str | None = Field(None, description="A column whose logarithm is added to every score.")
    exclude: str = Field("", description="Columns to leave out, separated by commas.")
    categorical: str = Field("", description="Columns whose numbers are codes, separated by commas.")
    impute: str = Field("mean", description="What fills a gap in a number: mean or median.")
    penalty: str = Field("l1", description="none, l1, ridge, elastic-net, mcp, ..., or with its weight: l1:0.01.")
    lam: float | None = Field(None, ge=0, description="Weight of the penalty; default 0.01.")
    l1_ratio: float = Field(0.5, ge=0, le=1, description="The share of l1 in elastic-net and sparse-group-lasso.")
    standardize: bool = Field(True, description="Penalise coefficients of standardised columns.")
    penalty_factor: tuple[str, ...] = Field((), description="NAME=NUMBER, what lam counts for a column: age=0.")
    bounds: tuple[str, ...] = Field((), description="NAME=LOW:HIGH for a coefficient, such as age=0:, or 0: for all.")
    weights: str = Field("samples", description="What counts the same: samples (rows), or sites.")
    ties: str = Field("efron", description="Cox: efron or breslow.")
    tol_absolute: float = Field(1e-6, gt=0, description="Stop when |F_nat| is at most this.")
    rounds: int = Field(1000, ge=1, description="Largest number of rounds.")

    @field_validator("penalty_factor", "bounds", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def make(cls, **values: Any) -> Self:
        """Validated as a whole: one InputError with a line for each mistake."""
        try:
            task = cls(**values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, given {e['input']!r:.40}" for e in error.errors()]
            raise InputError("\n".join(lines)) from None
        choose("family", task.family, FAMILIES)
        choose("penalty", penalty_name(task.penalty), PENALTIES)
        choose("way to weigh", task.weights, dict.fromkeys(("samples", "sites")))
        settled_lam(task.penalty, task.lam)
        check_goals(task.family, task.target, task.time, task.event)
        if (task.family == "binomial") != (task.trials_column is not None):
            raise InputError("--family binomial needs --trials-column, and no other family has it")
        if task.order is not None and task.family != "ordinal":
            raise InputError(f"expected --order with family ordinal, got family {task.family}; leave --order out")
        if task.family != "cox" and (task.entry is not None or task.strata is not None):
            raise InputError(f"expected --entry and --strata with family cox, got {task.family}; leave them out")
        if task.offset is not None and task.exposure is not None:
            raise InputError("expected --offset or --exposure, got both; the offset of an exposure is its logarithm")
        task.factors([], {}), task.limits([], {})
        return task

    def factors(self, columns: list[str], terms: Mapping[str, Sequence[str]]) -> dict[str, float] | None:
        """The penalty factors by column; a name is that of a column of the model, or of a table or term behind it."""
        found: dict[str, float] = {}
        for said in self.penalty_factor:
            name, equals, word = said.rpartition("=")
            if not equals or not is_number(word):
                raise InputError(f"expected --penalty-factor NAME=NUMBER, got {said!r:.60}; such as age=0")
            found |= dict.fromkeys(_columns_of(name, columns, terms), float(word))
        return found or None

    def limits(self, columns: list[str], terms: Mapping[str, Sequence[str]]) -> dict[str, tuple[float, float]] | None:
        """The bounds by column, as `factors`."""
        found: dict[str, tuple[float, float]] = {}
        for said in self.bounds:
            name, equals, words = said.rpartition("=")
            low, colon, high = words.partition(":")
            if not colon or not all(is_number(word or "0") for word in (low, high)):
                raise InputError(f"expected --bounds NAME=LOW:HIGH, or LOW:HIGH for all, got {said!r:.60}; as age=0:")
            named = _columns_of(name, columns, terms) if equals else columns
            found |= dict.fromkeys(named, (float(low or "-inf"), float(high or "inf")))
        return found or None

    @property
    def goals(self) -> list[str]:
        """The columns that y is made of."""
        return [
            name for name in (self.target, self.trials_column, self.entry, self.time, self.event) if name is not None
        ]

    @property
    def own_columns(self) -> list[str]:
        """The columns of a table that are no features."""
        others = [name for name in (self.offset, self.exposure, self.strata) if name is not None]
        return [*self.goals, *others, *listed(self.exclude)]

    def made_family(self) -> Response:
        return CoxResponse(self.ties) if self.family == "cox" else family(self.family)

    def offsets(self, rows: Table) -> Floats:
        """The column of offsets or exposures of one site, as it is."""
        return numbers(rows, self.exposure or self.offset or "", None if self.exposure is None else "exposures")

    def preprocessor(self) -> FederatedPreprocessor:
        return FederatedPreprocessor(self.impute, categorical=listed(self.categorical))

    def encoder(self) -> FederatedPreprocessor | FederatedFormula:
        """What makes numbers of tables: the formula, or the preprocessor."""
        return self.preprocessor() if self.formula is None else FederatedFormula(self.formula)

    def features(self, rows: Table) -> Table:
        return rows.without(self.own_columns)

    def y(self, rows: Table) -> Column:
        """The targets of one site: words for labels, numbers, or (time, event)."""
        if self.time is not None and self.event is not None:
            start = [] if self.entry is None else [numbers(rows, self.entry, None)]
            return np.stack([*start, numbers(rows, self.time, "times"), numbers(rows, self.event, "events")], 1)
        assert self.target is not None  # checked when the task was made
        if self.family in ("logistic", "ordinal"):
            return np.array([as_word(v) for v in complete(rows, self.target)], object)
        found, of = numbers(rows, self.target, KINDS.get(self.family)), self.trials_column
        return found if of is None else np.stack([found, numbers(rows, of, "trials")], 1)


def _columns_of(name: str, columns: list[str], terms: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The columns of the model that a name means; an unknown one is refused where the model is made."""
    return [name] if name in columns else terms.get(name, [name])


def assignments(words: str) -> list[str]:
    """NAME=NUMBER or NAME=LOW:HIGH, separated by commas; a name may have commas.

    >>> assignments("age=0, income, gross=2"), assignments("0:, city=Basel, BS=:1")
    (['age=0', 'income, gross=2'], ['0:', 'city=Basel, BS=:1'])
    """
    found, begun = list[str](), ""
    for part in words.split(","):
        begun = f"{begun},{part}" if begun else part
        _, equals, said = part.rpartition("=")
        if (equals or ":" in said) and all(is_number(word.strip() or "0") for word in said.split(":")):
            found.append(begun.strip())
            begun = ""
    return [*found, *([begun.strip()] if begun.strip() else [])]


def listed(words: str | None) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in (words or "").split(",") if name.strip()]


def with_formula(values: dict[str, Any]) -> dict[str, Any]:
    """The settings with the columns that the left side of their formula names."""
    if values.get("formula") is None:
        return values
    for name in ("target", "time", "event", "categorical", "impute"):
        if name in values:
            raise InputError(f"expected --formula or --{name}, got both; a formula says which columns are used")
    goals = FederatedFormula(values["formula"]).target
    if not goals:
        raise InputError("expected what to predict before ~, got nothing; write 'y ~ x', or 'Surv(time, event) ~ x'")
    names = (("target",), ("time", "event"), ("entry", "time", "event"))[len(goals) - 1]
    return values | dict(zip(names, goals, strict=True))


def with_weight(values: dict[str, Any]) -> dict[str, Any]:
    """The settings with the weight of the penalty as lam: `train` and `fit` take l1:0.01, mcp:0.01,3 and their like.

    mcp:auto,3 leaves the weight to lam, or to its choice.

    >>> with_weight({"penalty": "mcp:0.01,3"}), with_weight({"penalty": "elastic-net:0.02,0.01"})
    ({'penalty': 'mcp:3', 'lam': 0.01}, {'penalty': 'elastic-net', 'lam': 0.04, 'l1_ratio': 0.5})
    """
    penalty = str(values.get("penalty", ""))
    name, _, rest = penalty.partition(":")
    first, *others = words = [word.strip() for word in rest.split(",")]
    if not rest or name in WITHOUT_WEIGHT:
        return values
    if name in ("mcp", "scad") and first != "auto" and not others:
        warnings.warn(f"penalty {penalty} is now {name}:auto,{first}; use that", FutureWarning, stacklevel=2)
        return values
    if first == "auto":
        return values | {"penalty": ":".join([name, *([",".join(others)] if others else [])])}
    if name not in PENALTIES or not all(map(is_number, words)):
        return values  # refused where a penalty is made
    for other in ("lam", *(["l1_ratio"] if others else [])):
        if other in values:
            raise InputError(f"expected one weight of the penalty, got {penalty} and {other}; leave one out")
    lam = float(first)
    if name in ("elastic-net", "sparse-group-lasso") and len(others) == 1:
        second = float(others[0]) * (2 if name == "elastic-net" else 1)  # nu1 |b|_1 + nu2 |b|^2, as in `train`
        return values | {"penalty": name, "lam": lam + second, "l1_ratio": lam / ((lam + second) or 1.0)}
    return values | {"penalty": ":".join([name, *([",".join(others)] if others else [])]), "lam": lam}


def fit_choice(cv: str | None, select: str, lam: float | None, penalty: str) -> dict[str, Any]:
    """The options of an estimator that chooses lam; empty where lam is given."""
    if select not in SELECT:
        raise InputError(f"select is {select!r}; choose from {', '.join(SELECT)}")
    if cv is None and select == "1se":
        raise InputError("--select 1se compares held-out losses; add --cv 5, or --cv leave-one-site-out")
    if cv is not None and select not in ("min", "1se"):
        raise InputError(f"--select {select} is a criterion without folds; leave --cv out")
    if cv is None and select == "min":
        return {}
    if lam is not None:
        raise InputError("--cv and --select choose lam; leave --lam out")
    if penalty_name(penalty) in WITHOUT_WEIGHT:
        raise InputError(f"penalty {penalty!r} has no weight to choose; leave --cv and --select out")
    return {"cv": int(cv) if cv is not None and cv.isdecimal() else cv or 5, "select": select}


def estimator_of(
    config: FitConfig,
    choice: dict[str, Any],
    effects: dict[str, Any],
    classes: tuple[str, ...],
    by_column: dict[str, Any],
) -> Any:
    """The estimator of these settings with its site effects; one that chooses lam where `choice` says how.

    by_column: groups, penalty factors and bounds of columns.
    """
    names = ("penalty", "l1_ratio", "standardize", "weights")
    common = {name: getattr(config, name) for name in names} | by_column | effects
    common |= {"tol": config.tol_absolute, "max_rounds": config.rounds}
    common |= (choice or {"lam": config.lam}) | {"offset": config.offset, "exposure": config.exposure}
    if config.family == "ordinal":
        return (FederatedOrdinalRegressionCV if choice else FederatedOrdinalRegression)(order=classes, **common)
    if config.family == "cox":
        common |= {"ties": config.ties, "strata": config.strata}
        return (FederatedCoxRegressionCV if choice else FederatedCoxRegression)(**common)
    return (FederatedGLMCV if choice else FederatedGLM)(config.family, **common)


def check_goals(kind: str | None, target: str | None, time: str | None, event: str | None) -> None:
    """Refuse columns to predict that do not go together."""
    if (time is None) != (event is None):
        raise InputError("a Cox model needs both --time and --event")
    if time is not None and (target is not None or kind not in (None, "cox")):
        raise InputError("--time and --event are for --family cox, without --target")
    if time is None and kind == "cox":
        raise InputError("--family cox needs --time and --event instead of --target")
    if time is None and target is None:
        raise InputError("say what to predict: --target COLUMN, or --time and --event for a Cox model")


def ordered_classes(target: str | None, found: Iterable[str], positive: str | None) -> tuple[str, ...]:
    """Return the labels by name; of two, `positive` last: coefficients are those of its log-odds."""
    classes = sorted(set(found))
    if positive is None:
        return tuple(classes)
    if positive not in classes or len(classes) != 2:
        raise InputError(
            f"expected positive to be one of two labels, got {positive!r}; {target!r} has {', '.join(classes[:12])}"
        )
    return tuple(sorted(classes, key=lambda name: name == positive))


def numbers(rows: Table, name: str, what: str | None) -> Floats:
    """A column of numbers without gaps; the first that is not allowed is refused by its row at the site."""
    values = complete(rows, name)
    if is_words(values):
        message = f"{rows.where}column {name!r} holds words, such as {values[0]!r:.40}; numbers are needed"
        raise SiteError(message, "words", name)
    wrong, words = ~np.isfinite(values), "give finite numbers, or leave the row out"
    if what in POSITIVE and not bool(wrong.any()):
        wrong, words = values <= 0, f"{what} must be above 0"
    elif what is not None and not bool(wrong.any()):
        wrong, words = values < 0, f"{what} must be at least 0"
    if what == "events":
        wrong, words = (values != 0) & (values != 1), "1 is an event, 0 censored"
    if bool(wrong.any()):
        row = int(wrong.argmax())
        raise SiteError(f"{rows.where}column {name!r} has {values[row]:g} in row {row}; {words}", "range", name)
    return values


def complete(rows: Table, name: str) -> Column:
    """A column without gaps."""
    values = rows[name]
    gaps = missing(values)
    if bool(gaps.any()):
        raise SiteError(
            f"{rows.where}the target {name!r} has no value in row {int(gaps.argmax())}"
            f"{f' and {int(gaps.sum()) - 1} more' if gaps.sum() > 1 else ''}; leave the rows out",
            "gaps",
            name,
        )
    refuse_dates(name, values, f" at site {rows.name!r}" if rows.name else "")
    return values
