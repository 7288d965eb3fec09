"""Sums that do not tell who has added what."""

import pytest
import torch

from fednmap.simulation import distributed
from fednmap.simulation.tally import Tally


def shared(values, processes, monkeypatch):
    """The total of each process, where the processes share the pieces; one after another, and here."""
    monkeypatch.setattr(distributed, "size", lambda: processes)
    sent, found = [], []

    def gather(parts, like, most):
        return [[[v.clone() for v in part] for part in rows] for rows in sent]

    def tally(rank):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        made = Tally(len(values), [values[0]])
        for piece in distributed.share(len(values)):
            made.add(piece, [values[piece].clone() / 2])
            made.add(piece, [values[piece].clone() / 2])  # in two groups
        return made

    class Stop(Exception):
        pass

    def keep(parts, like, most):
        assert len(parts) <= most
        sent.append([[v.clone() for v in part] for part in parts])
        raise Stop

    for rank in range(processes):
        monkeypatch.setattr(distributed, "all_gather", keep)
        with pytest.raises(Stop):
            tally(rank).total()
    monkeypatch.setattr(distributed, "all_gather", gather)
    for rank in range(processes):
        found.append(tally(rank).total()[0])
    return found, sent


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7, 8, 16, 23, 64])
def test_any_number_of_processes_has_the_same_bits(pieces, monkeypatch):
    torch.manual_seed(0)
    values = [torch.randn(50) * 10 ** (k % 5) for k in range(pieces)]
    alone = Tally(pieces, [values[0]])
    for k, v in enumerate(values):
        alone.add(k, [v.clone()])
    expected = alone.total()[0]
    torch.testing.assert_close(expected, torch.stack(values).sum(0), rtol=1e-4, atol=1e-2)
    for processes in (2, 3, 4, 5, 8):
        found, sent = shared(values, processes, monkeypatch)
        assert all(torch.equal(total, expected) for total in found), processes
        if pieces % processes == 0 and pieces & (pieces - 1) == processes & (processes - 1) == 0:
            assert all(len(parts) == 1 for parts in sent)  # one vector from each
