"""What the benchmarks share: timing in turn, a table, a JSON file."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def arguments(text: str | None, *, threads: int = 1, **options: Any) -> argparse.Namespace:
    """--json FILE and --threads, and an option for each keyword, of its default's type."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, default=threads, help="threads of torch")
    for name, default in options.items():
        kind = {"action": "store_true"} if isinstance(default, bool) else {"type": type(default), "default": default}
        parser.add_argument("--" + name.replace("_", "-"), **kind)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given


def in_turn(
    jobs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Seconds of the fastest repeat of each job; one repeat of every job before the next repeat of any.

    The default clock is the processor time of this process, and the fastest repeat the least disturbed one: on a
    machine shared with others, anything else measures them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job()
    for _ in range(repeats):
        for name, job in jobs.items():
            began = clock()
            job()
            seconds[name].append(clock() - began)
    return {name: min(values) for name, values in seconds.items()}


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Printed with one column a key."""
    print(f"\n{title}")
    columns = list(rows[0])
    text = [[_cell(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[k]) for line in text)) for k, c in enumerate(columns)]
    for line in [columns, *text]:
        cells = [v.ljust(w) if k == 0 else v.rjust(w) for k, (v, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def write(path: Path | None, **figures: Any) -> None:
    if path:
        load = Path("/proc/loadavg")
        about = {"machine": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        about |= {"load": load.read_text().split()[0]} if load.exists() else {}
        path.write_text(json.dumps({**about, **figures}, indent=1) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)
