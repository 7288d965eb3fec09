"""How many functions a reader passes from one round to the next."""

import sys
from pathlib import Path

import pytest
import torch

import fednmap
from fednmap.algorithms import FedNMap
from fednmap.problems import Logistic
from fednmap.regularizers import L1

ROOT = Path(fednmap.__file__).parent
OWN = ("problems", "algorithms", "regularizers")  # what happens inside a problem and a method is theirs


def walk(running):
    """The functions of the package that the next round calls; comprehensions are part of the function they are in."""
    found, inside = set(), []

    def seen(frame, event, _):
        code = frame.f_code
        path = Path(code.co_filename)
        ours = path.is_relative_to(ROOT)
        if event == "call":
            if ours and not any(inside) and not code.co_name.startswith("<"):
                found.add((str(path.relative_to(ROOT)), code.co_qualname))
            inside.append(ours and path.relative_to(ROOT).parts[0] in OWN)
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(seen)
    try:
        next(running)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"chunk": 1}, {"participation": 0.5, "drop": 0.2}])
def test_one_round_is_twenty_functions_in_ten_files(options):
    torch.manual_seed(0)
    problem = Logistic([(torch.randn(20, 5), torch.randint(0, 2, (20,)).float() * 2 - 1) for _ in range(6)])
    running = fednmap.simulate(FedNMap(L1(0.01), eta_a=0.1, Q=3), problem, rounds=9, threads=1, **options)
    for _ in range(8):  # by now the tables of states have grown
        next(running)
    found = walk(running)
    assert 10 <= len(found) <= 20, sorted(found)
    assert len({file for file, _ in found}) <= 10
