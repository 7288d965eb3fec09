"""The last lines of a run: what was learnt, where things are, what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import mean
from typing import Any

from fednmap.measure import QUANTITIES
from fednmap.runs.folder import Job, RunFolder

DENSE = 0.05
"""Models with a smaller share of zeros are called dense."""

Trials = Sequence[dict[str, Any]]


def ending(folder: RunFolder, results: Trials) -> list[str]:
    """What was learnt, where the model is, what comes next; only the folder if every method has diverged or ended above
    its start, be it in one trial: such a method is not the best, as in the table."""
    lines = [f"run folder: {folder.path}", f"picture: {folder.path / 'plot.png'}"]
    failed = {r["method"] for r in results if "error" in r or "warning" in r}
    sound = [r for r in results if r["method"] not in failed and r.get("objective") is not None]
    methods = {m: [r for r in sound if r["method"] == m] for m in dict.fromkeys(r["method"] for r in sound)}
    if not methods:
        return lines
    best = min(methods, key=lambda m: _mean(methods[m], "objective"))
    said = [_words(best, methods[best], " (lowest psi)" if len(methods) > 1 else "")]
    dense = [m for m in methods if m != best and _mean(methods[m], "zeros") < DENSE <= _mean(methods[best], "zeros")]
    accurate = [m for m in dense if _mean(methods[m], "test_accuracy") == _mean(methods[m], "test_accuracy")]
    if accurate:
        other = max(accurate, key=lambda m: _mean(methods[m], "test_accuracy"))
        said.append(_words(other, methods[other], " (dense)"))
    model = folder.model_path(Job(best, 0))
    if model.exists():
        lines.append(f"model: {model}")
    path = shlex.quote(str(folder.path))
    first = [] if find_spec("plotly") else ["pip install 'fednmap[report]'"]
    then = [*first, f"fednmap report {path} -o report.html", f"fednmap export {path} --method {best} --prune"]
    return [*_headed("learnt: ", said), *lines, *_headed("next: ", then)]


def _headed(word: str, lines: Sequence[str]) -> list[str]:
    return [f"{' ' * len(word) if k else word}{line}" for k, line in enumerate(lines)]


def _mean(trials: Trials, key: str) -> float:
    """Over the trials that have measured it; NaN if none has."""
    values = [float(r[key]) for r in trials if r.get(key) is not None]
    return mean(values) if values else float("nan")


def _words(method: str, trials: Trials, what: str) -> str:
    """The method with what it is known for, its zeros and its accuracy."""
    shown = [(QUANTITIES[key].text(_mean(trials, key)), word) for key, word in _SHOWN.items()]
    said = [f"{text} % {word}" for text, word in shown if text != "-"]
    return f"{method}{what}: {', '.join(said)}"


_SHOWN = {"zeros": "zeros", "test_accuracy": "accuracy"}
