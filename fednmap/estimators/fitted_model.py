"""The model of a fit as its folder keeps it: coefficients with their names, how they predict, and their table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from typing import Any

import numpy as np

from fednmap.estimators.family_problems import FAMILIES, RATIOS, expected, family, threshold_names
from fednmap.estimators.fit_config import numbers
from fednmap.estimators.inference import Inference
from fednmap.estimators.path import RegularizationPath
from fednmap.estimators.rows import Floats
from fednmap.estimators.site_effects import SiteEffects
from fednmap.names import InputError, choose
from fednmap.problems.families import Ordinal
from fednmap.report.data_table import DataTable
from fednmap.runs.atomic_files import clear_errors, from_json, to_json, write_atomically
from fednmap.runs.folder import SUMS, RunFolder
from fednmap.tables import FederatedFormula, FederatedPreprocessor, Statistic, table

MODEL = "model.json"
VERSION = 1


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What predicts: coefficients by name, and how a table becomes their columns."""

    family: str
    target: str
    columns: tuple[str, ...]
    coef: Floats
    """(K, p)"""
    intercept: Floats
    classes: tuple[str, ...]
    preprocessor: FederatedPreprocessor | FederatedFormula
    constants: tuple[float, ...] = ()
    """What the family estimates once for all rows."""
    offset: str | None = None
    exposure: str | None = None
    """The column that is added to every score, itself or its logarithm."""
    effects: SiteEffects | None = None
    """The effects of the sites, where they differ."""

    @property
    def needed(self) -> set[str]:
        """The columns of a table that predictions need."""
        own = [name for name in (self.offset, self.exposure) if name is not None]
        return {*own, *(s.column for s in self.statistics)}

    @property
    def levels(self) -> tuple[tuple[str, ...], list[float]]:
        """The names and values of the intercepts; of ordered labels the thresholds, of a Cox model none."""
        if self.family == "ordinal":
            return threshold_names(self.classes), Ordinal(len(self.classes)).fitted(
                float(self.intercept[0]), np.array(self.constants)
            )["thresholds_"].tolist()
        level = [] if self.family == "cox" else self.intercept.tolist()
        return ("(intercept)",) * len(level), level

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is known of the columns of a table that the model reads."""
        return self.preprocessor.statistics_

    def check(self) -> None:
        """Raise ValueError if the parts do not fit together."""
        (outputs, p), kinds = self.coef.shape, len(self.classes)
        parts: list[Any] = [self.coef, self.intercept, self.constants]
        fits = list(self.preprocessor.get_feature_names_out()) == list(self.columns)
        fits &= self.intercept.shape == (outputs,)
        if self.family in ("logistic", "ordinal"):
            fits &= kinds == (outputs if outputs > 1 else 2 if self.family == "logistic" else len(self.constants) + 2)
        if (own := self.effects) is not None:
            parts += [own.intercept, own.deviation]
            fits &= own.deviation.shape == (len(own.sites), p) and own.intercept.shape == (len(own.sites),)
        fits &= all(name is None or isinstance(name, str) for name in (self.offset, self.exposure))
        if not fits or not all(np.isfinite(part).all() for part in parts):
            raise ValueError("its parts do not fit together")

    def predict(self, rows: Any, site: str | None = None) -> dict[str, list[Any]]:
        """Return columns of predictions: numbers; labels and probabilities; the hazard ratio.

        rows: a frame or a `fednmap.tables.Table`; site: whose own coefficients to use, default the shared ones.
        """
        rows = table(rows, only=self.needed)
        X = self.preprocessor.transform(rows)
        scores = X @ self.coef.T + self.intercept
        if site is not None:
            if self.effects is None or site not in self.effects.sites:
                known = "none" if self.effects is None else ", ".join(self.effects.sites)
                raise InputError(f"expected a site with its own coefficients ({known}), got {site!r}; leave site out")
            shared = 0.0 if self.family == "cox" else self.intercept
            scores[:, 0] += self.effects.added(X, np.full(len(X), site), shared)
        if self.offset is not None:
            scores = scores + numbers(rows, self.offset, None)[:, None]
        if self.exposure is not None:
            scores = scores + np.log(numbers(rows, self.exposure, "exposures"))[:, None]
        kind = Ordinal(len(self.classes)) if self.family == "ordinal" else family(self.family)
        mean = expected(kind, scores[:, 0] if scores.shape[1] == 1 else scores, self.constants)
        if self.family in ("logistic", "ordinal"):
            each = np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean
            labels = [self.classes[k] for k in each.argmax(1)]
            shares = {f"P({name})": each[:, k].tolist() for k, name in enumerate(self.classes)}
            return {self.target: labels, **shares}
        name = {"cox": "hazard ratio", "binomial": "P(success)"}.get(self.family, self.target)
        return {name: mean.tolist()}

    def coefficient_table(
        self, path: RegularizationPath | None = None, errors: Inference | None = None, *, penalised: bool = False
    ) -> DataTable:
        """Name, coefficient, its ratio, its standard error and interval, and the lam at which it enters.

        With errors the ratio has an interval too; "low" and "high" are the coefficient's. If the model is penalised,
        errors and intervals are those of the estimates without the penalty, which are a column "unpenalised".
        """
        ratio, (outputs, p) = RATIOS.get(self.family), self.coef.shape
        titles, level = self.levels
        if errors is not None and len(errors.estimate) == self.coef.size:  # intercepts are the sites' own
            titles, level = (), []
        # class by class, then the intercepts, as errors have them; an aliased column has NaN there
        value = np.array([*self.coef.flatten(), *level]) if errors is None or penalised else errors.estimate
        table: dict[str, Any] = {}
        if outputs > 1:
            table["class"] = [name for name in self.classes for _ in range(p)] + [*self.classes]
        table |= {"name": [*self.columns] * outputs + [*titles], "coefficient": value}
        with np.errstate(over="ignore"):
            if ratio:
                table[ratio] = np.exp(value)
            if penalised and errors is not None:
                table["unpenalised"] = errors.estimate
            if ratio and errors is not None:
                table |= {f"{ratio} low": np.exp(errors.low), f"{ratio} high": np.exp(errors.high)}
        if errors is not None:
            table |= {"standard error": errors.error, "low": errors.low, "high": errors.high, "p": errors.p_value}
        if path is not None:
            enters = [None if np.isnan(lam) else lam for lam in path.enters.tolist()]
            table["enters at lam"] = enters * outputs + [None] * len(level)
        cells = ((v + 0.0).tolist() if isinstance(v, np.ndarray) else v for v in table.values())
        each = list(zip(*cells, strict=True))
        places = np.arange(len(each))
        by_class = zip(
            places[: outputs * p].reshape(outputs, p), np.array_split(places[outputs * p :], outputs), strict=True
        )
        return DataTable([*table], [list(each[j]) for part in by_class for j in np.concatenate(part)])


def save(folder: File, about: dict[str, Any], model: FittedModel) -> None:
    """Write the model; `about` says how it was made."""
    kind = model.preprocessor
    names = ("family", "target", "columns", "classes", "constants", "offset", "exposure")
    said = about | {"version": VERSION, **{name: getattr(model, name) for name in names}}
    said |= {"coef": model.coef.tolist(), "intercept": model.intercept.tolist()}
    said |= {} if isinstance(kind, FederatedPreprocessor) else {"formula": kind.formula, "state": kind.state_}
    said["statistics"] = [asdict(s) for s in model.statistics]
    if model.effects is not None:
        own = zip(model.effects.sites, model.effects.intercept.tolist(), model.effects.deviation.tolist(), strict=True)
        said["site_effects"] = {site: {"intercept": a, "deviation": d} for site, a, d in own}
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MODEL, to_json(said))


def load(folder: str | File) -> FittedModel:
    """Return the model in the folder of a `fednmap fit`, which predicts rows of a frame.

    Raises InputError if the folder holds no model, or one that was changed since.

    >>> from tempfile import TemporaryDirectory
    >>> from click.testing import CliRunner
    >>> from fednmap.cli import app
    >>> with TemporaryDirectory() as folder:
    ...     _ = File(folder, "basel.csv").write_text("age,y\\n1,1\\n2,3\\n3,5\\n4,7\\n")
    ...     command = f"fit --data csv:{folder} --target y --penalty none --out {folder}/run"
    ...     _ = CliRunner().invoke(app, command.split())
    ...     load(f"{folder}/run").coef.round(3)
    array([[2.]])
    """
    folder = File(folder)
    if not (folder / MODEL).is_file():
        raise InputError(f"{folder} holds no {MODEL}; give the folder of a `fednmap fit`")
    said, changed = from_json(folder / MODEL, dict), RunFolder(folder).changed_files()
    if lines := [line for line in changed if line.startswith(MODEL) or SUMS in line]:
        raise InputError(f"{folder}: {lines[0]}; put it back from a copy, or fit again")
    try:
        choose("family", said["family"], FAMILIES)
        effects, own = None, said.get("site_effects")
        if own is not None:
            a, d = (np.array([site[name] for site in own.values()], float) for name in ("intercept", "deviation"))
            effects = SiteEffects(tuple(own), tuple(said["columns"]), a, d)
        statistics = [Statistic(**s | {"levels": tuple(s["levels"])}) for s in said["statistics"]]
        model = FittedModel(
            said["family"],
            str(said["target"]),
            tuple(said["columns"]),
            np.array(said["coef"], float).reshape(-1, len(said["columns"])),
            np.array(said["intercept"], float),
            tuple(map(str, said["classes"])),
            FederatedFormula(str(said["formula"])).know(statistics, said["state"])
            if "formula" in said
            else FederatedPreprocessor().know(statistics),
            tuple(map(float, said.get("constants", ()))),
            said.get("offset"),
            said.get("exposure"),
            effects,
        )
        model.check()
        return model
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / MODEL} was changed or is of another version ({error})") from None


def with_effects(model: FittedModel, file: str | File) -> tuple[FittedModel, str]:
    """Return the model with the effects of one site, from the file that its node wrote, and the site's name.

    Raises InputError if the file holds something else, or the effects of another fit.
    """
    said = from_json(File(file), dict)
    try:
        own = SiteEffects(
            (str(said["site"]),),
            tuple(said["columns"]),
            np.array([said["intercept"]], float),
            np.array([said["deviation"]], float),
        )
        same = own.names == model.columns and np.allclose(said["coef"], model.coef[0], rtol=1e-9, atol=1e-12)
        found = replace(model, effects=own)
        found.check()
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected the effects of a site in {file}, got something else ({error})") from None
    if not same:
        raise InputError(f"{file} is of another fit; give the file that this site's node wrote during this run")
    return found, own.sites[0]
