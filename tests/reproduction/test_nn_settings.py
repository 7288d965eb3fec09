"""The map of settings: its comparisons, its rule, and a small part of it run."""

from itertools import product

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
    curves = calibrated({choice: slope})
    assert N.is_kept(N.slopes(curves, choice)) is kept
    assert N.is_kept(N.slopes(curves[:-12], choice)) is None


def test_what_is_measured():
    measured = [t for t in range(1, 1001) if N.measured_after(t)]
    assert measured == [280, 290, 300, *range(910, 1001, 10)]


def test_each_trial_stands_once_and_calibration_comes_first():
    names = [job.name for job in N.jobs("middle", 3)]
    maps = 3 * 3 * len(N.MAP)
    assert len(names) == len(set(names)) == 3 * 9 * len(N.CALIBRATED) + maps
    assert names[0].startswith("n_FedNMap_n5_Q10_batch2_width32_replacement_rounds300")
    assert all(name.startswith("map_") for name in names[-maps:])


def calibrated(slopes_of):
    """Curves of the calibration: the slopes in n and Q of each setting, nearly without noise."""
    curves = []
    for choice, slope in slopes_of.items():
        for factor, grid in (("n", N.CLIENTS), ("Q", N.STEPS)):
            for value, seed in product(grid, N.SEEDS):
                setting = {"part": factor, "method": "FedNMap", "n": 30, "Q": 10, **choice._asdict()}
                y = value ** slope[factor] * (1 + 0.001 * (seed - 101) * (value == grid[0]))
                columns = {"round": np.array([300.0]), "gamma 4": np.array([y])}
                curves.append(Curve(setting | {factor: value, "rounds": 300, "trial": seed}, columns))
    return curves


def test_the_chosen_settings_are_the_kept_ones_nearest_first_else_the_nearest():
    a, b, c = N.CALIBRATED[:3]
    far, near, flat = {"n": -1.8, "Q": -1.6}, {"n": -1.5, "Q": -1.2}, {"n": -1.4, "Q": -1.1}
    assert N.chosen(calibrated({a: far, b: near, c: flat})) == [b, a]
    assert N.chosen(calibrated({b: flat, c: {"n": -0.5, "Q": -0.5}})) == [b]
    assert N.chosen([]) == []


def test_the_reading_says_how_often_the_ratio_rises_with_the_batch():
    curves = []
    for batch, ratio in ((1, 0.5), (2, 0.6), (4, 0.4)):
        choice = N.Choice(batch, 32, "replacement")
        for method, level in (("FedNMap", ratio), ("Zhang", 1.0), ("FedCanon", 1.0)):
            setting = {"part": "map", "method": method, "n": 20, "Q": 10, **choice._asdict(), "rounds": 300}
            columns = {"round": np.array([300.0])} | {name: np.array([level]) for name in N.MEASURES}
            curves += [Curve(setting | {"trial": seed}, columns) for seed in N.SEEDS]
    words = " ".join(N.judge(curves).reading.split())
    assert "0.50, 0.60, 0.40 for batch 1, 2, 4 (T = 300, width 32, replacement)" in words
    assert "smaller FedNMap's advantage, in 0 of 1 rows" in words
    assert "Left: 57 of the 60 settings" in words
    assert N.judge(curves[:-9]).reading == ""
