"""From a figure to its folder: trials, the picture, the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fednmap.names import InputError
from fednmap.runs.atomic_files import clear_errors, write_atomically
from reproduction import verdict
from reproduction.execution import finished, run_trials
from reproduction.figure import Figure, save
from reproduction.store import Store
from reproduction.trials import Curve, Trial, by_setting, kind
from reproduction.verdict import Verdict


def reproduce(
    figure: Figure,
    scale: str,
    *,
    trials: int | None,
    out: Path,
    workers: int,
    report: Callable[[str], None],
    only_finished: bool = False,
) -> Verdict:
    """Run the trials that are missing in OUT/NAME, each in OUT/runs; write tables, figure and verdict to OUT/NAME.

    Figures share their trials where settings agree. A call with more trials, or after an interruption, adds to what
    is there; `only_finished` runs nothing and judges what is there, by default all of it.
    """
    store, folder = figure.store(out), out / figure.name
    if trials is None:
        trials = _there(figure, scale, out) if only_finished else figure.trials[scale]
    if trials < 1:
        raise InputError(f"expected --trials of at least 1, got {trials}")
    jobs, complete = figure.jobs(scale, trials), trials
    if only_finished:
        curves = finished(jobs, store, lambda line: report(f"{figure.name}: {line}"))
        if not curves:
            raise InputError(
                f"expected trials of {figure.name}, scale {scale}, in {store.table}, got no finished trial; "
                "do run it without --finished first"
            )
        complete = _complete(jobs, curves, trials)
    else:
        curves = run_trials(jobs, store, workers, lambda line: report(f"{figure.name}: {line}"))
    found = figure.judge(curves)
    if not found.claims:
        raise InputError(
            f"expected trials of several settings to compare, got too few of {figure.name}'s trials in {store.table}; "
            "do run it without --finished first"
        )
    codes = Counter(curve.code for curve in curves)
    text = verdict.as_markdown(
        figure.name, figure.title, scale, trials, figure.choices, found, verdict.provenance(codes, figure.histories)
    )
    facts = verdict.as_json(figure.name, scale, complete, trials, found, codes)
    picture = figure.draw(curves)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "summary.csv", figure.summary(curves).encode())
        write_atomically(folder / "verdict.json", facts.encode())
        write_atomically(folder / "verdict.md", text.encode())
        save(picture, folder, figure.name)
    return found


def _there(figure: Figure, scale: str, out: Path) -> int:
    """The number of trials of which anything is there, in this figure's table or in another's; at least 1."""
    number, names = 1, {name for path in out.glob("*/trials.csv") for name in Store(path.parent).rows()}
    while any(job.name in names for job in figure.jobs(scale, number + 1) if job.setting["trial"] == number):
        number += 1
    return number


def _complete(jobs: list[Trial], curves: list[Curve], trials: int) -> int:
    """How often each setting was run, of those that the figure wants `trials` times; some it wants fewer times."""
    wanted, done = Counter(kind(job.setting) for job in jobs), by_setting(curves)
    return min((len(done[k]) for k, number in wanted.items() if number == trials and k in done), default=1)
