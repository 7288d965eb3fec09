"""The command `fednmap`."""

from __future__ import annotations

import sys
from typing import NoReturn

import click
import torch
import typer

from fednmap.commands import export, flower, listing, report, reproduce, show, speedup, train, tune
from fednmap.runs.workers import follow_torchrun

app = typer.Typer(
    help="Composite federated learning: minimise f(x) + phi(x) across clients that keep their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("compare")(train.compare)
app.command("tune")(tune.tune)
app.command("speedup")(speedup.speedup)
app.command("show")(show.show)
app.command("report")(report.report)
app.command("list")(listing.listing)
app.command("export")(export.export)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(flower.app, name="flower")


def main() -> NoReturn:
    """Run the command; bad input is one clear line and exit code 2."""
    torch.set_num_threads(1)  # small products: a second thread costs more than it brings
    try:
        code = None if follow_torchrun() else app(standalone_mode=False)
    except click.ClickException as error:
        fail(f"{error.format_message()} See --help.", 2)
    except (click.Abort, KeyboardInterrupt):
        fail("stopped", 130)
    except (ValueError, TypeError) as error:
        fail(str(error), 2)
    except (ArithmeticError, OSError) as error:
        fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        fail("out of memory; use a smaller model, fewer clients, a smaller batch_size or a smaller chunk", 1)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    print("\n".join(f"fednmap: {line}" for line in message.splitlines()), file=sys.stderr)
    sys.exit(code)
