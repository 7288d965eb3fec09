"""Communication complexities and Table 1, with numbers worked out by hand."""

from math import isclose, sqrt

import pytest

from fednmap.theory import rounds_to
from reproduction.complexity_table import complexity_table

NONCONVEX = dict(L=3.0, rho=1.0, sigma2=2.0, delta_psi=0.5, shift2=0.1, gradients2=1.1)
PL = dict(L=3.0, rho=1.0, sigma2=2.0, mu=0.5)


def test_nonconvex_rounds_by_hand():
    r = rounds_to(0.1, n=10, Q=4, **NONCONVEX)
    # 4 * 0.5 * 2 / (40 * 1e-4), 4 * 0.5 / 0.01, (1.1 + 9 * 0.1) / 0.01
    assert [round(v, 6) for v in r.terms.values()] == [1000.0, 200.0, 200.0]
    assert isclose(r.total, 1400)
    assert isclose(r.linear_until, 100)


def test_pl_rounds_by_hand():
    r = rounds_to(0.01, n=10, Q=4, **PL)
    # 4 * 2 / (40 * 0.01 * 0.25), sqrt(9 * 2 / (0.01 * 0.5 * 4.5^2))
    assert isclose(r.terms["noise"], 80)
    assert isclose(r.terms["drift"], sqrt(18 / (0.005 * 20.25)))
    assert isclose(r.linear_until, 40 * 80 / r.terms["drift"])


@pytest.mark.parametrize(("eps", "setting"), [(0.1, NONCONVEX), (0.01, PL)])
def test_the_noise_term_dominates_exactly_up_to_the_limit(eps, setting):
    until = int(rounds_to(eps, n=1, Q=1, **setting).linear_until)
    assert until > 1
    for nQ, dominates in ((until, True), (until + 1, False)):
        terms = rounds_to(eps, n=nQ, Q=1, **setting).terms
        noise = terms.pop("noise")
        assert (noise >= sum(terms.values())) is dominates


@pytest.mark.parametrize("setting", [NONCONVEX, PL])
def test_doubling_clients_or_steps_halves_the_noise_term_alone(setting):
    one = rounds_to(0.1, n=5, Q=3, **setting)
    for n, Q in ((10, 3), (5, 6)):
        two = rounds_to(0.1, n=n, Q=Q, **setting)
        assert isclose(two.terms["noise"], one.terms["noise"] / 2)
        assert isclose(two.total - two.terms["noise"], one.total - one.terms["noise"])


def test_without_noise_there_is_nothing_to_speed_up():
    assert rounds_to(0.1, n=5, Q=3, **{**NONCONVEX, "sigma2": 0.0}).linear_until == 0


def test_one_setting_must_be_named():
    for extra in ({}, dict(delta_psi=1.0, mu=1.0)):
        with pytest.raises(ValueError, match="delta_psi for the nonconvex setting or mu for the PL"):
            rounds_to(0.1, L=1.0, rho=0.0, sigma2=1.0, n=1, Q=1, **extra)


def test_table_1_by_hand():
    rows = complexity_table(sigma2=64.0, n=4, Q=1, T=1000, zeta=27.0, bound=3.0, subgradient=6.0)
    value = {(row.method, row.objective): row.value for row in rows}
    noise = sqrt(64 / 4000)
    # sigma^(2/3) = 4, zeta^(2/3) = 9, T^(2/3) = 100
    assert isclose(value["FedDA", "f convex"], noise + (9 + 4) / 100)
    assert isclose(value["EControlDA", "f convex"], noise + 4 / 100 + 1 / 1000)
    assert isclose(value["Fast-FedDA", "f strongly convex"], 0.064 + (27**2 + 9) / 1e6)
    assert isclose(value["Zhang 2024", "f strongly convex"], (64 + 36) / 4000)
    assert value["Zhang 2026", "psi PL"] is None
    assert value["FedCanon", "psi PL"] is None
    assert isclose(value["FedNMap", "f nonconvex"], noise + 1 / 1000)
    assert isclose(value["FedNMap", "psi PL"], 64 / 4000 + 64e-6)


def test_table_1_with_local_steps():
    rows = {row.method: row for row in complexity_table(sigma2=64.0, n=4, Q=8, T=1000, zeta=27.0, bound=3.0)}
    assert isclose(rows["FedDA"].value, sqrt(64 / 32000) + (9 + 4 / 2) / 100)
    assert isclose(rows["Fast-FedDA"].value, 0.064 + 64 * (27**2 + 9) / 1e6)
    assert rows["EControlDA"].value is None
    assert rows["EControlDA"].note == "has no local steps, Q = 8"
    assert rows["Zhang 2024"].note == "needs subgradient"
