"""`fednmap tune`: step sizes for FedNMap, with a proof and without."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from fednmap.commands.auto import check_auto, search, take_auto
from fednmap.commands.options import AUTO, ConfigFile, Jobs, Json, Threads, TrustCode, take_threads, with_config
from fednmap.names import InputError
from fednmap.runs.configuration import STOPPING, Config
from fednmap.runs.experiment import prepare
from fednmap.runs.files import json_text
from fednmap.runs.process_pool import how_many, parallel_map
from fednmap.theory.tune import PILOTS

HIDDEN = ("trials", "eval_every", "eval_last", "eval_samples", "checkpoint_every", "chunk", *STOPPING)


@with_config(hidden=HIDDEN)
def tune(
    values: dict[str, Any],
    config: ConfigFile = None,
    trust_code: TrustCode = False,
    budget: Annotated[
        int | None, typer.Option(help="Rounds that all pilots may take together. [default: 16 pilots of <= 100 rounds]")
    ] = None,
    residual_only: Annotated[
        bool, typer.Option("--residual-only", help="Judge by the residual alone, even at a saddle of all-zero weights.")
    ] = False,
    jobs: Jobs = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Find eta_a and gamma for FedNMap: the guaranteed pair, and the best of short pilot runs.

    One that is given on the command line is kept, and the other found; those of a TOML file are found anew.
    """
    take_threads(threads)
    base = Config.read(config, trust=trust_code).model_dump(exclude_unset=True) if config else {}
    base = {name: value for name, value in base.items() if name not in AUTO}  # every run.toml has them
    given, _ = take_auto(base | values)
    auto = tuple(name for name in AUTO if name not in given)
    if not auto:
        raise InputError("eta_a and gamma are both given, so that there is nothing to find; leave one of them out")
    in_parallel = partial(parallel_map, count=how_many(jobs, PILOTS))
    checked = Config.make(**given)
    check_auto(checked, auto)
    found = search(prepare(checked), auto, budget=budget, residual_only=residual_only, parallel_map=in_parallel)
    if json:
        report = {
            "eta_a": found.eta_a,
            "gamma": found.gamma,
            "stationarity": found.pilot.score if found.pilot else None,
            "guaranteed": {"eta_a": found.guaranteed_eta_a, "gamma": found.guaranteed_gamma},
            "measured": {"L": found.L, "rho": found.rho, "sigma2": found.sigma2},
            "measure_gamma": found.measure_gamma,
            "budget": found.budget,
            "rounds_used": found.rounds_used,
            "pilots": [asdict(p) for p in found.pilots],
        }
        print(json_text(report))
        return
    print("\n".join(found.lines()))
    print(f"use it with: fednmap train ... --eta-a {found.eta_a:.4g} --gamma {found.gamma:.4g}")
