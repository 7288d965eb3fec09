"""The coefficients of a linear model by the names of their columns."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from fednmap.report.data_table import DataTable
from fednmap.runs.folder import Model

MOST = 30
"""Coefficients that a terminal shows; files have them all."""


class Coefficient(NamedTuple):
    """One number of a model, for a column as it was given."""

    label: str
    """Whose score it is part of; empty where there is one score."""
    name: str
    value: float
    standard: float
    """For the column as it was trained on: of deviation 1 where columns were standardised."""


def coefficients(model: Model) -> list[Coefficient]:
    """Return all of them, the intercepts last; none where the model is not linear or its columns have no names."""
    p = len(model.features)
    if not p or list(model.parameters) != ["x"]:
        return []
    x = model.parameters["x"].double().numpy()
    outputs = len(model.labels) if len(model.labels) > 2 else 1
    if len(x) != outputs * (p + model.intercept):
        return []
    inner = x[: outputs * p].reshape(outputs, p)
    constant = x[outputs * p :] if model.intercept else np.zeros(outputs)
    shift, scale = (np.array(part) for part in model.scaling) if model.scaling[0] else (np.zeros(p), np.ones(p))
    outer = inner / scale
    found = []
    for k in range(outputs):
        label = model.labels[k] if outputs > 1 else ""
        each = zip(model.features, outer[k].tolist(), inner[k].tolist(), strict=True)
        found += [Coefficient(label, *one) for one in each]
        if model.intercept:
            level = float(constant[k])
            found.append(Coefficient(label, "(intercept)", level - float(outer[k] @ shift), level))
    return found


def shown(models: Mapping[str, Model]) -> list[Table]:
    """Return a table for the terminal per model: what is not zero, the largest first."""
    tables = []
    for title, model in models.items():
        kept, left_out = _largest(coefficients(model))
        if not kept:
            continue
        what = f", for {model.labels[1]}" if len(model.labels) == 2 else ""
        hidden = [] if model.scaling[0] else ["standardised"]
        hidden += [] if len(model.labels) > 2 else ["label"]
        table = DataTable(["label", "column", "coefficient", "standardised"], kept).without(hidden)
        more = f"{left_out} more are not zero" if left_out else None
        tables.append(table.rich(title=f"{title}{what}", caption=more, box=box.SIMPLE_HEAD))
    return tables


def readable(table: DataTable) -> DataTable:
    """Leave out "low" and "high" where the ratio has an interval: a table to read has one interval a row."""
    ratio = any(name.endswith(" low") for name in table.head)
    return table.without(["low", "high"]) if ratio else table


def page(models: Mapping[str, Model]) -> str:
    """Return the same as HTML, with all coefficients that are not zero in some model."""
    found = {title: coefficients(model) for title, model in models.items()}
    found = {title: rows for title, rows in found.items() if rows}
    if not found:
        return ""
    keys = list(dict.fromkeys((c.label, c.name) for rows in found.values() for c in rows))
    values = {title: {(c.label, c.name): c.value for c in rows} for title, rows in found.items()}
    labels = {model.labels for title, model in models.items() if title in found}
    of = ", for " + " or ".join(sorted(escape(each[1]) for each in labels)) if {*map(len, labels)} == {2} else ""
    rows = [
        [": ".join(filter(None, key)), *(values[title].get(key, "-") for title in found)]
        for key in keys
        if any(values[title].get(key) for title in found)
    ]
    return (
        f"<h2>Coefficients</h2><p>By column{of}, on the scale on which the columns were given; those that are zero "
        f"everywhere are left out.</p>{DataTable(['column', *found], rows).html()}"
    )


def _largest(found: list[Coefficient]) -> tuple[list[Coefficient], int]:
    """The largest by their standard size, intercepts last; and how many others are not zero."""
    some = sorted((c for c in found if c.value and c.name != "(intercept)"), key=lambda c: -abs(c.standard))
    return [*some[:MOST], *(c for c in found if c.name == "(intercept)")], max(0, len(some) - MOST)
