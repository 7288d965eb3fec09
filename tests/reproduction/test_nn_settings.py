"""The map of settings: its comparisons, its rule, and a small part of it run."""

import numpy as np
import pytest

from reproduction import nn_settings as N
from reproduction.trials import Curve


@pytest.mark.parametrize(
    ("slope", "kept"),
    [({"n": -1.5, "Q": -1.2}, True), ({"n": -1.5, "Q": -0.9}, False), ({"n": -1.0, "Q": -1.2}, False)],
)
def test_a_setting_is_kept_if_both_slopes_reach_the_papers(slope, kept):
    choice = N.Choice(2, 32, "replacement")
    curves = []
    for factor, grid in (("n", N.CLIENTS), ("Q", N.STEPS)):
        for value in grid:
            for seed in N.SEEDS:
                setting = {"part": factor, "method": "FedNMap", "n": 30, "Q": 10, **choice._asdict()}
                y = value ** slope[factor] * (1 + 0.001 * (seed - 101))
                columns = {"round": np.array([300.0]), "gamma 4": np.array([y])}
                curves.append(Curve(setting | {factor: value, "rounds": 300, "trial": seed}, columns))
    assert N.is_kept(N.slopes(curves, choice)) is kept
    assert N.is_kept(N.slopes(curves[:-12], choice)) is None


def test_what_is_measured():
    assert [t for t in range(1, 1001) if N.measured_after(t) and t > 250][:6] == [280, 290, 300, 350, 400, 450]
    assert sum(N.measured_after(t) for t in range(901, 1001)) == 10


def test_the_map_comes_first_and_each_trial_once():
    names = [job.name for job in N.jobs("middle", 3)]
    assert len(names) == len(set(names)) == 30 * 3 * 3 + 30 * 3 * 9
    assert names[0].startswith("map_FedNMap_n20_Q10_batch1_width32_replacement_rounds1000")
