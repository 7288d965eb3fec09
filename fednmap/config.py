"""What a run is made from: one validated record, the same from the command line, from TOML and from Python."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fednmap.algorithms import ALGORITHMS
from fednmap.data import DATASETS, PARTITIONS
from fednmap.names import choose, unknown

Value = bool | int | float | str


class Config(BaseModel):
    """All settings of a run; the description of each is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    data: str = Field("digits", description="Data set; see `fednmap list datasets`.")
    test: str | None = Field(None, description="File with test samples, for svm:PATH.")
    model: str = Field("auto", description="logistic, least-squares, or a network: linear, mlp:64, cnn, ...")
    clients: int = Field(20, ge=1, description="Number of clients n; a natural partition brings its own.")
    partition: str = Field("auto", description="sorted, iid, shards[:k], dirichlet[:alpha] or natural.")
    algorithms: tuple[str, ...] = Field(("fednmap",), min_length=1, description="Methods to run.")
    reg: str = Field("elastic-net:0.001,0.01", description="Regularizer phi; see `fednmap list regularizers`.")
    reg_only: str | None = Field(
        None, description="Regularize only `weights`, or parameters whose name fits a pattern."
    )
    gamma: float | None = Field(None, gt=0, description="FedNMap's prox parameter; default 4 eta_a eta_s Q.")
    eta_a: float = Field(0.1, gt=0, description="Local step size.")
    eta_s: float = Field(1.0, gt=0, description="Server step size.")
    local_steps: int = Field(10, ge=1, description="Local steps Q of a round.")
    rounds: int = Field(300, ge=0, description="Communication rounds T.")
    batch_size: int = Field(32, ge=0, description="Samples of a local step; 0 for exact gradients.")
    participation: float = Field(1.0, gt=0, le=1, description="Share of the clients drawn in a round.")
    loss: float = Field(0.0, ge=0, lt=1, description="Probability that a reply is lost.")
    seed: int = Field(0, ge=0, description="Decides initialisation, partition, minibatches and participation.")
    trials: int = Field(1, ge=1, description="Independent repetitions, with seeds seed, seed + 1, ...")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the computation.")
    device: str = Field("cpu", description="Torch device, such as cpu or cuda.")
    eval_every: int = Field(10, ge=1, description="Rounds between measurements.")
    measure_gamma: float | None = Field(None, gt=0, description="gamma of |F_nat|^2; default FedNMap's gamma.")
    checkpoint_every: int = Field(50, ge=1, description="Rounds between checkpoints.")
    chunk: int | None = Field(None, ge=1, description="Clients computed side by side.")
    set: dict[str, Value] = Field({}, description="Parameters of single methods, such as fedda.eta_s = 0.5.")

    @field_validator("data")
    @classmethod
    def _data(cls, value: str) -> str:
        choose("data set", value.partition(":")[0], DATASETS)
        return value

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str) -> str:
        name = value.partition(":")[0]
        if name not in [*PARTITIONS, "natural", "auto"]:
            raise unknown("partition", name, [*PARTITIONS, "natural", "auto"])
        return value

    @field_validator("algorithms")
    @classmethod
    def _algorithms(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            choose("algorithm", value, ALGORITHMS)
        if len(set(values)) < len(values):
            raise ValueError("a method is named twice")
        return values

    @model_validator(mode="after")
    def _set(self) -> Config:
        for key in self.set:
            name, dot, parameter = key.partition(".")
            if not dot:
                raise ValueError(f"set takes METHOD.PARAMETER=VALUE, such as fedda.eta_s=0.5, given {key!r}")
            allowed = [f.name for f in fields(choose("algorithm", name, ALGORITHMS)) if f.name != "phi"]  # type: ignore[arg-type]
            if parameter not in allowed:
                raise unknown(f"parameter of {name}", parameter, allowed)
        return self

    @classmethod
    def make(cls, **values: Any) -> Config:
        """Validated as a whole: one ValueError with a line for each mistake."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError("\n".join(_line(mistake) for mistake in error.errors())) from None

    @classmethod
    def read(cls, path: Path) -> Config:
        """From a TOML file."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from None
        return cls.make(**values)

    def toml(self) -> str:
        """As TOML, with what each setting means; `read` gives the same configuration back."""
        lines = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is None or name == "set":
                lines.append(f"# {name}: {field.description}" if value is None else "")
                continue
            lines.append(f"# {field.description}\n{tomli_w.dumps({name: value}).strip()}")
        return "\n".join(line for line in lines if line) + "\n" + (tomli_w.dumps({"set": self.set}) if self.set else "")


def _line(mistake: Any) -> str:
    """One mistake in one line: what was given, what is allowed."""
    name = ".".join(str(part) for part in mistake["loc"]) or "configuration"
    if mistake["type"] == "extra_forbidden":
        return str(unknown("setting", name, Config.model_fields))
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "value_error":
        return message if name == "configuration" else f"{name}: {message}"
    return f"{name} is {mistake['input']!r}; {message[0].lower()}{message[1:]}"
