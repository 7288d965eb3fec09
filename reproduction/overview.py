"""One page of all verdicts: what holds in short, how to run it again, figure by figure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

from reproduction.figure import Figure
from reproduction.store import Store
from reproduction.verdict import by_code, command, markdown_table

INTRODUCTION = """\
Every figure of *Achieving Linear Speedup for Composite Federated Learning* (Huang, Pu and Johansson, 2026), its Table
1, and benchmarks of others (FLamby, NIID-Bench) were run with this library. A program judges each claim from the
numbers and their 95 % intervals, by a rule on the figure's own page. Of the {claims} main claims below, {hold} are
reproduced, {fail} are not and {open} are not judged."""

READING = """\
- **How much**: ratios of final values, geometric means over the trials; "0.90 of Zhang's" is a tenth lower. A
  difference below 2 % counts as none. An interval in brackets is a 95 % interval.
- **Not judged** means that the interval includes both answers, or what the table says.
- **Smallest effect**: the difference that the trials show with probability 0.8. A smaller one can escape them.
- **Open settings**: the paper does not give the hidden width, batch size, rounds and initialisation. The figure's page
  says what was chosen, and how the verdict depends on it.
- **FedCanon** ([arXiv 2504.11903](https://arxiv.org/abs/2504.11903)) is reconstructed from its abstract. A claim about
  it is a claim about that reconstruction."""

REDO = """\
`fednmap reproduce`, run in the repository, writes this page and everything it shows. A second call continues: finished
trials are not run again, and `--trials` adds more. `trials.csv` of a figure records what each trial was made from:
seed, configuration, SHA-256 of the data, code and versions. A trial with other settings or data is run again."""

CODE = """\
A code is named by the first digits of a SHA-256 of those sources of the library that numbers depend on, without what
`reproduction` adds for a figure. {codes}"""

CLASSES = {True: "holds", False: "fails", None: "open"}
"""Of the site's style sheet."""


def overview(folder: Path, figures: Iterable[Figure]) -> str:
    """The page for the figures that have a verdict in `folder`, with links relative to the folder's parent."""
    figures = list(figures)
    found = [(f, json.loads(path.read_text())) for f in figures if (path := folder / f.name / "verdict.json").is_file()]
    main = [(figure, facts, c) for figure, facts in found for c in facts["claims"] if c.get("effect")]
    counts = Counter(claim["holds"] for _, _, claim in main)
    sentences = INTRODUCTION.format(claims=len(main), hold=counts[True], fail=counts[False], open=counts[None])
    summary = [["claim", "verdict", "how much", "smallest effect", "trials", "where"]]
    for f, facts, c in main:
        trials = str(c.get("trials") or facts["trials"])
        link = _link(f, f.number or f.name)
        summary.append([c["claim"], _verdict(c), c["effect"], c.get("power") or "-", trials, link])
    parts = ["# The paper, reproduced", _wrapped(sentences), *([markdown_table(summary)] if main else []), READING]
    parts += ["## Run it again", REDO, markdown_table(_commands(figures, dict((f.name, facts) for f, facts in found)))]
    tables = [Store(path.parent).rows() for path in sorted(folder.glob("*/trials.csv"))]
    if codes := {name: row.provenance.code_digest for rows in tables for name, row in rows.items()}:  # some are shared
        parts.append(_wrapped(CODE.format(codes=by_code(Counter(codes.values())))))
    for figure, facts in found:
        parts += _section(figure, facts, f"{folder.name}/{figure.name}")
    return "\n\n".join(parts) + "\n"


def _commands(figures: Iterable[Figure], found: dict[str, Any]) -> list[list[str]]:
    table = [["in the paper", "name", "scale", "trials", "reproduced", "not", "not judged", "command"]]
    for figure in figures:
        if figure.name not in found:
            missing = [figure.name, "not run", *["-"] * 4, f"`fednmap reproduce {figure.name}`"]
            table.append([figure.number or "-", *missing])
            continue
        facts = found[figure.name]
        counts = [str(sum(c["holds"] is h for c in facts["claims"])) for h in (True, False, None)]
        row = [_link(figure, figure.name), facts["scale"], str(facts["trials"]), *counts, _command(facts)]
        table.append([figure.number or "-", *row])
    return table


def _section(figure: Figure, facts: dict[str, Any], place: str) -> list[str]:
    """The picture, all claims behind a fold, what they say together, and where the numbers are."""
    rows = [["claim", "paper", "measured", "smallest effect", "verdict"]]
    rows += [[c["claim"], c["paper"], c["measured"], c.get("power") or "-", _verdict(c)] for c in facts["claims"]]
    numbers = f"[summary]({place}/summary.csv), [trials]({place}/trials.csv)"
    numbers += f", [histories]({place}/histories.csv.gz)" if figure.histories else ""
    source = "" if figure.number else " Not in the paper."
    last = f"Settings, rule and sensitivity: [{figure.name}]({place}/verdict.md). Numbers: {numbers}."
    return [
        f"## {_heading(figure)}",
        _sentence(figure.title) + source,
        f"![{figure.title}]({place}/{figure.name}.png)",
        f"<details><summary>All claims, with numbers: {len(facts['claims'])}</summary>",
        markdown_table(rows),
        "</details>",
        *([_wrapped(facts["reading"])] if "reading" in facts else []),
        *([_wrapped(by_code(facts["codes"]))] if "codes" in facts else []),
        _wrapped(last),
        f"Run it again: {_command(facts)}",
    ]


def _verdict(claim: dict[str, Any]) -> str:
    first, colon, rest = claim.get("verdict", "judged by an older rule").partition(": ")
    return f'<b class="{CLASSES[claim["holds"]]}">{first}</b>{colon}{rest}'


def _heading(figure: Figure) -> str:
    return f"{figure.number}: {figure.name}" if figure.number else figure.name


def _link(figure: Figure, text: str) -> str:
    return f"[{text}](#{_heading(figure).lower().replace(':', '').replace(' ', '-')})"


def _wrapped(text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(fill(part, 118, break_long_words=False, break_on_hyphens=False) for part in paragraphs)


def _command(facts: dict[str, Any]) -> str:
    return command(facts["name"], facts["scale"], facts.get("asked", facts["trials"]))


def _sentence(title: str) -> str:
    return title if title.endswith("?") else f"{title}."
