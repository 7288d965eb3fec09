"""`fednmap speedup`: how the accuracy after T rounds depends on the number of clients or of local steps."""

from __future__ import annotations

import json as json_
import sys
from collections import deque
from typing import Annotated, Any

import typer

from fednmap.commands.auto import settle, take_auto
from fednmap.commands.options import ConfigFile, Json, Out, with_config
from fednmap.config import Config
from fednmap.experiment import Experiment, prepare
from fednmap.measure import objective, stationarity
from fednmap.runs import Job, RunFolder
from fednmap.simulation import simulate
from fednmap.speedup import Over, plot
from fednmap.speedup import speedup as sweep
from fednmap.theory import Rounds, estimate_smoothness, estimate_variance, mean_gradient2, rounds_to

LAST = 5  # the residual is averaged over so many closing rounds: a single one is noisy


@with_config(hidden=("eval_every", "checkpoint_every"), rounds=100, trials=3)
def speedup(
    values: dict[str, Any],
    over: Annotated[str, typer.Option(help="n for clients, q for local steps.")] = "n",
    sweep_values: Annotated[
        str, typer.Option("--values", help="Numbers of clients or of local steps, separated by commas.")
    ] = "5,10,20,40",
    config: ConfigFile = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Sweep over clients or local steps at a fixed eta_a eta_s Q; fit the slope and say whether speedup is linear."""
    base = Config.read(config).model_dump(exclude_unset=True) if config else {}
    given, auto = take_auto(base | values)
    settings = settle(Config.make(**given), auto, lambda line: print(line, file=sys.stderr))
    if over not in ("n", "q"):
        raise ValueError(f"--over is {over!r}; use n for clients or q for local steps")
    kind: Over = "n" if over == "n" else "q"
    numbers = _numbers(sweep_values)
    first = prepare(_varied(settings, kind, min(numbers), 0))
    folder = RunFolder.create(out, settings, "speedup")
    measure_gamma = first.measure_gamma

    def run(value: int, trial: int) -> float:
        found = reached(prepare(_varied(settings, kind, value, trial)), measure_gamma)
        folder.append(Job(f"fednmap {kind}={value}", trial), {"round": settings.rounds, "stationarity": found})
        folder.flush()
        return found

    found = sweep(run, kind, numbers, settings.trials)
    eps2 = float(found.reached.mean(1).min())
    need = forecast(first, eps2)
    other = settings.local_steps if kind == "n" else settings.clients
    plot(found, folder.path / "speedup.png")
    report = {
        "over": over,
        "values": found.values,
        "stationarity": found.reached.tolist(),
        "slope": found.slope,
        "interval": [found.low, found.high] if settings.trials > 1 else None,
        "verdict": found.verdict,
        "saturates_at": found.saturates_at,
        "predicted_linear_until": need.linear_until / other,
    }
    (folder.path / "speedup.json").write_text(json_.dumps(report, indent=1) + "\n", encoding="utf-8")
    if json:
        print(json_.dumps(report, indent=1))
        return
    for value, row in zip(found.values, found.reached, strict=True):
        spread = f"({row.min():.2e} to {row.max():.2e})"
        print(f"{'n' if kind == 'n' else 'Q'} = {value:<5d} |F_nat|^2 = {row.mean():.3e}  {spread}")
    print("\n".join(found.lines(need.linear_until / other)))
    print(f"run folder: {folder.path}")


def reached(experiment: Experiment, measure_gamma: float) -> float:
    """The squared residual of FedNMap at the end of a run, averaged over its last rounds."""
    config, algorithm = experiment.config, experiment.algorithm("fednmap")
    rounds = simulate(
        algorithm,
        experiment.problem,
        rounds=config.rounds,
        start=experiment.start(algorithm),
        participation=config.participation,
        loss=config.loss,
        seed=config.seed,
        chunk=config.chunk,
    )
    closing = deque((algorithm.model(round_.server) for round_ in rounds), maxlen=LAST)
    found = [float(stationarity(experiment.problem, experiment.phi, x, measure_gamma)) for x in closing]
    return sum(found) / len(found)


def forecast(experiment: Experiment, eps2: float) -> Rounds:
    """`rounds_to` the residual eps2, with constants measured at the start."""
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


def _varied(config: Config, over: Over, value: int, trial: int) -> Config:
    """With this many clients or local steps; eta_a Q stays, as in the paper's figures, so the default gamma does."""
    values = config.model_dump()
    values["seed"] = config.seed + trial
    if over == "n":
        values["clients"] = value
    else:
        values |= {"local_steps": value, "eta_a": config.eta_a * config.local_steps / value}
    return Config.make(**values)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--values is {text!r}; give whole numbers separated by commas, such as 5,10,20") from None
