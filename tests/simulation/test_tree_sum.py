"""Sums that do not tell who has added what."""

import pytest
import torch

from fednmap.simulation import distributed
from fednmap.simulation.client_groups import TreeSum
from fednmap.simulation.sums import divided
from fednmap.simulation.threads import ThreadPool


def shared(values, processes, monkeypatch):
    """The total of each process, where the processes share the pieces; one after another, and here."""
    monkeypatch.setattr(distributed, "size", lambda: processes)
    sent, found = [], []

    def gather(parts, like, most):
        return [[[v.clone() for v in part] for part in rows] for rows in sent]

    def tally(rank):
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        made = TreeSum(len(values), [values[0]])
        for piece in distributed.share(len(values)):
            made.add(piece, [values[piece].clone() / 2], last=False)
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
    alone = TreeSum(pieces, [values[0]])
    for k, v in enumerate(values):
        alone.add(k, [v.clone()])
    expected = alone.total()[0]
    torch.testing.assert_close(expected, torch.stack(values).sum(0), rtol=1e-4, atol=1e-2)
    for processes in (2, 3, 4, 5, 8):
        found, sent = shared(values, processes, monkeypatch)
        assert all(torch.equal(total, expected) for total in found), processes
        if pieces % processes == 0 and pieces & (pieces - 1) == processes & (processes - 1) == 0:
            assert all(len(parts) == 1 for parts in sent)  # one vector from each


def test_what_is_added_stays_as_it_is():
    """The tensors may be kept by whoever has computed them, such as a part of a problem that returns its own."""
    for pieces in ([0], [0, 1], [0, 0, 1, 2, 2]):
        given = [torch.full((2,), 1.0 + k) for k in range(len(pieces))]
        tally = TreeSum(3, [given[0]])
        for piece, later, v in zip(pieces, [*pieces[1:], None], given, strict=True):
            tally.add(piece, [v], last=piece != later)
        assert torch.equal(tally.total()[0], torch.stack(given).sum(0))
        assert all(torch.equal(v, torch.full((2,), 1.0 + k)) for k, v in enumerate(given))


class Kept:
    """A problem whose parts return a gradient that they keep."""

    n, dim, pieces, start = 4, 3, 4, torch.zeros(3)

    def __init__(self, k=None, of=1):
        self.g = torch.arange(3.0) / of

    def part(self, k, of):
        return Kept(k, of)

    def loss(self, x):
        return self.g @ x

    def gradient(self, x):
        return self.g

    def oracle(self, clients, t):
        return lambda x, q: self.g.expand(*clients.shape, 3)


def test_a_gradient_that_a_problem_keeps_is_the_same_twice():
    with ThreadPool(1) as pool:
        whole = divided(Kept(), pool)
        first = whole.gradient(torch.zeros(3)).clone()
        torch.testing.assert_close(first, torch.arange(3.0))
        assert torch.equal(whole.gradient(torch.zeros(3)), first)
