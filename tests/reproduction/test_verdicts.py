"""The paper's figures: verdicts that follow from the numbers alone."""

import numpy as np
import pytest
from curves import ROUNDS, curve, mobilenet_curves, nn_curves

from reproduction import local_stepsize, mobilenet, nn, sensitivity, speedup
from reproduction.trials import Curve, select
from reproduction.verdict import Claim, compare, holm, judged, number, power, slope, together


def test_compare_pairs_the_trials() -> None:
    a = {0: 1.0, 1: 10.0, 2: 100.0}
    assert compare(a, {k: 1.1 * v for k, v in a.items()}).word == "lower"
    assert compare({k: 1.1 * v for k, v in a.items()}, a).word == "higher"
    assert compare(a, {0: 1.3, 1: 9.0, 2: 100.0}).word == "undecided"
    assert compare(a, {1: 9.0}).word == "undecided"  # one trial has no interval
    assert compare(a, {k: 1.01 * v for k, v in a.items()}).word == "level"  # as sure as can be, and too small to matter
    assert compare(a, {k: 2 * v for k, v in a.items()}).mean == pytest.approx(0.5)


def test_the_interval_is_students_of_the_paired_logarithms() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    theirs = {k: float(v) for k, v in enumerate(np.exp(rng.normal(size=10)))}
    ours = {k: v * float(np.exp(rng.normal(-0.2, 0.1))) for k, v in theirs.items()}
    found, logs = compare(ours, theirs), np.log([ours[k] / theirs[k] for k in ours])
    low, high = stats.t.interval(0.95, 9, logs.mean(), stats.sem(logs))
    assert np.allclose([found.mean, found.low, found.high], np.exp([logs.mean(), low, high]))
    assert found.p == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)


def test_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        found = compare(dict(enumerate(np.exp(rng.normal(0.1, 0.3, 3)))), dict.fromkeys(range(3), 1.0))
        covered += found.low <= np.exp(0.1) <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_the_smallest_effect_is_found_in_four_of_five() -> None:
    """With an effect of the mean power, the test finds a difference in about 80 % of the experiments."""
    rng = np.random.default_rng(2)
    one = dict.fromkeys(range(10), 1.0)
    powers = [compare(dict(enumerate(np.exp(rng.normal(0, 0.1, 10)))), one).log.power for _ in range(400)]
    effect = -float(np.sqrt(np.mean(np.square(powers))))
    found = [compare(dict(enumerate(np.exp(rng.normal(effect, 0.1, 10)))), one).word == "lower" for _ in range(1000)]
    assert 0.76 <= np.mean(found) <= 0.84


def test_equal_methods_are_called_different_in_one_of_twenty() -> None:
    rng = np.random.default_rng(3)
    one = dict.fromkeys(range(3), 1.0)
    found = [compare(dict(enumerate(np.exp(rng.normal(0, 0.3, 3)))), one).word for _ in range(1000)]
    assert 0.03 <= 1 - found.count("undecided") / 1000 <= 0.075


def test_one_trial_has_no_interval() -> None:
    found = compare({0: 1.0}, {0: 2.0})
    assert (found.mean, found.low, found.high, found.p) == (0.5, 0.0, np.inf, 1.0)
    assert (str(found), power([found]), found.judged()) == ("0.50", "none", None)


def test_holm_rejects_in_order_and_stops() -> None:
    assert holm([0.001, 0.02, 0.02, 0.2]) == [True, False, False, False]
    assert holm([0.001, 0.01, 0.02, 0.04]) == [True] * 4


def test_a_family_is_judged_with_holms_correction() -> None:
    """A single comparison with p = 0.03 is lower; three of them are not judged."""
    found = compare({0: 0.8, 1: 0.7, 2: 0.62}, dict.fromkeys(range(3), 1.0))
    assert 0.02 < found.p < 0.05
    assert judged([found]) == [True]
    assert judged([found] * 3) == [None] * 3
    assert together([True, True]) is True
    assert together([True, None]) is None
    assert together([None, False]) is False


def test_the_four_verdicts() -> None:
    said = [
        Claim("c", "p", "m", holds, reason="few trials", settings=s, tried=t).verdict
        for holds, s, t in ((True, "", 1), (True, "batch 2", 3), (False, "", 1), (False, "", 3), (None, "", 1))
    ]
    assert said == [
        "reproduced",
        "reproduced under named settings: batch 2",
        "not reproduced",
        "not reproduced in any of 3 settings",
        "not judged: few trials",
    ]


def test_slope_of_a_power_law() -> None:
    assert slope([5, 10, 80], [3 * v**-1.2 for v in (5, 10, 80)]) == pytest.approx(-1.2)


def test_nn_holds_where_fednmap_is_lowest() -> None:
    claims = nn.judge(nn_curves(2.0)).claims
    assert len(claims) == 1 + 2 * (6 + 1) + (3 + 1) + (4 + 1)
    assert all(c.holds is True for c in claims)
    assert claims[0].verdict == "reproduced"
    told = [c.effect for c in claims if c.effect]
    assert len(told) == 3
    assert told[0].startswith("300 rounds: 0.50 of Zhang's; ")


@pytest.mark.parametrize(("zhang", "wobble", "holds"), [(0.9, 0.0, False), (1.0, 0.0, False), (1.05, 0.5, None)])
def test_nn_does_not_hold_where_zhang_is_lower_or_level(zhang: float, wobble: float, holds: bool | None) -> None:
    """With a wide spread, nothing is judged."""
    claims = nn.judge(nn_curves(zhang, wobble=wobble)).claims
    assert [c.holds for c in claims[:15]] == [holds] * 15
    assert claims[0].verdict.startswith("not reproduced in any of 2 settings" if holds is False else "not judged: ")
    assert all(c.holds for c in claims[15:])


def test_nn_names_the_rounds_after_which_it_holds() -> None:
    curves = [c for c in nn_curves(2.0) if c.setting["rounds"] != 300]
    curves += [c for c in nn_curves(0.9) if c.setting["rounds"] == 300]
    assert nn.judge(curves).claims[0].verdict == "reproduced under named settings: 1000 rounds"


def test_nn_does_not_judge_all_panels_from_some() -> None:
    some = [c for c in nn_curves(2.0) if c.setting["n"] != 100]
    found = {c.claim: c.holds for c in nn.judge(some).claims}
    assert found["FedNMap has the lowest |F_nat|^2 in all panels after 300 rounds"] is None


def test_nn_shows_batch_size_and_rounds() -> None:
    (rows,) = nn.judge(nn_curves(2.0)).tables.values()
    assert {(row[1], row[2]) for row in rows[1:] if row[0] == "20, 10"} == {
        *(("8", r) for r in ("100", "200", "300", "500", "1000")),
        *(("32", r) for r in ("100", "200", "300")),
    }


@pytest.mark.parametrize(("power", "holds"), [(-1.3, True), (-0.6, True), (-0.3, False)])
def test_speedup_is_judged_by_the_slope(power: float, holds: bool) -> None:
    curves = [curve(n**power, k, start=0, n=n) for n in (5, 10, 20) for k in range(2)]
    falls, steep = speedup.judge_speedup(curves, "n", "-1.436", "").claims
    assert falls.holds is True
    assert steep.holds is holds
    assert speedup.exponent(curves, "n").slope == pytest.approx(power)


def test_a_slope_whose_interval_holds_the_theorys_is_not_judged() -> None:
    curves = [curve(n ** (-0.3 - 0.4 * k), k, start=0, n=n) for n in (5, 10, 20) for k in range(2)]
    found = speedup.exponent(curves, "n")
    assert found.slope == pytest.approx(-0.5)
    assert found.low == pytest.approx(-0.5 - 12.7062 * 0.2, rel=1e-4)  # Student's t with one degree of freedom
    steep = speedup.judge_speedup(curves, "n", "", "").claims[1]
    assert steep.holds is None
    assert "-0.500 [-3.041, 2.041]" in steep.measured


def test_speedup_throughout_fails_where_curves_cross() -> None:
    curves = [curve(1.0, k, start=0, n=5) for k in range(2)]
    for k in range(2):
        late = np.where(ROUNDS > 150, 0.1, 10.0)
        curves.append(Curve({"n": 10, "trial": k}, {"round": ROUNDS, "stationarity": late}))
    assert speedup.judge_speedup(curves, "n", "", "").claims[0].holds is False


@pytest.mark.parametrize(
    ("growth", "end", "comparable"), [(1.2, 1.0, True), (5.0, 1.0, False), (0.1, 1.0, False), (5.0, 0.5, None)]
)
def test_local_stepsize(growth: float, end: float, comparable: bool | None) -> None:
    """Values 0.01 and `growth` times that; in the last third of the rounds `end` times as large."""
    curves = []
    for rule, step in local_stepsize.RULES.items():
        for Q in (5, 10):
            level = 1 / Q if rule == "1/Q" else 0.01 * (growth if Q == 10 else 1) * np.where(ROUNDS > 200, end, 1)
            setting = {"Q": Q, "eta_a": round(step(Q), 6), "gamma": 4.0}
            y = level + np.exp(-ROUNDS * Q / 100)
            curves += [Curve({**setting, "trial": k}, {"round": ROUNDS, "stationarity": y}) for k in range(2)]
    found = local_stepsize.judge(curves)
    (_, first, second), holds = next(iter(found.tables.values())), [c.holds for c in found.claims]
    assert (first[1], second[1], second[5]) == ("5", "10", "yes")
    assert float(second[6].split()[0]) == pytest.approx(growth, rel=0.05)  # both fall by `end`
    assert holds == [True, True, comparable, True, comparable]


def test_sensitivity_judges_one_thing_at_a_time() -> None:
    curves = [
        curve(level, k, start=0, method=method, **case._asdict())
        for case in sensitivity.CASES["paper"]
        for method, level in (("FedNMap", 1.0), ("Zhang", 0.5 if case.gamma == 16 else 2.0))
        for k in range(2)
    ]
    found = sensitivity.judge(curves)
    assert [(c.claim.split()[-1], c.holds, c.effect) for c in found.claims] == [
        ("width", True, "0.50 of Zhang's"),
        ("size", True, "0.50 of Zhang's"),
        ("gamma", False, "0.50 to 2.00 of Zhang's"),
    ]
    assert len(found.tables["Every case"]) == 1 + 11
    assert found.reading == ""  # whose words are of other numbers


def test_sensitivity_is_read_where_the_numbers_say_so() -> None:
    levels = {1.0: 1.0, 4.0: 2.0, 16.0: 0.5}
    curves = [
        curve(level, k, start=0, method=method, **case._asdict())
        for case in sensitivity.CASES["paper"]
        for method, level in (("FedNMap", 1.0), ("Zhang", levels[case.gamma]))
        for k in range(2)
    ]
    assert "ends at 0.50, 0.50, 0.50 of Zhang's for widths 32, 64, 128" in sensitivity.judge(curves).reading
    assert sensitivity.judge(curves[4:]).reading == ""


def test_local_stepsize_says_where_the_root_does_what_the_paper_says() -> None:
    curves = []
    for gamma, growth in ((4.0, 5.0), (16.0, 1.2)):
        for rule, step in local_stepsize.RULES.items():
            for Q in (5, 10):
                level = 0.01 * (growth if Q == 10 and rule == "1/sqrt(Q)" else 1)
                setting = {"Q": Q, "eta_a": round(step(Q), 6), "gamma": gamma}
                y = level + np.exp(-ROUNDS * Q / 100)
                curves += [Curve({**setting, "trial": k}, {"round": ROUNDS, "stationarity": y}) for k in range(2)]
    reading = " ".join(local_stepsize.judge(curves).reading.split())
    assert "3 times as high from Q = 5 to 10 with gamma = 16; not so from Q = 5 to 10 with gamma = 4." in reading
    assert local_stepsize.judge([c for c in curves if c.setting["gamma"] == 4]).reading == ""


def test_mobilenet_is_judged_only_when_trained() -> None:
    assert [c.holds for c in mobilenet.judge(mobilenet_curves(1.0)).claims] == [True, True]
    assert [c.holds for c in mobilenet.judge(mobilenet_curves(2.0)).claims] == [None, None]
    one_is_not = mobilenet_curves(1.0) + [again(c, 2) for c in mobilenet_curves(2.0)[::2]]
    assert [c.holds for c in mobilenet.judge(one_is_not).claims] == [None, None]


def test_mobilenet_sparsity_is_not_judged_while_the_initial_weights_shrink() -> None:
    sparsity, loss = mobilenet.judge(mobilenet_curves(1.0, l1=3e-4)).claims
    assert (sparsity.holds, loss.holds) == (None, True)
    assert "the initial weights still shrink" in sparsity.reason


def test_mobilenet_sparsity_is_compared_with_that_without_data() -> None:
    """Soft-thresholding the initial weights gives the published values."""
    rounds = np.arange(0.0, 501.0, 100.0)
    found = mobilenet.untrained(Curve({"trial": 0, "l1": 3e-4}, {"round": rounds}))
    assert found == pytest.approx([0.496, 0.614, 0.690, 0.750, 0.796, 0.832], abs=6e-4)
    same = mobilenet_curves(1.0)
    for c in same:
        c.columns["hoyer"] = mobilenet.untrained(c)
    assert "without data gives the same sparsity" in mobilenet.judge(same).claims[0].reason


def again(curve: Curve, trial: int) -> Curve:
    return Curve({**curve.setting, "trial": trial}, curve.columns)


def test_mobilenet_compares_the_trials_that_all_methods_have() -> None:
    one = mobilenet_curves(1.0)[::2]
    more = one + [again(c, 2) for c in one[:2]]
    found = mobilenet.judge(more)
    assert found == mobilenet.judge(one)
    assert [c.trials for c in found.claims] == [1, 1]
    assert mobilenet.judge(more[3:] + more[2:3]).claims == []


def test_mobilenet_compares_the_methods_that_were_run() -> None:
    without = [c for c in mobilenet_curves(1.0) if c.setting["method"] != "FedCanon"]
    found = mobilenet.judge(without).claims
    assert [c.paper for c in found] == ["higher than Zhang", "lower than Zhang"]
    assert all("FedCanon" not in c.measured for c in found)
    assert mobilenet.judge(select(without, method="FedNMap")).claims == []


def test_a_trial_that_diverged_is_the_highest() -> None:
    fine, lost = {0: 1.0, 1: 1.1}, {0: 1.0, 1: float("nan")}
    assert compare(fine, lost).mean == compare(fine, {0: 1.0, 1: float("inf")}).mean == 0
    assert compare(lost, fine).mean == float("inf")
    assert compare(lost, lost).word == "level"
    assert compare({0: float("nan"), 1: 1.0}, lost).word == "undecided"  # each where the other has not
    assert compare(fine, {2: 9.0}).word == "undecided"  # nothing in common
    every = {k: float("nan") for k in range(6)}
    assert compare(dict.fromkeys(every, 1.0), every).word == "lower"  # all signs agree: p = 1/32
    assert compare(every, dict.fromkeys(every, 1.0)).word == "higher"
    assert compare(dict.fromkeys(range(5), 1.0), every).word == "undecided"
    assert number(lost).startswith("nan")
