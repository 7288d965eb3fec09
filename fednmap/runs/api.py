"""`fednmap.run`: run your own methods, problems and models in Python, kept in a run folder if one is named."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from fednmap.core import Algorithm, Problem, Regularizer, info_of
from fednmap.measure import problem_gamma
from fednmap.names import InputError
from fednmap.problems import Network
from fednmap.runs.atomic_files import from_toml, locked, write_atomically
from fednmap.runs.checkpoints import Checkpoint
from fednmap.runs.execution import DONE, Recorder, Task, run_and_record, stored_result
from fednmap.runs.fingerprints import described, identity
from fednmap.runs.folder import Job, Model, RunFolder
from fednmap.runs.process_pool import Interrupted, interrupts
from fednmap.simulation import Callback, Diverged, Record, Result, Round, simulate
from fednmap.simulation.callbacks import Listener, first_reason, listeners, name_of
from fednmap.simulation.loop import check_kinds, first_point, origin
from fednmap.simulation.participation import Sampler
from fednmap.simulation.schedules import Schedule
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool
from fednmap.simulation.trajectory import Metric, check_measuring, run_and_measure
from fednmap.simulation.uplink import Part, UplinkParts

INDEPENDENT = ("stop", "sample", "chunk", "threads")
"""Options on which no state depends, and `sample`, which is described by what it is made of."""

OPTIONAL = ("uplink", "secagg", "tag")
"""Options that the settings name only if they are given."""


def run(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    start: Tensor | None = None,
    participation: float = 1.0,
    drop: float = 0.0,
    seed: int = 0,
    sampler: Sampler | None = None,
    eta_a: float | Schedule | None = None,
    uplink: UplinkParts | None = None,
    secagg: Part | None = None,
    every: int = 10,
    closing: int = 1,
    phi: Regularizer | None = None,
    measure_gamma: float | None = None,
    metrics: Mapping[str, Metric] | None = None,
    sample: Problem | None = None,
    callbacks: Listener | Iterable[Listener] = (),
    stop: Listener | Iterable[Listener] | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    store: str | Path | None = None,
    after: Round | Result | None = None,
    before: Record | None = None,
    earlier: Iterable[Record] = (),
    history: bool = True,
    folder: str | Path | None = None,
    checkpoint_every: int = 50,
    tag: str | None = None,
) -> Result:
    """Run a method and measure it: before the first round, every `every` rounds and at the end.

    rounds:        how many there are in all, counted from the start of the run, even with `after` and in a folder.
    start, participation, drop, seed, sampler, eta_a, uplink, secagg, chunk, threads, store: as in `simulate`. With an
                   `uplink` that adds noise an epsilon is measured.

    every:         rounds between measurements.
    closing:       how many of the last rounds are all measured: a mean over them is less noisy than one of them.
    phi:           the regularizer of the objective that is measured; default the algorithm's own.
    measure_gamma: gamma of the natural residual; default that of the problem, see `fednmap.measure.problem_gamma`.
                   It costs 16 gradients of all clients, which count as `eval_seconds`.
    metrics:       more to measure: name -> function of the model x.
    sample:        what is measured in place of the problem, such as the same on fewer rows; the problem itself only
                   after the last of the rounds. `stop` receives what is measured.
    callbacks:     receive every round and every record: Callbacks, or functions of a record. One that returns True, or
                   a reason, ends the run.
    stop:          when to end early: Tolerance(1e-6), Patience(10), TimeLimit(60), or a function of a record; the first
                   of several that has a reason ends the run. `Result.ended` gives the reason.

    after:         the Result of an earlier call with the same arguments, or a Round of it, to continue from; `rounds`
                   must be above the rounds done. With a Round, `before` are the totals of bytes and seconds so far and
                   `earlier` the records, which `stop` and an epsilon need.
    history:       keep all records in the result; without, only the last, for long runs whose records a callback keeps.

    folder:        a run folder that `fednmap show` and `report` read: measurements, checkpoints, model and closing
                   numbers are written as they come. The same call again continues where an earlier one was stopped or
                   killed, to the same bits; when all rounds are done, or a callback of that name ended them, it returns
                   what was stored, and with more rounds it continues. Another method, problem, sampler, schedule or
                   metric is refused, even if only the source text of a function or a number it uses has changed; a
                   problem of your own that changes as it runs identifies itself by a `digest()`. Without `after`,
                   `before`, `earlier`, `history` and `store`.
    checkpoint_every: rounds between checkpoints.
    tag:           a name for the version of your own functions and classes; the folder then compares the tag in place
                   of their source text. Needed where that cannot be read.

    A run whose psi ends above its start warns, and says so in `Result.warning`. If the iterates become non-finite, the
    `Diverged` error carries what was measured so far as `.result`.

    >>> from fednmap.algorithms import FedNMap
    >>> from fednmap.regularizers import L1
    >>> from fednmap.testing import heterogeneous
    >>> result = run(FedNMap(L1(0.2), eta_a=0.02, Q=5), heterogeneous(), rounds=300)
    >>> result.final["stationarity"] < 1e-12
    True
    """
    simulated: dict[str, Any] = {"participation": participation, "drop": drop, "seed": seed, "sampler": sampler}
    simulated |= {"eta_a": eta_a, "uplink": uplink, "secagg": secagg, "chunk": chunk, "threads": threads}
    measured: dict[str, Any] = {"every": every, "closing": closing, "sample": sample, "stop": listeners(stop)}
    earlier_run: dict[str, Any] = {"after": after, "before": before, "earlier": [*earlier], "store": store}
    if folder is None:
        options = simulated | measured | earlier_run | {"phi": phi, "measure_gamma": measure_gamma, "metrics": metrics}
        options |= {"rounds": rounds, "start": start, "callbacks": callbacks, "history": history}
        return _warned(run_and_measure(algorithm, problem, **options))
    check_kinds(algorithm, problem)
    for name, value in (earlier_run | {"history": not history}).items():
        if value:
            raise InputError(f"{name} and folder do not go together: the folder says where the run continues")
    if checkpoint_every < 1:
        raise InputError(f"checkpoint_every is {checkpoint_every}; it must be at least 1")
    start, phi = first_point(problem, start), algorithm.phi if phi is None else phi
    if measure_gamma is None:
        with ThreadPool(threads) as pool:
            measure_gamma = problem_gamma(divided(problem, pool, here=True), phi, origin(problem, start))
    # what can be refused is refused before there is a folder
    check_measuring(every, closing, measure_gamma, metrics or {})
    simulate(algorithm, problem, rounds=rounds, start=start, **simulated)
    options = simulated | measured | {"phi": phi, "measure_gamma": measure_gamma, "metrics": metrics or None}
    settings = _settings(algorithm, problem, start, options, tag)

    def saved(x: Tensor) -> Model:
        return Model(problem.parameters(x) if isinstance(problem, Network) else {"x": x}, ())

    job = Job(algorithm.name.lower(), 0)
    task = Task(job, algorithm, problem, start, rounds, checkpoint_every, settings, options, saved, facts=settings)
    return _warned(_run_in_folder(Path(folder), task, listeners(callbacks)))


def _warned(result: Result) -> Result:
    if result.warning:
        warnings.warn(result.warning, stacklevel=3)
    return result


def _settings(
    algorithm: Algorithm, problem: Problem, start: Tensor, options: dict[str, Any], tag: str | None
) -> dict[str, Any]:
    """Describe what the states and measurements depend on; of the user's functions and objects all they hold."""
    given = {name: value for name, value in (options | {"tag": tag}).items() if name not in INDEPENDENT}
    found = {
        "algorithm": described(algorithm, tag),
        "problem": _problem(problem, tag),
        "start": hashlib.sha256(start.detach().cpu().contiguous().numpy().data).hexdigest(),
        "dtype": str(start.dtype).removeprefix("torch."),
        **{k: described(v, tag) for k, v in sorted(given.items()) if v is not None or k not in OPTIONAL},
    }
    sample = options["sample"]
    if sample is not None:
        data = info_of(sample).digest
        found["sample"] = _problem(sample, tag) if data is None else f"{_problem(sample, tag)}, {data()}"
    return found


def _problem(problem: Problem, tag: str | None) -> str:
    """Describe the problem, with a digest of what it is made of; its data have another digest."""
    words, said = f"{type(problem).__name__}, {problem.n} clients, {problem.dim} parameters", info_of(problem)
    if said.made_of is None:
        return words if said.digest is not None else f"{words}, {identity(problem, tag)}"
    made_of = said.made_of()
    shown = [f"{name} {value}" for name, value in made_of.items() if isinstance(value, bool | int | float | str)]
    return ", ".join([words, *shown, identity(made_of, tag)])


def _run_in_folder(path: Path, task: Task, callbacks: list[Callback]) -> Result:
    """Run the rounds that the folder does not hold yet, if any; return what it then holds."""
    if not (path / "run.toml").exists():
        about = {"made_in": "Python", "data": "own", "model": type(task.problem).__name__, "clients": task.problem.n}
        about |= {"penalty": str(described(task.options["phi"])), "rounds": task.rounds, "trials": 1}
        about |= {"algorithms": [task.job.method], "measure_gamma": task.options["measure_gamma"]}
        RunFolder.create(path, about | {"settings": task.settings}, "run")
    folder, digest = RunFolder.open(path), info_of(task.problem).digest
    if not folder.made_in_python():
        raise InputError(f"{path} was made by the command line; continue it there, by --resume {path}")
    with locked(path), interrupts() as stop_flag:
        for line in folder.check_settings(task.settings):
            warnings.warn(line, stacklevel=4)
        if digest is not None:
            folder.check_data_digest(digest())
        known = from_toml(path / "run.toml")
        same = known["rounds"] == task.rounds  # with other rounds a callback may end the run elsewhere
        enders = [name_of(callback) for callback in callbacks] if same else []
        closing = stored_result(folder, task.job, task.rounds, task.options["stop"], warnings.warn, enders)
        closing = closing or _ended_by_round(folder, task)
        if closing is None:
            folder.remove_checksums()
            folder.repair()
            if not same:
                write_atomically(path / "run.toml", tomli_w.dumps(known | {"rounds": task.rounds}).encode())
            try:
                closing = run_and_record(task, folder, callbacks, stop_flag)
                folder.write_checksums()
            except Interrupted:
                raise KeyboardInterrupt("stopped and saved; the same call continues") from None
    return _result(task, folder, closing)


def _ended_by_round(folder: RunFolder, task: Task) -> dict[str, Any] | None:
    """Return the closing numbers if a reason to stop that judges rounds ends the run after its last one."""
    closing = folder.result(task.job)
    kept = _latest(task, folder)
    if closing is None or kept is None or kept.t + 1 != closing["rounds"]:
        return None
    last, totals = kept.as_round(), kept.totals
    reason = first_reason(task.options["stop"], lambda callback: callback.on_round(last, totals))
    return closing | {"ended": reason} if reason is not None else None


def _latest(task: Task, folder: RunFolder) -> Checkpoint | None:
    return Recorder(task, folder).latest(task.algorithm, task.start, task.problem.n)[0]


def _result(task: Task, folder: RunFolder, closing: dict[str, Any]) -> Result:
    """Return what the folder holds as a Result."""
    kept = _latest(task, folder)
    records: list[Record] = folder.records(*task.job)
    ended = str(closing.get("ended", DONE))
    result = Result(task.problem, task.start, task.options["measure_gamma"], records)
    result.ended, result.ended_by = "" if ended == DONE else ended, str(closing.get("ended_by", ""))
    result.warning = closing.get("warning", "")
    if records:
        result.totals |= {name: records[-1][name] for name in result.totals}
    if "error" in closing:
        error = Diverged.from_message(closing["error"])
        error.result = result
        raise error
    model = folder.model(task.job)
    assert model is not None  # it was there when the run ended
    parameters = model.parameters
    x = task.problem.flat(parameters) if isinstance(task.problem, Network) else parameters["x"]
    result.x = x.to(task.start.device)
    if kept is not None and kept.t + 1 == closing["rounds"]:
        result.last = kept.as_round()
    return result
