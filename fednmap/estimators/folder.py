"""A fitted model in a folder: the model with its names, tables, pictures, a page."""

from __future__ import annotations

import csv
import io
from base64 import b64encode
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path as File
from typing import Any

import numpy as np

from fednmap.estimators.families import FAMILIES
from fednmap.estimators.sites import Floats
from fednmap.names import InputError, choose
from fednmap.runs.files import clear_errors, from_json, to_json, write_atomically
from fednmap.runs.folder import FIT
from fednmap.tables import FederatedPreprocessor, Statistic, Table

PICTURES = {"path": "Coefficients along lam", "cv": "The choice of lam"}
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
    preprocessor: FederatedPreprocessor

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is known of the columns of a table that the model reads."""
        return self.preprocessor.statistics_

    def predict(self, rows: Table) -> dict[str, list[Any]]:
        """Columns of predictions: numbers; labels and probabilities; the hazard ratio."""
        scores = self.preprocessor.transform(rows) @ self.coef.T + self.intercept
        mean = FAMILIES[self.family]().mean(scores[:, 0] if scores.shape[1] == 1 else scores)
        if self.family == "logistic":
            each = np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean
            labels = [self.classes[k] for k in each.argmax(1)]
            shares = {f"P({name})": each[:, k].tolist() for k, name in enumerate(self.classes)}
            return {self.target: labels, **shares}
        name = "hazard ratio" if self.family == "cox" else self.target
        return {name: mean.tolist()}


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
        "statistics": [asdict(s) for s in model.preprocessor.statistics_],
    }
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FIT, to_json(said))


def load(folder: File) -> FittedModel:
    """The model of a folder."""
    if not (folder / FIT).is_file():
        raise InputError(f"{folder} holds no {FIT}; give the folder of a `fednmap fit`")
    said = from_json(folder / FIT, dict)
    try:
        choose("family", said["family"], FAMILIES)
        preprocessor = FederatedPreprocessor()
        preprocessor.statistics_ = tuple(Statistic(**(s | {"levels": tuple(s["levels"])})) for s in said["statistics"])
        return FittedModel(
            said["family"],
            said["target"],
            tuple(said["columns"]),
            np.array(said["coef"], float).reshape(-1, len(said["columns"])),
            np.array(said["intercept"], float),
            tuple(said["classes"]),
            preprocessor,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / FIT} was changed or is of another version ({error})") from None


def as_csv(columns: list[str], rows: list[list[Any]]) -> str:
    """A table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()


def page(
    title: str, lines: list[str], tables: dict[str, tuple[list[str], list[list[Any]]]], pictures: list[File]
) -> str:
    """One self-contained page: lines, tables, pictures."""
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for head, (columns, rows) in tables.items():
        cells = "".join("<tr>" + "".join(f"<td>{escape(_shown(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        names = "".join(f"<th>{escape(name)}</th>" for name in columns)
        parts.append(f"<h2>{escape(head)}</h2><table><tr>{names}</tr>{cells}</table>")
    for picture in pictures:
        data = b64encode(picture.read_bytes()).decode()
        parts.append(f"<h2>{PICTURES.get(picture.stem, picture.stem)}</h2>")
        parts.append(f'<img alt="{escape(picture.stem)}" src="data:image/png;base64,{data}">')
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return f"{head}<body>{''.join(parts)}</body></html>"


def _shown(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
