"""What is to be fitted to tables: target, family, penalty; and how a site's table becomes targets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, field_validator

from fednmap.estimators.family_problems import FAMILIES, CoxResponse, family
from fednmap.estimators.inference import COV_TYPES
from fednmap.estimators.linear_models import FederatedCoxRegression, FederatedGLM, FederatedOrdinalRegression
from fednmap.estimators.model_selection import (
    LEAVE_ONE_SITE_OUT,
    SELECT,
    FederatedCoxRegressionCV,
    FederatedGLMCV,
    FederatedOrdinalRegressionCV,
)
from fednmap.estimators.penalties import (
    GROUPED,
    PENALTIES,
    WITHOUT_WEIGHT,
    bounds_of,
    factors_of,
    penalty_name,
    settled_lam,
)
from fednmap.estimators.rows import Floats
from fednmap.names import InputError, choose, is_number
from fednmap.problems.families import Response
from fednmap.runs.configuration import Settings
from fednmap.tables import FederatedFormula, FederatedPreprocessor, Table, as_word
from fednmap.tables.table import Column, SiteError, is_words, missing, refuse_dates

NUMBERS = {"poisson": "counts", "negative-binomial": "counts", "binomial": "successes", "gamma": "a Gamma target"}
"""What the numbers of a target are called, of which none may be below 0."""
POSITIVE = ("exposures", NUMBERS["gamma"])
MANY_CLASSES = 50
LOCAL = ("heterogeneity",)
"""Settings that a fit between machines does not have yet."""


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
        None, description="The label whose probability is modelled, of two, default the last by name; Cox: of an event."
    )
    time: str | None = Field(None, description="Cox: the column of times.")
    event: str | None = Field(None, description="Cox: the column of events, 1 or 0, or yes or no.")
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
    path: bool = Field(False, description="Also fit 50 models from lambda_max down.")
    cv: str | None = Field(None, description="Choose lam: a number of folds within sites, or leave-one-site-out.")
    select: str = Field("min", description="The rule of the choice: min, 1se, bic, ebic.")
    cov_type: str | None = Field(
        None, description="Standard errors: nonrobust, HC0 or cluster; default: chosen, and with penalty none alone."
    )
    site_effects: str = Field(
        "none",
        description="What differs between sites: none, intercepts, random (intercepts, shrunk), or sparse (intercepts "
        "and some coefficients).",
    )
    mu: float | None = Field(
        None,
        description="Weight of the sites' deviations; default with --site-effects sparse 0.7 lam, with random by "
        "marginal likelihood.",
    )
    heterogeneity: bool = Field(False, description="Also compare the sites: their own estimates, tests, a forest plot.")
    evaluate: str | None = Field(
        None, description="Also predict rows by models without them: a number of folds, or leave-one-site-out."
    )

    @field_validator("penalty_factor", "bounds", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def make(cls, **values: Any) -> Self:
        """Return settings that were validated as a whole; raise InputError with a line for each mistake."""
        try:
            task = cls(**values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, given {e['input']!r:.40}" for e in error.errors()]
            raise InputError("\n".join(lines)) from None
        choose("family", task.family, FAMILIES)
        choose("penalty", penalty_name(task.penalty), PENALTIES)
        choose("way to weigh", task.weights, dict.fromkeys(("samples", "sites")))
        if task.cov_type is not None:
            choose("cov-type", task.cov_type, dict.fromkeys(COV_TYPES))
        settled_lam(task.penalty, task.lam)
        task.choice(), task.by_column([], {})
        timed, cox = task.time is not None, task.family == "cox"
        binomial, trials = task.family == "binomial", task.trials_column is not None
        for wrong, words in (
            (timed != (task.event is not None), "a Cox model needs both --time and --event"),
            (timed and not (cox and task.target is None), "--time and --event are for --family cox, without --target"),
            (cox and not timed, "--family cox needs --time and --event instead of --target"),
            (not task.goals, "say what to predict: --target COLUMN, or --time and --event for a Cox model"),
            (binomial != trials, "--family binomial needs --trials-column, and no other family has it"),
            (
                task.offset and task.exposure,
                "expected --offset or --exposure, got both; the offset of an exposure is its log",
            ),
            (cox and task.offset_column, "expected no offset and no exposure with family cox, got one; leave it out"),
            (
                task.mu is not None and task.site_effects not in ("random", "sparse"),
                f"expected --mu with --site-effects random or sparse, got {task.site_effects}; leave --mu out",
            ),
        ):
            if wrong:
                raise InputError(words)
        for name in ("cv", "evaluate"):
            value = getattr(task, name)
            if value is not None and value != LEAVE_ONE_SITE_OUT and not value.isdecimal():
                raise InputError(f"expected --{name} as a number of folds or {LEAVE_ONE_SITE_OUT}, got {value!r:.40}")
        only = {"order": ("ordinal",), "positive": ("logistic", "cox"), "entry": ("cox",), "strata": ("cox",)}
        for name, of in only.items():
            if getattr(task, name) is not None and task.family not in of:
                words = f"expected --{name} with family {' or '.join(of)}, got family {task.family}"
                raise InputError(f"{words}; leave --{name} out")
        return task

    def choice(self) -> dict[str, Any]:
        """Return the options of an estimator that chooses lam; none where lam is given."""
        if self.select not in SELECT:
            raise InputError(f"select is {self.select!r}; choose from {', '.join(SELECT)}")
        if self.cv is None and self.select == "1se":
            raise InputError("--select 1se compares held-out losses; add --cv 5, or --cv leave-one-site-out")
        if self.cv is not None and self.select not in ("min", "1se"):
            raise InputError(f"--select {self.select} is a criterion without folds; leave --cv out")
        if self.cv is None and self.select == "min":
            return {}
        if self.lam is not None:
            raise InputError("--cv and --select choose lam; leave --lam out")
        if penalty_name(self.penalty) in WITHOUT_WEIGHT:
            raise InputError(f"penalty {self.penalty!r} has no weight to choose; leave --cv and --select out")
        return {"cv": folds(self.cv or "5"), "select": self.select}

    def by_column(self, columns: Sequence[str], terms: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return penalty_factor and bounds by column; a name is that of a column of the model, or of a table or term
        behind it."""
        found: dict[str, dict[str, Any]] = {"penalty_factor": {}, "bounds": {}}
        for option, said in [("penalty_factor", v) for v in self.penalty_factor] + [("bounds", v) for v in self.bounds]:
            name, equals, words = said.rpartition("=")
            ends = words.split(":")
            if option == "bounds" and (len(ends) != 2 or not all(is_number(word or "0") for word in ends)):
                raise InputError(f"expected --bounds NAME=LOW:HIGH, or LOW:HIGH for all, got {said!r:.60}; as age=0:")
            if option == "penalty_factor" and not (equals and is_number(words)):
                raise InputError(f"expected --penalty-factor NAME=NUMBER, got {said!r:.60}; such as age=0")
            value = (float(ends[0] or "-inf"), float(ends[1] or "inf")) if option == "bounds" else float(words)
            named = columns if not equals else [name] if name in columns else terms.get(name, [name])
            found[option] |= dict.fromkeys(named, value)
        return {option: each or None for option, each in found.items()}

    def estimator(self, encoder: FederatedPreprocessor | FederatedFormula, classes: tuple[str, ...]) -> Any:
        """Return the estimator of these settings for the columns of a fitted encoder."""
        columns, terms = [str(name) for name in encoder.get_feature_names_out()], encoder.groups()
        options = self.by_column(columns, terms) | (self.choice() or {"lam": self.lam})
        factors_of(options["penalty_factor"], self.penalty, columns, {})  # refused before there is a folder
        bounds_of(options["bounds"], columns, {})
        options |= {"groups": terms if penalty_name(self.penalty) in GROUPED else None}
        options |= {"tol": self.tol_absolute, "max_rounds": self.rounds}
        for name in ("penalty", "l1_ratio", "standardize", "weights", "offset", "exposure", "site_effects", "mu"):
            options[name] = getattr(self, name)
        chooses = "cv" in options
        if self.family == "ordinal":
            return (FederatedOrdinalRegressionCV if chooses else FederatedOrdinalRegression)(order=classes, **options)
        if self.family == "cox":
            options |= {"ties": self.ties, "strata": self.strata}
            return (FederatedCoxRegressionCV if chooses else FederatedCoxRegression)(**options)
        return (FederatedGLMCV if chooses else FederatedGLM)(self.family, **options)

    @property
    def goals(self) -> list[str]:
        """The columns that y is made of."""
        return [
            name for name in (self.target, self.trials_column, self.entry, self.time, self.event) if name is not None
        ]

    @property
    def offset_column(self) -> str | None:
        """The column of offsets or exposures."""
        return self.exposure if self.offset is None else self.offset

    @property
    def extra_columns(self) -> list[str]:
        """The columns of the model that have no coefficients, without the goals."""
        return [name for name in (self.offset_column, self.strata) if name is not None]

    @property
    def own_columns(self) -> list[str]:
        """The columns of a table that are no features."""
        return [*self.goals, *self.extra_columns, *listed(self.exclude)]

    def made_family(self) -> Response:
        return CoxResponse(self.ties) if self.family == "cox" else family(self.family)

    def classes(self, found: Iterable[str]) -> tuple[str, ...]:
        """Return the labels by name, of two `positive` last: coefficients are those of its log-odds; ordered ones as
        --order says, else by size or name; () where the target is no label."""
        labels = sorted(set(found))
        if self.family not in ("logistic", "ordinal"):
            return ()
        if len(labels) < 2:
            raise InputError(f"the target {self.target!r} holds one class only, {labels[0]!r}; two are needed")
        if len(labels) > MANY_CLASSES:
            raise InputError(
                f"the target {self.target!r} has {len(labels)} different values; {self.family} predicts classes, "
                "for numbers use --family gaussian"
            )
        if self.order is not None:
            if set(order := listed(self.order)) != set(labels) or len(order) != len(labels):
                raise InputError(
                    f"expected order to name every label of {self.target!r} once ({', '.join(labels)}), got "
                    f"{self.order!r}"
                )
            return tuple(order)
        if self.family == "ordinal":
            return tuple(sorted(labels, key=float) if all(map(is_number, labels)) else labels)
        if self.positive is not None and (self.positive not in labels or len(labels) != 2):
            raise InputError(
                f"expected positive to be one of two labels, got {self.positive!r}; {self.target!r} has "
                f"{', '.join(labels[:12])}"
            )
        return tuple(labels if self.positive is None else sorted(labels, key=lambda name: name == self.positive))

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
            event = complete(rows, self.event)
            if is_words(event) and (self.positive or {*event} <= {"yes", "no"}):
                event = (event == (self.positive or "yes")).astype(float)
            else:
                event = numbers(rows, self.event, "events")
            return np.stack([*start, numbers(rows, self.time, "times"), event], 1)
        assert self.target is not None  # checked when the task was made
        if self.family in ("logistic", "ordinal"):
            return np.array([as_word(v) for v in complete(rows, self.target)], object)
        found, of = numbers(rows, self.target, NUMBERS.get(self.family)), self.trials_column
        return found if of is None else np.stack([found, numbers(rows, of, "trials")], 1)


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


def folds(words: str) -> int | str:
    """Return a number of folds, or the name of another rule."""
    return int(words) if words.isdecimal() else words


def numbers(rows: Table, name: str, what: str | None) -> Floats:
    """A column of numbers without gaps; the first that is not allowed is refused by its row at the site."""
    values = complete(rows, name)
    if is_words(values):
        needed = "1 or 0 is needed, yes or no, or --positive LABEL" if what == "events" else "numbers are needed"
        message = f"{rows.where}column {name!r} holds words, such as {values[0]!r:.40}; {needed}"
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
