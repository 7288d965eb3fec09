"""Memory on a network: the chosen steps follow from the kept trials, and the verdict from the numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from reproduction import network_memory as M
from reproduction.reproduce import finished
from reproduction.trials import Curve

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"


def run(method: M.Method, trial: int, psi: float, reached: int, penalty: str = "L1") -> Curve:
    """Reaches 96 % accuracy at measurement `reached`."""
    t = np.arange(10.0, 60.0, 10.0)
    columns = {"round": t, "objective": np.full(5, psi), "accuracy": np.where(np.arange(5) >= reached, 0.96, 0.5)}
    columns |= {"zeros": np.full(5, 0.9), "megabytes": t * (1.5 if method.memory else 1.0)}
    setting = {"figure": "network", "part": "claim", "penalty": penalty, "method": method.name, "step": method.step}
    return Curve({**setting, "trial": trial}, columns)


@pytest.mark.parametrize("penalty", M.PENALTIES)
def test_the_chosen_steps_are_what_the_kept_tuning_says(penalty):
    curves = finished(M.FIGURE.jobs("paper", 1), M.FIGURE.store(KEPT), lambda line: None)
    assert M.best(curves, penalty) == M.BEST[penalty]


def test_the_verdict_counts_bytes_and_not_rounds():
    """At four of five rounds memory sends 1.2 times the bytes."""
    curves = []
    for k in range(10):
        curves.append(run(M.QUASI_NEWTON, k, 0.5 + 0.001 * k, 3))
        curves += [run(m, k, 1.0, 4) for m in M.BEST["L1"]]
    psi, first, last = M.judge(curves).claims
    assert psi.holds is True
    assert first.holds is last.holds is False
    assert first.measured.startswith("1.20")


def test_a_run_that_does_not_get_there_sends_infinitely_many():
    never = run(M.QUASI_NEWTON, 0, 0.5, 9)
    assert M.until(never, 0.9, "megabytes") == math.inf
    assert M.until(run(M.QUASI_NEWTON, 0, 0.5, 2), 0.9, "megabytes") == 45.0


def test_bytes_are_those_of_both_directions():
    """After 5 rounds 20 clients sent one vector of float32 each and received two."""
    config = M.config_of("L1", M.QUASI_NEWTON, 0).model_copy(update={"rounds": 5})
    (record,) = M.measure(config, Path())
    assert record["megabytes"] == pytest.approx(5 * 20 * 3 * 4 * (64 * 64 + 64 + 640 + 10) / 1e6)
    assert 0 < record["zeros"] < 1
