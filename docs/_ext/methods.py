"""The table of methods, written from what each declares of itself when the site is built."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent.parent / "explanation" / "methods_table.txt"


def table() -> str:
    from fednmap.algorithms import ALGORITHMS

    lines = [
        "| name | solves | up | down | prox per round | ends with exact gradients at | rate as published |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in ALGORITHMS.items():
        t = kind.traits
        down = f"{t.down}, {t.up} if counted before" if t.broadcast_follows else f"{t.down}"
        up = f"{t.up} + Hessian" if t.hessians else f"{t.up}"
        cells = (f"`{name}`", "f + phi" if t.composite else "f", up, down, t.prox, t.fixed_point.value, t.rate)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def setup(app: object) -> dict[str, bool]:
    app.connect("builder-inited", lambda _: PAGE.write_text(table(), encoding="utf-8"))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
