"""What a run is made from: one validated record, the same from the command line, from TOML and from Python.

The tables of names are loaded when a value is checked, so that the fields alone, for `--help`, cost little.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from fednmap.names import InputError, choose, current, is_code, look_up, parsed, parted, unknown

T = TypeVar("T")
Value = bool | int | float | str

NOT_NETWORKS = ("logistic", "least-squares", "auto")
"""Models that are not made of a torch module, and the word for a choice by the data."""

STOPPING = ("tol", "tol_absolute", "time_limit", "patience")
"""Settings that end a run before its rounds are done."""

REMOVED = [("compile", False)]
"""Settings of earlier versions, with the value that had no effect: files that have it stay readable."""

TIMING = ("asynchronous", "delays", "slowdown")
"""Settings of asynchronous runs that are text."""

LARGEST = 2**53  # whole numbers up to here are exact in torch, numpy and JSON


class Settings(BaseModel):
    """Settings that may be given under a former name for one version more, with a warning that has the new one."""

    RENAMED: ClassVar[dict[str, str]] = {}
    """Former name -> name."""

    @model_validator(mode="before")
    @classmethod
    def _current(cls, values: Any) -> Any:
        return current(values, cls.RENAMED) if isinstance(values, dict) else values


class Config(Settings):
    """All settings of a run; the description of each is its help text."""

    RENAMED = {"reg": "penalty", "reg_only": "penalty_only"}
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    data: str = Field("digits", description="Data set; see `fednmap list datasets`.")
    test: str | None = Field(None, description="File with test samples, for svm:PATH.")
    model: str = Field("auto", description="logistic, least-squares, or a network: linear, mlp:64, cnn, ...")
    intercept: bool | None = Field(None, description="Unpenalised intercept; default: with one file per client.")
    standardize: bool | None = Field(None, description="Standardise columns; default: with one file per client.")
    weights: Literal["clients", "samples"] = Field("clients", description="Give equal weight to clients or samples.")
    clients: int = Field(20, ge=1, description="Number of clients n; a natural partition has its own.")
    partition: str = Field("auto", description="Partition: sorted, iid, shards[:k], dirichlet[:alpha] or natural.")
    algorithms: tuple[str, ...] = Field(("fednmap",), min_length=1, description="Methods to run.")
    penalty: str = Field("l1:0.001", description="Penalty phi with its weight; see `fednmap list regularizers`.")
    penalty_only: str | None = Field(None, description="Penalise only `weights`, or parameters that match a pattern.")
    gamma: float | None = Field(None, gt=0, description="FedNMap's prox parameter; default 4 eta_a eta_s Q.")
    memory: int = Field(0, ge=0, le=1000, description="Pairs of FedNMap's quasi-Newton memory; needs batch size 0.")
    eta_a: float = Field(0.2, gt=0, description="Local step size; with a schedule, its first value.")
    schedule: str = Field("constant", description="eta_a by round: constant, cosine[:LAST], sqrt, steps:FACTOR,EVERY.")
    eta_s: float = Field(1.0, gt=0, description="Server step size.")
    local_steps: int = Field(10, ge=1, description="Local steps Q of a round.")
    local_momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of local steps, 0 at the start of a round.")
    local_decay: float = Field(1.0, gt=0, le=1, description="Factor on the step size after each local step of a round.")
    rounds: int = Field(200, ge=0, description="Communication rounds T.")
    tol: float | None = Field(None, gt=0, lt=1, description="Stop when |F_nat| is at most this times its first value.")
    tol_absolute: float | None = Field(None, gt=0, description="Stop when |F_nat| is at most this.")
    time_limit: float | None = Field(None, gt=0, description="Stop after this many seconds of computing and measuring.")
    patience: int | None = Field(None, ge=1, description="Stop if psi falls by less than 0.01 % in N measurements.")
    batch_size: int = Field(32, ge=0, description="Samples per local step; 0 for exact gradients.")
    minibatches: Literal["replacement", "reshuffle"] = Field(
        "replacement", description="Draw samples with replacement, or reshuffle (each once per epoch)."
    )
    participation: float = Field(1.0, gt=0, le=1, description="Share of the clients drawn in a round.")
    sampler: str = Field("uniform", description="Who takes part: uniform, poisson, cyclic, or trace:FILE.")
    drop: float = Field(0.0, ge=0, lt=1, description="Probability that a reply, or on a graph a link, is lost.")
    topology: str | None = Field(None, description="Graph of methods without a server; see `fednmap list topologies`.")
    asynchronous: str | None = Field(
        None,
        description="When the server steps, on a virtual clock: buffer:K replies, window:TIME, deadline:TIME, or all.",
    )
    delays: str = Field("constant", description="Duration of a job with --async: exponential, trace:FILE, ...")
    slowdown: str | None = Field(None, description="Factor on a client's delays with --async: lognormal:1.2 or 1,1,20.")
    staleness: int | None = Field(None, ge=0, description="Most server steps that a reply may be late, with --async.")
    secagg: bool = Field(False, description="Secure aggregation: the server sees only the sum of the uplinks.")
    secagg_bound: float | None = Field(None, gt=0, description="Largest norm of an uplink with secagg; default 2^20.")
    secagg_bits: int | None = Field(None, description="Bits per number of a masked uplink: 32 or 64; default 64.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of first model, partition, minibatches and participation.")
    trials: int = Field(1, ge=1, description="Independent repetitions, with seeds seed, seed + 1, ...")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the computation.")
    device: str = Field("cpu", description="Torch device, such as cpu or cuda.")
    eval_every: int = Field(10, ge=1, description="Rounds between measurements.")
    eval_samples: int | None = Field(None, ge=1, description="Measure on this many samples; at the end on all.")
    eval_last: int = Field(1, ge=1, description="Measure after each of this many last rounds.")
    measure_gamma: float | None = Field(None, gt=0, description="gamma of |F_nat|^2; default 1 / smoothness of f.")
    checkpoint_every: int = Field(50, ge=1, description="Rounds between checkpoints.")
    chunk: int | None = Field(None, ge=1, description="Clients computed in one batch.")
    dp_clip: float | None = Field(None, gt=0, le=1e30, description="Differential privacy: clip uplinks to this norm.")
    dp_noise: float | None = Field(None, ge=0, description="Noise on the clipped sum, in units of dp_clip.")
    dp_epsilon: float | None = Field(None, gt=0, description="Choose the noise so that all rounds spend this epsilon.")
    dp_budget: float | None = Field(None, gt=0, description="Refuse rounds beyond this epsilon; default dp_epsilon.")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of the guarantee, below 1 / clients.")
    dp_forget: float | None = Field(
        None, ge=0, le=1, description="Share of a control variate forgotten per round; default 0.5 with noise."
    )
    dp_unit: Literal["client", "example"] = Field("client", description="Unit of privacy: a client, or one example.")
    dp_among: int | None = Field(
        None, ge=1, description="This many clients together add enough noise; default: the server adds it."
    )
    aggregate: str = Field("mean", description="Aggregation: mean, median, trimmed[:SHARE], ..., clip:C.")
    attack: str | None = Field(None, description="Let the first COUNT clients send wrong vectors: KIND:COUNT[,SIZE].")
    set: dict[str, Value] = Field({}, description="Parameters of single methods, such as fedda.eta_s = 0.5.")
    labels: dict[str, str] = Field({}, description="What methods are called in tables, plots and reports.")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and bool not in _kinds(cls.model_fields[str(info.field_name)]):
            raise InputError("true and false are not numbers")  # Python would count with them
        if isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"{shown(str(value), 40)} is larger than anything that can be counted; use less")
        return value

    @field_validator(
        "data", "model", "partition", "penalty", "sampler", "schedule", "topology", "aggregate", "attack", *TIMING
    )
    @classmethod
    def _known_name(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            _check_name(str(info.field_name), value)
        return value

    @field_validator("algorithms")
    @classmethod
    def _known_methods(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        repeated = [f"{value!r} is named {values.count(value)} times; name it once" for value in twice]
        return _refuse([*map(_method_mistake, values), *repeated], values)

    @field_validator("set")
    @classmethod
    def _known_parameters(cls, values: dict[str, Value]) -> dict[str, Value]:
        return _refuse(map(_parameter_mistake, values), values)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        for wrong, line in _conflicts(self):
            if wrong:
                raise InputError(line)
        return self

    @classmethod
    def make(cls, **values: Any) -> Config:
        """Validate the settings as a whole; one InputError has a line for each mistake."""
        try:
            return cls.model_validate({name: v for name, v in values.items() if (name, v) not in REMOVED})
        except ValidationError as error:
            lines = [line for mistake in error.errors(include_url=False) for line in _lines(mistake)]
            raise InputError("\n".join(dict.fromkeys(lines))) from None

    @classmethod
    def read(cls, path: Path, *, trust: bool = False) -> Config:
        """Read a TOML file.

        trust: load the code that it names, as package.module:Name; otherwise a file that names code is refused.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not valid TOML: {shown(str(error), 120)}") from None
        if not trust and (code := code_in(values)):
            raise InputError(f"{path} names code to load, {shown(code[0], 80)}; if you trust it, add --trust-code")
        try:
            return cls.make(**values)
        except InputError as error:
            raise InputError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    def toml(self) -> str:
        """As TOML, with what each setting means; `read` gives the same configuration back."""
        lines = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None:
                lines.append(f"# {name}: {field.description}")
            elif not isinstance(value, dict):
                lines.append(f"# {field.description}\n{tomli_w.dumps({name: value}).strip()}")
        tables = {name: value for name in ("set", "labels") if (value := getattr(self, name))}  # last, as TOML has them
        return "\n".join(lines) + "\n" + tomli_w.dumps(tables)


def parse_set(assignments: list[str] | None) -> dict[str, Any]:
    """METHOD.PARAMETER=VALUE, with VALUE a number, true, false or a word."""
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise InputError(f"--set takes METHOD.PARAMETER=VALUE, such as fedda.eta_s=0.5, given {assignment!r}")
        values[key.strip()] = parsed(text.strip())
    return values


def _registries() -> dict[str, Mapping[str, Any]]:
    """Setting -> the names it takes; it also takes code of the user's own, package.module:Name."""
    from fednmap.algorithms import ALGORITHMS
    from fednmap.data import DATASETS
    from fednmap.decentralized import DECENTRALIZED, TOPOLOGIES
    from fednmap.models.build import MODELS
    from fednmap.regularizers import REGULARIZERS

    methods = {**ALGORITHMS, **DECENTRALIZED}
    models: dict[str, Any] = {**MODELS, **dict.fromkeys(NOT_NETWORKS)}
    return {"data": DATASETS, "model": models, "penalty": REGULARIZERS, "topology": TOPOLOGIES, "algorithms": methods}


def code_in(values: Mapping[str, Any]) -> list[str]:
    """Return the settings among `values` that name code to load, as package.module:Name."""
    values, registries = current(values, Config.RENAMED, None), _registries()
    methods, overrides = values.get("algorithms"), values.get("set")
    words = [*methods] if isinstance(methods, list | tuple) else []
    for key, value in overrides.items() if isinstance(overrides, dict) else ():
        words += [key.rpartition(".")[0], *([value] if key.endswith(".of") else [])]
    known = registries.pop("algorithms")
    named = [*((values.get(name), names) for name, names in registries.items()), *((word, known) for word in words)]
    return [spec for spec, names in named if isinstance(spec, str) and is_code(spec.strip(), names)]


def _check_name(setting: str, value: str) -> None:
    """Refuse a name that stands for nothing."""
    from fednmap.asynchronous import delays_of, factors, rule_of
    from fednmap.core import Regularizer
    from fednmap.data import PARTITIONS
    from fednmap.decentralized.topologies import check_name
    from fednmap.privacy.robust import attack_of, centre_of
    from fednmap.simulation.participation import sampler_of
    from fednmap.simulation.schedules import schedule_of

    checks: dict[str, Callable[[str], object]] = {
        "partition": lambda v: choose(
            "partition", v.partition(":")[0], dict.fromkeys([*PARTITIONS, "natural", "auto"])
        ),
        "sampler": lambda v: sampler_of(v, 1.0),
        "schedule": lambda v: schedule_of(v, 1.0, 1),
        "topology": check_name,
        "aggregate": centre_of,
        "attack": attack_of,
        "asynchronous": rule_of,
        "delays": lambda v: delays_of(v, None, None, 0),
        "slowdown": lambda v: factors(v, None),
    }
    if setting in checks:
        checks[setting](value)
        return
    kind = {"data": "data set", "model": "model", "penalty": "regularizer"}[setting]
    known = _registries()[setting]
    look_up(kind, parted(value.strip(), known)[0], known, Regularizer if setting == "penalty" else None)


def _refuse(mistakes: Iterable[str], values: T) -> T:
    if found := [*filter(None, mistakes)]:
        raise InputError("\n".join(found))
    return values


def _conflicts(c: Config) -> Iterator[tuple[Any, str]]:
    """Yield a condition under which settings do not go together, and the line that says so."""
    from fednmap.algorithms import WITH_MEMORY
    from fednmap.core import Algorithm
    from fednmap.decentralized import method

    def given(*settings: str) -> str:
        """Return the first of the settings that is given, and its value."""
        return next((f"{name} is {v}" for name in settings if (v := getattr(c, name)) is not None), "")

    kinds = {name: method(name) for name in c.algorithms}
    served = {name: kind for name, kind in kinds.items() if issubclass(kind, Algorithm)}
    names, with_server = ", ".join(kinds), ", ".join(served)
    serverless = ", ".join(name for name in kinds if name not in served)
    everybody = ", ".join(name for name, kind in served.items() if kind.traits.full_participation)
    called = [c.labels.get(name, name) for name in kinds]
    others = ", ".join(name for name in c.labels if name not in kinds)
    yield others, f"expected labels of {names}, got one of {others}; name a method that runs"
    yield len({*called}) < len(called), f"expected labels that differ, got {', '.join(called)}; change one"

    memory, graph, aggregate = given("memory"), given("topology"), f"aggregate is {c.aggregate}"
    has_memory = any(kind in (*WITH_MEMORY, *WITH_MEMORY.values()) for kind in kinds.values())
    yield c.memory and not has_memory, f"{memory}, and {names} has none; leave it out, or use fednmap"
    sampling = f"participation = {c.participation} and sampler = {c.sampler}"
    sampled, robust = c.participation < 1 or c.sampler != "uniform", c.aggregate != "mean"
    needs = f"{serverless} has no server and needs a graph; give topology, such as --topology ring"
    yield serverless and not graph, needs
    without = "leave topology out, or use norm-ed, norm-dsgt, pg-extra or prox-dsgd"
    yield served and graph, f"{graph}, and {with_server} works with a server; {without}"
    links = "leave them out, drop says how many links fail"
    yield graph and sampled, f"{graph}: on a graph every node takes part in every round, given {sampling}; {links}"
    everyone = f"{everybody} needs every client in every round, given {sampling} and drop = {c.drop}"
    yield everybody and (sampled or c.drop > 0), f"{everyone}; use participation = 1 and drop = 0, or fednmap"
    tolerance, samples = given("tol", "tol_absolute").partition(" ")[0], given("eval_samples")
    yield tolerance and samples, f"{samples}, and {tolerance} is judged on all samples; leave one of them out"

    late = given("asynchronous")
    timed = f"delays is {c.delays}" if c.delays != "constant" else given("slowdown", "staleness")
    sums = f"{late}: secure aggregation, privacy and robust rules are for rounds that end for all clients together"
    yield timed and not late, f"{timed}: only for asynchronous runs; add --async window:2, say"
    yield late and graph, f"{graph} with {late}: methods on a graph wait for their neighbours; leave one out"
    changed = c.secagg or c.dp_clip or robust or c.attack
    yield late and changed, f"{sums}; leave --async out, or secagg, dp_clip, aggregate and attack"
    yield late and c.sampler != "uniform", f"{late}: jobs go to clients without one; leave sampler out"

    masks, bits = given("secagg_bound", "secagg_bits"), c.secagg_bits
    rounding = "secagg_bits = 32 rounds to steps of bound x clients / 2^31; set secagg_bound"
    yield masks and not c.secagg, f"{masks} without secure aggregation; add secagg = true"
    yield bits not in (None, 32, 64), f"secagg_bits is {bits}; use 32 or 64"
    yield bits == 32 and c.secagg_bound is None, rounding
    yield c.secagg and robust, f"{aggregate} with secagg: the server sees only the sum of the uplinks; use one of them"

    clip, by_row, noise = given("dp_clip"), c.dp_unit == "example", c.dp_noise or c.dp_epsilon
    private = given("dp_noise", "dp_epsilon", "dp_budget", "dp_forget", "dp_among")
    both = c.dp_noise is not None and c.dp_epsilon is not None
    unaccounted = f"sampler is {c.sampler}: privacy is counted for poisson, or uniform with everybody"
    fixed = f"the accounting assumes Poisson sampling, given {sampling}; use sampler = poisson"
    nobody = "dp_among says who adds the noise, and there is none; give dp_noise or dp_epsilon"
    yield private and not clip, f"{private} without dp_clip: noise protects only uplinks of bounded norm; add dp_clip"
    yield both, "dp_noise and dp_epsilon are both given; one follows from the other, so leave one out"
    yield c.dp_budget and not noise, "dp_budget without noise: epsilon is infinite; give dp_noise or dp_epsilon"
    yield c.dp_among and not noise, nobody
    yield noise and not by_row and c.participation < 1 and c.sampler != "poisson", fixed
    yield noise and not by_row and c.sampler not in ("poisson", "uniform"), unaccounted
    yield clip and not by_row and robust, f"{aggregate} with dp_clip: the noise is for a mean; use one of them"
    curvature = f"{memory}: clipped or noisy uplinks show no curvature; use memory = 0"
    yield c.memory and (clip or robust), curvature
    yield by_row and c.dp_among, "dp_among is for clients; with dp_unit = example every site adds its noise itself"


def _method_mistake(name: str) -> str:
    from fednmap.decentralized import method

    try:
        method(name)
    except InputError as error:
        return str(error)
    return ""


def _parameter_mistake(key: str) -> str:
    """Return what is wrong with METHOD.PARAMETER."""
    from fednmap.algorithms import WITH_MEMORY
    from fednmap.decentralized import method

    name, dot, parameter = key.rpartition(".")
    if not dot:
        return f"takes METHOD.PARAMETER=VALUE, such as fedda.eta_s=0.5, given {key!r}"
    if mistake := _method_mistake(name):
        return mistake
    kind: Any = method(name)
    allowed = [f.name for f in fields(WITH_MEMORY.get(kind, kind)) if f.name != "phi"]
    return "" if parameter in allowed else str(unknown(f"parameter of {name}", parameter, allowed))


def _lines(mistake: Any) -> list[str]:
    """Return a line for each mistake in one setting: what was given, what is allowed, what it means."""
    said = mistake.get("ctx", {}).get("error")
    if isinstance(said, ValueError) and not isinstance(said, InputError):
        raise said  # not the user's mistake
    if not mistake["loc"]:  # settings that do not go together
        return [str(said)]
    name = str(mistake["loc"][0])
    if mistake["type"] == "extra_forbidden":
        return [str(unknown("setting", name, Config.model_fields))]
    if mistake["type"] == "value_error" and not isinstance(mistake["input"], bool):
        return [f"{name}: {line}" for line in str(said).splitlines()]
    field = Config.model_fields[name]
    meaning = (field.description or "").removesuffix(".")
    return [f"{name} is {shown(repr(mistake['input']), 60)}; it must be {_allowed(field)} ({meaning})"]


def _kinds(field: FieldInfo) -> list[Any]:
    """Return the types of a setting, without None."""
    return [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]


def _allowed(field: FieldInfo) -> str:
    """Describe the values of a setting: its kind and its range."""
    if field.annotation == dict[str, Value]:
        return "a table of METHOD.PARAMETER = number, text, true or false"
    if field.annotation == tuple[str, ...]:
        return "a list of one name or more"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    kinds = _kinds(field)
    if kinds[0] not in words:
        return " or ".join(map(repr, kinds))
    ends = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = ((word, getattr(m, name, None)) for m in field.metadata for name, word in ends.items())
    parts = [f"{word} {limit}" for word, limit in limits if limit is not None]
    return words[kinds[0]] + (f", {' and '.join(parts)}" if parts else "")


def shown(text: str, width: int) -> str:
    """Return the text in one line of at most `width` characters, without what would upset a terminal."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= width else clean[: width - 3] + "..."
