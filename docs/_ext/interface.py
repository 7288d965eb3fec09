"""The page of the interface, written from what the modules export when the site is built: one page per class."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parent.parent / "reference" / "api.md"

BY_CLASS = {
    "fednmap.algorithms": ("Methods", "FedNMap first, then in the order of `fednmap list algorithms`."),
    "fednmap.regularizers": ("Regularizers", "[Which one to choose](../regularizers.md)."),
    "fednmap.problems": ("Problems", "Linear models, Cox and networks: [data and models](../data.md)."),
    "fednmap.estimators": ("Estimators", "With scikit-learn's interface: [estimators](../estimators.md)."),
}
MODULES = {
    "fednmap.core": "the interfaces: `Regularizer`, `Algorithm`, `Problem`",
    "fednmap.simulation": "`simulate`, `Result`, `Round`, callbacks and stopping rules",
    "fednmap.decentralized": "methods on a graph, without a server",
    "fednmap.asynchronous": "rounds that do not wait for all clients",
    "fednmap.data": "data sets, partitions, `ClientData`",
    "fednmap.models": "networks by name",
    "fednmap.tables": "tables of several sites as numbers",
    "fednmap.measure": "objective, natural residual, sparsity",
    "fednmap.theory": "step sizes with a guarantee, measured constants",
    "fednmap.privacy": "differential privacy, robust aggregation",
    "fednmap.testing": "checks for your own methods and regularizers",
}

START = """\
# Python interface

Every public name is importable from the module where you would look for it: `fednmap.run`,
`fednmap.algorithms.FedNMap`, `fednmap.regularizers.L1`, `fednmap.problems.Network`.

## Run

{run}
`simulate`, `Result`, `Round`, `Callback`, `Tolerance`, `Patience`, `TimeLimit` and `Diverged` can be imported from
`fednmap`, and are on the page of [simulation](generated/fednmap.simulation).
"""


def page() -> str:
    parts = [START.format(run=_summary(["fednmap.run", "fednmap.load", "fednmap.InputError"]))]
    for module, (title, text) in BY_CLASS.items():
        parts.append(f"## {title}\n\n{text}\n\n{_summary(f'{module}.{name}' for name in _names(module))}")
    rows = "\n".join(f"| [{name}](generated/{name}) | {text} |" for name, text in MODULES.items())
    parts.append(f"## Modules\n\n| module | content |\n|---|---|\n{rows}\n\n{_summary(MODULES, hidden=True)}")
    return "\n".join(parts)


def _names(module: str) -> list[str]:
    """The classes and functions that a module exports; methods in the order of their table."""
    found = import_module(module)
    names = [n for n in found.__all__ if inspect.isclass(getattr(found, n)) or inspect.isfunction(getattr(found, n))]
    table = [kind.__name__ for kind in getattr(found, "ALGORITHMS", {}).values()]
    return sorted(names, key=lambda n: table.index(n) if n in table else len(table))


def _summary(names: Iterable[str], hidden: bool = False) -> str:
    lines = ["```{eval-rst}", ".. autosummary::", "   :toctree: generated", "   :nosignatures:", ""]
    text = "\n".join([*lines, *(f"   {name}" for name in names), "```", ""])
    return f"<div hidden>\n\n{text}\n</div>\n" if hidden else text


def setup(app: object) -> dict[str, bool]:
    app.connect("config-inited", lambda *_: PAGE.write_text(page(), encoding="utf-8"))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
