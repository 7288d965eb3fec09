"""From a figure to its folder: run the trials that are missing, each in its own process; the picture, the verdict."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fednmap.names import InputError
from fednmap.runs.atomic_files import clear_errors, write_atomically
from fednmap.runs.folder import VERSIONS, RunFolder
from fednmap.runs.process_pool import ProcessPool, Send, interrupts
from fednmap.simulation.distributed import WorkerLost
from reproduction import verdict
from reproduction.figure import Figure, save
from reproduction.store import Provenance, Row, Store
from reproduction.trials import Curve, Trial, by_setting, kind
from reproduction.verdict import Verdict

Report = Callable[[str], None]


def reproduce(
    figure: Figure,
    scale: str,
    *,
    trials: int | None,
    out: Path,
    workers: int,
    report: Report,
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


def finished(jobs: Sequence[Trial], store: Store, report: Report) -> list[Curve]:
    """Return the curves of the trials that have been run with today's settings, without running any."""
    why = _reasons(jobs, store, {})
    _report_reasons(why, "left out", report)
    return store.curves(job for job in jobs if why.get(job.name) == "")


def run_trials(jobs: Sequence[Trial], store: Store, workers: int, report: Report) -> list[Curve]:
    """Run the trials that are missing, `workers` at a time, each in its own process; return the curves of all.

    A trial of other settings or other data is run again. While it runs, a trial's files are in OUT/runs.
    """
    if workers < 1:
        raise InputError(f"expected --jobs of at least 1, got {workers}")
    with clear_errors(store.folder):
        store.folder.mkdir(parents=True, exist_ok=True)
    why = _reasons(jobs, store, _data_digests(jobs, store, report))
    _report_reasons(why, "run again", report)
    missing = [job for job in jobs if why.get(job.name, "missing")]
    report(f"{len(jobs)} trials, {len(jobs) - len(missing)} already there")
    for k, (job, seconds) in enumerate(_running(missing, store, workers)):
        report(f"{k + 1}/{len(missing)}  {job.name}  {seconds:.0f} s")
    return store.curves(jobs)


def _reasons(jobs: Sequence[Trial], store: Store, digests: Mapping[str, str]) -> dict[str, str]:
    """Name of a finished trial -> why it is of no use; empty if it is of use.

    A trial that another figure in OUT has finished with these settings is taken over.
    """
    rows = store.rows()
    why = {job.name: _reason(job, rows[job.name], digests) for job in jobs if job.name in rows}
    wanted = {job.name: job for job in jobs if why.get(job.name, "missing")}
    for other in _other_stores(store) if wanted and store.histories else ():
        theirs = other.rows()
        found = [n for n, job in wanted.items() if n in theirs and not _reason(job, theirs[n], digests)]
        if found:
            store.copy(other, found)
            why |= dict.fromkeys(found, "")
            wanted = {name: job for name, job in wanted.items() if name not in found}
    return why


def _other_stores(store: Store) -> list[Store]:
    """The tables of other figures that have histories."""
    found = sorted(store.folder.parent.glob("*/histories.csv.gz"))
    return [Store(path.parent) for path in found if path.parent != store.folder]


def _reason(job: Trial, row: Row, digests: Mapping[str, str]) -> str:
    was = row.provenance
    now = digests.get(str(job.configuration.get("data")), was.data_digest)
    return was.changed_settings(job.configuration) or ("" if now == was.data_digest else "their data were others")


def _data_digests(jobs: Sequence[Trial], store: Store, report: Report) -> dict[str, str]:
    """Data set -> its SHA-256 today, for the trials that are there; each is loaded once."""
    found: dict[str, str] = {}
    unknown: set[str] = set()
    rows = store.rows()
    for job in jobs:
        name = str(job.configuration.get("data"))
        if job.name in rows and job.data is not None and name not in found and name not in unknown:
            try:
                found[name] = job.data()
            except (InputError, OSError) as error:
                report(f"{name} cannot be compared with the data of finished trials: {error}")
                unknown.add(name)
    return found


def _report_reasons(why: Mapping[str, str], what: str, report: Report) -> None:
    for words, count in Counter(why.values()).items():
        if words:
            report(f"{count} of {len(why)} trials {what}: {words}")


def _running(jobs: Sequence[Trial], store: Store, workers: int) -> Iterator[tuple[Trial, float]]:
    workers = min(workers, len(jobs))
    if workers < 2:
        yield from ((job, _run(job, store)) for job in jobs)
        return
    # spawned, because a fork of a process that has used torch's threads may hang
    try:
        with ProcessPool(partial(_run_in_pool, store), workers, spawn=True) as pool, interrupts() as stop:
            yield from ((jobs[k], seconds) for k, seconds in pool.run(jobs, stop=stop))
    except WorkerLost as error:
        raise WorkerLost(f"{error}; run the same command again to continue") from None


def _run_in_pool(store: Store, job: Trial, _: Send) -> float:
    return _run(job, store)


def _run(job: Trial, store: Store) -> float:
    """Run the trial, add it to the store, return the seconds it took."""
    began, path = time.monotonic(), store.folder.parent / "runs" / job.name
    records = job.measure(path)
    environment = RunFolder(path).environment()  # empty for a trial that has no run folder
    if not environment:
        environment = {name: version(name) for name in VERSIONS} | {"data": job.data() if job.data else ""}
    store.add(job, records, Provenance.of(job, environment))
    return time.monotonic() - began
