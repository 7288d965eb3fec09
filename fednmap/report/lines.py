"""What stands above and below tables and pictures of a run, in a line each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from fednmap.runs.folder import About
from fednmap.runs.recording import DONE


def about_line(said: About) -> str:
    """The problem in a line."""
    words = [str(word) for word in (said.data, said.model, said.reg) if word is not None]
    words += [f"{n} {what}" for n, what in ((said.clients, "clients"), (said.rounds, "rounds")) if n is not None]
    return ", ".join(words)


def made_by(began: Mapping[str, Any]) -> list[str]:
    """The command of a run, and its versions and date, of what is known."""
    command = shlex.join(str(word) for word in began.get("command", []))
    versions = ", ".join(f"{name} {began[name]}" for name in ("fednmap", "torch", "numpy", "python") if name in began)
    words = ([f"made by: {command}"] if command else []) + ([versions] if versions else [])
    return [*words, f"began: {began['began']}"] if "began" in began else words


def ended_lines(results: Iterable[dict[str, Any]]) -> list[str]:
    """How each method has ended, in words, with its warning; nothing of those that have run all their rounds well."""
    lines = []
    for r in results:
        if r.get("ended") not in (None, DONE):
            lines.append(f"{_called(r)}: {r['rounds']} rounds, {r['ended']}")
        if r.get("warning"):
            lines.append(f"{_called(r)}: {r['warning']}")
    return lines


def took_part_lines(results: Iterable[dict[str, Any]]) -> list[str]:
    """In how many rounds each client was counted, where clients have names."""
    lines = []
    for r in results:
        rounds: dict[str, int] = r.get("took_part") or {}
        if rounds:
            said = ", ".join(f"{name} {count}" for name, count in rounds.items())
            lines.append(f"counted in rounds, of {r['rounds']}: {said}")
    return lines


def warning_lines(results: Iterable[dict[str, Any]]) -> list[str]:
    """What a method's result must not be read without."""
    return [f"warning: {_called(r)}: {line}" for r in results for line in r.get("warnings") or ()]


def _called(result: dict[str, Any]) -> str:
    return str(result["method"]) + (f" #{result['trial'] + 1}" if result["trial"] else "")


def measuring_line(results: Iterable[dict[str, Any]]) -> str:
    """How much of the time went into measurements."""
    spent = [(r["eval_seconds"], r["seconds"]) for r in results if r.get("seconds") and r.get("eval_seconds")]
    share = sum(e for e, _ in spent) / sum(s for _, s in spent) if spent else 0.0
    return f"measuring: {100 * share:.0f} % of the time" if share >= 0.005 else ""


def gamma_line(results: Iterable[dict[str, Any]], gamma: float | None) -> str:
    """The gamma with which |F_nat|^2 was measured, in words: as the results say, else `gamma`; nothing if unknown."""
    gammas = [r.get("measure_gamma") or gamma for r in results if r.get("stationarity") is not None]
    known = list(dict.fromkeys(f"{value:g}" for value in gammas if value is not None))
    return f"|F_nat|^2 with gamma = {', '.join(known)}" if known else ""


def jobs_line(results: Iterable[dict[str, Any]]) -> str:
    """That seconds were measured while several runs shared the machine; nothing if each had it alone."""
    most = max((int(r.get("jobs") or 1) for r in results), default=1)
    return f"s: {most} runs at a time shared the machine" if most > 1 else ""
