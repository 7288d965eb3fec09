"""`fednmap train` and `fednmap compare`: one method, or several on the same problem."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from fednmap.commands.options import Launch, settings_of, take_threads, trusting, with_config
from fednmap.commands.tune import measured_every, settle, take_auto
from fednmap.names import InputError
from fednmap.report.closing import closing_table, ending
from fednmap.report.plots import comparison
from fednmap.report.progress import waiting, watched
from fednmap.report.terminal import console
from fednmap.runs.atomic_files import clear_errors, json_text
from fednmap.runs.configuration import Config, parse_set
from fednmap.runs.execution import Worker, execute
from fednmap.runs.experiment import Experiment, prepare, settled
from fednmap.runs.folder import RunFolder
from fednmap.runs.presets import preset as preset_file
from fednmap.runs.process_pool import how_many, process_pool
from fednmap.runs.sweep import is_sweep
from fednmap.runs.tracking import imported, trackers
from fednmap.runs.workers import check_workers, group, under_torchrun
from fednmap.simulation.distributed import WorkerLost

DEFAULT = ("fednmap", "zhang", "fedcanon", "fedda", "fedavg", "fedavg-pruned")
PACE = {"eval_every": "Or auto: measuring takes at most a tenth of the time."}


@with_config(hidden=("trials", "jobs"), words=PACE)
def train(
    values: dict[str, Any],
    launch: Launch,
    algorithm: Annotated[
        str | None, typer.Option(help="Method; see `fednmap list algorithms`. (default fednmap)")
    ] = None,
) -> None:
    """Train one model across clients.

    Example: fednmap train --data digits --model mlp:64 --penalty l1:0.001 --rounds 200
    """
    if algorithm:
        values["algorithms"] = (algorithm,)
    elif launch.preset:
        values["algorithms"] = ("fednmap",)
    folder, results = _run("train", values, replace(launch, jobs=1))
    _close(folder, results, (results[0] if len(results) == 1 else {"results": results}) if launch.json else None)


@with_config(words=PACE)
def compare(
    values: dict[str, Any],
    launch: Launch,
    algorithms: Annotated[
        str | None, typer.Option(help=f"Methods, separated by commas. (default {','.join(DEFAULT)})")
    ] = None,
) -> None:
    """Run several methods from the same start with the same minibatches, and compare them.

    Example: fednmap compare --preset digits --algorithms fednmap,zhang,fedavg
    """
    if algorithms:
        values["algorithms"] = tuple(name.strip() for name in algorithms.split(",") if name.strip())
    elif launch.preset is None and launch.config is None and launch.resume is None:
        values["algorithms"] = DEFAULT
    folder, results = _run("compare", values, launch)
    _close(folder, results, {"results": results} if launch.json else None)


def _run(command: str, values: dict[str, Any], launch: Launch) -> tuple[RunFolder, list[dict[str, Any]]]:
    """Make a new run, or continue one; return its folder and its closing numbers."""
    for name in launch.track or []:
        imported(name)
    check_workers(launch.workers)
    take_threads(launch.threads, launch.workers)
    if launch.preset and (launch.config or launch.resume):
        other = "--config" if launch.config else "--resume"
        raise InputError(f"--preset {launch.preset} and {other} both give settings; use one")
    experiment: Experiment | None = None
    if launch.resume is None:
        experiment = _prepared(values, launch)
        config = experiment.config
    else:
        if values or launch.set or launch.label or launch.config or launch.out:
            raise InputError("--resume takes the settings of its folder; leave the other options out")
        if is_sweep(launch.resume):
            raise InputError(f"{launch.resume} is a sweep; continue it with fednmap speedup --resume {launch.resume}")
        config = RunFolder.open(launch.resume).config(trust=launch.trust_code)
    check_workers(launch.workers, config.clients)
    if config.asynchronous is not None and (launch.workers > 1 or under_torchrun()):
        raise InputError("--async has one virtual clock in one process; leave --workers and torchrun out")
    at_once = how_many(launch.jobs, config.trials * len(config.algorithms))
    if launch.workers > 1 or under_torchrun() or launch.track or config.device != "cpu":
        if launch.jobs is not None and launch.jobs > 1:
            raise InputError("--jobs does not go with --workers, torchrun, --track or a GPU; leave it out")
        at_once = 1
    folder = RunFolder.create(launch.out, config, command) if launch.resume is None else RunFolder(launch.resume)
    again = f"fednmap {command} --resume {shlex.quote(str(folder.path))}{trusting(config)}"
    try:
        with (
            group(launch.workers),
            process_pool(Worker(experiment), at_once) as pool,
            watched(again, launch.quiet) as reporter,
        ):
            return folder, execute(config, folder, reporter, trackers(launch.track, folder), experiment, pool)
    except WorkerLost as error:
        again += f" --workers {launch.workers}" if launch.workers > 1 else ""
        raise WorkerLost(f"{error}; continue from the last checkpoint with\n  {again}") from None


def _prepared(values: dict[str, Any], launch: Launch) -> Experiment:
    """Build what the settings name; what can be refused is refused before there is a folder."""
    typed = values
    base = settings_of(preset_file(launch.preset) if launch.preset else launch.config, launch.trust_code)
    values, auto = take_auto(base | values | {"set": base.get("set", {}) | parse_set(launch.set)})
    if launch.label:
        values["labels"] = base.get("labels", {}) | dict(_label(word) for word in launch.label)
    paced = values.get("eval_every") == "auto"
    if paced:
        del values["eval_every"]
    config = Config.make(**values)
    with waiting(f"loading {config.data}{', and looking for step sizes' if auto else ''}", launch.quiet):
        config, experiment = settle(config, auto, lambda line: print(line, file=sys.stderr))
        experiment = experiment or prepare(config)
    names = experiment.config.algorithms
    for name in ("eta_a", "eta_s"):  # a typed step size that no method has, if all are the user's own
        if name in typed and not any(":" not in n or hasattr(experiment.algorithm(n), name) for n in names):
            raise InputError(f"expected a method with {name}, got {names[0]}; use --set {names[0]}.NAME=VALUE")
    with waiting("estimating the smoothness of the loss, for |F_nat|", launch.quiet):
        experiment = settled(experiment)
    return experiment.with_settings(eval_every=measured_every(experiment)) if paced else experiment


def _label(word: str) -> tuple[str, str]:
    method, sign, name = word.partition("=")
    if not (method and sign and name):
        raise InputError(f"expected --label METHOD=NAME, got {word!r}; give such as --label fednmap=ours")
    return method, name


def _close(folder: RunFolder, results: list[dict[str, Any]], as_json: dict[str, Any] | None) -> None:
    """What the user sees at the end: a table or JSON, the plot, and which methods diverged."""
    screen = console()
    if as_json is None:
        screen.print(closing_table(results, folder.about()))
    else:
        print(json_text(as_json))
    with clear_errors(folder.path):
        comparison(folder, folder.path / "plot.png")
    folder.write_checksums("plot.png")
    if as_json is None:
        screen.print("\n".join(ending(folder, results)), highlight=False, soft_wrap=True)
    failed = {r["method"]: r["error"] for r in reversed(results) if "error" in r}
    if failed:
        names = [method for method in dict.fromkeys(r["method"] for r in results) if method in failed]
        raise ArithmeticError(f"{', '.join(names)} diverged: {failed[names[0]]}")
