"""The tuned steps: the chosen settings follow from the kept trials, and the verdict from the numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from reproduction import tuned_steps as S
from reproduction.reproduce import finished
from reproduction.trials import Curve

KEPT = Path(__file__).parents[2] / "docs" / "reproduction"


def ended(part: str, choice: S.Choice, trial: int, psi: float, share: float = 0.8) -> Curve:
    columns = {"round": np.array([200.0]), "objective": np.array([psi]), "zeros": np.array([share])}
    return Curve({"part": part, "task": "first-run", **choice._asdict(), "trial": trial}, columns)


@pytest.mark.parametrize("name", S.BEST)
def test_the_chosen_settings_are_what_the_kept_tuning_says(name):
    jobs = [job for job in S.FIGURE.jobs("paper", 1) if job.setting["part"] == "tune"]
    curves = finished(jobs, S.FIGURE.store(KEPT), lambda line: None)
    assert S.best(curves, name) == S.BEST[name]


def test_the_best_setting_has_the_least_psi_and_never_diverges():
    task = S.TASKS["first-run"]
    wanted = S.Choice("FedNMap", 2.0, 16.0)
    curves = []
    for choice in S.grid(task):
        for seed in task.seeds:
            psi = 0.5 if choice == wanted else 1.0
            psi = math.inf if choice.step == 4.0 and seed == 101 else 0.1 if choice.step == 4.0 else psi
            curves.append(ended("tune", choice, seed, psi))
    assert S.best(curves, "first-run")[0] == wanted
    assert S.best(curves[:-3], "first-run") == ()


@pytest.mark.parametrize(("ours", "verdict"), [(0.9, True), (1.0, False), (1.1, False)])
def test_the_claim_follows_from_the_numbers(ours, verdict):
    free, default, *others = S.BEST["first-run"]
    rng = np.random.default_rng(0)
    curves = [ended("claim", free, k, ours * (1 + 0.001 * rng.standard_normal())) for k in range(10)]
    curves += [ended("claim", c, k, 1 + 0.001 * rng.standard_normal()) for c in (default, *others) for k in range(10)]
    first = S.judge(curves).claims[0]
    assert "than Zhang" in first.claim
    assert first.holds is verdict


def test_a_best_step_at_the_end_of_its_grid_is_not_judged():
    task = S.TASKS["first-run"]
    assert S.at_end(task, S.Choice("Zhang", 16.0))
    assert S.at_end(task, S.Choice("FedNMap", 4.0, 2.0))
    assert not S.at_end(task, S.Choice("Zhang", 4.0))
    assert not S.at_end(task, S.Choice("FedNMap", 4.0, 16.0))


def test_what_is_measured():
    assert [t for t in range(1, 201) if S.measured_after(t, 200)] == [40, 80, 120, 160, 184, 188, 192, 196, 200]
