"""The options that `train`, `compare` and their relatives share: one per field of `Config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from fednmap.names import current
from fednmap.runs.configuration import Config, Settings, code_in
from fednmap.simulation import threads

Command = Callable[..., None]

PLAIN = (bool, int, float, str)
AUTO = ("eta_a", "gamma")  # also take the word auto: found by pilots, see `fednmap.commands.tune`

PANELS: dict[str, tuple[str, ...]] = {
    "Data": ("data", "target", "formula", "time", "event", "exclude", "clients", "partition"),
    "Model and penalty": ("family", "model", "penalty", "lam", "penalty_factor", "site_effects", "mu"),
    "Choice of lam": ("path", "cv", "select"),
    "Checks": ("evaluate", "heterogeneity", "cov_type"),
    "Sweep": ("over", "sweep_values"),
    "Method and steps": ("algorithm", "algorithms", "eta_a", "local_steps", "batch_size", "budget"),
    "Rounds and stopping": ("rounds", "tol", "deadline", "min_clients"),
    "Clients and loss": ("participation", "drop"),
    "Privacy": ("secagg", "dp_clip", "dp_epsilon"),
    "Output": ("preset", "config", "out", "resume"),
}
"""The panels of the help, in order; every other option is in the last one."""
ADVANCED = "Advanced"
FLAGS = {"asynchronous": "async"}
"""Options whose name differs from that of their setting."""


def with_config(
    hidden: tuple[str, ...] = (),
    words: Mapping[str, str] = MappingProxyType({}),
    settings: type[Settings] = Config,
    **defaults: Any,
) -> Callable[[Command], Command]:
    """Give a command `f(values, ...)` an option for every field of `settings`; `values` holds those the user gave.

    words:    fields that also take a word in place of a number, and what it stands for.
    defaults: those of the command where they are not those of `settings`, for the help texts; the command puts them in.

    The types, defaults and help texts are those of `settings`, so that there is one place to change them.
    """

    def decorate(command: Command) -> Command:
        declared = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "values"]
        own = [_option(p.name, p.annotation, p.default) for p in declared if p.annotation is not Launch]
        hints = get_type_hints(Launch, include_extras=True) if len(own) < len(declared) else {}
        launching = [_option(name, kind, getattr(Launch, name)) for name, kind in hints.items() if name not in hidden]
        fields = []
        for name, field in settings.model_fields.items():
            if name in hidden or name in ("algorithms", "set", "labels"):
                continue
            default = defaults.get(name, field.default)
            shown = f"(default {default})" if default not in (None, "", ()) else None
            word = "Or auto: found by short pilot runs." if name in AUTO else words.get(name)
            help = " ".join(part for part in (field.description, word, shown) if part)
            flag = _flag(name)
            may_be_no = field.annotation == bool | None or field.default is True
            flag = f"{flag}/--no-{flag[2:]}" if may_be_no else flag
            kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind in PLAIN]
            kind = str if word or len(kinds) != 1 else kinds[0]  # everything but numbers and flags as text
            kind = list[str] if field.default == () else kind
            fields.append(_option(name, Annotated[kind | None, typer.Option(flag, help=help, show_default=False)]))
            for old in (old for old, new in settings.RENAMED.items() if new == name):
                fields.append(_option(old, Annotated[kind | None, typer.Option(_flag(old), hidden=True)]))

        def wrapped(**given: Any) -> None:
            values = {p.name: given.pop(p.name) for p in fields}
            if launching:
                given["launch"] = Launch(**{p.name: given.pop(p.name) for p in launching})
            given_values = {k: v for k, v in values.items() if v is not None}
            command(current(given_values, settings.RENAMED, _flag), **given)

        wrapped.__signature__ = inspect.Signature(_in_panels([*own, *launching, *fields]))  # type: ignore[attr-defined]
        wrapped.__doc__ = command.__doc__
        wrapped.__name__ = command.__name__
        return wrapped

    return decorate


def _flag(name: str) -> str:
    """The option of a setting."""
    return f"--{FLAGS.get(name, name.replace('_', '-'))}"


def _in_panels(options: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the options in the order of the help, each in its panel."""
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    places = {name: k for k, name in enumerate(panels)}
    found = []
    for option in sorted(options, key=lambda option: places.get(option.name, len(places))):
        kind, info = get_args(option.annotation)
        info = copy(info)
        info.rich_help_panel = panels.get(option.name, ADVANCED)
        found.append(option.replace(annotation=Annotated[kind, info]))
    return found


def _option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def take_threads(given: int | None, processes: int = 1) -> None:
    """Limit the threads of this process to `given`, by default to its share of the cores."""
    threads.limit(given)
    if processes > 1:
        threads.limit(threads.share(processes))


def trusting(config: Config) -> str:
    """Return the options that `--resume` of such a run needs."""
    return " --trust-code" if code_in(config.model_dump()) else ""


Out = Annotated[Path | None, typer.Option(help="Run folder; default runs/TIME-COMMAND.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings from a TOML file, such as a run's run.toml.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Load code that a TOML file names, as package.module:Name.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the final numbers as JSON, and nothing else, on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of each process; the results are the same for any number. (default one per core)"),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Runs in parallel, each in its own process; the results are the same. (default one per core)"),
]
Set = Annotated[list[str] | None, typer.Option("--set", help="METHOD.PARAMETER=VALUE, such as fedda.eta_s=0.5.")]


@dataclass(frozen=True)
class Launch:
    """How a command makes its run: the options that are no settings of the run itself.

    A command of `with_config` with a parameter `launch` has all of them that are not hidden.
    """

    set: Set = None
    label: Annotated[list[str] | None, typer.Option(help="METHOD=NAME, what tables and plots call a method.")] = None
    preset: Annotated[str | None, typer.Option(help="Named settings; see `fednmap list presets`.")] = None
    config: ConfigFile = None
    out: Out = None
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None
    track: Annotated[list[str] | None, typer.Option(help="Also send the metrics to tensorboard or mlflow.")] = None
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that share the clients of one run, on this machine; for several machines use torchrun."
        ),
    ] = 1
    jobs: Jobs = None
    threads: Threads = None
    trust_code: TrustCode = False
    json: Json = False
    quiet: Quiet = False


def settings_of(file: Path | None, trust: bool) -> dict[str, Any]:
    """Return what a file of settings gives; nothing without a file."""
    return Config.read(file, trust=trust).model_dump(exclude_unset=True) if file else {}
