"""The paper's table: exponents, limits, and the problems they are measured on."""

import numpy as np
import pytest
import torch
from curves import ROUNDS, table_curves

from fednmap.measure import stationarity
from fednmap.simulation import simulate
from reproduction import table1, table1_trials
from reproduction.quadratics import Quadratics
from reproduction.trials import Curve


def test_table_compares_exponents_with_the_stated_ones() -> None:
    fast, slow = ({c.claim: c.holds for c in table1.judge(table_curves(p)).claims} for p in (-1.0, -0.5))
    assert None in fast.values()
    assert False not in fast.values()
    assert slow["FedNMap, nonconvex: rate in n, Q, T"] is True
    assert slow["FedNMap, PL: rate in n, Q, T"] is False
    assert slow["Zhang, PL: rate in n, Q, T"] is None


def test_an_exponent_that_the_trials_leave_open_is_not_judged() -> None:
    found = {c.claim: c for c in table1.judge(table_curves(-1.0, wobble=0.1)).claims}
    open_ = found["FedNMap, PL: rate in n, Q, T"]
    assert (open_.holds, open_.trials) == (None, 2)
    wide = 12.7062 * 0.1  # Student's t with one degree of freedom, standard error 0.1 sqrt(2) / sqrt(2)
    assert open_.measured.startswith(f"n^-1.00 [{-1 - wide:.2f}, {-1 + wide:.2f}]")
    one = [c for c in table_curves(-1.0) if c.setting["trial"] == 0]
    assert "n^-1.00, Q^-1.00" in {c.claim: c for c in table1.judge(one).claims}["FedNMap, PL: rate in n, Q, T"].measured


def test_the_table_of_some_trials() -> None:
    """What was not run is left out, not made up."""
    some = [c for c in table_curves(-1.0) if (c.setting["part"], c.setting["method"]) == ("rate", "Zhang")]
    assert [c.claim.split(":")[0] for c in table1.judge(some).claims] == ["Zhang, strongly convex", "Zhang, PL"]
    limits = [c for c in table_curves(-1.0) if c.setting["part"] == "limit" and c.setting["method"] == "Zhang"]
    (claim,) = table1.judge(limits).claims
    assert (claim.claim.split()[0], claim.trials) == ("methods", 1)
    assert "FedDA" not in claim.measured
    for curves in (some, limits):
        table1.draw(curves)
        assert table1.closing(curves).startswith("method,problem")


def test_table_takes_the_best_step() -> None:
    for row in table1.ROWS:
        _, errors, steps = table1.best(table_curves(-1.0), row, "n")
        assert steps == [0.25] * 3
        assert (errors[0] > errors[1]).all()
        assert (errors[1] > errors[2]).all()


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
