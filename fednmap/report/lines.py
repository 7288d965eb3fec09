"""Lines above and below the tables and pictures of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fednmap.runs.execution import DONE
from fednmap.runs.folder import About


def about_line(said: About) -> str:
    """Describe the problem."""
    words = [str(word) for word in (said.data, said.model, said.reg) if word is not None]
    words += [f"{n} {what}" for n, what in ((said.clients, "clients"), (said.rounds, "rounds")) if n is not None]
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
            lines.append(f"{name}: {r['rounds']} rounds, {r['ended']}")
        if r.get("warning"):
            lines.append(f"{name}: {r['warning']}")
        if took_part := r.get("took_part"):  # of clients that have names
            said = ", ".join(f"{client} {count}" for client, count in took_part.items())
            lines.append(f"counted in rounds, of {r['rounds']}: {said}")
        lines += [f"warning: {name}: {line}" for line in r.get("warnings") or ()]
    return lines


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
