"""The command `fednmap`: a subcommand is imported when it is called, which keeps `--help` fast."""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any, NoReturn

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fednmap import __version__
from fednmap.names import FOREIGN, InputError

COMMANDS = {
    "train": "Train one model across clients.",
    "compare": "Run several methods from the same start with the same minibatches, and compare them.",
    "fit": "Fit one linear model to tables, one file per site. A simulation: this process reads all files.",
    "predict": "Predict the rows of a new file with a fitted model.",
    "example": "Write the files of an example, to try other commands on: hospitals.",
    "tune": "Find eta_a and gamma for FedNMap: the guaranteed pair, and the best of short pilot runs.",
    "speedup": "Sweep over clients or local steps at a fixed eta_a eta_s Q; fit the slope and say whether speedup is "
    "linear.",
    "show": "Show a run in the terminal, or list the runs of a folder.",
    "watch": "Monitor a run: in the terminal, as JSON lines, or for Prometheus.",
    "report": "Write one self-contained HTML page about runs: curves, closing numbers, surviving weights, "
    "configuration.",
    "list": "List algorithms, topologies, regularizers, datasets, partitions, models or presets.",
    "export": "Write a trained model as safetensors, onnx or torch, and print its size with and without zeros.",
    "reproduce": "Run a figure of the paper or a benchmark of others, and judge its claims. A second call continues.",
    "audit": "List everything that left the clients in a run: names, shapes, bytes, rounds; from the clients' own "
    "logs.",
    "flower": "Federations between real machines, on Flower.",
}
"""Name -> the first line of its help."""

ELSEWHERE = {
    "compare": "train:compare",
    "predict": "fit:predict",
    "example": "listing:example",
    "report": "show:report",
    "list": "listing:listing",
    "export": "export_model:export",
    "flower": "flower:app",
}
"""Commands that are not the function of their name in the module of their name, in `fednmap.commands`."""

LONGEST = 1000  # characters of a line on stderr: a name or cell in it may be of any length
TORCH_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError: |\w+: (\[enforce fail at [^\]]*\] [^.]*\. )?DefaultCPUAllocator: |"
    r"\w+: Storage size calculation overflowed"
)
"""The type and the words of the errors that torch raises."""


class LazyCommand(TyperCommand):
    """A command that is known by its name and one line, and loaded when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=COMMANDS[name])

    def loaded(self) -> click.Command:
        if self.name == "reproduce":
            command = _reproduce()
        else:
            module, function = ELSEWHERE.get(str(self.name), f"{self.name}:{self.name}").split(":")
            command = getattr(import_module(f"fednmap.commands.{module}"), function)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        found = typer.Typer(add_completion=False)
        found.command(self.name)(command)
        return typer.main.get_command(found)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        context = self.loaded().make_context(info_name, args, parent, **extra)  # --help ends here
        if "torch" in sys.modules:  # some commands do without
            import torch

            torch.set_num_threads(1)  # threads of our own share the work
        return context

    def invoke(self, context: click.Context) -> Any:
        return context.command.invoke(context)


def _reproduce() -> Any:
    """Return the command of the package `reproduction`, which is in the repository and not in the wheel."""
    here = os.getcwd()
    if os.path.isfile(os.path.join(here, "reproduction", "command.py")) and here not in sys.path:
        sys.path.append(here)
    try:
        return import_module("reproduction.command").reproduce
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "reproduction":
            raise
        raise InputError(
            f"expected the folder reproduction/ of fednmap's repository in {here}, got none; "
            "do git clone the repository and run `fednmap reproduce` in its root"
        ) from None


def _version(context: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        print(f"fednmap {__version__}")
        context.exit()


app = TyperGroup(
    name="fednmap",
    help="Composite federated learning: minimise f(x) + phi(x) across clients that keep their data.",
    commands={name: LazyCommand(name) for name in COMMANDS},
    no_args_is_help=True,
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_version,
            help="The version, and exit.",
        )
    ],
)


def main(command: click.Command = app, name: str | None = None) -> NoReturn:
    """Run the command and exit.

    Wrong input prints one line, with exit code 2. A run that failed (it diverged, or memory, disk or connection failed)
    prints one line, with exit code 1. An error in fednmap prints a traceback, with exit code 70; an error in the user's
    code, package.module:Name, prints a traceback, with exit code 2. `name` is the program's name in the help.
    """
    if "_FEDNMAP_COMPLETE" in os.environ:  # eval "$(_FEDNMAP_COMPLETE=source_bash fednmap)"
        import_module("typer.completion").completion_init()
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            # torchrun started this process, perhaps to work for process 0
            worked = "WORLD_SIZE" in os.environ and import_module("fednmap.runs.workers").run_as_torchrun_worker()
            code = None if worked else command(prog_name=name, standalone_mode=False)
        except click.ClickException as error:
            # click and typer both suggest; without a subcommand the help was shown, and there is no message
            message = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", error.format_message())
            fail(f"{message or 'expected a command.'} See --help.", 2)
        except InputError as error:
            fail(str(error), 2)
        except (click.Abort, KeyboardInterrupt):
            fail("stopped", 130)
        except BrokenPipeError:  # the reader of our output has gone, as in `fednmap list algorithms | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as error:
            if known := outcome(error):
                fail(known, 1)
            traceback.print_exc()
            fail(*_blame(error))
    sys.exit(code if isinstance(code, int) else 0)


def outcome(error: Exception) -> str | None:
    """Return what to say of an end that is nobody's mistake; None where it must be ours."""
    torchs = isinstance(error, RuntimeError) and TORCH_OUT_OF_MEMORY.match(f"{type(error).__name__}: {error}")
    if isinstance(error, MemoryError) or torchs:
        return "out of memory; use a smaller model, fewer clients, a smaller batch_size or a smaller chunk"
    if isinstance(error, OSError):  # with a number it is the system's, which should have been caught
        return str(error) if error.errno is None else None
    if isinstance(error, ArithmeticError):  # the iterates are not finite; Python's own kinds are mistakes in a formula
        return None if isinstance(error, ZeroDivisionError | OverflowError | FloatingPointError) else str(error)
    return None


def _blame(error: Exception) -> tuple[str, int]:
    """Return a line that says whether fednmap or the user's code raised the error, and the exit code."""
    ours = os.path.dirname(os.path.abspath(__file__)) + os.sep
    foreign = {file: name for file, name in FOREIGN.items() if not file.startswith(ours)}
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if file in foreign or file.startswith(ours)), "")
    if last in foreign:
        return f"the error is in {foreign[last]}, which is your own code; see the lines above", 2
    if not foreign:
        return "this is an error in fednmap, not in your input; please report it with the lines above", 70
    theirs = f"what {', '.join(foreign.values())} passed to it; if the latter is right, please report it"
    return f"this is an error in fednmap, or in {theirs}", 70


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"fednmap: warning: {' '.join(str(message).split())}", file=sys.stderr)


def fail(message: str, code: int) -> NoReturn:
    lines = [line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in message.splitlines()]
    print("\n".join(f"fednmap: {line}" for line in lines), file=sys.stderr)
    sys.exit(code)
