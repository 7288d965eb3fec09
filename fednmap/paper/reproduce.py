"""From a figure's name to its folder: trials, one tidy table, the picture, the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fednmap.names import InputError
from fednmap.paper import verdict
from fednmap.paper.figure import Figure, save
from fednmap.paper.trials import Curve, Trial, by_setting, finished, kind, run_trials, tidy
from fednmap.paper.verdict import Verdict
from fednmap.runs.files import clear_errors, write_atomically


def reproduce(
    figure: Figure,
    scale: str,
    *,
    trials: int | None,
    out: Path,
    workers: int,
    tell: Callable[[str], None],
    only_finished: bool = False,
) -> Verdict:
    """Run the trials that are missing in OUT/trials, each in OUT/runs; write tables, figure and verdict to OUT/NAME.

    Figures share their trials where settings agree. A call with more trials, or after an interruption, adds to what
    is there; `only_finished` runs nothing and judges what is there, by default all of it.
    """
    kept, folder = out / "trials", out / figure.name
    if trials is None:
        trials = _there(figure, scale, kept) if only_finished else figure.trials[scale]
    if trials < 1:
        raise InputError(f"trials is {trials}; at least 1 is needed")
    jobs, complete = figure.jobs(scale, trials), trials
    if only_finished:
        curves = finished(jobs, kept, lambda line: tell(f"{figure.name}: {line}"))
        if not curves:
            raise InputError(f"{kept} has no finished trial of {figure.name}, scale {scale}; run it first")
        complete = _complete(jobs, curves, trials)
    else:
        curves = run_trials(jobs, kept, workers, lambda line: tell(f"{figure.name}: {line}"))
    found = figure.judge(curves)
    if not found.claims:
        raise InputError(f"{kept} has too few of {figure.name}'s trials to compare anything; run more of them first")
    text = verdict.as_markdown(figure.name, figure.title, scale, trials, figure.choices, found)
    picture = figure.draw(curves)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "results.csv", tidy(curves).encode())
        write_atomically(folder / "summary.csv", figure.summary(curves).encode())
        write_atomically(folder / "verdict.json", verdict.as_json(figure.name, scale, complete, trials, found).encode())
        write_atomically(folder / "verdict.md", text.encode())
        save(picture, folder, figure.name)
    return found


def _there(figure: Figure, scale: str, kept: Path) -> int:
    """The number of trials of which anything is there; at least 1."""
    number = 1
    while any((kept / j.file).is_file() for j in figure.jobs(scale, number + 1) if j.setting["trial"] == number):
        number += 1
    return number


def _complete(jobs: list[Trial], curves: list[Curve], trials: int) -> int:
    """How often each setting was run, of those that the figure wants `trials` times; some it wants fewer times."""
    wanted, done = Counter(kind(job.setting) for job in jobs), by_setting(curves)
    return min((len(done[k]) for k, number in wanted.items() if number == trials and k in done), default=1)
