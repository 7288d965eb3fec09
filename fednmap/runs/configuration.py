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
    intercept: bool | None = Field(
        None,
        description="Unpenalised intercept in logistic and least-squares models; default: with one file per client.",
    )
    standardize: bool | None = Field(
        None,
        description="Scale columns to deviation 1 (and, with an intercept, mean 0); default: with one file per client.",
    )
    weights: Literal["clients", "samples"] = Field(
        "clients", description="What counts the same in f: clients, or samples."
    )
    clients: int = Field(20, ge=1, description="Number of clients n; a natural partition has its own.")
    partition: str = Field(
        "auto", description="How samples are divided: sorted, iid, shards[:k], dirichlet[:alpha] or natural."
    )
    algorithms: tuple[str, ...] = Field(("fednmap",), min_length=1, description="Methods to run.")
    penalty: str = Field("l1:0.001", description="Penalty phi with its weight; see `fednmap list regularizers`.")
    penalty_only: str | None = Field(
        None, description="Penalise only `weights`, or parameters whose name fits a pattern."
    )
    gamma: float | None = Field(None, gt=0, description="FedNMap's prox parameter; default 4 eta_a eta_s Q.")
    memory: int = Field(
        0,
        ge=0,
        le=1000,
        description="Quasi-Newton memory of FedNMap's server, 10 to 40 pairs; for exact gradients (batch size 0).",
    )
    eta_a: float = Field(0.2, gt=0, description="Local step size; with a schedule, its first value.")
    schedule: str = Field(
        "constant", description="Schedule of eta_a: constant, cosine[:LAST], sqrt, or steps:FACTOR,EVERY."
    )
    eta_s: float = Field(1.0, gt=0, description="Server step size.")
    local_steps: int = Field(10, ge=1, description="Local steps Q of a round.")
    rounds: int = Field(200, ge=0, description="Communication rounds T.")
    tol: float | None = Field(None, gt=0, lt=1, description="Stop when |F_nat| is at most this times its first value.")
    tol_absolute: float | None = Field(None, gt=0, description="Stop when |F_nat| is at most this.")
    time_limit: float | None = Field(None, gt=0, description="Stop after this many seconds of computing and measuring.")
    patience: int | None = Field(
        None, ge=1, description="Stop when psi has not fallen by 0.01 % in this many measurements."
    )
    batch_size: int = Field(32, ge=0, description="Samples per local step; 0 for exact gradients.")
    minibatches: Literal["replacement", "reshuffle"] = Field(
        "replacement", description="How samples are drawn: replacement, or reshuffle (each once per epoch)."
    )
    participation: float = Field(1.0, gt=0, le=1, description="Share of the clients drawn in a round.")
    sampler: str = Field("uniform", description="Who takes part: uniform, poisson, cyclic, or trace:FILE.")
    drop: float = Field(0.0, ge=0, lt=1, description="Probability that a reply, or on a graph a link, is lost.")
    topology: str | None = Field(
        None, description="Graph of methods without a server: ring, torus, ...; see `fednmap list topologies`."
    )
    asynchronous: str | None = Field(
        None,
        description="Do not wait for all clients: the server steps after buffer:K replies or window:TIME; with all or "
        "deadline:TIME it waits, on the same virtual clock.",
    )
    delays: str = Field(
        "constant", description="Virtual time of a job with --async: constant, exponential, pareto:1.2, trace:FILE, ..."
    )
    slowdown: str | None = Field(
        None, description="Factor per client on its delays with --async: lognormal:1.2, or numbers such as 1,1,20."
    )
    staleness: int | None = Field(
        None, ge=0, description="Wait for replies that would be later than this many steps of the server, with --async."
    )
    secagg: bool = Field(False, description="Secure aggregation: the server sees only the sum of the uplinks.")
    secagg_bound: float | None = Field(
        None,
        gt=0,
        description="Largest norm of an uplink with secagg; it sets the rounding. Default 2^20 (Flower: norm-bound).",
    )
    secagg_bits: int | None = Field(None, description="Bits per number of a masked uplink: 32 or 64; default 64.")
    seed: int = Field(
        0, ge=0, lt=2**32, description="Random seed of first model, partition, minibatches and participation."
    )
    trials: int = Field(1, ge=1, description="Independent repetitions, with seeds seed, seed + 1, ...")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the computation.")
    device: str = Field("cpu", description="Torch device, such as cpu or cuda.")
    eval_every: int = Field(10, ge=1, description="Rounds between measurements.")
    eval_samples: int | None = Field(
        None, ge=1, description="Measure on this many training samples, evenly spaced; on all after the last round."
    )
    eval_last: int = Field(1, ge=1, description="Measure after each of this many last rounds.")
    measure_gamma: float | None = Field(
        None, gt=0, description="gamma of |F_nat|^2; default 1 / smoothness of f, the same for all methods."
    )
    checkpoint_every: int = Field(50, ge=1, description="Rounds between checkpoints.")
    chunk: int | None = Field(None, ge=1, description="Clients computed in one batch.")
    dp_clip: float | None = Field(None, gt=0, le=1e30, description="Differential privacy: clip uplinks to this norm.")
    dp_noise: float | None = Field(None, ge=0, description="Noise on the clipped sum, in units of dp_clip.")
    dp_epsilon: float | None = Field(
        None, gt=0, description="Choose the noise so that all rounds together spend this epsilon."
    )
    dp_budget: float | None = Field(
        None, gt=0, description="Refuse rounds that would spend more epsilon than this; default dp_epsilon."
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of the guarantee, below 1 / clients.")
    dp_forget: float | None = Field(
        None, ge=0, le=1, description="Share of a control variate that is forgotten per round; default 0.5 with noise."
    )
    dp_unit: Literal["client", "example"] = Field(
        "client", description="Unit of privacy: a client, or one example of a client."
    )
    dp_among: int | None = Field(
        None,
        ge=1,
        description="Clients add the noise themselves; this many together add enough. Default: the server adds it.",
    )
    aggregate: str = Field(
        "mean", description="Aggregation of the uplinks: mean, median, trimmed[:SHARE], ..., clip:C."
    )
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

    def named(kind: str, base: type | None = None) -> None:
        known = _registries()[setting]
        look_up(kind, parted(value.strip(), known)[0], known, base)

    checks: dict[str, Callable[[], object]] = {
        "data": lambda: named("data set"),
        "model": lambda: named("model"),
        "penalty": lambda: named("regularizer", Regularizer),
        "partition": lambda: choose(
            "partition", value.partition(":")[0], dict.fromkeys([*PARTITIONS, "natural", "auto"])
        ),
        "sampler": lambda: sampler_of(value, 1.0),
        "schedule": lambda: schedule_of(value, 1.0, 1),
        "topology": lambda: check_name(value),
        "aggregate": lambda: centre_of(value),
        "attack": lambda: attack_of(value),
        "asynchronous": lambda: rule_of(value),
        "delays": lambda: delays_of(value, None, None, 0),
        "slowdown": lambda: factors(value, None),
    }
    checks[setting]()


def _refuse(mistakes: Iterable[str | None], values: T) -> T:
    if found := [mistake for mistake in mistakes if mistake]:
        raise InputError("\n".join(found))
    return values


def _conflicts(config: Config) -> Iterator[tuple[Any, str]]:
    """Yield a condition under which settings do not go together, and the line that says so."""
    from fednmap.algorithms import WITH_MEMORY
    from fednmap.core import Algorithm
    from fednmap.decentralized import method

    def given(*settings: str) -> str:
        """Return the first of the settings that is given, and its value."""
        return next((f"{name} is {v}" for name in settings if (v := getattr(config, name)) is not None), "")

    kinds = {name: method(name) for name in config.algorithms}
    served = {name: kind for name, kind in kinds.items() if issubclass(kind, Algorithm)}
    names, with_server = ", ".join(kinds), ", ".join(served)
    serverless = ", ".join(name for name in kinds if name not in served)
    unknown = [name for name in config.labels if name not in kinds]
    yield unknown, f"expected labels of {names}, got one of {', '.join(unknown)}; name a method that runs"
    called = [config.labels.get(name, name) for name in kinds]
    yield (
        len(set(called)) < len(called),
        f"expected labels that differ, got {', '.join(called)}; change one",
    )
    everybody = ", ".join(name for name, kind in served.items() if kind.traits.full_participation)
    memory, graph, aggregate = given("memory"), given("topology"), f"aggregate is {config.aggregate}"
    sampling = f"participation = {config.participation} and sampler = {config.sampler}"
    sampled = config.participation < 1 or config.sampler != "uniform"
    robust = config.aggregate != "mean"

    has_memory = any(kind in (*WITH_MEMORY, *WITH_MEMORY.values()) for kind in kinds.values())
    yield config.memory and not has_memory, f"{memory}, and {names} has none; leave it out, or use fednmap"
    needs = f"{serverless} has no server and needs a graph; give topology, such as --topology ring"
    yield serverless and not graph, needs
    without = "leave topology out, or use norm-ed, norm-dsgt, pg-extra or prox-dsgd"
    yield served and graph, f"{graph}, and {with_server} works with a server; {without}"
    links = "leave them out, drop says how many links fail"
    yield graph and sampled, f"{graph}: on a graph every node takes part in every round, given {sampling}; {links}"
    all_take_part = f"{everybody} needs every client in every round, given {sampling} and drop = {config.drop}"
    wrong = everybody and (sampled or config.drop > 0)
    yield wrong, f"{all_take_part}; use participation = 1 and drop = 0, or fednmap"
    tolerance, samples = given("tol", "tol_absolute").partition(" ")[0], given("eval_samples")
    yield tolerance and samples, f"{samples}, and {tolerance} is judged on all samples; leave one of them out"

    late, timed = given("asynchronous"), given("slowdown", "staleness")
    timed = f"delays is {config.delays}" if config.delays != "constant" else timed
    yield timed and not late, f"{timed}: only for asynchronous runs; add --async window:2, say"
    yield late and graph, f"{graph} with {late}: methods on a graph wait for their neighbours; leave one out"
    sums = f"{late}: secure aggregation, privacy and robust rules are for rounds that end for all clients together"
    changed = config.secagg or config.dp_clip or robust or config.attack
    yield late and changed, f"{sums}; leave --async out, or secagg, dp_clip, aggregate and attack"
    yield late and config.sampler != "uniform", f"{late}: jobs go to clients without one; leave sampler out"

    masks, bits = given("secagg_bound", "secagg_bits"), config.secagg_bits
    yield masks and not config.secagg, f"{masks} without secure aggregation; add secagg = true"
    yield bits not in (None, 32, 64), f"secagg_bits is {bits}; use 32 or 64"
    rounding = "secagg_bits = 32 rounds to steps of bound x clients / 2^31; set secagg_bound"
    yield bits == 32 and config.secagg_bound is None, rounding
    yield config.secagg and robust, f"{aggregate} with secagg, which shows the server sums alone; use one"

    clip, rows, among = given("dp_clip"), config.dp_unit == "example", given("dp_among")
    private = given("dp_noise", "dp_epsilon", "dp_budget", "dp_forget", "dp_among")
    noise = config.dp_noise or config.dp_epsilon
    both = config.dp_noise is not None and config.dp_epsilon is not None
    yield private and not clip, f"{private} without dp_clip: noise hides what is bounded only"
    yield both, "dp_noise and dp_epsilon are both given; one follows from the other, so leave one out"
    budget = "dp_budget is given without noise: epsilon is infinite; give dp_noise or dp_epsilon"
    yield config.dp_budget and not noise, budget
    yield among and not noise, "dp_among says who adds the noise, and there is none; give dp_noise or dp_epsilon"
    clients, sampler = noise and not rows, config.sampler
    poisson = f"the accounting assumes Poisson sampling, given {sampling}; use sampler = poisson"
    yield clients and config.participation < 1 and sampler != "poisson", poisson
    counted = f"sampler is {sampler}: privacy is counted for poisson, or uniform with everybody"
    yield clients and sampler not in ("poisson", "uniform"), counted
    yield clip and not rows and robust, f"{aggregate} with dp_clip: the noise is for a mean; use one of them"
    curvature = f"{memory}: what is clipped or noised shows no curvature; use memory = 0"
    yield config.memory and (clip or robust), curvature
    yield rows and among, "dp_among is for clients; with dp_unit = example every site adds its noise itself"


def _method_mistake(name: str) -> str | None:
    from fednmap.decentralized import method

    try:
        method(name)
    except InputError as error:
        return str(error)
    return None


def _parameter_mistake(key: str) -> str | None:
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
    return None if parameter in allowed else str(unknown(f"parameter of {name}", parameter, allowed))


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
