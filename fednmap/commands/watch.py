"""`fednmap watch`: monitor a run in the terminal, as JSON lines, or for Prometheus."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from fednmap.commands.show import run_folders, state
from fednmap.measure import quantity
from fednmap.names import InputError
from fednmap.report.progress import describe
from fednmap.report.series import expected
from fednmap.report.terminal import console
from fednmap.runs.folder import Job, RunFolder
from fednmap.simulation import Record

SECONDS = 2.0


def watch(
    run: Annotated[Path | None, typer.Argument(help="Run folder; default the newest in runs.")] = None,
    every: Annotated[float, typer.Option(help="Seconds between looks at the folder.", min=0.1)] = SECONDS,
    json_lines: Annotated[bool, typer.Option("--json", help="Print each measurement as a line of JSON.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Serve /metrics (Prometheus) and /healthz on this port.", min=0, max=65535)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
) -> None:
    """Monitor a run: in the terminal, as JSON lines, or for Prometheus.

    Only the run folder is read, so that a run of train, compare or Flower can be watched from any process.
    """
    if json_lines and port is not None:
        raise InputError("expected --json or --port, got both; start a second fednmap watch")
    folder = RunFolder.open(run or run_folders(Path("runs"))[-1])
    if port is not None:
        _serve(folder, host, port)
    elif json_lines:
        for job, record in _news(folder, every):
            print(to_json_line(job, record), flush=True)
    else:
        _show(folder, every)


def _show(folder: RunFolder, every: float) -> None:
    screen = console()
    if not screen.is_terminal:
        for job, record in _news(folder, every):
            screen.print(
                f"{_label(folder, job)}  round {int(record['round'])}  {describe(record)}",
                highlight=False,
                soft_wrap=True,
            )
    else:
        with Live(console=screen, auto_refresh=False) as live:
            while True:
                going = folder.running()
                live.update(_table(folder), refresh=True)
                if not going:
                    break
                time.sleep(every)
    screen.print(state(folder), highlight=False)


def _table(folder: RunFolder) -> Table:
    """The newest measurement of each method."""
    table = Table("method", "round", "newest measurement", title=f"{folder.path}: {state(folder)}", box=SIMPLE_HEAD)
    for job, records in _measured(folder).items():
        table.add_row(_label(folder, job), f"{records[-1]['round']:g}", describe(records[-1]))
    return table


def _label(folder: RunFolder, job: Job) -> str:
    return job.method if (folder.about().trials or 1) == 1 else str(job)


def _measured(folder: RunFolder) -> dict[Job, list[Record]]:
    return {
        job: [dict(zip(curves, values, strict=True)) for values in zip(*curves.values(), strict=True)]
        for job, curves in folder.curves().items()
    }


def _news(folder: RunFolder, every: float) -> Iterator[tuple[Job, Record]]:
    """Yield each measurement once, those of the past first, until the run has ended."""
    told: dict[Job, int] = {}
    while True:
        going = folder.running()  # before reading: what is written until the end is read once more
        for job, records in _measured(folder).items():
            yield from ((job, record) for record in records[told.get(job, 0) :])
            told[job] = len(records)
        if not going:
            return
        time.sleep(every)


def to_json_line(job: Job, record: Record) -> str:
    """Return a measurement as one line of JSON; what is not finite is null."""
    values = {name: v if math.isfinite(v) else None for name, v in record.items()}
    return json.dumps({"method": job.method, "trial": job.trial} | values)


def to_prometheus(folder: RunFolder) -> str:
    """Return the newest measurement of each method in Prometheus' text format.

    Quantities are gauges `fednmap_NAME`, with the labels run, method and trial.
    """
    run, results = folder.path.name, folder.results()
    lines = []
    facts = {
        "running": ("1 while the run is active", int(folder.running())),
        "jobs_finished": ("methods and trials that are finished", len(results)),
        "jobs_expected": ("methods and trials of the run", expected(folder)),
    }
    for name, (meaning, count) in facts.items():
        lines += [*_heading(name, meaning), f"fednmap_{name}{_labels(run=run)} {count}"]
    samples: dict[str, list[str]] = {}
    for job, records in _measured(folder).items():
        for name, value in records[-1].items():
            samples.setdefault(name, []).append(
                f"{_labels(run=run, method=job.method, trial=job.trial)} {_number(value)}"
            )
    for name, found in samples.items():
        safe = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
        lines += [*_heading(safe, quantity(name).title), *(f"fednmap_{safe}{sample}" for sample in found)]
    return "\n".join(lines) + "\n"


def _heading(name: str, meaning: str) -> list[str]:
    return [f"# HELP fednmap_{name} {meaning}".replace("\n", " "), f"# TYPE fednmap_{name} gauge"]


def _labels(**labels: Any) -> str:
    def escaped(value: Any) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def _number(value: float) -> str:
    return (
        "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf" if math.isinf(value) else repr(float(value))
    )


def server(folder: RunFolder, host: str, port: int) -> ThreadingHTTPServer:
    """Return an HTTP server of /metrics and /healthz; the latter is 503 if the run has stopped before its end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                if self.path == "/metrics":
                    self._answer(200, to_prometheus(folder), "text/plain; version=0.0.4; charset=utf-8")
                elif self.path == "/healthz":
                    said = state(folder)
                    self._answer(503 if said.startswith("stopped") else 200, said + "\n", "text/plain; charset=utf-8")
                else:
                    self._answer(404, "expected /metrics or /healthz\n", "text/plain; charset=utf-8")
            except InputError as error:  # such as a run folder that was damaged or deleted
                self._answer(503, f"{error}\n", "text/plain; charset=utf-8")

        def _answer(self, code: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Say nothing about each request."""

    return ThreadingHTTPServer((host, port), Handler)


def _serve(folder: RunFolder, host: str, port: int) -> None:
    try:
        serving = server(folder, host, port)
    except OSError as error:
        raise InputError(f"cannot serve on {host}:{port}: {error.strerror}; choose another --port") from None
    with serving:
        address = f"http://{host}:{serving.server_address[1]}"
        console(stderr=True).print(f"{address}/metrics and {address}/healthz; Ctrl-C ends", highlight=False)
        serving.serve_forever()
