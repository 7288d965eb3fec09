"""What a federation agrees on, read from the run configuration of a Flower app; and who a node is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from flwr.app import Context, MessageType
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fednmap.flower.disclosure import Rules
from fednmap.names import InputError, current, unknown
from fednmap.runs.configuration import Config, Settings, code_in, parse_set
from fednmap.runs.uplink_config import check_between_machines, grid_of
from fednmap.simulation.quantised import Quantised

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def client_name(text: object) -> str:
    """A client's name, refused unless it is safe as the name of a folder.

    >>> client_name("hospital-a")
    'hospital-a'
    """
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise InputError(
            f"the client's name is {text!r}; use 1 to 64 letters, digits, '.', '_' or '-', first a letter or digit"
        )
    return text


class FederationSettings(BaseModel):
    """Who takes part, and how patient the server is; the description of each field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[str, ...] = Field(
        min_length=1, description="The clients' names, separated by commas: client 0, client 1, ..."
    )
    run_folder: Path = Field(description="Run folder, on the server's machine.")
    resume: bool = Field(False, description="Go on from the last checkpoint in the run folder.")
    deadline: float = Field(600.0, gt=0, description="Seconds after which a round ends without those who are late.")
    min_clients: int | None = Field(
        None, ge=1, description="Replies that a round needs, default all that are drawn; with fewer it is repeated."
    )
    attempts: int = Field(10, ge=1, description="Times that a round is tried before the run stops, ready to resume.")
    measure_stationarity: bool = Field(
        False, description="Clients also send their exact gradient when the model is measured."
    )
    norm_bound: float | None = Field(None, gt=0, description="Longest vector that is accepted from a client.")
    clients_file: Path | None = Field(
        None,
        description="The server's clients.toml: client -> fingerprint of the key that its node must prove.",
    )
    pin_on_first_use: bool = Field(False, description="Enter a client that is not in clients-file with its first key.")
    log_json: bool = Field(False, description="Write server.log as JSON lines: time, level, message.")
    secagg_threshold: int | None = Field(
        None,
        ge=2,
        description="Clients that unmask a sum with secagg, more than half of those drawn, which is the default.",
    )

    @field_validator("names", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        for name in names:
            client_name(name)
        if len(set(names)) < len(names):
            raise InputError("a client is named twice")
        return names

    @model_validator(mode="after")
    def _keys(self) -> Self:
        if self.pin_on_first_use and self.clients_file is None:
            raise InputError("pin-on-first-use writes keys into clients-file; say which file that is")
        return self

    @classmethod
    def make(cls, **values: Any) -> FederationSettings:
        """Validated as a whole: one InputError with a line for each mistake."""
        try:
            return cls(**values)
        except ValidationError as error:
            lines = [": ".join([*map(str, e["loc"]), e["msg"].removeprefix("Value error, ")]) for e in error.errors()]
            raise InputError("\n".join(lines)) from None


def read(run_config: Mapping[str, Any]) -> tuple[Config, FederationSettings]:
    """The settings of the run and of the federation, from kebab-case keys; "" stands for a default.

    >>> config, federation = read({"names": "a, b", "run-folder": "runs/x", "eta-a": 0.05, "gamma": ""})
    >>> config.clients, config.eta_a, federation.names
    (2, 0.05, ('a', 'b'))
    """
    own, given = split(run_config, Config, "algorithm")
    federation = FederationSettings.make(**own)
    if "algorithm" in given:
        given["algorithms"] = (given.pop("algorithm"),)
    if "set" in given:
        given["set"] = parse_set(str(given["set"]).split())
    if code := code_in(given):
        raise InputError(f"{code[0]!r} names code, which settings of a federation cannot; write an app of your own")
    if given.get("secagg") and "secagg_bound" not in given and federation.norm_bound:
        given["secagg_bound"] = federation.norm_bound
    config = Config.make(**{**given, "clients": len(federation.names)})
    check_together(config, federation)
    return config, federation


def split(run_config: Mapping[str, Any], kind: type[Settings], *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The given settings of the federation, and the others: fields of `kind`, and `more`."""
    given = {key.replace("-", "_"): value for key, value in run_config.items() if value != ""}
    given, others = current(given, kind.RENAMED), (*kind.model_fields, *more)
    own = {name: given.pop(name) for name in FederationSettings.model_fields if name in given}
    for key in given:
        if key not in others:
            raise unknown("setting", key, [*others, *FederationSettings.model_fields])
    return own, given


def run_settings(config: Config, federation: FederationSettings) -> dict[str, Any]:
    """The run configuration that `read` turns back into the two records."""
    left_out = {"algorithms", "set", "clients", "drop", "trials"}
    values = config.model_dump(exclude=left_out) | federation.model_dump(mode="json")
    values |= {"algorithm": config.algorithms[0], "names": ",".join(federation.names)}
    words = {key: str(v).lower() if isinstance(v, bool) else str(v) for key, v in config.set.items()}
    values["set"] = " ".join(f"{key}={word}" for key, word in words.items())
    return {key.replace("_", "-"): "" if v is None else v for key, v in values.items()}


class Node:
    """The client that a node runs for, as the node was started: its name and its folder; and the settings of a run.

    A node that has a `partition-id` and no name, as in Flower's simulation, is the client of that number.
    """

    config: Config
    federation: FederationSettings

    def __init__(self, context: Context) -> None:
        self.context, about = context, context.node_config
        if "client" not in about and "partition-id" in about:
            names, number = str(context.run_config.get("names", "")).split(","), int(str(about["partition-id"]))
            if not 0 <= number < len(names):
                raise InputError(f"this is node {number} of a federation of {len(names)}; it takes no part")
            about["client"] = names[number].strip()
        if "client" not in about:
            raise InputError("this node has no name; start it with --node-config \"client='hospital-a'\"")
        self.name = client_name(about["client"])
        self.folder = Path(str(about.get("state-dir", Path.home() / ".fednmap" / "clients"))).expanduser()

    @cached_property
    def rules(self) -> Rules:
        """What this site allows, from its own file."""
        return Rules.read(self.context.node_config.get("rules"))


def grid_for(config: Config, kind: str) -> Quantised | None:
    """What vectors are rounded to under masks, by the kind of message: measurements have their own grid."""
    measured = config.secagg and kind == MessageType.EVALUATE
    return Quantised(config.clients) if measured else grid_of(config, config.clients)


class Threshold(NamedTuple):
    """Clients whose shares unmask a sum: those who must stay to its end, and one more than may collude.

    least:   in any sum.
    part:    of the clients that hold shares; those of a round, or all when the model is measured.
    clients: of the federation.
    noisy:   clients whose noise must be in a sum before it is unmasked; 0 where there is none.

    >>> rule = Threshold(least=3, part=Fraction(3, 4), clients=10)
    >>> rule.of(4), rule.of(10)
    (3, 8)
    """

    least: int
    part: Fraction
    clients: int
    noisy: int = 0

    def of(self, holders: int) -> int:
        """For a sum of which so many clients hold shares.

        It is always more than half. A server that reports a client as lost to some clients, and as present to others,
        gets enough answers to one of the two lists at most.
        """
        return max(self.least, holders // 2 + 1, math.ceil(self.part * holders))

    def summed(self, holders: int) -> int:
        """Clients that must be in such a sum: also those whose noise it needs."""
        return max(self.of(holders), self.noisy)


def threshold(config: Config, federation: FederationSettings) -> Threshold:
    n = len(federation.names)
    drawn = max(1, round(config.participation * n))
    noisy = (config.dp_among or 0) if config.dp_noise else 0
    if federation.secagg_threshold is None:
        return Threshold(drawn // 2 + 1, Fraction(1, 2), n, noisy)
    return Threshold(federation.secagg_threshold, Fraction(federation.secagg_threshold, drawn), n, noisy)


def check_together(config: Config, federation: FederationSettings) -> None:
    """Refuse settings that do not go together, by the first rule that they break."""
    check_between_machines(config)
    n, least = len(federation.names), threshold(config, federation).least
    drawn = max(1, round(config.participation * n))
    of_round = f"{drawn} of {n} clients are drawn in a round"
    tolerance = config.tol or config.tol_absolute
    measured = tolerance or config.patience or federation.measure_stationarity
    rules = {
        f"min-clients is {federation.min_clients}, and {of_round}": (federation.min_clients or 0) > drawn,
        # sums of losses and gradients carry no noise
        "tol, patience or measure-stationarity is given with dp-noise, and clients then send no losses or gradients; "
        "leave it out": config.dp_noise and measured,
        "secagg-threshold is given without it; add secagg = true": not config.secagg and federation.secagg_threshold,
        "a tolerance needs |F_nat|, for which clients send their gradient when the model is measured: set "
        "measure-stationarity = true, or use patience or time-limit": tolerance and not federation.measure_stationarity,
        "topology, drop and several methods are for simulations (fednmap train); leave it out": config.topology
        or config.drop
        or len(config.algorithms) > 1,
        "delays and slowdown are of the virtual clock of fednmap train, and time is real here; leave them out": (
            config.delays != "constant" or config.slowdown
        ),
        f"asynchronous is {config.asynchronous}, which is what a run without it does; leave it out, and give deadline "
        "and min-clients = 1": (config.asynchronous or "").startswith("deadline"),
    }
    if config.secagg:
        rules |= {
            f"secagg hides a client among others, and {of_round}; draw at least 2": drawn < 2,
            f"secagg-threshold is {least}, and {of_round}; use at most {drawn}": least > drawn,
            f"secagg-threshold is {least} of {drawn} clients: a server that lies could unmask single vectors with the "
            f"shares of half of them; use at least {drawn // 2 + 1}": 2 * least <= drawn,
            f"secagg needs equally many clients in every round, which {config.sampler} does not draw": (
                config.sampler.partition(":")[0] not in ("uniform", "cyclic")
            ),
            "norm-bound and secagg-bound differ; with secagg they are one, give one of them": (
                federation.norm_bound is not None and config.secagg_bound != federation.norm_bound
            ),
        }
    for why, broken in rules.items():
        if broken:
            raise InputError(why)
