"""The sites of a federation as they describe themselves, and whether they fit together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from fednmap.flower.preflight import Site, mismatches, usual, versions
from fednmap.flower.roster import exchange
from fednmap.names import InputError
from fednmap.runs.files import to_json, write_atomically

log = logging.getLogger("flwr")


class Sites:
    """Who has been asked what it has; what everybody must have is what most of those had who were asked first."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.expected: Site | None = None
        self.checked: dict[str, int] = {}
        """Sites that were asked, and the node that answered: another one may have other data."""
        self.unfit: set[str] = set()

    def check(self, nodes: Mapping[str, int], least: int, file: Path) -> Site:
        """Before the first round: what all have, also kept in `file`. What does not fit together stops the run."""
        sites, mistakes = self._ask(nodes)
        if sites:
            self.expected = usual(sites)
            mistakes |= mismatches(sites, self.expected)
        if mistakes:
            words = ". ".join(f"{name}: {what}" for name, what in mistakes.items())
            raise InputError(f"the sites do not fit together. {words}. Correct this and begin again")
        if len(sites) < least or self.expected is None:
            silent = ", ".join(name for name in nodes if name not in sites)
            raise TimeoutError(f"{silent}: no word within {self.deadline:g} s on what data is there")
        self.checked = {name: nodes[name] for name in sites}
        for name, site in sites.items():
            own, server = (site.torch, site.python), versions()[1:]
            note = "" if own == server else f"; the server has torch {server[0]}, Python {server[1]}"
            log.info("%s: %d samples, torch %s, Python %s%s", name, site.samples, *own, note)
        write_atomically(file, to_json({name: site.record() for name, site in sites.items()}))
        return self.expected

    def fitting(self, nodes: Mapping[str, int]) -> dict[str, int]:
        """Without nodes that joined since and do not fit; these are named once."""
        new = {name: node for name, node in nodes.items() if self.checked.get(name) != node}
        if new:
            sites, mistakes = self._ask(new)
            mistakes |= mismatches(sites, self.expected)
            for name, what in mistakes.items():
                log.warning("%s: left out: %s", name, what)
            self.unfit = (self.unfit - new.keys()) | mistakes.keys()
            self.checked |= {name: new[name] for name in sites.keys() | mistakes.keys()}
        return {name: node for name, node in nodes.items() if self.checked.get(name) == node and name not in self.unfit}

    def _ask(self, nodes: Mapping[str, int]) -> tuple[dict[str, Site], dict[str, str]]:
        """What sites say of themselves, and why some cannot."""
        found = exchange(self.grid, nodes, f"{MessageType.QUERY}.site", lambda _: RecordDict(), self.deadline)
        sites: dict[str, Site] = {}
        mistakes = dict(found.errors)
        for name, content in found.replies.items():
            try:
                record: Any = content["site"]
                if "failed" in record:
                    raise InputError(f"its data cannot be loaded ({record['failed']!s:.200})")
                sites[name] = Site.read(record)
            except (InputError, KeyError, TypeError) as error:
                mistakes[name] = str(error)
        return sites, mistakes
