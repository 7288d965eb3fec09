"""Theorems 1 and 2: every formula written out anew, with exact numbers, from the paper."""

from decimal import Decimal as D
from fractions import Fraction
from math import ceil, exp, isclose, log, sqrt

import pytest

from fednmap.theory import c0, nonconvex, pl

CONSTANTS = [
    dict(L=2.0, rho=0.5, sigma2=3.0, delta_psi=0.7, n=20, Q=5, T=400_000),
    dict(L=0.1, rho=3.0, sigma2=0.2, delta_psi=4.0, n=3, Q=1, T=10_000_000),
    dict(L=7.0, rho=0.0, sigma2=50.0, delta_psi=0.01, n=100, Q=20, T=50_000),
]


def close(a, b):
    return isclose(float(a), float(b), rel_tol=1e-10)


def test_c0_by_hand():
    # gamma rho = 1/4, gamma L = 1/2: (3 - 1) / (2 (3 - 1 + 1)) = 1/3.
    assert isclose(c0(gamma=0.5, rho=0.5, L=1.0), Fraction(1, 3))


def test_theorem_1_by_hand():
    # L + rho = 1, sigma^2 T / (delta n Q) = 90000 / 100 = 900, so m = ceil(sqrt(900 / 9)) = 10,
    # eta_hat = 1 / (320 * 30), eta_a = 1 / (380 (900 * 10^4)^(1/4) + 240 sqrt(900000)).
    s = nonconvex(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10, T=90_000)
    assert s.m == 10
    assert isclose(s.gamma, 0.2)
    assert isclose(s.eta_hat, 1 / 9600)
    assert isclose(s.eta_a, 1 / (380 * sqrt(3000) + 240 * 300 * sqrt(10)))
    assert isclose(s.largest_eta_hat, 1 / (1000 * sqrt(26)))
    assert isclose(s.largest_eta_a, 1 / (1000 * sqrt(260)))
    assert isclose(s.terms["gap"], 27 * 9600 / 90_000)
    assert isclose(s.terms["noise"], 0.33)
    assert s.violations == ()


@pytest.mark.parametrize("k", CONSTANTS)
def test_theorem_1_in_decimal_arithmetic(k):
    L, rho, s2, delta, n, Q, T = (D(str(k[v])) for v in ("L", "rho", "sigma2", "delta_psi", "n", "Q", "T"))
    F2, shift, grads = D("1.3"), D("0.4"), D("2.5")
    s = nonconvex(**k, normal_map2=float(F2), shift2=float(shift), gradients2=float(grads))
    gamma = 1 / (5 * (rho + L))
    m = ceil((s2 * T / (9 * (rho + L) * delta * n * Q)).sqrt())
    eta_hat = 1 / (320 * (s2 * T * (rho + L) / (n * Q * delta)).sqrt())
    eta_a = 1 / (
        380 * (s2 * T * Q**3 * (L + rho) ** 3 / (n * delta)).sqrt().sqrt()
        + 240 * ((L + rho) * T * Q * s2 / delta).sqrt()
    )
    assert s.m == m
    assert close(s.gamma, gamma)
    assert close(s.eta_hat, eta_hat)
    assert close(s.eta_a, eta_a)
    assert close(s.eta_s * s.eta_a * k["Q"], eta_hat)
    one = 1 - gamma * rho
    root = (L**2 + 1 / gamma**2).sqrt()
    assert close(s.largest_gamma, gamma)
    assert close(s.largest_eta_hat, one / (100 * m * root))
    assert close(s.largest_eta_a, one / (100 * Q * (m * (L**2 + 1 / gamma**2)).sqrt()))
    lipschitz = (L + 2 / gamma) / one
    assert close(s.proof_eta_hat, one / (70 * m * lipschitz))
    C0 = (3 - 4 * gamma * rho) / (2 * (3 - 4 * gamma * rho + 4 * gamma**2 * L**2))
    bound = (
        27 * delta / (eta_hat * T)
        + 27 * gamma * C0 * F2 / (2 * eta_hat * T)
        + 330 * s2 / (m * n * Q)
        + 110000 * eta_a**2 * Q * L**2 * s2 / one**2
        + 2 * L**2 / (one**2 * T) * shift
        + 2 / (one**2 * T) * grads
    )
    assert close(s.bound, bound)
    assert close(s.terms["drift"], 110000 * eta_a**2 * Q * L**2 * s2 / one**2)
    # The closing rate is the general bound with 1/m, eta_hat and eta_a replaced by their own bounds (teta_res).
    worst = (
        27 * 320 * (s2 * (rho + L) * delta / (n * Q * T)).sqrt()
        + 330 * s2 / (n * Q) * (9 * (L + rho) * n * Q * delta / (s2 * T)).sqrt()
        + 110000 * Q * L**2 * s2 / one**2 * delta / (240**2 * (L + rho) * T * Q * s2)
        + 27 * gamma * C0 * F2 / (2 * eta_hat * T)
        + 2 * L**2 / (one**2 * T) * shift
        + 2 / (one**2 * T) * grads
    )
    assert close(s.tuned_bound, worst)
    exact = nonconvex(**{**k, "n": 10**15, "T": 10**9})  # so many clients that the 1/T term stands alone
    alone = D(exact.tuned_bound) - 9630 * ((L + rho) * delta * s2 / (D(10**15) * Q * D(10**9))).sqrt()
    assert isclose(alone, D(110000) / 57600 * L**2 * delta / ((L + rho) * one**2 * D(10**9)), rel_tol=1e-8)
    assert s.bound <= s.tuned_bound
    # The term that the paper's closing rate drops.
    dropped = 864 * C0 * F2 * (s2 / ((L + rho) * delta * n * Q * T)).sqrt()
    assert close(s.terms["normal map"], dropped)


@pytest.mark.parametrize("k", CONSTANTS)
def test_theorem_1_holds_its_own_conditions_at_large_T(k):
    s = nonconvex(**k)
    assert s.violations == ()
    assert s.eta_hat <= s.largest_eta_hat
    assert s.eta_a <= s.largest_eta_a


def test_theorem_1_at_small_T_says_what_is_violated():
    k = dict(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10)
    few = nonconvex(**k, T=10)
    assert [v.split()[0] for v in few.violations] == ["eta_hat", "eta_a"]
    assert few.eta_hat > few.largest_eta_hat
    assert few.safe_eta_hat <= few.largest_eta_hat
    assert few.safe_eta_a == few.largest_eta_a
    # S = sqrt(sigma^2 T / (K delta n Q)): with m = 1 the steps are admissible from 320 S >= 100 sqrt(26) on.
    S = 100 * sqrt(26) / 320
    assert any("eta_hat" in v for v in nonconvex(**k, T=int(S**2 * 100) - 1).violations)
    assert not any("eta_hat" in v for v in nonconvex(**k, T=int(S**2 * 100) + 1).violations)


def test_theorem_1_needs_m_up_to_T_and_a_smaller_step_in_its_proof():
    loud = nonconvex(L=1.0, rho=0.0, sigma2=1e6, delta_psi=1.0, n=1, Q=1, T=10)
    assert loud.m > 10
    assert any(v.startswith("m = ") for v in loud.proof_gaps)
    # For rho >> L: 320 S against 70 * 10 / 0.64 * m, m about S / 3.
    weak = nonconvex(L=1e-3, rho=1.0, sigma2=1.0, delta_psi=1.0, n=1, Q=1, T=9_000_000)
    assert weak.violations == ()
    assert any(v.startswith("eta_hat") for v in weak.proof_gaps)
    assert weak.safe_eta_hat == weak.proof_eta_hat < weak.eta_hat


def test_without_noise_the_steps_are_the_largest_admissible():
    s = nonconvex(L=3.0, rho=1.0, sigma2=0.0, delta_psi=1.0, n=10, Q=4, T=100)
    assert s.m == 1
    assert isclose(s.eta_hat, 0.95 / (100 * sqrt(9 + 400)))
    assert isclose(s.eta_a, s.eta_hat / 4)
    assert isclose(s.eta_s, 1.0)
    assert s.violations == ()
    assert s.tuned_bound == s.bound == s.terms["gap"]
    p = pl(L=3.0, rho=1.0, mu=0.5, sigma2=0.0, n=10, Q=4, T=100, lyapunov_gap=2.0)
    assert p.m == 1
    assert isclose(p.eta_hat, 1 / (120 * 4.5))
    assert p.violations == ()
    assert p.bound == p.tuned_bound == p.terms["start"]
    small = pl(L=3.0, rho=1.0, mu=0.5, sigma2=0.0, n=10, Q=4, T=100, eta_s=0.1)
    assert isclose(small.eta_a, 1 / (96 * 4 * 4.5))


PL_CONSTANTS = [
    dict(L=2.0, rho=0.5, mu=0.02, sigma2=3.0, n=20, Q=5, T=4000, eta_s=1.0),
    dict(L=10.0, rho=0.0, mu=0.3, sigma2=0.1, n=4, Q=10, T=777, eta_s=2.5),
]


@pytest.mark.parametrize("k", PL_CONSTANTS)
def test_theorem_2_written_out(k):
    L, rho, mu, s2, n, Q, T, eta_s = k.values()
    s = pl(**k, lyapunov_gap=1.7)
    gamma = 1 / (5 * (mu + L + rho))
    eta_a = log(n * Q * T) / (120 * Q * (L + rho + mu) * T)
    m = ceil(mu * T / (L + rho))
    assert (s.m, s.eta_s) == (m, eta_s)
    assert close(s.gamma, gamma)
    assert close(s.eta_a, eta_a)
    assert close(s.eta_hat, eta_a * eta_s * Q)
    assert close(s.largest_eta_hat, 1 / (120 * m * (L + rho + mu)))
    assert close(s.largest_eta_a, 1 / (96 * Q * (L + rho + mu)))
    assert close(s.proof_eta_a, (1 - gamma * rho) / (70 * Q * sqrt(m * (L**2 + 1 / gamma**2))))
    C0 = (3 - 4 * gamma * rho) / (2 * (3 - 4 * gamma * rho + 4 * gamma**2 * L**2))
    limits = (
        (1 - gamma * rho) / (70 * m * sqrt(L**2 + 1 / gamma**2)),
        (1 + gamma * mu * C0) / (10 * m * mu),
    )
    assert close(s.proof_eta_hat, min(limits))
    factor = exp(-2 * eta_a * eta_s * Q * mu * T / (9 * (1 + gamma * mu * C0)))
    noise = 36 * s2 / (m * n * mu * Q) + 12100 * eta_a**2 * Q * L**2 * s2 / (mu * (1 - gamma * rho) ** 2)
    assert close(s.bound, factor * 1.7 + noise)
    # The first factor is a small power of nQT, as the docstring says.
    assert close(factor, (n * Q * T) ** (-eta_s * mu / (540 * (L + rho + mu) * (1 + gamma * mu * C0))))
    order = 36 * (L + rho) * s2 / (n * Q * T * mu**2)
    order += (
        (log(n * Q * T) / 120) ** 2 * 12100 * L**2 * s2 / (Q * T**2 * mu * (L + rho + mu) ** 2) / (1 - gamma * rho) ** 2
    )
    assert close(s.tuned_bound, order + factor * 1.7)
    assert s.bound <= s.tuned_bound


def test_theorem_2_violates_its_condition_for_large_T_for_mu_near_L_and_for_large_eta_s():
    fine = dict(L=1.0, rho=0.0, mu=0.05, sigma2=1.0, n=10, Q=10, T=1000, eta_s=1.0)
    assert pl(**fine).violations == ()
    for change in (dict(T=10**8), dict(mu=0.9), dict(eta_s=20.0)):
        found = pl(**{**fine, **change})
        assert any(v.startswith("eta_hat") for v in found.violations), change
        assert found.eta_hat > found.largest_eta_hat
        assert found.safe_eta_hat <= found.largest_eta_hat
    # mu T whole: the condition is eta_s m log(nQT) <= T, on both sides of equality.
    limit = 1000 / (50 * log(10 * 10 * 1000))
    assert pl(**{**fine, "eta_s": 0.999 * limit}).violations == ()
    assert pl(**{**fine, "eta_s": 1.001 * limit}).violations != ()


def test_the_smaller_m_of_the_docstring_reaches_the_rate():
    L, mu, n, Q, T = 1.0, 0.5, 10, 10, 10**7
    K, gamma = L + mu, 1 / (5 * (L + mu))
    stretch = 1 + gamma * mu * c0(gamma, 0.0, L)
    m = 2 * mu * T / (1080 * K * stretch * log(n * Q * T))
    assert isclose(exp(-2 * mu * T / (120 * m * K) / (9 * stretch)), 1 / (n * Q * T))


def test_starting_terms_that_were_not_given_are_named():
    k = dict(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10, T=1000)
    assert nonconvex(**k).left_out == ("normal_map2", "shift2", "gradients2")
    given = nonconvex(**k, shift2=0.5, gradients2=2.0)
    assert given.left_out == ()
    # |F_nor(z_0)|^2 <= 2 |grad f|^2 + 2 |z_0 - x_0|^2 / gamma^2 = 4 + 25.
    assert isclose(given.terms["normal map"], nonconvex(**k, normal_map2=29.0).terms["normal map"])
    assert pl(1.0, 0.0, 0.1, 1.0, 10, 10, 100).left_out == ("lyapunov_gap",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(L=0.0), "L is 0; it must be finite and above 0"),
        (dict(rho=-1.0), "rho is -1"),
        (dict(delta_psi=0.0), "delta_psi is 0"),
        (dict(Q=0), "Q is 0; it must be a whole number"),
        (dict(sigma2=float("nan")), "sigma2 is nan"),
    ],
)
def test_constants_that_make_no_sense_are_refused(change, message):
    good = dict(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10, T=1000)
    with pytest.raises(ValueError, match=message):
        nonconvex(**{**good, **change})
