"""The page about runs: HTML with everything it needs inside; page.js draws its figures with Plotly."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fednmap.names import InputError, current
from fednmap.report import coefficients
from fednmap.report.closing import Trials, about_line, columns, ended_lines, gamma_line, made_by, rows
from fednmap.report.series import Series, Values, collect, drawn, expected, models, positive
from fednmap.runs.atomic_files import finite, from_toml, write_atomically
from fednmap.runs.configuration import Config
from fednmap.runs.folder import Model, RunFolder

POINTS = 12_000
"""Points of all curves of one quantity together; more are not visible, and make the page slow."""

PICTURES = 12
"""Methods whose first layer is shown."""


def report(folders: Sequence[RunFolder], path: Path) -> None:
    """Write the page about these runs."""
    series = collect(folders)
    if not series:
        raise InputError(f"{', '.join(str(f.path) for f in folders)}: nothing was measured yet")
    curves, left_out = curve_figure(series)
    trained, damaged = models(series)
    gamma_lines = (gamma_line(folder.results(), folder.about().measure_gamma) for folder in folders)
    gammas = "; ".join(filter(None, dict.fromkeys(gamma_lines)))
    names = [f"{folder.path.resolve().name}, " if len(folders) > 1 else "" for folder in folders]
    ended = [name + line for name, f in zip(names, folders, strict=True) for line in ended_lines(f.results())]
    several = ""
    if any(len(one.trials) > 1 for one in series):
        several = "Line: the mean of the trials. Band: from the least to the greatest. "
    body = [
        *(f"<p class=note>{escape(note)}</p>" for note in [*_notes(folders, left_out), *damaged]),
        f"<h2>Closing numbers</h2>{_numbers({s.label: s.results for s in series if s.results})}",
        f"<p>Bold: the lowest psi and the best accuracy. A click on a heading sorts. {escape(gammas)}</p>",
        f"<p>{'<br>'.join(map(escape, ended))}</p>",
        f"<h2>Curves</h2><p>{several}A click on a name hides or shows a method, a double click shows it alone; drag to "
        "zoom, double click to go back.</p>",
        _figure(curves, "curves"),
        coefficients.page(trained),
    ]
    if (zeros := layer_figure(trained)) is not None:
        body.append(f"<h2>Which weights survived</h2><p>Zeros of each layer.</p>{_figure(zeros, 'layers')}")
    if (first := first_layer_figure(trained)) is not None:
        explained = "First layer: the norm of the weights at each pixel, or of a filter's entries. White is zero."
        body.append(f"<p>{explained}</p>{_figure(first, 'first-layer')}")
    for folder in folders:
        made, toml = made_by(folder.environment()), (folder.path / "run.toml").read_text(encoding="utf-8")
        body.append(
            f"<h2>{escape(folder.path.resolve().name)}</h2><pre class=command>{escape(chr(10).join(made))}</pre>"
        )
        body.append(f"<details><summary>configuration (run.toml)</summary><pre>{escape(toml)}</pre></details>")
    body.append(f"<script>{_file('page.js')}</script>")
    title = ", ".join(folder.path.resolve().name for folder in folders)
    subtitle = [about_line(folder.about()) for folder in folders]
    # plotly.js (MIT), its bundle of curves and heat maps, compressed; page.js unpacks it
    plotly = b64encode(files(__package__).joinpath("plotly-cartesian.min.js.gz").read_bytes()).decode()
    write_page(path, title, subtitle, body, f"<script type=text/plain id=plotly>{plotly}</script>")


def write_page(path: Path, title: str, subtitle: Sequence[str], body: Sequence[str], head: str = "") -> None:
    """Write a page with everything it needs inside; `title` and the lines of `subtitle` are text, the rest is HTML."""
    lines = "<br>".join(map(escape, subtitle))
    page = Template(_file("page.html")).substitute(title=escape(title), subtitle=lines, head=head, body="\n".join(body))
    write_atomically(path, page.encode())


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def picture(path: Path) -> str:
    """Return a PNG file as HTML."""
    data = b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _notes(folders: Sequence[RunFolder], left_out: int) -> list[str]:
    """What a reader must know in order not to be misled."""
    notes = []
    for folder in folders:
        done = folder.results()
        if len(done) < expected(folder):
            notes.append(f"{folder.path.resolve().name} is not finished; unfinished methods are missing in the table.")
        notes += [f"{r['method']}: {r['error']}" for r in done if "error" in r]
        notes += [f"{folder.path.resolve().name}: {line}" for line in folder.damages()]
    said = [current(from_toml(folder.path / "run.toml"), Config.RENAMED, None) for folder in folders]
    names = dict.fromkeys(name for values in said for name in values if name not in ("algorithms", "labels"))
    differ = [name for name in names if any(values.get(name) != said[0].get(name) for values in said)]
    if differ:
        words = (f"{name} ({', '.join(str(values.get(name, '-')) for values in said)})" for name in differ)
        notes.append(f"The runs differ in {'; '.join(words)}.")
    if "measure_gamma" in differ:
        notes.append("|F_nat|² is measured with each run's own gamma; set measure_gamma to compare it between runs.")
    if left_out:
        notes.append("Long curves are drawn with fewer points; metrics.csv has them all.")
    return notes


def _numbers(results: Mapping[str, Trials]) -> str:
    """Return the closing table, and what its columns mean."""
    shown = columns(results)
    head = "".join(f"<th>{escape(column.head)}</th>" for column in shown)
    body = ""
    for row in rows(results):
        body += f"<tr><td>{escape(row.title)}</td>"
        for cell in row.cells:
            value, best = "" if cell.value is None else repr(cell.value), " class=best" if cell.best else ""
            body += f"<td data-value={value}{best}>{escape(cell.text)}</td>"
        body += "</tr>"
    words = "".join(f"<dt>{escape(q.label)}</dt><dd>{escape(q.meaning)}</dd>" for q in shown if q.meaning)
    table = f"<table id=numbers><thead><tr><th>method</th>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=wide>{table}</div><details><summary>what the columns mean</summary><dl>{words}</dl></details>"


def _figure(shown: Any, name: str) -> str:
    """Return the figure's place, and what page.js draws there."""
    data = json.dumps(finite(shown), allow_nan=False).replace("<", "\\u003c")
    html = f"<div id={name}></div><script type=application/json class=figure data-for={name}>{data}</script>"
    return html if name == "curves" else f"<div class=wide>{html}</div>"  # which scrolls


def curve_figure(series: Sequence[Series]) -> tuple[dict[str, Any], int]:
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


def layer_figure(models: Mapping[str, Model]) -> dict[str, Any] | None:
    """Return the zeros of every layer of every method's model, in percent."""
    found = {label: model.parameters for label, model in models.items()}
    names = list(dict.fromkeys(name for parameters in found.values() for name in parameters))
    zeros = [[100 * float((p[n] == 0).double().mean()) if n in p else None for n in names] for p in found.values()]
    return {"zeros": zeros, "layers": [*map(_text, names)], "methods": [*map(_text, models)]} if names else None


def first_layer_figure(models: Mapping[str, Model]) -> list[dict[str, Any]] | None:
    """Return a picture per method of the pixels or filters that the first layer reads, None where all is zero."""
    pictures = {label: picture for label, model in models.items() if (picture := _weight_norms(model)) is not None}
    shown = [
        {
            "title": _text(label if len(label) < 34 else f"…{label[-32:]}"),
            "norms": np.where(picture == 0, np.nan, picture).tolist(),
        }
        for label, picture in [*pictures.items()][:PICTURES]
    ]
    return shown or None


def _weight_norms(model: Model) -> Values | None:
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
