"""What a run is made from: one validated record, the same from the command line, from TOML and from Python.

The tables of names are loaded when a value is checked, so that the fields alone, for `--help`, cost little.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from fednmap.names import InputError, is_code, look_up, parsed, parted, unknown

Value = bool | int | float | str

NOT_NETWORKS = ("logistic", "least-squares", "auto")
"""Models that are not made of a torch module, and the word for a choice by the data."""

STOPPING = ("tol", "tol_absolute", "time_limit", "patience")
"""Settings that end a run before its rounds are done."""

REMOVED = [("compile", False)]
"""Settings of earlier versions, with the value that had no effect: files that have it stay readable."""

LARGEST = 2**53  # whole numbers up to here are exact in torch, numpy and JSON


class Config(BaseModel):
    """All settings of a run; the description of each is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    data: str = Field("digits", description="Data set; see `fednmap list datasets`.")
    test: str | None = Field(None, description="File with test samples, for svm:PATH.")
    model: str = Field("auto", description="logistic, least-squares, or a network: linear, mlp:64, cnn, ...")
    intercept: bool | None = Field(
        None,
        description="Whether logistic and least-squares have one, never penalised; default for one file per client.",
    )
    standardize: bool | None = Field(
        None, description="Columns of deviation 1, with an intercept also of mean 0; default for one file per client."
    )
    weights: Literal["clients", "samples"] = Field(
        "clients", description="clients count the same, or every one of their samples does."
    )
    clients: int = Field(20, ge=1, description="Number of clients n; a natural partition brings its own.")
    partition: str = Field("auto", description="sorted, iid, shards[:k], dirichlet[:alpha] or natural.")
    algorithms: tuple[str, ...] = Field(("fednmap",), min_length=1, description="Methods to run.")
    reg: str = Field("l1:0.001", description="Regularizer phi; see `fednmap list regularizers`.")
    reg_only: str | None = Field(
        None, description="Regularize only `weights`, or parameters whose name fits a pattern."
    )
    gamma: float | None = Field(None, gt=0, description="FedNMap's prox parameter; default 4 eta_a eta_s Q.")
    memory: int = Field(
        0,
        ge=0,
        le=1000,
        description="Secants FedNMap's server remembers, 10 to 40 say, for exact gradients (batch size 0).",
    )
    eta_a: float = Field(0.2, gt=0, description="Local step size; its first value where it follows a schedule.")
    schedule: str = Field("constant", description="Of eta_a: constant, cosine[:LAST], sqrt, or steps:FACTOR,EVERY.")
    eta_s: float = Field(1.0, gt=0, description="Server step size.")
    local_steps: int = Field(10, ge=1, description="Local steps Q of a round.")
    rounds: int = Field(200, ge=0, description="Communication rounds T.")
    tol: float | None = Field(None, gt=0, lt=1, description="Stop when |F_nat| is at most this times its first value.")
    tol_absolute: float | None = Field(None, gt=0, description="Stop when |F_nat| is at most this.")
    time_limit: float | None = Field(None, gt=0, description="Stop after so many seconds of computing and measuring.")
    patience: int | None = Field(
        None, ge=1, description="Stop when psi has not fallen by 0.01 % in so many measurements."
    )
    batch_size: int = Field(32, ge=0, description="Samples of a local step; 0 for exact gradients.")
    minibatches: Literal["replacement", "reshuffle"] = Field(
        "replacement", description="How samples are drawn: replacement, or reshuffle (each once per epoch)."
    )
    participation: float = Field(1.0, gt=0, le=1, description="Share of the clients drawn in a round.")
    sampler: str = Field("uniform", description="Who takes part: uniform, poisson, cyclic, or trace:FILE.")
    drop: float = Field(0.0, ge=0, lt=1, description="Probability that a reply, or on a graph a link, is lost.")
    topology: str | None = Field(
        None, description="Graph of methods without a server: ring, torus, ...; see `fednmap list topologies`."
    )
    secagg: bool = Field(False, description="Secure aggregation: the server sees sums of uplinks alone.")
    secagg_bound: float | None = Field(
        None, gt=0, description="Longest uplink with secagg; default norm-bound, else 2^20. It decides the rounding."
    )
    secagg_bits: int | None = Field(None, description="Of a number in a masked uplink: 32 or 64, the default.")
    seed: int = Field(0, ge=0, lt=2**32, description="Decides first model, partition, minibatches and participation.")
    trials: int = Field(1, ge=1, description="Independent repetitions, with seeds seed, seed + 1, ...")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the computation.")
    device: str = Field("cpu", description="Torch device, such as cpu or cuda.")
    eval_every: int = Field(10, ge=1, description="Rounds between measurements.")
    eval_samples: int | None = Field(
        None, ge=1, description="Training samples that are measured, evenly spaced; all of them after the last round."
    )
    eval_last: int = Field(1, ge=1, description="Closing rounds that are all measured.")
    measure_gamma: float | None = Field(
        None, gt=0, description="gamma of |F_nat|^2; default 1 / smoothness of f, the same for all methods."
    )
    checkpoint_every: int = Field(50, ge=1, description="Rounds between checkpoints.")
    chunk: int | None = Field(None, ge=1, description="Clients computed side by side.")
    dp_clip: float | None = Field(None, gt=0, description="Differential privacy: the largest norm of an uplink.")
    dp_noise: float | None = Field(None, ge=0, description="Noise on the clipped sum, in units of dp_clip.")
    dp_epsilon: float | None = Field(None, gt=0, description="In place of dp_noise: as much as all rounds need for it.")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of the guarantee, below 1 / clients.")
    dp_forget: float | None = Field(
        None, ge=0, le=1, description="Share of a correction that is forgotten per round; default 0.5 with noise."
    )
    dp_unit: Literal["client", "example"] = Field("client", description="Who is hidden: a client, or an example of it.")
    dp_among: int | None = Field(
        None, ge=1, description="Clients whose own noise suffices; default: the server adds it."
    )
    aggregate: str = Field("mean", description="Centre of the uplinks: mean, median, trimmed[:SHARE], ..., clip:C.")
    attack: str | None = Field(None, description="First COUNT clients send wrong vectors: KIND:COUNT[,SIZE].")
    set: dict[str, Value] = Field({}, description="Parameters of single methods, such as fedda.eta_s = 0.5.")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and bool not in _kinds(cls.model_fields[str(info.field_name)]):
            raise InputError("true and false are not numbers")  # Python would count with them
        if isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"{shown(str(value), 40)} is larger than anything that can be counted; use less")
        return value

    @field_validator("data")
    @classmethod
    def _data(cls, value: str, info: ValidationInfo) -> str:
        from fednmap.data import DATASETS

        if _looks_up(info):
            look_up("data set", parted(value, DATASETS)[0], DATASETS)
        return value

    @field_validator("model")
    @classmethod
    def _model(cls, value: str, info: ValidationInfo) -> str:
        from fednmap.models.build import MODELS

        allowed = dict.fromkeys([*MODELS, *NOT_NETWORKS])
        if _looks_up(info):
            look_up("model", parted(value, allowed)[0], allowed)
        return value

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str, info: ValidationInfo) -> str:
        from fednmap.data import PARTITIONS

        name, allowed = value.partition(":")[0], [*PARTITIONS, "natural", "auto"]
        if _looks_up(info) and name not in allowed:
            raise unknown("partition", name, allowed)
        return value

    @field_validator("sampler")
    @classmethod
    def _sampler(cls, value: str) -> str:
        from fednmap.simulation.participation import sampler_of

        sampler_of(value, 1.0)
        return value

    @field_validator("topology")
    @classmethod
    def _topology(cls, value: str | None, info: ValidationInfo) -> str | None:
        from fednmap.decentralized.topologies import check_name

        if value is not None and _looks_up(info):
            check_name(value)
        return value

    @field_validator("aggregate")
    @classmethod
    def _aggregate(cls, value: str) -> str:
        from fednmap.privacy.robust import centre_of

        centre_of(value)
        return value

    @field_validator("attack")
    @classmethod
    def _attack(cls, value: str | None) -> str | None:
        from fednmap.privacy.attacks import attack_of

        if value is not None:
            attack_of(value)
        return value

    @field_validator("schedule")
    @classmethod
    def _schedule(cls, value: str) -> str:
        from fednmap.simulation.schedules import schedule_of

        schedule_of(value, 1.0, 1)
        return value

    @field_validator("reg")
    @classmethod
    def _reg(cls, value: str, info: ValidationInfo) -> str:
        from fednmap.core import Regularizer
        from fednmap.regularizers.parse import REGULARIZERS

        if _looks_up(info):
            look_up("regularizer", parted(value.strip(), REGULARIZERS)[0], REGULARIZERS, Regularizer)
        return value

    @field_validator("algorithms")
    @classmethod
    def _algorithms(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        mistakes = [mistake for value in values if _looks_up(info) and (mistake := _method_mistake(value))]
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        mistakes += [f"{value!r} is named {values.count(value)} times; name it once" for value in twice]
        if mistakes:
            raise InputError("\n".join(mistakes))
        return values

    @field_validator("set")
    @classmethod
    def _set(cls, values: dict[str, Value], info: ValidationInfo) -> dict[str, Value]:
        mistakes = [mistake for key in values if _looks_up(info) and (mistake := _parameter_mistake(key))]
        if mistakes:
            raise InputError("\n".join(mistakes))
        return values

    @model_validator(mode="after")
    def _who_remembers(self, info: ValidationInfo) -> Config:
        from fednmap.algorithms import WITH_MEMORY
        from fednmap.decentralized import method

        methods = [method(name) for name in self.algorithms] if self.memory and _looks_up(info) else []
        if methods and not any(kind in (*WITH_MEMORY, *WITH_MEMORY.values()) for kind in methods):
            words = f"memory is {self.memory}, and {', '.join(self.algorithms)}"
            raise InputError(f"{words} has none; leave it out, or use fednmap")
        return self

    @model_validator(mode="after")
    def _on_a_graph(self, info: ValidationInfo) -> Config:
        from fednmap.core import Algorithm
        from fednmap.decentralized import method

        kinds = {name: method(name) for name in self.algorithms} if _looks_up(info) else {}
        served = [name for name, kind in kinds.items() if issubclass(kind, Algorithm)]
        if self.topology is None and len(served) < len(kinds):
            without = ", ".join(name for name in kinds if name not in served)
            raise InputError(f"{without} has no server and needs a graph; give topology, such as --topology ring")
        if self.topology is not None and served:
            raise InputError(
                f"topology is {self.topology}, and {', '.join(served)} works with a server; leave topology out, or use "
                "norm-ed, norm-dsgt, pg-extra or prox-dsgd"
            )
        if self.topology is not None and (self.participation < 1 or self.sampler != "uniform"):
            raise InputError(
                f"topology is {self.topology}: on a graph every node takes part in every round, given participation = "
                f"{self.participation} and sampler = {self.sampler}; leave them out, drop says how many links fail"
            )
        return self

    @model_validator(mode="after")
    def _everybody(self, info: ValidationInfo) -> Config:
        from fednmap.core import Algorithm
        from fednmap.decentralized import method

        kinds = {name: method(name) for name in self.algorithms} if _looks_up(info) else {}
        need = [name for name, kind in kinds.items() if issubclass(kind, Algorithm) and kind.traits.full_participation]
        if need and (self.participation < 1 or self.drop > 0 or self.sampler != "uniform"):
            raise InputError(
                f"{', '.join(need)} needs every client in every round, given participation = {self.participation}, "
                f"sampler = {self.sampler} and drop = {self.drop}; use participation = 1 and drop = 0, or fednmap"
            )
        return self

    @model_validator(mode="after")
    def _of_all_samples(self) -> Config:
        given = [name for name in ("tol", "tol_absolute") if getattr(self, name) is not None]
        if given and self.eval_samples is not None:
            raise InputError(
                f"eval_samples is {self.eval_samples}, and {given[0]} is judged on all samples; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _masks(self) -> Config:
        given = [name for name in ("secagg_bound", "secagg_bits") if getattr(self, name) is not None]
        if given and not self.secagg:
            raise InputError(f"{given[0]} is {getattr(self, given[0])} without secure aggregation; add secagg = true")
        if self.secagg_bits not in (None, 32, 64):
            raise InputError(f"secagg_bits is {self.secagg_bits}; use 32 or 64")
        if self.secagg_bits == 32 and self.secagg_bound is None:
            raise InputError("secagg_bits = 32 rounds to steps of bound x clients / 2^31; set secagg_bound")
        if self.secagg and self.aggregate != "mean":
            raise InputError(f"aggregate is {self.aggregate} with secagg, which shows the server sums alone; use one")
        return self

    @model_validator(mode="after")
    def _private(self) -> Config:
        given = [
            name for name in ("dp_noise", "dp_epsilon", "dp_forget", "dp_among") if getattr(self, name) is not None
        ]
        if self.dp_clip is None and given:
            raise InputError(
                f"{given[0]} is {getattr(self, given[0])} without dp_clip: noise hides what is bounded only"
            )
        if self.dp_noise is not None and self.dp_epsilon is not None:
            raise InputError("dp_noise and dp_epsilon are both given; one follows from the other, so leave one out")
        if self.dp_among is not None and not (self.dp_noise or self.dp_epsilon):
            raise InputError("dp_among says who adds the noise, and there is none; give dp_noise or dp_epsilon")
        noise, rows = bool(self.dp_noise or self.dp_epsilon), self.dp_unit == "example"
        if noise and not rows and self.participation < 1 and self.sampler != "poisson":
            raise InputError(
                f"sampler is {self.sampler} with participation = {self.participation}: the noise of a sampled round is "
                "counted for clients that come by a coin of their own; use sampler = poisson"
            )
        if noise and not rows and self.sampler not in ("poisson", "uniform"):
            raise InputError(f"sampler is {self.sampler}: privacy is counted for poisson, or uniform with everybody")
        if self.dp_clip is not None and not rows and self.aggregate != "mean":
            raise InputError(f"aggregate is {self.aggregate} with dp_clip: the noise is for a mean; use one of them")
        if self.memory and (self.dp_clip is not None or self.aggregate != "mean"):
            raise InputError(f"memory is {self.memory}: what is clipped or noised shows no curvature; use memory = 0")
        if rows and self.dp_among is not None:
            raise InputError("dp_among is for clients; with dp_unit = example every site adds its noise itself")
        return self

    @classmethod
    def make(cls, **values: Any) -> Config:
        """Validated as a whole: one InputError with a line for each mistake."""
        return cls._made(values, look_up=True)

    @classmethod
    def _made(cls, values: dict[str, Any], look_up: bool) -> Config:
        values = {name: value for name, value in values.items() if (name, value) not in REMOVED}
        try:
            return cls.model_validate(values, context={"look_up": look_up})
        except ValidationError as error:
            lines = [line for mistake in error.errors(include_url=False) for line in _lines(mistake)]
            raise InputError("\n".join(dict.fromkeys(lines))) from None

    @classmethod
    def read(cls, path: Path, *, trust: bool = False, look_up: bool = True) -> Config:
        """From a TOML file.

        trust:   load the code that it names, as package.module:Name; otherwise a file that names code is refused.
        look_up: False takes all names as they are, known or not, and loads nothing.
        """
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not valid TOML: {shown(str(error), 120)}") from None
        if look_up and not trust and (code := code_in(values)):
            raise InputError(f"{path} names code to load, {shown(code[0], 80)}; if you trust it, add --trust-code")
        try:
            return cls._made(values, look_up)
        except InputError as error:
            raise InputError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    def toml(self) -> str:
        """As TOML, with what each setting means; `read` gives the same configuration back."""
        lines = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None:
                lines.append(f"# {name}: {field.description}")
            elif name != "set":
                lines.append(f"# {field.description}\n{tomli_w.dumps({name: value}).strip()}")
        return "\n".join(lines) + "\n" + (tomli_w.dumps({"set": self.set}) if self.set else "")


def parse_set(assignments: list[str] | None) -> dict[str, Any]:
    """METHOD.PARAMETER=VALUE, with VALUE a number, true, false or a word."""
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise InputError(f"--set takes METHOD.PARAMETER=VALUE, such as fedda.eta_s=0.5, given {assignment!r}")
        values[key.strip()] = parsed(text.strip())
    return values


def code_in(values: Mapping[str, Any]) -> list[str]:
    """The settings among `values` that name code to load, as package.module:Name."""
    from fednmap.algorithms import ALGORITHMS
    from fednmap.data import DATASETS
    from fednmap.decentralized import DECENTRALIZED, TOPOLOGIES
    from fednmap.models.build import MODELS
    from fednmap.regularizers.parse import REGULARIZERS

    methods, overrides, known = values.get("algorithms"), values.get("set"), (*ALGORITHMS, *DECENTRALIZED)
    named: list[tuple[Any, Iterable[str]]] = [
        (values.get("data"), DATASETS),
        (values.get("model"), (*MODELS, *NOT_NETWORKS)),
        (values.get("reg"), REGULARIZERS),
        (values.get("topology"), TOPOLOGIES),
        *((name, known) for name in (methods if isinstance(methods, list | tuple) else ())),
        *((key.rpartition(".")[0], known) for key in (overrides if isinstance(overrides, dict) else ())),
        *((v, known) for key, v in (overrides.items() if isinstance(overrides, dict) else ()) if key.endswith(".of")),
    ]
    return [spec for spec, names in named if isinstance(spec, str) and is_code(spec.strip(), tuple(names))]


def _looks_up(info: ValidationInfo) -> bool:
    return not info.context or bool(info.context["look_up"])


def _method_mistake(name: str) -> str | None:
    from fednmap.decentralized import method

    try:
        method(name)
    except InputError as error:
        return str(error)
    return None


def _parameter_mistake(key: str) -> str | None:
    """What is wrong with METHOD.PARAMETER."""
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
    """A mistake in a line, or several of one setting in as many: what was given, what is allowed, what it means."""
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
    """The types of a setting, without None."""
    return [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]


def _allowed(field: FieldInfo) -> str:
    """The values of a setting in words: its kind and its range."""
    if field.annotation == dict[str, Value]:
        return "a table of METHOD.PARAMETER = number, text, true or false"
    if field.annotation == tuple[str, ...]:
        return "a list of one name or more"
    kinds = _kinds(field)
    words = [word for kind in kinds for word in _words(kind, _range(field))]
    return " or ".join(words)


def _words(kind: Any, range: str) -> list[str]:
    if kind in (int, float):
        return [("a whole number" if kind is int else "a number") + range]
    if kind is str:
        return ["text"]
    if kind is bool:
        return ["true or false"]
    return [repr(value) for value in get_args(kind)] or [repr(kind)]


def _range(field: FieldInfo) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = ((word, getattr(m, name, None)) for m in field.metadata for name, word in words.items())
    parts = [f"{word} {limit}" for word, limit in limits if limit is not None]
    return ", " + " and ".join(parts) if parts else ""


def shown(text: str, width: int) -> str:
    """The text in one line of at most `width` characters, without what would upset a terminal."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= width else clean[: width - 3] + "..."
