"""A fitted model with its names: what it predicts, the table of its coefficients, and its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import numpy as np

from fednmap.estimators.families import FAMILIES, expected, family
from fednmap.estimators.rows import Floats
from fednmap.names import InputError, choose
from fednmap.report.data_table import DataTable
from fednmap.runs.files import clear_errors, from_json, to_json, write_atomically
from fednmap.tables import FederatedPreprocessor, Statistic, Table

MODEL = "model.json"
VERSION = 1
RATIOS = {"logistic": "odds ratio", "cox": "hazard ratio", "poisson": "rate ratio"}


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
    preprocessor: FederatedPreprocessor

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is known of the columns of a table that the model reads."""
        return self.preprocessor.statistics_

    def predict(self, rows: Table) -> dict[str, list[Any]]:
        """Columns of predictions: numbers; labels and probabilities; the hazard ratio."""
        scores = self.preprocessor.transform(rows) @ self.coef.T + self.intercept
        mean = expected(family(self.family), scores[:, 0] if scores.shape[1] == 1 else scores)
        if self.family == "logistic":
            each = np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean
            labels = [self.classes[k] for k in each.argmax(1)]
            shares = {f"P({name})": each[:, k].tolist() for k, name in enumerate(self.classes)}
            return {self.target: labels, **shares}
        name = "hazard ratio" if self.family == "cox" else self.target
        return {name: mean.tolist()}

    def coefficient_table(self, path: Any = None, errors: Any = None) -> DataTable:
        """Name, coefficient, its ratio, its standard error and interval, and the lam at which it enters.

        With errors the ratio has an interval of its own; "low" and "high" are the coefficient's.
        """
        ratio, several = RATIOS.get(self.family), len(self.coef) > 1
        head = [*(["class"] if several else []), "name", "coefficient", *([ratio] if ratio else [])]
        if errors is not None:
            head += [f"{ratio} low", f"{ratio} high"] if ratio else []
            head += ["standard error", "low", "high", "p"]
        head += ["enters at lam"] if path is not None else []
        rows = []
        for k, coefs in enumerate(self.coef):
            constant = [] if self.family == "cox" else [("(intercept)", float(self.intercept[k]))]
            for j, (name, value) in enumerate([*zip(self.columns, map(float, coefs), strict=True), *constant]):
                # errors are class by class, then the intercepts
                at = k * len(coefs) + j if j < len(coefs) else self.coef.size + k
                if errors is not None:
                    value = float(errors.estimate[at])  # NaN for an aliased column
                value += 0.0  # no minus before a zero
                row: list[Any] = [*([self.classes[k]] if several else []), name, value]
                row += [_exp(value)] if ratio else []
                if errors is not None:
                    row += [_exp(float(v[at])) for v in (errors.low, errors.high)] if ratio else []
                    row += [float(v[at]) for v in (errors.error, errors.low, errors.high, errors.p_value)]
                if path is not None:
                    enters = path.enters[j] if j < len(coefs) else np.nan
                    row.append(None if np.isnan(enters) else float(enters))
                rows.append(row)
        return DataTable(head, rows)


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def save(folder: File, about: dict[str, Any], model: FittedModel) -> None:
    """Write the model; `about` says how it was made."""
    said = about | {
        "version": VERSION,
        "family": model.family,
        "target": model.target,
        "columns": list(model.columns),
        "coef": model.coef.tolist(),
        "intercept": model.intercept.tolist(),
        "classes": list(model.classes),
        "statistics": [asdict(s) for s in model.statistics],
    }
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MODEL, to_json(said))


def load(folder: File) -> FittedModel:
    """The model of a folder."""
    if not (folder / MODEL).is_file():
        raise InputError(f"{folder} holds no {MODEL}; give the folder of a `fednmap fit`")
    said = from_json(folder / MODEL, dict)
    try:
        choose("family", said["family"], FAMILIES)
        return FittedModel(
            said["family"],
            said["target"],
            tuple(said["columns"]),
            np.array(said["coef"], float).reshape(-1, len(said["columns"])),
            np.array(said["intercept"], float),
            tuple(said["classes"]),
            FederatedPreprocessor().know([Statistic(**s | {"levels": tuple(s["levels"])}) for s in said["statistics"]]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / MODEL} was changed or is of another version ({error})") from None
