"""`fednmap train` and `fednmap compare`: one method, or several on the same problem."""

from __future__ import annotations

import shlex
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from fednmap.commands.auto import settle, take_auto
from fednmap.commands.options import (
    ConfigFile,
    Jobs,
    Json,
    Out,
    PresetName,
    Quiet,
    Resume,
    Set,
    Threads,
    Track,
    TrustCode,
    Workers,
    take_threads,
    trusting,
    with_config,
)
from fednmap.commands.watch import watched
from fednmap.names import InputError
from fednmap.report.closing import closing_table
from fednmap.report.ending import ending
from fednmap.report.plots import comparison
from fednmap.report.terminal import console
from fednmap.runs.configuration import Config, parse_set
from fednmap.runs.eval_interval import measured_every
from fednmap.runs.execution import PoolWork, execute
from fednmap.runs.experiment import prepare, settled
from fednmap.runs.files import clear_errors, json_text
from fednmap.runs.folder import RunFolder
from fednmap.runs.presets import preset as preset_file
from fednmap.runs.process_pool import check_jobs, how_many, process_pool
from fednmap.runs.sweep import is_sweep
from fednmap.runs.tracking import check_trackers, trackers
from fednmap.runs.workers import check_workers, group, under_torchrun
from fednmap.simulation.distributed import WorkerLost

DEFAULT = ("fednmap", "zhang", "fedcanon", "fedda", "fedavg", "fedavg-pruned")
PACE = {"eval_every": "Or auto: as often as takes a tenth of the time."}


@with_config(hidden=("trials",), words=PACE)
def train(
    values: dict[str, Any],
    algorithm: Annotated[
        str | None, typer.Option(help="Method; see `fednmap list algorithms`. (default fednmap)")
    ] = None,
    set: Set = None,
    preset: PresetName = None,
    config: ConfigFile = None,
    out: Out = None,
    resume: Resume = None,
    track: Track = None,
    workers: Workers = 1,
    threads: Threads = None,
    trust_code: TrustCode = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train one model across clients."""
    if algorithm:
        values["algorithms"] = (algorithm,)
    elif preset:
        values["algorithms"] = ("fednmap",)
    settings = _file(preset, config, resume)
    folder, results = _run("train", values, set, settings, out, resume, track, workers, 1, threads, trust_code, quiet)
    _close(folder, results, (results[0] if len(results) == 1 else {"results": results}) if json else None)


@with_config(words=PACE)
def compare(
    values: dict[str, Any],
    algorithms: Annotated[
        str | None, typer.Option(help=f"Methods, separated by commas. (default {','.join(DEFAULT)})")
    ] = None,
    set: Set = None,
    preset: PresetName = None,
    config: ConfigFile = None,
    out: Out = None,
    resume: Resume = None,
    track: Track = None,
    workers: Workers = 1,
    jobs: Jobs = None,
    threads: Threads = None,
    trust_code: TrustCode = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods from the same start with the same minibatches, and compare them."""
    if algorithms:
        values["algorithms"] = tuple(name.strip() for name in algorithms.split(","))
    elif preset is None and config is None and resume is None:
        values["algorithms"] = DEFAULT
    settings = _file(preset, config, resume)
    folder, results = _run(
        "compare", values, set, settings, out, resume, track, workers, jobs, threads, trust_code, quiet
    )
    _close(folder, results, {"results": results} if json else None)


def _file(name: str | None, config: Path | None, resume: Path | None) -> Path | None:
    """The file of settings that a new run starts from."""
    if name is None:
        return config
    if config is not None or resume is not None:
        raise InputError(f"--preset {name} and {'--config' if config else '--resume'} both give settings; use one")
    return preset_file(name)


def _run(
    command: str,
    values: dict[str, Any],
    assignments: list[str] | None,
    file: Path | None,
    out: Path | None,
    resume: Path | None,
    track: list[str] | None,
    workers: int,
    jobs: int | None,
    threads: int | None,
    trust_code: bool,
    quiet: bool,
) -> tuple[RunFolder, list[dict[str, Any]]]:
    """A new run, or one continued, and its closing numbers."""
    check_trackers(track)
    check_workers(workers)
    take_threads(threads, workers)
    if resume is not None:
        if values or assignments or file or out:
            raise InputError("--resume takes the settings of its folder; leave the other options out")
        if is_sweep(resume):
            raise InputError(f"{resume} is a sweep; continue it with fednmap speedup --resume {resume}")
        folder, experiment = RunFolder.open(resume), None
        config = folder.config(trust=trust_code)
        check_workers(workers, config.clients)
        at_once = _at_once(config, jobs, workers, track)
    else:
        base = Config.read(file, trust=trust_code).model_dump(exclude_unset=True) if file else {}
        values = base | values | {"set": base.get("set", {}) | parse_set(assignments)}
        values, auto = take_auto(values)
        paced = values.get("eval_every") == "auto"
        values = {name: value for name, value in values.items() if not (paced and name == "eval_every")}
        config, experiment = settle(Config.make(**values), auto, lambda line: print(line, file=sys.stderr))
        experiment = settled(experiment or prepare(config))  # what can be refused is refused before there is a folder
        if paced:
            experiment = experiment.with_setting(eval_every=measured_every(experiment))
        config = experiment.config
        check_workers(workers, config.clients)
        at_once = _at_once(config, jobs, workers, track)
        folder = RunFolder.create(out, config, command)
    callbacks = trackers(track, folder)
    again = f"fednmap {command} --resume {shlex.quote(str(folder.path))}{trusting(config)}"
    try:
        with (
            group(workers),
            process_pool(PoolWork(experiment), at_once) as pool,
            watched(again, quiet) as reporter,
        ):
            if pool is not None:  # this one only waits for them
                threading.Thread(target=import_module, args=("matplotlib.pyplot",), daemon=True).start()
            results = execute(config, folder, reporter, callbacks, experiment, pool)
    except WorkerLost as error:
        again += f" --workers {workers}" if workers > 1 else ""
        raise WorkerLost(f"{error}; continue from the last checkpoint with\n  {again}") from None
    return folder, results


def _at_once(config: Config, jobs: int | None, workers: int, track: list[str] | None) -> int:
    """How many methods and trials run at the same time: one where processes share it, or it has a tracker or a GPU."""
    check_jobs(jobs)
    if workers > 1 or under_torchrun() or track or config.device != "cpu":
        if jobs is not None and jobs > 1:
            raise InputError("--jobs does not go with --workers, torchrun, --track or a GPU; leave it out")
        return 1
    return how_many(jobs, config.trials * len(config.algorithms))


def _close(folder: RunFolder, results: list[dict[str, Any]], as_json: dict[str, Any] | None) -> None:
    """What the user sees at the end: a table or JSON, the plot, and which methods diverged."""
    if as_json is not None:
        print(json_text(as_json))
    else:
        screen = console()
        screen.print(closing_table(results, folder.about().measure_gamma))
    with clear_errors(folder.path):
        comparison(folder, folder.path / "plot.png")
    if as_json is None:
        screen.print("\n".join(ending(folder, results)), highlight=False, soft_wrap=True)
    failed = {r["method"]: r["error"] for r in reversed(results) if "error" in r}
    if failed:
        names = [method for method in dict.fromkeys(r["method"] for r in results) if method in failed]
        raise ArithmeticError(f"{', '.join(names)} diverged: {failed[names[0]]}")
