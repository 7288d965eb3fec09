"""The page itself: HTML around the figures, with everything it needs inside."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fednmap.names import InputError
from fednmap.report import coefficients, figures
from fednmap.report.closing import Row, columns, rows
from fednmap.report.lines import about_line, ended_lines, gamma_line, warning_lines
from fednmap.report.series import Series, collect, expected
from fednmap.runs.files import clear_errors, from_toml, write_atomically
from fednmap.runs.folder import Model, RunFolder


def report(folders: Sequence[RunFolder], path: Path) -> None:
    """Write the page about these runs."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise InputError("the report needs plotly; pip install 'fednmap[report]'") from None
    series = collect(folders)
    if not series:
        raise InputError(f"{', '.join(str(f.path) for f in folders)}: nothing was measured yet")
    curves, left_out = figures.curves(series)
    models, damaged = _models(series)
    body = [
        *(f"<p class=note>{escape(note)}</p>" for note in [*_notes(folders, left_out), *damaged]),
        f"<h2>Closing numbers</h2><div class=wide>{_table(series)}</div>",
        f"<p>The best of each column is bold. A click on a heading sorts. {escape(_gammas(folders))}</p>",
        _glossary(series),
        _ended(folders),
        "<h2>Curves</h2><p>A click on a name hides or shows a method, a double click shows it alone; drag to zoom, "
        "double click to go back.</p>",
        _figure(curves, "curves"),
        coefficients.page(models) + _weights(models),
        *(_run(folder) for folder in folders),
        f"<script>{_SORT}</script><script>{_PHONE}</script>",
    ]
    title = ", ".join(folder.path.resolve().name for folder in folders)
    subtitle = [about_line(folder.about()) for folder in folders]
    write_page(path, title, subtitle, body, f"<script>{get_plotlyjs()}</script>")


def write_page(path: Path, title: str, subtitle: Sequence[str], body: Sequence[str], head: str = "") -> None:
    """Write a page with everything it needs inside; `title` and the lines of `subtitle` are text, the rest is HTML."""
    lines = "<br>".join(map(escape, subtitle))
    page = Template(_PAGE).substitute(title=escape(title), subtitle=lines, head=head, body="\n".join(body))
    with clear_errors(path.parent):
        write_atomically(path, page.encode())


def picture(path: Path) -> str:
    """Return a PNG file as HTML."""
    data = b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _models(series: Sequence[Series]) -> tuple[dict[str, Model], list[str]]:
    """What was trained, by label; and a line for each file that cannot be read."""
    models, damaged = {}, []
    for one in series:
        try:
            model = one.folder.model(one.first)
        except InputError as error:
            damaged.append(str(error))
        else:
            if model is not None:
                models[one.label] = model
    return models, damaged


def _notes(folders: Sequence[RunFolder], left_out: int) -> list[str]:
    """What a reader must know in order not to be misled."""
    notes = []
    for folder in folders:
        done = folder.results()
        if len(done) < expected(folder):
            notes.append(f"{folder.path.resolve().name} is not finished; unfinished methods are missing in the table.")
        notes += [f"{r['method']}: {r['error']}" for r in done if "error" in r]
        notes += [f"{folder.path.resolve().name}: {line}" for line in folder.cut()]
    said = [from_toml(folder.path / "run.toml") for folder in folders]
    names = dict.fromkeys(name for values in said for name in values if name != "algorithms")
    differ = [name for name in names if any(values.get(name) != said[0].get(name) for values in said)]
    if differ:
        words = (f"{name} ({', '.join(str(values.get(name, '-')) for values in said)})" for name in differ)
        notes.append(f"The runs differ in {'; '.join(words)}.")
    if "measure_gamma" in differ:
        notes.append("|F_nat|² is measured with each run's own gamma; set measure_gamma to compare it between runs.")
    if left_out:
        notes.append("Long curves are drawn with fewer points; metrics.csv has them all.")
    return notes


def _table(series: Sequence[Series]) -> str:
    results = {s.label: s.results for s in series if s.results}
    head = "".join(f"<th>{escape(column.head)}</th>" for column in columns(results))
    body = "".join(_row(row) for row in rows(results))
    return f"<table id=numbers><thead><tr><th>method</th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _glossary(series: Sequence[Series]) -> str:
    """What the columns mean, of those that need a word."""
    shown = [q for q in columns({s.label: s.results for s in series if s.results}) if q.meaning]
    words = "".join(f"<dt>{escape(q.label)}</dt><dd>{escape(q.meaning)}</dd>" for q in shown)
    return f"<details><summary>what the columns mean</summary><dl>{words}</dl></details>" if words else ""


def _row(row: Row) -> str:
    cells = "".join(
        f"<td data-value={'' if cell.value is None else repr(cell.value)!s}{' class=best' if cell.best else ''}>"
        f"{escape(cell.text)}</td>"
        for cell in row.cells
    )
    return f"<tr><td>{escape(row.title)}</td>{cells}</tr>"


def _gammas(folders: Sequence[RunFolder]) -> str:
    lines = (gamma_line(folder.results(), folder.about().measure_gamma) for folder in folders)
    return "; ".join(dict.fromkeys(line for line in lines if line))


def _ended(folders: Sequence[RunFolder]) -> str:
    """Which methods have ended before their rounds were done, and why; and what they warn of."""
    names = [f"{folder.path.resolve().name}, " if len(folders) > 1 else "" for folder in folders]
    said = [[*ended_lines(f.results()), *warning_lines(f.results())] for f in folders]
    lines = [name + line for name, own in zip(names, said, strict=True) for line in own]
    return f"<p>{'<br>'.join(map(escape, lines))}</p>" if lines else ""


def _weights(models: Mapping[str, Model]) -> str:
    parts = []
    zeros, first = figures.layers(models), figures.first_layer(models)
    if zeros is not None:
        parts.append(
            "<h2>Which weights survived</h2><p>Zeros of each layer.</p>" + _scrolling(_figure(zeros, "layers"))
        )
    if first is not None:
        explained = "First layer: the norm of the weights at each pixel, or of a filter's entries. White is zero."
        parts.append(f"<p>{explained}</p>" + _scrolling(_figure(first, "first-layer")))
    return "".join(parts)


def _scrolling(html: str) -> str:
    return f"<div class=wide>{html}</div>"


def _run(folder: RunFolder) -> str:
    began = folder.environment()
    versions = ", ".join(f"{name} {began[name]}" for name in ("fednmap", "torch", "numpy", "python") if name in began)
    command = shlex.join(str(word) for word in began.get("command", []))
    toml = (folder.path / "run.toml").read_text(encoding="utf-8")
    made_by = f"<p>Made by</p><pre class=command>{escape(command)}</pre>" if command else ""
    return (
        f"<h2>{escape(folder.path.resolve().name)}</h2>{made_by}"
        f"<p>{escape(versions)}; began {escape(str(began.get('began', '?')))}</p>"
        f"<details><summary>configuration (run.toml)</summary><pre>{escape(toml)}</pre></details>"
    )


def _figure(figure: Any, name: str) -> str:
    # Plotly offers to upload the chart unless told not to
    options = {"displaylogo": False, "responsive": True, "showSendToCloud": False, "plotlyServerURL": ""}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=options))


# The policy forbids the page every connection, so that what it shows can only come from this file.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; font-src data:; form-action 'none'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title - fednmap</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem }
.subtitle { color: #666; margin-top: .2rem }
.note { background: #fff6dd; border-left: 4px solid #e0b000; padding: .4rem .8rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left }
thead { border-bottom: 2px solid #444 }
tbody tr { border-bottom: 1px solid #ddd } tbody tr:hover { background: #f5f8fc }
#numbers th { cursor: pointer; user-select: none } th[aria-sort=ascending]::after { content: " ▲" }
th[aria-sort=descending]::after { content: " ▼" }
.best { font-weight: 700; color: #05603a }
.wide { overflow-x: auto } img { max-width: 100% }
dt { font-weight: 600; margin-top: .5rem } dd { margin-left: 1.2rem }
summary { cursor: pointer }
@media (max-width: 700px) {
#layers, #first-layer { min-width: 620px }
body { margin: 1rem auto } th, td { padding: .3rem .5rem } }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto }
</style>
$head
</head>
<body>
<h1>$title</h1>
<p class=subtitle>$subtitle</p>
$body
</body>
</html>
"""

# On a narrow screen the panels stand in one column, with the legend below them.
_PHONE = """
const curves = document.getElementById("curves");
const wide = JSON.parse(JSON.stringify(curves.layout));
const panels = [...new Set(curves.data.map(line => (line.xaxis || "x").slice(1)))];
let narrow = false;
function arrange() {
  if ((window.innerWidth < 700) === narrow) return;
  narrow = !narrow;
  const n = panels.length, change = {};
  for (const [k, id] of panels.entries()) {
    change["xaxis" + id + ".domain"] = narrow ? [0, 1] : wide["xaxis" + id].domain;
    change["yaxis" + id + ".domain"] = narrow ? [1 - (k + 0.72) / n, 1 - k / n] : wide["yaxis" + id].domain;
  }
  const below = {orientation: "h", x: 0, y: -0.12 / n, yanchor: "top", groupclick: "togglegroup"};
  change.legend = narrow ? below : wide.legend;
  change.height = narrow ? 300 * n + 190 : wide.height;
  change["margin.t"] = narrow ? 120 : wide.margin.t;
  for (const [k, menu] of (wide.updatemenus || []).entries()) {
    change["updatemenus[" + k + "].x"] = narrow ? 0 : menu.x;
    change["updatemenus[" + k + "].pad.b"] = narrow ? 12 + 46 * k : menu.pad.b;
  }
  curves.style.height = curves.parentNode.style.height = change.height + "px";
  Plotly.relayout(curves, change);
}
arrange();
window.addEventListener("resize", arrange);
"""

_SORT = """
for (const [k, head] of document.querySelectorAll("#numbers th").entries())
  head.onclick = () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = document.querySelector("#numbers tbody");
    const key = row => k ? parseFloat(row.cells[k].dataset.value) : row.cells[0].textContent;
    const order = (a, b) => k ? (isNaN(a) - isNaN(b)) || (down ? b - a : a - b) : (down ? -1 : 1) * a.localeCompare(b);
    body.append(...[...body.rows].sort((r, s) => order(key(r), key(s))));
  };
"""
