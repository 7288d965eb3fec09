"""What the figures of a page show, as values that JSON holds; page.js draws them with Plotly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from typing import Any

import numpy as np

from fednmap.report.series import Series, Values, drawn, positive
from fednmap.runs.folder import Model

POINTS = 12_000
"""Points of all curves of one quantity together; more are not visible, and make the page slow."""

PICTURES = 12
"""Methods whose first layer is shown."""


def curves(series: Sequence[Series]) -> tuple[dict[str, Any], int]:
    """Return every quantity along rounds, megabytes and seconds; and the most measurements left out of a curve.

    With several trials: the mean, and a band from least to most.
    """
    points = max(100, POINTS // max(1, len(series)))
    shown, lines = drawn(series), []
    for panel, quantity in enumerate(shown):
        for k, whole in enumerate(series):
            if not whole.has(quantity.key):
                continue
            one = whole.having(quantity.key)
            y = quantity.scale * one.values(quantity.key, points)
            sent = 1e-6 * one.values("bytes_up", points).mean(0)
            spent = one.values("train_seconds", points) + one.values("eval_seconds", points)
            x = {"rounds": one.values("round", points)[0], "megabytes": sent, "seconds": spent.mean(0)}
            line = {"panel": panel, "method": k, "name": _text(one.label), "y": _short(y.mean(0))}
            line |= {"x": {axis: _short(values) for axis, values in x.items()}}
            lines.append(line | ({"low": _short(y.min(0)), "high": _short(y.max(0))} if len(y) > 1 else {}))
    panels = [{"title": q.html or _text(q.axis), "log": q.log and positive(series, q.key)} for q in shown]
    longest = max((len(c["round"]) for s in series for c in s.trials), default=0)
    return {"panels": panels, "lines": lines}, max(0, longest - points)


def layers(models: Mapping[str, Model]) -> dict[str, Any] | None:
    """Return the zeros of every layer of every method's model, in percent."""
    found = {label: model.parameters for label, model in models.items()}
    names = list(dict.fromkeys(name for parameters in found.values() for name in parameters))
    zeros = [[100 * float((p[n] == 0).double().mean()) if n in p else None for n in names] for p in found.values()]
    return {"zeros": zeros, "layers": [*map(_text, names)], "methods": [*map(_text, models)]} if names else None


def first_layer(models: Mapping[str, Model]) -> list[dict[str, Any]] | None:
    """Return a picture per method of the pixels or filters that the first layer reads, None where all is zero."""
    pictures = {label: picture for label, model in models.items() if (picture := _picture(model)) is not None}
    shown = [
        {
            "title": _text(label if len(label) < 34 else f"…{label[-32:]}"),
            "norms": np.where(picture == 0, np.nan, picture).tolist(),
        }
        for label, picture in [*pictures.items()][:PICTURES]
    ]
    return shown or None


def _picture(model: Model) -> Values | None:
    """|w| of the first layer as a picture: per pixel over all units, or the filters of a convolution in a grid."""
    if len(model.inputs) != 3:
        return None
    channels, height, width = model.inputs
    weight = next(iter(model.parameters.values())).double().numpy()
    if weight.ndim == 4:
        return _mosaic(np.linalg.norm(weight, axis=1))
    if weight.size % prod(model.inputs):
        return None
    return np.asarray(np.linalg.norm(weight.reshape(-1, channels, height, width), axis=(0, 1)))


def _mosaic(filters: Values) -> Values:
    """The filters in rows, with a line of nothing between them."""
    columns = int(np.ceil(np.sqrt(len(filters))))
    padded = np.pad(filters, ((0, -len(filters) % columns), (0, 1), (0, 1)))
    rows = padded.reshape(-1, columns, *padded.shape[1:]).swapaxes(1, 2)  # row, line, column, place
    return rows.reshape(-1, columns * padded.shape[2])[:-1, :-1]


def _text(words: str) -> str:
    """Words as they are, for Plotly, which reads tags and a few entities, none of quotes."""
    return escape(words, quote=False)


def _short(values: Values) -> list[float]:
    """The numbers with the digits that a curve shows."""
    return [float(f"{v:.6g}") for v in values.tolist()]
