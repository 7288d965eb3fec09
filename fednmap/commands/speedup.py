"""`fednmap speedup`: how the accuracy after T rounds depends on the number of clients or of local steps."""

from __future__ import annotations

import shlex
import sys
import warnings
from typing import Annotated, Any

import typer

from fednmap.commands.options import Launch, settings_of, take_threads, trusting, with_config
from fednmap.commands.tune import settle, take_auto
from fednmap.measure import objective
from fednmap.names import InputError
from fednmap.report.plots import speedup as plot
from fednmap.report.progress import waiting, watched
from fednmap.runs.atomic_files import clear_errors, json_text, to_json, write_atomically
from fednmap.runs.configuration import STOPPING, Config
from fednmap.runs.execution import Worker
from fednmap.runs.experiment import Experiment, prepare
from fednmap.runs.process_pool import how_many, process_pool
from fednmap.runs.sweep import OUTCOME, PICTURE, Sweep, varied
from fednmap.theory import Rounds, estimate_smoothness, estimate_variance, mean_gradient2, rounds_to
from fednmap.theory.scaling import checked, fit_speedup

# one closing round is noisy: the residual is averaged over the last `eval_last`
DEFAULTS: dict[str, Any] = {"rounds": 100, "trials": 3, "eval_last": 5}


@with_config(hidden=(*STOPPING, "eval_samples", "set", "label", "preset", "track", "workers"), **DEFAULTS)
def speedup(
    values: dict[str, Any],
    launch: Launch,
    over: Annotated[str | None, typer.Option(help="n for clients, q for local steps. (default n)")] = None,
    sweep_values: Annotated[
        str | None,
        typer.Option(
            "--values", help="Numbers of clients or of local steps, separated by commas. (default 5,10,20,40)"
        ),
    ] = None,
) -> None:
    """Sweep over clients or local steps at a fixed eta_a eta_s Q; fit the slope and say whether speedup is linear.

    The slope is that of log |F_nat|^2, averaged over the last --eval-last rounds, against log n or log Q.

    Example: fednmap speedup --over n --values 5,10,20,40
    """
    take_threads(launch.threads)
    how_many(launch.jobs, 1)  # refused before anything runs
    if launch.resume is not None:
        if over or sweep_values or launch.config or launch.out or values:
            raise InputError("--resume takes the settings of its folder; leave the other options out")
        sweep = Sweep.open(launch.resume)
    else:
        sweep = _begin(values, launch, over or "n", sweep_values or "5,10,20,40")
    config = sweep.folder.config(trust=launch.trust_code or launch.resume is None)
    again = f"fednmap speedup --resume {shlex.quote(str(sweep.folder.path))}{trusting(config)}"
    at_once = how_many(launch.jobs, config.trials) if config.device == "cpu" else 1
    with process_pool(Worker(None), at_once) as pool, watched(again, launch.quiet) as reporter:
        reached = dict(zip(sweep.values, sweep.run(config, reporter, pool), strict=True))
    found = fit_speedup(lambda value, trial: reached[value][trial], sweep.over, sweep.values, config.trials)
    need = forecast(prepare(varied(config, sweep.over, sweep.values[0])), float(found.reached.mean(1).min()))
    outcome: dict[str, Any] = {"over": found.over, "values": [*found.values]}
    outcome |= {"rounds": config.rounds, "trials": config.trials, "stationarity": found.reached.tolist()}
    outcome |= {"slope": found.slope, "interval": [found.low, found.high] if config.trials > 1 else None}
    other = config.local_steps if found.over == "n" else config.clients
    until = {"predicted_linear_until": need.linear_until / other}
    outcome |= {"verdict": found.verdict, "saturates_at": found.saturates_at} | until
    write_atomically(sweep.folder.path / OUTCOME, to_json(outcome))
    if launch.json:
        print(json_text(outcome))
    else:
        for value, row in zip(found.values, found.reached, strict=True):
            spread = f"({row.min():.2e} to {row.max():.2e})"
            print(f"{found.name} = {value:<5d} |F_nat|^2 = {row.mean():.3e}  {spread}")
        print("\n".join(found.lines(outcome["predicted_linear_until"])))
        print(f"run folder: {sweep.folder.path}")
    with clear_errors(sweep.folder.path):
        plot(found, sweep.folder.path / PICTURE)
    sweep.folder.write_checksums()


def _begin(given: dict[str, Any], launch: Launch, over: str, values: str) -> Sweep:
    """Make a new sweep; what can be refused is refused before there is a folder."""
    given, auto = take_auto(DEFAULTS | settings_of(launch.config, launch.trust_code) | given)
    if early := [name for name in STOPPING if given.get(name) is not None]:
        raise InputError(f"a sweep compares what equal rounds reach, and {early[0]} would end some early; leave it out")
    if few := given.get("eval_samples"):
        raise InputError(f"eval_samples is {few}, and a sweep compares |F_nat|^2 of all samples; leave it out")
    try:
        parts = [int(part) for part in values.split(",")]
    except ValueError:
        raise InputError(f"--values is {values!r}; give whole numbers separated by commas, such as 5,10,20") from None
    kind, numbers = checked(over, parts)
    config = Config.make(**given)
    with waiting(f"loading {config.data}, and estimating the smoothness of the loss", launch.quiet):
        config, _ = settle(config, auto, lambda line: print(line, file=sys.stderr))
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # the runs repeat them
            first, last = (prepare(varied(config, kind, number)) for number in (numbers[0], numbers[-1]))
        if kind == "n" and (own := last.config.clients) != numbers[-1]:
            raise InputError(f"{config.data} brings its own {own} clients; use --partition iid, or --over q")
        gamma = first.measure_gamma  # one for all that is compared
    known = {"model": first.config.model, "partition": first.config.partition, "measure_gamma": gamma}
    if kind == "q":
        known["clients"] = first.config.clients
    return Sweep.create(launch.out, config.model_copy(update={"algorithms": ("fednmap",), **known}), kind, numbers)


def forecast(experiment: Experiment, eps2: float) -> Rounds:
    """Return `rounds_to` the residual eps2, with constants measured at the start."""
    problem, phi, config = experiment.problem, experiment.phi, experiment.config
    x = phi.prox(problem.start, experiment.gamma)
    return rounds_to(
        eps2**0.5,
        L=estimate_smoothness(problem, x, iterations=15).largest,
        rho=phi.rho,
        sigma2=estimate_variance(problem, x).largest,
        n=problem.n,
        Q=config.local_steps,
        delta_psi=max(0.0, float(objective(problem, phi, x))),
        shift2=float((x - problem.start).square().sum()),
        gradients2=mean_gradient2(problem, x),
    )
