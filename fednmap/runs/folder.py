"""Run folders: what a run leaves on disk, in a form that survives kills and full disks.

run.toml                          the whole configuration
environment.json                  versions, the command, when it began, the data's digest, the configuration once more
metrics.csv                       long form (method, trial, round, metric, value), appended while running
checkpoints/METHOD-TRIAL/         the last two states, safetensors with a JSON file each
models/METHOD-TRIAL.safetensors   the trained parameters
results.json                      the closing numbers of every finished method and trial
SHA256SUMS                        digests of all files of a finished run, as `sha256sum --check` reads them

Each entry of results.json holds its own SHA-256, that of its model and that of its measurements; a checkpoint holds
those of its tensors and of the measurements before it. They are checked when they are read. In metrics.csv a last line
without its end is ignored. Folders of earlier versions stay readable.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fednmap.names import InputError, current
from fednmap.runs import atomic_files as files
from fednmap.runs.configuration import STOPPING, Config
from fednmap.simulation import Record, lock

HEADING = b"method,trial,round,metric,value\n"
COSTS = frozenset({"train_seconds", "eval_seconds", "bytes_up", "bytes_down"})
"""Metrics that every measurement has; one without them is half written."""
SUMS = "SHA256SUMS"
MISSING = f"{SUMS} is missing: the run was stopped at its very end, or the file was removed"
SEALED = ("*.toml", "*.json", "*.csv", "*.png", "models/*.safetensors", "checkpoints/*/*")
"""What SHA256SUMS lists."""
VERSIONS = ("fednmap", "torch", "numpy")
EXTENDABLE = frozenset({"rounds", "trials", "algorithms", "labels", "checkpoint_every", *STOPPING})
"""Settings that may be changed in run.toml before `--resume`: no state depends on them."""

SECRET = "(?:token|password|passphrase|secret)"
OPTION = re.compile(rf"((?:^|(?<=\0))-[^\0=]*{SECRET}[^\0=]*[\0=])[^\0]*", re.IGNORECASE)
"""Of a command whose words are separated by NUL: --some-token=VALUE, or --some-token and the next word."""
ASSIGNMENT = re.compile(rf"""([\w.-]*{SECRET}[\w.-]*\s*=\s*)("[^"]*"|'[^']*'|\S+)""", re.IGNORECASE)

Curves = dict[str, "array[float]"]
"""Column name -> its values along a run; all of the same length, `round` among them."""


class Job(NamedTuple):
    """One method in one trial."""

    method: str
    trial: int

    def __str__(self) -> str:
        """Return the name of its files; of an own method, package.module:Name, without the colon."""
        return f"{self.method.replace(':', '.')}-{self.trial}"


class Row(NamedTuple):
    """One line of metrics.csv."""

    job: Job
    round: int
    metric: str
    value: float

    def line(self) -> bytes:
        return f"{self.job.method},{self.job.trial},{self.round},{self.metric},{self.value!r}\n".encode()


class About(BaseModel):
    """What run.toml says of a run, without looking names up; None where it does not say."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    data: str | None = None
    model: str | None = None
    penalty: str | None = None
    clients: int | None = None
    rounds: int | None = None
    trials: int | None = None
    algorithms: tuple[str, ...] = Field((), strict=False)
    labels: dict[str, str] = {}
    measure_gamma: float | None = None
    made_in: str | None = None
    """"Python" for `fednmap.run`, "fit" for `fednmap fit`; None for a run that a configuration describes."""


class Model(NamedTuple):
    """What a method has trained."""

    parameters: dict[str, Tensor]
    """In the network's order."""
    inputs: tuple[int, ...]
    """The shape of one sample, (channels, height, width) for pictures; () where it is not known."""
    features: tuple[str, ...] = ()
    """The names of the columns of a table."""
    labels: tuple[str, ...] = ()
    """What the labels 0, 1, ... stand for."""
    intercept: bool = False
    """Whether the numbers of a linear model end with one per output."""
    scaling: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    """What was subtracted from the columns and what they were divided by, where they were standardised."""

    def about(self) -> dict[str, Any]:
        """Return what the file's metadata hold; names that the model does not have are left out."""
        given = self._asdict() | {"scaling": self.scaling if self.scaling[0] else ()}
        return {name: v for name, v in given.items() if name == "inputs" or (name != "parameters" and v)}

    @classmethod
    def of(cls, parameters: dict[str, Tensor], about: Mapping[str, Any]) -> Model:
        """Return the model of these parameters and metadata."""
        shift, scale = about.get("scaling") or ((), ())
        words = {name: tuple(about.get(name, ())) for name in ("inputs", "features", "labels")}
        return cls(parameters, **words, intercept=bool(about.get("intercept")), scaling=(tuple(shift), tuple(scale)))


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._measured: dict[Job, tuple[int, Any]] = {}  # rows and their running SHA-256, of jobs that are written here

    @classmethod
    def create(
        cls, path: Path | None, config: Config | dict[str, Any], command: str, more: Mapping[str, bytes] | None = None
    ) -> RunFolder:
        """Make a folder with its configuration and the files `more`; refused if it already holds something.

        config: for a run that a Config does not describe: what `about` says of it, and its `settings`.
        """
        if isinstance(config, Config):
            toml, settings = config.toml(), config.model_dump(mode="json")
        else:
            settings = config["settings"]
            given = {name: value for name, value in settings.items() if value is not None}
            toml = tomli_w.dumps(config | {"settings": given})
        if path is None:
            path = _fresh(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{command}")
        elif path.exists() and not path.is_dir():
            raise InputError(f"{path} is a file; choose another folder")
        with files.clear_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            with files.locked(path):
                if not all(p.name == files.LOCK or re.fullmatch(r"\..*\.part", p.name) for p in path.iterdir()):
                    raise InputError(f"{path} is not empty; choose another folder, or continue it with --resume {path}")
                for name, data in (more or {}).items():
                    files.write_atomically(path / name, data)
                files.write_atomically(path / "run.toml", toml.encode())
                folder = cls(path)
                folder._write_environment(provenance(settings))
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return a folder that a run has made."""
        if not (path / "run.toml").is_file():
            raise InputError(f"{path} is not a run folder: it has no run.toml")
        return cls(path)

    def config(self, *, trust: bool = False) -> Config:
        """Return the configuration, validated, to run it; `about` describes a run without loading anything."""
        if self.made_in_python():
            raise InputError(f"{self.path} was made in Python; continue it there, by run(..., folder=...)")
        if self.about().made_in == "fit":
            raise InputError(f"expected a run of train, got a fit, {self.path}; repeat it with `fednmap fit`")
        return Config.read(self.path / "run.toml", trust=trust)

    def made_in_python(self) -> bool:
        """Return whether no configuration describes the run: it was made by `fednmap.run(..., folder=)`."""
        return self.about().made_in == "Python"

    def about(self) -> About:
        """Describe the run, even if names in it have changed since or belong to others."""
        found = current(files.from_toml(self.path / "run.toml"), Config.RENAMED, None)
        if found.get("data") == "own" and "made_in" not in found:
            found.pop("model", None)  # the clients have their own, whatever the settings say
        try:
            return About.model_validate(found)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise InputError(f"{self.path / 'run.toml'} was changed: {name} is {found[name]!r:.40}") from None

    def environment(self) -> dict[str, Any]:
        """Return what is known of the run's beginning; nothing if it was killed before that was written."""
        path = self.path / "environment.json"
        found = files.verified(files.from_json(path, dict)) if path.exists() else {}
        if found is None or not isinstance(found.get("settings", {}), dict):
            raise InputError(f"{path} was changed: it is not what was written; put it back from a copy")
        return found | {k: current(v, Config.RENAMED, None) for k, v in found.items() if k == "settings"}

    def _write_environment(self, facts: dict[str, Any]) -> None:
        files.write_atomically(self.path / "environment.json", files.to_json(files.add_checksum(facts)))

    def check_data_digest(self, data: str) -> None:
        """Refuse to continue with other data than the run began with; `data` is their digest."""
        began = self.environment()
        if "data" not in began:
            self._write_environment(began | {"data": data})
        elif began["data"] != data:
            raise InputError(
                f"the data of {self.path} have changed since the run began; put them back, or start a new run with "
                f"--config {self.path / 'run.toml'}"
            )

    def check_settings(self, now: dict[str, Any]) -> list[str]:
        """Refuse settings with which this run was not begun; return what else the user should know."""
        if words := self.changed(now):
            if self.made_in_python():
                raise InputError(f"{self.path} holds another run: {words}; choose another folder for a new run")
            file = self.path / "run.toml"
            raise InputError(f"{file} was edited: {words}; put it back, or use it for a new run with --config")
        began = self.environment()
        before = began.get("settings") or now
        edited = sorted(k for k in EXTENDABLE & before.keys() & now.keys() if before[k] != now[k])
        lines = [f"{k} is {now[k]!r} and was {before[k]!r} when the run began" for k in edited]
        for name in VERSIONS:
            if began.get(name, version(name)) != version(name):
                versions = f"{name} {began[name]} and continues with {version(name)}"
                lines.append(f"this run began with {versions}: last digits may differ")
        return lines + [line for line in self.changed_files() if not (edited and line.startswith("run.toml "))]

    def changed(self, now: dict[str, Any], free: frozenset[str] = EXTENDABLE) -> str:
        """Return which settings are others than when the run began, in words; of those that are not free."""
        before = self.environment().get("settings")
        if not isinstance(before, dict):
            return ""
        names = before.keys() | now.keys() if self.made_in_python() else before.keys() & now.keys()
        others = sorted(k for k in names - free if before.get(k) != now.get(k))
        return ", ".join(f"{k} is {now.get(k)!r} and was {before.get(k)!r}" for k in others)

    def repair(self) -> None:
        """Delete what a kill has left half written."""
        with files.clear_errors(self.path):
            for part in self.path.rglob(".*.part"):
                part.unlink(missing_ok=True)
            if not (self.path / "environment.json").exists():
                known = files.from_toml(self.path / "run.toml")
                self._write_environment(provenance(known.get("settings", known)))
            self._rewrite(self._rows())

    def append(self, job: Job, record: Record) -> None:
        """Append one measurement to metrics.csv."""
        rows = [Row(job, int(record["round"]), name, float(v)) for name, v in record.items() if name != "round"]
        for row in rows:
            if any(character in row.metric for character in ',"\r\n'):
                raise InputError(f"the metric's name is {row.metric!r}; leave out commas, quotes and ends of lines")
        lines = b"".join(row.line() for row in rows)
        with self._writing(), (self.path / "metrics.csv").open("ab") as file:
            file.write(lines if file.tell() else HEADING + lines)
        if job in self._measured:
            before, digest = self._measured[job]
            digest.update(lines)
            self._measured[job] = before + len(rows), digest

    def measured(self, job: Job, rows: int | None = None) -> dict[str, Any]:
        """Return how many rows of metrics.csv are the job's, at most `rows`, and their SHA-256."""
        count, digest = self._measured.get(job, (0, hashlib.sha256())) if rows is None else (0, hashlib.sha256())
        if rows is not None or job not in self._measured:
            for row in islice((row for row in self._rows() if row.job == job), rows):
                count += 1
                digest.update(row.line())
        if rows is None:
            self._measured[job] = count, digest
        return {"rows": count, "sha256": digest.hexdigest()}

    def flush(self) -> None:
        """Measurements are on disk before the checkpoint that relies on them."""
        with files.clear_errors(self.path):
            files.to_disk(self.path / "metrics.csv")

    def curves(self) -> dict[Job, Curves]:
        """Return all that was measured so far, in one pass; a measurement that is half written is left out."""
        found: dict[Job, Curves] = {}
        for (job, done), rows in groupby(self._rows(), key=lambda row: (row.job, row.round)):
            record = {"round": float(done)} | {row.metric: row.value for row in rows}
            if record.keys() >= (found[job].keys() if job in found else COSTS):
                curves = found.setdefault(job, {name: array("d") for name in record})
                for name, values in curves.items():
                    values.append(record[name])
        return found

    def damage(self, job: Job) -> str:
        """Say what of a finished job is not as it was written: its measurements or its model; nothing if all is."""
        facts = next((facts for facts in self._entries() if (facts["method"], facts["trial"]) == job), {})
        known, sha, model = facts.get("measured"), facts.get("model_sha256"), self.model_path(job)
        if known and self.measured(job, known["rows"]) != known:
            return f"metrics.csv was changed or cut short: the measurements of {job} are not those that were written"
        if facts and not known:  # of an earlier version
            last = max((row.round for row in self._rows() if row.job == job), default=-1)
            if last < facts["rounds"]:
                there = f"end at round {last} of {facts['rounds']}" if last >= 0 else "are missing"
                return f"metrics.csv was cut short: the measurements of {job} {there}"
        return _difference(model, f"models/{model.name}", sha) if sha else ""

    def write_checksums(self, *names: str) -> None:
        """Write SHA256SUMS, with all files of the run; where there is one, only add these files to it."""
        found = self._sums() if names else {}
        paths = [self.path / name for name in names]
        if not found:  # pages, logs and exported models may be written again by other commands
            paths += [p for kind in SEALED for p in self.path.glob(kind) if p.name[0] != "."]
        found |= {p.relative_to(self.path).as_posix(): files.file_digest(p) for p in paths}
        order = sorted(found, key=lambda name: (name == "run.toml", name))  # a list that was cut has no run.toml
        files.write_atomically(self.path / SUMS, "".join(f"{found[name]}  {name}\n" for name in order).encode())

    def is_complete(self) -> bool:
        """Return whether all files of a finished run are there, SHA256SUMS as the last; earlier versions had none."""
        entries = self._entries()
        return bool(entries) and ((self.path / SUMS).exists() or not any("measured" in facts for facts in entries))

    def remove_checksums(self) -> None:
        """Remove SHA256SUMS before files change."""
        with files.clear_errors(self.path):
            (self.path / SUMS).unlink(missing_ok=True)

    def changed_files(self, checkpoints: bool = True) -> list[str]:
        """Return a line for each file that SHA256SUMS does not know as it is; a run.toml may have been edited."""
        try:
            known = self._sums()
        except InputError as error:
            return [str(error)]
        names = [name for name in known if checkpoints or not name.startswith("checkpoints/")]
        return [*filter(None, (_difference(self.path / name, name, known[name]) for name in names))]

    def damages(self) -> list[str]:
        """Return a line for each file that is not as it was written, as far as closing numbers depend on it."""
        jobs, said = [Job(result["method"], result["trial"]) for result in self.results()], self.about()
        lines = [line for line in map(self.damage, jobs) if line] + self.changed_files(checkpoints=False)
        whole = len(jobs) >= (said.trials or 1) * max(1, len(said.algorithms))
        return lines + ([MISSING] if whole and not self.is_complete() and not self.running() else [])

    def _sums(self) -> dict[str, str]:
        """What SHA256SUMS holds; nothing if there is none."""
        try:
            lines = (self.path / SUMS).read_text().splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            lines = [""]
        found = {line[66:]: line[:64] for line in lines if re.fullmatch(r"[0-9a-f]{64}  [^/.].*", line)}
        if len(found) < len(lines) or "run.toml" not in found:
            raise InputError(f"{self.path / SUMS} was changed or cut short; delete it if all else is right")
        return found

    def records(self, method: str, trial: int) -> list[Record]:
        """Return what was measured of one method, a record for each measurement."""
        curves = self.curves().get(Job(method, trial), {})
        return [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]

    def delete_after(self, job: Job, done: int) -> None:
        """Drop the measurements of rounds that will be run again."""
        with self._writing():
            self._measured.pop(job, None)
            if any(row.job == job and row.round > done for row in self._rows()):
                self._rewrite(row for row in self._rows() if row.job != job or row.round <= done)

    def sort_jobs(self, jobs: Sequence[Job]) -> None:
        """Put measurements and closing numbers of jobs that ran at the same time into this order."""
        place = {job: k for k, job in enumerate(jobs)}
        self._rewrite(iter(sorted(self._rows(), key=lambda row: place.get(row.job, len(place)))))
        self._write_results(sorted(self._entries(), key=lambda r: place.get(Job(r["method"], r["trial"]), len(place))))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Wait until no other process of this run writes; each locks run.toml meanwhile, which does not change."""
        with files.clear_errors(self.path), lock.exclusive(self.path / "run.toml"):
            yield

    def _rewrite(self, rows: Iterator[Row]) -> None:
        with files.replacing(self.path / "metrics.csv") as part, part.open("wb") as file:
            file.write(HEADING)
            file.writelines(row.line() for row in rows)

    def _rows(self) -> Iterator[Row]:
        """Yield the complete lines of metrics.csv; the checksums of earlier versions, a sixth column, are ignored."""
        path = self.path / "metrics.csv"
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        with file:
            for number, line in enumerate(file, 1):
                if number == 1 or not line.endswith(b"\n"):
                    continue
                try:
                    method, trial, done, metric, value = line.decode().split(",")[:5]
                    yield Row(Job(method, int(trial)), int(done), metric, float(value))
                except ValueError:
                    raise InputError(
                        f"{path}, line {number} was changed since it was written; "
                        "put the file back from a copy, or delete the lines of that round"
                    ) from None

    def results(self) -> list[dict[str, Any]]:
        """Return the closing numbers of what is finished."""
        return [{name: v for name, v in facts.items() if name != "measured"} for facts in self._entries()]

    def _entries(self) -> list[dict[str, Any]]:
        """What results.json holds, checked."""
        path = self.path / "results.json"
        if not path.exists():
            return []
        results = []
        for entry in files.from_json(path, list):
            facts = files.verified(entry) if isinstance(entry, dict) else {}
            if facts is None:
                job = f"{entry.get('method')}-{entry.get('trial')}"
                raise InputError(f"{path} was changed: the numbers of {job} are not those that were written")
            if not {"method", "trial", "rounds"} <= facts.keys():
                raise InputError(f"{path} was changed: each entry needs method, trial and rounds")
            results.append(facts)
        return results

    def _write_results(self, entries: Sequence[dict[str, Any]]) -> None:
        files.write_atomically(self.path / "results.json", files.to_json([files.add_checksum(r) for r in entries]))

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return the closing numbers of one job; None before its end."""
        return next((r for r in self.results() if (r["method"], r["trial"]) == job), None)

    def finish(self, job: Job, result: dict[str, Any], model: Model | None) -> dict[str, Any]:
        """Keep the model, if there is one, then the closing numbers; these as `results` gives them back."""
        facts = {"method": job.method, "trial": job.trial, **result}
        if model is not None:
            path = self.model_path(job)
            with files.clear_errors(self.path):
                path.parent.mkdir(exist_ok=True)
            tensors = {k: v.detach().cpu().contiguous() for k, v in model.parameters.items()}
            about = json.dumps({"order": list(tensors), **model.about()})
            data = save(tensors, metadata={"fednmap": about})  # several keys would change places
            files.write_atomically(path, data)
            facts["model_sha256"] = hashlib.sha256(data).hexdigest()
        with self._writing():
            others = [r for r in self._entries() if (r["method"], r["trial"]) != job]
            self._write_results([*others, facts | {"measured": self.measured(job)}])
        return dict(files.finite(facts))

    def model(self, job: Job) -> Model | None:
        """Return what was trained; None before the end."""
        path = self.model_path(job)
        if not path.exists():
            return None
        known = (self.result(job) or {}).get("model_sha256")
        try:
            if known and known != files.file_digest(path):
                raise InputError("it is not the file that results.json knows")
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("fednmap", "{}"))
                parameters = {name: file.get_tensor(name) for name in about.get("order") or list(file.keys())}
                return Model.of(parameters, about)
        except (SafetensorError, ValueError, TypeError, AttributeError, OSError) as error:
            raise InputError(f"{path} was changed or cut short: {error}") from None

    def model_path(self, job: Job) -> Path:
        return self.path / "models" / f"{job}.safetensors"

    def checkpoints(self, job: Job) -> Path:
        return self.path / "checkpoints" / str(job)

    def running(self) -> bool:
        """Return whether the run is going on now."""
        return lock.is_held(self.path / files.LOCK)


def _difference(path: Path, name: str, digest: str) -> str:
    """Say how a file differs from the one with this digest; nothing if it does not."""
    now = files.file_digest(path)
    return "" if now == digest else f"{name} is {'not the file that was written' if now else 'missing'}"


def provenance(settings: dict[str, Any]) -> dict[str, Any]:
    """Return where results come from: command, time, versions, settings."""
    return {
        "command": redacted(_command()),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in VERSIONS},
        "settings": settings,
    }


def _command() -> list[str]:
    """What a person typed; nothing in a process that another program started, such as Flower's."""
    program, *arguments = sys.argv or [""]
    path = Path(program)
    if path.stem == "fednmap" or (path.name == "__main__.py" and path.parent.name == "fednmap"):
        return ["fednmap", *arguments]
    return ["python", program, *arguments] if path.suffix == ".py" and path.name != "__main__.py" else []


def redacted(words: Sequence[str]) -> list[str]:
    """Return a command without its secrets: the values of options named token, password or secret.

    >>> redacted(["run", "--token", "abc", "--rounds", "3", "-c", "db-password='x y' rounds=3"])
    ['run', '--token', '***', '--rounds', '3', '-c', 'db-password=*** rounds=3']
    """
    text = OPTION.sub(r"\1***", "\0".join(words))
    return [ASSIGNMENT.sub(r"\1***", word) for word in text.split("\0")] if words else []


def _fresh(path: Path) -> Path:
    """`path`, or with a number behind it: a folder that did not exist before this call."""
    fresh, k = path, 1
    with files.clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                fresh.mkdir()
                return fresh
            except FileExistsError:
                k += 1
                fresh = path.with_name(f"{path.name}-{k}")
