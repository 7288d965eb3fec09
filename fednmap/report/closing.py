"""The words about a run: what it was, its closing table, where things are, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isnan
from statistics import mean, stdev
from typing import Any, NamedTuple

from rich.text import Text

from fednmap.measure import QUANTITIES, Quantity, quantities
from fednmap.report.terminal import TextTable
from fednmap.runs.configuration import code_in
from fednmap.runs.execution import DONE
from fednmap.runs.folder import About, Job, RunFolder

Trials = Sequence[dict[str, Any]]
"""The closing numbers of one method's trials."""

NAMES = ("method", "trial", "error", "ended", "ended_by", "warning", "jobs")
"""Fields of a closing record that are not measured numbers."""

MARKED = ("objective", "test_accuracy", "support_precision", "support_recall")
"""Columns whose best is bold. Residual and sparsity belong to models that differ in psi."""

DENSE = 0.05
"""Models with a smaller share of zeros are called dense."""


class Cell(NamedTuple):
    text: str
    value: float | None
    """The mean over the trials, as it is shown."""
    best: bool = False


class ClosingRow(NamedTuple):
    title: str
    cells: list[Cell]


def columns(results: Mapping[str, Trials]) -> list[Quantity]:
    """Return what the table shows: each quantity of the catalogue, and each metric of the user, that some trial has."""
    return quantities(
        key
        for trials in results.values()
        for result in trials
        for key, value in result.items()
        if key not in NAMES and (value is None or (isinstance(value, int | float) and not isinstance(value, bool)))
    )


def rows(results: Mapping[str, Trials]) -> list[ClosingRow]:
    """Return a row per method, label -> the closing numbers of its trials: mean, spread, and the best psi and accuracy.

    A method that diverged, or whose psi rose, is never the best, and where all are equal none is.
    """
    flaws = [_flaw(trials) for trials in results.values()]
    cells = [_column(column, results, flaws) for column in columns(results)]
    titles = [f"{label} ({flaw})" if flaw else label for label, flaw in zip(results, flaws, strict=True)]
    return [ClosingRow(title, [column[k] for column in cells]) for k, title in enumerate(titles)]


def closing_table(results: Sequence[dict[str, Any]], said: About | None = None) -> TextTable:
    """Return a table with a row per method, mean and spread over the trials, the best psi and accuracy in bold.

    said: what run.toml says: the labels, and the gamma of |F_nat|^2 where the results do not hold it.
    """
    labels, gamma = (said.labels, said.measure_gamma) if said else ({}, None)
    by_method = {labels.get(method, method): trials for method, trials in _by_method(results).items()}
    table = rows(by_method)
    cells = [[Text(c.text.replace(" ±", "\n±"), "bold" if c.best else "") for c in row.cells] for row in table]
    columns_ = [(q.head, [row[k] for row in cells]) for k, q in enumerate(columns(by_method))]
    below = [gamma_line(results, gamma), *cost_lines(results), *ended_lines(results)]
    return TextTable("method", [row.title for row in table], columns_, right=True, below="\n".join(filter(None, below)))


def ending(folder: RunFolder, results: Trials) -> list[str]:
    """Return the last lines of a run: the best method, where the model is, what comes next.

    Only the folder if every method has a flaw, be it in one trial: such a method is not the best, as in the table.
    """
    lines = [f"run folder: {folder.path}", f"picture: {folder.path / 'plot.png'}"]
    by_method = _by_method(results)
    methods = {m: [r for r in trials if r.get("objective") is not None] for m, trials in by_method.items()}
    methods = {m: trials for m, trials in methods.items() if trials and not _flaw(by_method[m])}
    if not methods:
        return lines
    best = min(methods, key=lambda m: _mean(methods[m], "objective"))
    labels = folder.about().labels
    found = [_one_line(labels.get(best, best), methods[best], " (lowest psi)" if len(methods) > 1 else "")]
    dense = [m for m in methods if m != best and _mean(methods[m], "zeros") < DENSE <= _mean(methods[best], "zeros")]
    accurate = [m for m in dense if not isnan(_mean(methods[m], "test_accuracy"))]
    if accurate:
        other = max(accurate, key=lambda m: _mean(methods[m], "test_accuracy"))
        found.append(_one_line(labels.get(other, other), methods[other], " (dense)"))
    model = folder.model_path(Job(best, 0))
    if model.exists():
        lines.append(f"model: {model}")
    path = shlex.quote(str(folder.path))
    trusted = " --trust-code" if code_in(folder.about().model_dump()) else ""
    then = [f"fednmap report {path} -o report.html", f"fednmap export {path} --method {best} --prune{trusted}"]
    return [*_headed("result: ", found), *lines, *_headed("next: ", then)]


def _by_method(results: Trials) -> dict[str, list[dict[str, Any]]]:
    methods = dict.fromkeys(r["method"] for r in results)
    return {method: [r for r in results if r["method"] == method] for method in methods}


def _headed(word: str, lines: Sequence[str]) -> list[str]:
    return [f"{' ' * len(word) if k else word}{line}" for k, line in enumerate(lines)]


def _mean(trials: Trials, key: str) -> float:
    """Return the mean over the trials that have measured it; NaN if none has."""
    values = [float(r[key]) for r in trials if r.get(key) is not None]
    return mean(values) if values else float("nan")


def _one_line(method: str, trials: Trials, what: str) -> str:
    named = {"zeros": "zeros", "test_accuracy": "accuracy"}
    shown = [(QUANTITIES[key].text(_mean(trials, key)), word) for key, word in named.items()]
    return f"{method}{what}: {', '.join(f'{text} % {word}' for text, word in shown if text != '-')}"


def _column(column: Quantity, results: Mapping[str, Trials], flaws: Sequence[str]) -> list[Cell]:
    """Return the cells of a column, the best marked."""
    cells = [_cell(column, trials) for trials in results.values()]
    values = [None if flaw else cell.value for cell, flaw in zip(cells, flaws, strict=True)]
    known = {value for value in values if value is not None and isfinite(value)}
    if column.key not in MARKED or len(known) < 2:
        return cells
    best = max(known) if column.better > 0 else min(known)
    return [cell._replace(best=value == best) for cell, value in zip(cells, values, strict=True)]


def _cell(column: Quantity, trials: Trials) -> Cell:
    values = [float(v) for r in trials if (v := r.get(column.key)) is not None and not isnan(v)]
    if not values:
        return Cell("-", None)
    text = column.text(mean(values))
    if len(set(values)) > 1 and column.better and all(map(isfinite, values)):
        text = f"{text} ± {column.text(stdev(values))}"
    return Cell(text, column.scale * mean(values))


def _flaw(trials: Trials) -> str:
    """Return what is wrong with a method in one of its trials, in a word or two."""
    rose = any("warning" in r for r in trials)
    return "diverged" if any("error" in r for r in trials) else "psi rose" if rose else ""


def about_line(said: About) -> str:
    """Describe the problem."""
    words = [str(word) for word in (said.data, said.model, said.penalty) if word is not None]
    words += [f"{said.clients} clients"] if said.clients is not None else []
    words += [rounds_text(said.rounds)] if said.rounds is not None else []
    return ", ".join(words)


def made_by(began: Mapping[str, Any]) -> list[str]:
    """Return the command of a run, its versions and its date, of what is known."""
    command = shlex.join(str(word) for word in began.get("command", []))
    versions = ", ".join(f"{name} {began[name]}" for name in ("fednmap", "torch", "numpy", "python") if name in began)
    words = ([f"made by: {command}"] if command else []) + ([versions] if versions else [])
    return [*words, f"began: {began['began']}"] if "began" in began else words


def ended_lines(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return how each method has ended, unless it has run all its rounds, and what its numbers do not say."""
    lines = []
    for r in results:
        name = str(r["method"]) + (f" #{r['trial'] + 1}" if r.get("trial") else "")
        if r.get("ended") not in (None, DONE):
            lines.append(f"{name}: {rounds_text(r['rounds'])}, {r['ended']}")
        if r.get("warning"):
            lines.append(f"{name}: {r['warning']}")
        if took_part := r.get("took_part"):  # of clients that have names
            said = ", ".join(f"{client} {count}" for client, count in took_part.items())
            lines.append(f"counted in rounds, of {r['rounds']}: {said}")
        lines += [f"warning: {name}: {line}" for line in r.get("warnings") or ()]
    return lines


def rounds_text(rounds: int) -> str:
    return f"{rounds} round" if rounds == 1 else f"{rounds} rounds"


def cost_lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return how much of the time went into measurements, and how many runs shared the machine meanwhile."""
    spent = [(r["eval_seconds"], r["seconds"]) for r in results if r.get("seconds") and r.get("eval_seconds")]
    share = sum(e for e, _ in spent) / sum(s for _, s in spent) if spent else 0.0
    most = max((int(r.get("jobs") or 1) for r in results), default=1)
    lines = [f"measuring: {100 * share:.0f} % of the time"] if share >= 0.005 else []
    return [*lines, f"s: {most} runs at a time shared the machine"] if most > 1 else lines


def gamma_line(results: Iterable[dict[str, Any]], gamma: float | None) -> str:
    """Return the gamma with which |F_nat|^2 was measured, as the results say, else `gamma`; "" if unknown."""
    gammas = [r.get("measure_gamma") or gamma for r in results if r.get("stationarity") is not None]
    known = list(dict.fromkeys(f"{value:g}" for value in gammas if value is not None))
    return f"|F_nat|^2 with gamma = {', '.join(known)}" if known else ""
