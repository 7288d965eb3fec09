"""One page of all verdicts: claim, figure, verdict, command."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reproduction.figure import Figure
from reproduction.store import Store
from reproduction.verdict import by_code, command, markdown_table, word

INTRODUCTION = """\
Every figure of *Achieving Linear Speedup for Composite Federated Learning* (Huang, Pu and Johansson, 2026), its
Table 1, and benchmarks of others (FLamby, NIID-Bench), run with this library; each claim is judged by a program, from
the numbers, by a rule stated on the figure's own page. A claim that does not hold here is reported as not holding. The
paper leaves some settings open (hidden width, batch size, rounds, initialisation, ...): what was chosen is on the
figure's page, and how the verdict depends on the choice.

This page and everything it shows are written by the command `fednmap reproduce`, run in the repository. A second call
continues: trials that are finished are not run again, and `--trials` adds more. The table `trials.csv` of a figure
says what each trial was made from: seed, configuration, the SHA-256 of its data, code, versions; one made from other
settings or data is run again. FedCanon is a reconstruction from its abstract, so a claim about it is one about that
reconstruction."""

RATIOS = """\
Ratios are of closing values, geometric means over the trials; "0.90 of Zhang's" is a tenth lower. A difference below
2 % counts as none. Every claim, with its numbers, stands further below."""

CODE = """\
A code is named by the first digits of a SHA-256 of the library's sources that numbers depend on; what `reproduction`
adds for a figure is not in it. {codes}"""


def _trials(claim: dict[str, Any], facts: dict[str, Any]) -> str:
    return str(claim.get("trials") or facts["trials"])


def overview(folder: Path, figures: Iterable[Figure]) -> str:
    """The page for the figures that have a verdict in `folder`, with links relative to the folder's parent."""
    figures = list(figures)
    found = [(f, json.loads(path.read_text())) for f in figures if (path := folder / f.name / "verdict.json").is_file()]
    first = [["claim", "holds", "how much", "trials", "figure"]]
    first += [
        [c["claim"], f"**{word(c['holds'])}**", c["effect"], _trials(c, facts), f"[{figure.name}](#{figure.name})"]
        for figure, facts in found
        for c in facts["claims"]
        if c.get("effect")
    ]
    table = [["figure", "scale", "trials", "hold", "do not hold", "not judged", "command"]]
    for figure, facts in found:
        counts = [str(sum(c["holds"] is h for c in facts["claims"])) for h in (True, False, None)]
        table.append(
            [f"[{figure.name}](#{figure.name})", facts["scale"], str(facts["trials"]), *counts, _command(facts)]
        )
    missing = [f for f in figures if f.name not in {figure.name for figure, _ in found}]
    table += [[f.name, "not run", *["-"] * 4, f"`fednmap reproduce {f.name}`"] for f in missing]
    parts = ["# The paper, reproduced", *([markdown_table(first), RATIOS] if len(first) > 1 else [])]
    parts.append(INTRODUCTION)
    tables = [Store(path.parent).rows() for path in sorted(folder.glob("*/trials.csv"))]
    if codes := {name: row.provenance.code_digest for rows in tables for name, row in rows.items()}:  # some are shared
        parts.append(CODE.format(codes=by_code(Counter(codes.values()))))
    parts.append(markdown_table(table))
    for figure, facts in found:
        place = f"{folder.name}/{figure.name}"
        rows = [["claim", "paper", "measured", "verdict"]]
        rows += [[c["claim"], c["paper"], c["measured"], f"**{word(c['holds'])}**"] for c in facts["claims"]]
        parts += [f"## {figure.name}", _sentence(figure.title), f"![{figure.title}]({place}/{figure.name}.png)"]
        parts += [
            markdown_table(rows),
            *([facts["reading"]] if "reading" in facts else []),
            *([by_code(facts["codes"])] if "codes" in facts else []),
            f"Settings, rule, sensitivity: [{place}/verdict.md]({place}/verdict.md). Numbers:",
        ]
        parts[-1] += f" [summary]({place}/summary.csv), [trials]({place}/trials.csv)"
        parts[-1] += f", [histories]({place}/histories.csv.gz)" if figure.histories else ""
        parts[-1] += f". Redo: {_command(facts)}"
    return "\n\n".join(parts) + "\n"


def _command(facts: dict[str, Any]) -> str:
    return command(facts["name"], facts["scale"], facts.get("asked", facts["trials"]))


def _sentence(title: str) -> str:
    return title if title.endswith("?") else f"{title}."
