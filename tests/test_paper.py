"""The paper's figures: verdicts that follow from the numbers alone, tables, pages and pictures."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fednmap.commands.reproduce import NAMES
from fednmap.measure import stationarity
from fednmap.paper import FIGURES, local_stepsize, mobilenet, nn, sensitivity, slopes, table1, table1_trials
from fednmap.paper.overview import overview
from fednmap.paper.quadratics import Quadratics
from fednmap.paper.reproduce import reproduce
from fednmap.paper.trials import Curve, Made, select, summary, tidy
from fednmap.paper.verdict import Claim, Verdict, as_json, compare, number, ratio, slope
from fednmap.simulation import simulate

ROUNDS = np.arange(0.0, 310.0, 10.0)


def silent(line: str) -> None:
    pass


def curve(level: float, trial: int = 0, start: float = 1.0, wobble: float = 0.0, **setting: object) -> Curve:
    """Falls from `start` to `level` within a few measurements; trials differ by a factor of up to 1 + wobble."""
    y = level * (1 + wobble * np.cos(3 * trial)) + start * np.exp(-ROUNDS / 10)
    return Curve({**setting, "trial": trial}, {"round": ROUNDS, "stationarity": y})


def test_tables_hold_every_trial() -> None:
    curves = [curve(1e-3, trial, wobble=0.1, method="FedNMap", n=20) for trial in range(3)]
    assert len(tidy(curves).splitlines()) == 1 + 3 * len(ROUNDS)
    head, row = summary(curves).splitlines()
    closing = dict(zip(head.split(","), row.split(","), strict=True))
    assert closing["trials"] == "3"
    finals = [c.final("stationarity") for c in curves]
    assert float(closing["stationarity_mean"]) == pytest.approx(np.mean(finals), rel=1e-5)
    assert float(closing["stationarity_std"]) == pytest.approx(np.std(finals, ddof=1), rel=1e-5)


# --- verdicts


def test_final_is_the_mean_of_the_last_tenth() -> None:
    c = Curve({"trial": 0}, {"round": np.arange(0.0, 101.0, 5.0), "y": np.arange(21.0)})
    assert c.final("y") == 19.5
    assert c.final("y", rounds=50) == 10


def test_compare_pairs_the_trials() -> None:
    a = {0: 1.0, 1: 10.0, 2: 100.0}
    assert compare(a, {k: 1.1 * v for k, v in a.items()}) == "lower"
    assert compare({k: 1.1 * v for k, v in a.items()}, a) == "higher"
    assert compare(a, {0: 1.3, 1: 9.0, 2: 100.0}) == "level"
    assert compare(a, {1: 9.0}) == "higher"
    assert compare(a, {k: 1.01 * v for k, v in a.items()}) == "level"  # as sure as can be, and too small to matter
    assert ratio(a, {k: 2 * v for k, v in a.items()}) == pytest.approx(0.5)


def test_slope_of_a_power_law() -> None:
    assert slope([5, 10, 80], [3 * v**-1.2 for v in (5, 10, 80)]) == pytest.approx(-1.2)


def nn_curves(zhang: float, trials: int = 3, wobble: float = 0.0) -> list[Curve]:
    """FedNMap ends at 1 / (n Q), Zhang at `zhang` times that, FedCanon at three times."""
    levels = {"FedNMap": 1.0, "Zhang": zhang, "FedCanon": 3.0}
    return [
        curve(levels[m] / (n * Q), k, wobble=wobble * (m == "Zhang"), method=m, n=n, Q=Q, batch=b, rounds=rounds)
        for n, Q in nn.PANELS["paper"]
        for b, rounds in nn._variants((n, Q))
        for m in nn.METHODS
        for k in range(trials)
    ]


def test_nn_holds_where_fednmap_is_lowest() -> None:
    claims = nn.judge(nn_curves(2.0)).claims
    assert len(claims) == 2 * (6 + 1) + (3 + 1) + (4 + 1)
    assert all(c.holds is True for c in claims)
    told = [c.effect for c in claims if c.effect]
    assert len(told) == 4
    assert told[0].startswith("0.50 of Zhang's; ")


@pytest.mark.parametrize(("zhang", "wobble"), [(0.9, 0.0), (1.0, 0.0), (1.05, 0.5)])
def test_nn_does_not_hold_where_zhang_is_lower_or_level(zhang: float, wobble: float) -> None:
    claims = nn.judge(nn_curves(zhang, wobble=wobble)).claims
    assert [c.holds for c in claims[:14]] == [False] * 14
    assert all(c.holds for c in claims[14:])


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
    falls, steep = slopes.judge_speedup(curves, "n", "-1.436").claims
    assert falls.holds is True
    assert steep.holds is holds
    assert slopes.exponent(curves, "n").slope == pytest.approx(power)


def test_a_slope_whose_interval_holds_the_theorys_is_not_judged() -> None:
    curves = [curve(n ** (-0.3 - 0.4 * k), k, start=0, n=n) for n in (5, 10, 20) for k in range(2)]
    found = slopes.exponent(curves, "n")
    assert found.slope == pytest.approx(-0.5)
    assert found.low == pytest.approx(-0.5 - 12.7062 * 0.2, rel=1e-4)  # Student's t with one degree of freedom
    steep = slopes.judge_speedup(curves, "n", "").claims[1]
    assert steep.holds is None
    assert "-0.500 [-3.041, 2.041]" in steep.measured


def test_speedup_throughout_fails_where_curves_cross() -> None:
    curves = [curve(1.0, k, start=0, n=5) for k in range(2)]
    for k in range(2):
        late = np.where(ROUNDS > 150, 0.1, 10.0)
        curves.append(Curve({"n": 10, "trial": k}, {"round": ROUNDS, "stationarity": late}))
    assert slopes.judge_speedup(curves, "n", "").claims[0].holds is False


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
    assert float(second[6]) == pytest.approx(growth, rel=0.05)  # both fall by `end`
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


def mobilenet_curves(loss: float) -> list[Curve]:
    ends = {"FedNMap": (loss, 0.6), "Zhang": (1.1 * loss, 0.5), "FedCanon": (1.2 * loss, 0.4)}
    return [
        Curve(
            {"method": m, "n": 5, "Q": 10, "trial": 0},
            {"round": ROUNDS, "hoyer": np.full(len(ROUNDS), s), "loss": np.full(len(ROUNDS), f)},
        )
        for m, (f, s) in ends.items()
    ]


def test_mobilenet_is_judged_only_when_trained() -> None:
    assert [c.holds for c in mobilenet.judge(mobilenet_curves(1.0)).claims] == [True, True]
    assert [c.holds for c in mobilenet.judge(mobilenet_curves(2.0)).claims] == [None, None]
    one_is_not = mobilenet_curves(1.0) + [again(c) for c in mobilenet_curves(2.0)]
    assert [c.holds for c in mobilenet.judge(one_is_not).claims] == [None, None]


def again(curve: Curve) -> Curve:
    return Curve({**curve.setting, "trial": 1}, curve.columns)


def test_mobilenet_compares_the_trials_that_all_methods_have() -> None:
    more = mobilenet_curves(1.0) + [again(c) for c in mobilenet_curves(1.5)[:2]]
    found = mobilenet.judge(more)
    assert found == mobilenet.judge(mobilenet_curves(1.0))
    assert [c.trials for c in found.claims] == [1, 1]
    assert mobilenet.judge(more[3:] + more[2:3]).claims == []


def test_a_trial_that_diverged_is_the_highest() -> None:
    fine, lost = {0: 1.0, 1: 1.1}, {0: 1.0, 1: float("nan")}
    assert compare(fine, lost) == compare(fine, {0: 1.0, 1: float("inf")}) == "lower"
    assert compare(lost, fine) == "higher"
    assert compare(lost, lost) == "level"
    assert (ratio(fine, lost), ratio(lost, fine), ratio(lost, lost)) == (0, float("inf"), 1)
    assert number(lost).startswith("nan")


def test_settings_that_only_one_side_names_have_their_default() -> None:
    was = Made({"rounds": 500, "gamma": 2.5}, None, None)
    assert was.differs({"rounds": 500, "gamma": 2.5, "minibatches": "replacement", "columns": ["loss"]}) == ""
    assert was.differs({"rounds": 500, "gamma": 2.5, "eval_samples": 5000}) == "eval_samples was None and is 5000"


def test_too_few_trials_to_compare_is_said(tmp_path: Path) -> None:
    job = mobilenet.jobs("middle", 1)[0]
    (tmp_path / "trials").mkdir()
    columns = [*job.setting, "round", "hoyer", "loss"]
    row = [*job.setting.values(), 500, 0.5, 1.0]
    told = json.dumps({"configuration": dict(job.configuration)})
    (tmp_path / "trials" / job.file).write_text(f"# {told}\n{','.join(columns)}\n{','.join(map(str, row))}\n")
    with pytest.raises(ValueError, match="too few of mobilenet's trials"):
        reproduce(mobilenet.FIGURE, "middle", trials=1, out=tmp_path, workers=1, tell=silent, only_finished=True)
    assert not (tmp_path / "mobilenet").exists()


# --- the table


def table_curves(power: float) -> list[Curve]:
    """Errors (n Q T)^power at the best step, and limits that are all reached."""
    curves = []
    for row in table1.ROWS:
        points = [(n, Q, T, s) for n, Q, T in table1_trials.cross(row.method) for s in table1_trials.STEPS]
        n, Q, T, step = (np.array(v, dtype=float) for v in zip(*points, strict=True))
        value = (n * Q * T) ** power * np.where(step == 0.25, 1.0, 2.0)
        setting = table1._setting("rate", row.method, row.problem, 0)
        curves.append(Curve(setting, {"round": T, "n": n, "Q": Q, "step": step, "value": value}))
    for problem in table1_trials.PROBLEMS:
        for method in table1.METHODS:
            setting = table1._setting("limit", method, problem, 0)
            curves.append(Curve(setting, {"round": ROUNDS, "value": 10 ** (-ROUNDS / 10)}))
    return curves


def test_table_compares_exponents_with_the_stated_ones() -> None:
    fast, slow = ({c.claim: c.holds for c in table1.judge(table_curves(p)).claims} for p in (-1.0, -0.5))
    assert None in fast.values()
    assert False not in fast.values()
    assert slow["FedNMap, nonconvex: rate in n, Q, T"] is True
    assert slow["FedNMap, PL: rate in n, Q, T"] is False
    assert slow["Zhang, PL: rate in n, Q, T"] is None


def test_table_takes_the_best_step() -> None:
    for row in table1.ROWS:
        _, errors, steps = table1.best(table_curves(-1.0), row, "n")
        assert steps == [0.25] * 3
        assert errors[0] > errors[1] > errors[2]


def test_nonconvex_error_is_the_mean_over_all_rounds() -> None:
    T = 70
    phi, f = table1_trials.PHI["nonconvex"], table1_trials.PROBLEMS["nonconvex"](2, noise=table1_trials.NOISE, seed=1)
    kind = table1_trials.algorithm("FedNMap", phi, 0.5, 2)
    each = [float(stationarity(f, phi, kind.model(r.server), 1.0)) for r in simulate(kind, f, rounds=T)]
    assert table1_trials.error("FedNMap", "nonconvex", 2, 2, T, 0.5, 1) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
    ("y", "word"),
    [
        (10 ** (-ROUNDS / 10), "reached"),
        (np.r_[1, ROUNDS[1:] ** -2.0], "falling as T^-2"),
        (np.full(len(ROUNDS), 1e-3), "stalls"),
        (np.full(len(ROUNDS), np.inf), "diverged"),
    ],
)
def test_outcomes(y: np.ndarray, word: str) -> None:
    assert table1.outcome(Curve({}, {"round": ROUNDS, "value": y})).startswith(word)


@pytest.mark.parametrize("problem", table1_trials.PROBLEMS)
def test_the_function_does_not_depend_on_the_number_of_clients(problem: str) -> None:
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)
    two, many = (table1_trials.PROBLEMS[problem](n) for n in (2, 32))
    torch.testing.assert_close(two.gradient(x), many.gradient(x))
    clients = many.oracle(torch.arange(32), 0)(x, 0)
    torch.testing.assert_close(clients.mean(0), many.gradient(x))
    exact = torch.func.grad(many.loss)(x)
    torch.testing.assert_close(exact, many.gradient(x))


def test_the_noise_has_the_stated_variance() -> None:
    f = Quadratics(400, smallest=0.2, spread=0.8, noise=3.0)
    still = Quadratics(400, smallest=0.2, spread=0.8)
    every = torch.arange(400)
    noise = f.oracle(every, 1)(f.start, 2) - still.oracle(every, 1)(f.start, 2)
    assert float(noise.square().sum(-1).mean()) == pytest.approx(9.0, rel=0.1)
    torch.testing.assert_close(f.oracle(every[3], 1)(f.start, 2), f.oracle(every, 1)(f.start, 2)[3])


def test_clients_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="pairs"):
        Quadratics(3, smallest=0.2, spread=0.0)


def test_fednmap_reaches_the_optimum_the_table_measures_from() -> None:
    records = table1_trials.limit("FedNMap", "strongly convex", 200)
    assert records[-1]["value"] < 1e-12 * records[0]["value"]
    biased = table1_trials.limit("FedCanon", "strongly convex", 200)
    assert biased[-1]["value"] > 1e-6


# --- pages and pictures


def test_the_page_shows_every_verdict_there_is(tmp_path: Path) -> None:
    claims = [{"claim": f"claim {h}", "paper": "", "measured": "|x|", "holds": h} for h in (True, False, None)]
    facts = {"name": "nn", "scale": "quick", "trials": 2, "claims": claims}
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "verdict.json").write_text(json.dumps(facts))
    text = overview(tmp_path, FIGURES.values())
    assert "| [nn](#nn) | quick | 2 | 1 | 1 | 1 | `fednmap reproduce nn --scale quick --trials 2` |" in text
    assert "| claim False |  | \\|x\\| | **does not hold** |" in text
    assert "| speedup-n | not run | - | - | - | - | `fednmap reproduce speedup-n` |" in text
    assert "do not say what they were made from" not in text


def test_the_page_counts_trials_that_do_not_say_what_they_were_made_from(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "old.csv").write_text("method,round\n")
    (tmp_path / "trials" / "new.csv").write_text('# {"configuration": {}}\nmethod,round\n')
    assert "1 of the 2 files of trials are older than that line" in overview(tmp_path, FIGURES.values())


def test_the_page_begins_with_what_holds_and_how_much(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    for k, code in enumerate(("aaa", "aaa", "bbb")):
        told = json.dumps({"configuration": {}, "code": code})
        (tmp_path / "trials" / f"{k}.csv").write_text(f"# {told}\nmethod,round\n")
    (tmp_path / "nn").mkdir()
    verdict = Verdict([Claim("a", "p", "m", False, "0.90 of b"), Claim("without", "p", "m", True)])
    (tmp_path / "nn" / "verdict.json").write_text(as_json("nn", "paper", 10, verdict))
    text = overview(tmp_path, FIGURES.values())
    first = text.split("\n\n")[1]
    assert first.splitlines()[2:] == ["| a | **does not hold** | 0.90 of b | 10 | [nn](#nn) |"]
    assert "2 by aaa; 1 by bbb." in text


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished trial"):
        reproduce(nn.FIGURE, "quick", trials=1, out=tmp_path, workers=1, tell=silent, only_finished=True)


@pytest.mark.parametrize("draw", [partial(slopes.draw_speedup, factor="n"), nn.draw, mobilenet.draw, table1.draw])
def test_pictures_can_be_drawn(draw: object, tmp_path: Path) -> None:
    curves = {
        nn.draw: lambda: nn_curves(2.0),
        mobilenet.draw: lambda: mobilenet_curves(1.0),
        table1.draw: lambda: table_curves(-1.0),
    }.get(draw, lambda: [curve(1 / n, k, n=n) for n in (5, 10) for k in range(2)])()
    draw(curves).savefig(tmp_path / "figure.png", dpi=30)  # type: ignore[operator]
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in FIGURES for scale in FIGURES[name].trials])
def test_every_figure_names_its_trials_apart(name: str, scale: str) -> None:
    jobs = FIGURES[name].jobs(scale, 2)
    assert len({job.file for job in jobs}) == len(jobs)
    assert FIGURES[name].name == name
    assert name in NAMES


def test_speedup_in_n_shares_trials_with_the_comparison() -> None:
    ours = {job.file for job in FIGURES["nn"].jobs("paper", 1)}
    shared = [job for job in FIGURES["speedup-n"].jobs("paper", 1) if job.file in ours]
    assert [job.setting["n"] for job in shared] == [20, 50, 100]


def test_select_sorts_by_trial() -> None:
    curves = [curve(1.0, k, method="A") for k in (2, 0, 1)]
    assert [c.setting["trial"] for c in select(curves, method="A")] == [0, 1, 2]
