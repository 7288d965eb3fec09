"""A sweep on disk: one configuration with several numbers of clients or of local steps, a folder of ordinary runs.

run.toml, environment.json   the configuration that is varied, as in every run folder
speedup.toml                 what is varied: over, values
n=10, n=20, ...              an ordinary run folder for each number of clients (q=10, ... of local steps)
speedup.json, speedup.png    the outcome, when all of them are finished
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from fednmap.names import InputError
from fednmap.runs.atomic_files import from_json, from_toml, locked, write_atomically
from fednmap.runs.configuration import Config
from fednmap.runs.execution import Reporter, execute
from fednmap.runs.folder import RunFolder
from fednmap.runs.process_pool import ProcessPool
from fednmap.theory.scaling import Over, checked

RECORD, OUTCOME, PICTURE = "speedup.toml", "speedup.json", "speedup.png"


@dataclass(frozen=True)
class Sweep:
    folder: RunFolder
    over: Over
    values: tuple[int, ...]

    @classmethod
    def create(cls, path: Path | None, config: Config, over: Over, values: tuple[int, ...]) -> Sweep:
        record = tomli_w.dumps({"over": over, "values": values}).encode()
        return cls(RunFolder.create(path, config, "speedup", {RECORD: record}), over, values)

    @classmethod
    def open(cls, path: Path) -> Sweep:
        """Return a folder that a sweep has made."""
        if not is_sweep(path):
            raise InputError(f"{path} is not a sweep: it has no {RECORD}")
        record = from_toml(path / RECORD)
        try:
            return cls(RunFolder.open(path), *checked(record["over"], [int(value) for value in record["values"]]))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path / RECORD} was changed or cut short: {error}") from None

    def name(self, value: int) -> str:
        return f"{self.over}={value}"

    def part(self, value: int) -> RunFolder:
        """Return the run with this many clients or local steps."""
        return RunFolder(self.folder.path / self.name(value))

    def parts(self) -> list[RunFolder]:
        """Return the runs that have begun."""
        return [part for part in map(self.part, self.values) if (part.path / "run.toml").exists()]

    def state(self) -> str:
        """Finished, running, or how many values are done."""
        if self.outcome() and not self.folder.running():
            return "finished"
        trials = self.folder.about().trials or 1
        done = sum(len(part.results()) >= trials for part in self.parts())
        return f"{'running' if self.folder.running() else 'stopped'}, {done} of {len(self.values)} values done"

    def run(self, config: Config, reporter: Reporter, pool: ProcessPool | None = None) -> list[list[float]]:
        """Run what is not finished yet; return for each value and trial |F_nat|^2, averaged over the closing rounds.

        config: that of the folder.
        pool:   processes that run several trials at a time.
        """
        with locked(self.folder.path):
            for line in self.folder.check_settings(config.model_dump(mode="json")):
                reporter.message(line)
            self.folder.remove_checksums()
            return [self._run(value, varied(config, self.over, value), reporter, pool) for value in self.values]

    def _run(self, value: int, config: Config, reporter: Reporter, pool: ProcessPool | None) -> list[float]:
        folder = self.part(value)
        if not (folder.path / "run.toml").exists():
            RunFolder.create(folder.path, config, "speedup")
        elif folder.config(trust=True) != config:  # the sweep was made longer or wider
            write_atomically(folder.path / "run.toml", config.toml().encode())
        reporter.label = f"{self.name(value)} "
        for result in execute(config, folder, reporter, pool=pool):
            if "error" in result:
                raise ArithmeticError(f"{folder.path}: {result['error']}")
        return [_reached(folder, config, trial) for trial in range(config.trials)]

    def outcome(self) -> dict[str, Any] | None:
        """Return what was found; None before all of speedup.toml and run.toml is done."""
        path, about = self.folder.path / OUTCOME, self.folder.about()
        found: dict[str, Any] = from_json(path, dict) if path.exists() else {}
        asked = {"over": self.over, "values": list(self.values), "rounds": about.rounds, "trials": about.trials}
        return found if asked.items() <= found.items() else None


def _reached(folder: RunFolder, config: Config, trial: int) -> float:
    records, first = folder.records("fednmap", trial), config.rounds - config.eval_last
    closing = [record["stationarity"] for record in records if record["round"] > first]
    due = min(config.eval_last, config.rounds + 1)
    if len(closing) < due:
        raise InputError(
            f"{folder.path / 'metrics.csv'} was cut short: trial {trial} has {len(closing)} of {due} closing rounds; "
            f"delete {folder.path}, and --resume runs it again"
        )
    return fmean(closing)


def is_sweep(path: Path) -> bool:
    return (path / RECORD).is_file()


def varied(config: Config, over: Over, value: int) -> Config:
    """With this many clients or local steps; eta_a Q stays, as in the paper's figures, so the default gamma does."""
    values = config.model_dump(exclude_unset=True) | {"algorithms": ("fednmap",)}
    if over == "n":
        return Config.make(**values | {"clients": value})
    if fixed := sorted({"fednmap.Q", "fednmap.eta_a"} & config.set.keys()):
        raise InputError(f"a sweep over q varies Q and eta_a, and set keeps {' and '.join(fixed)}; leave that out")
    if config.schedule.strip().startswith("cosine:"):
        raise InputError(f"the last step of {config.schedule} is the same for all Q; use cosine for a sweep over q")
    return Config.make(**values | {"local_steps": value, "eta_a": config.eta_a * config.local_steps / value})
