"""Theorems 1 and 2: step sizes with a guarantee, the bounds they give, whether their conditions hold; and how many
rounds an accuracy costs.

Reference: Huang, Pu and Johansson, Achieving linear speedup for composite federated learning, 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fednmap.names import InputError


@dataclass(frozen=True)
class Steps:
    r"""A theorem's choice of parameters, its bound there, and which of its conditions the choice violates.

    `gamma`, `m`, `eta_hat`, `eta_a`, `eta_s` hold the paper's formula, admissible or not, with
    $\hat\eta = \eta_a \eta_s Q$. `nonconvex` and `pl` return them.

    >>> nonconvex(L=1.0, rho=0.0, sigma2=0.0, delta_psi=1.0, n=10, Q=10, T=100).bound > 0
    True
    """

    gamma: float
    m: int
    """Rounds in one step of the multistep analysis; the algorithm does not know it."""
    eta_hat: float
    eta_a: float
    eta_s: float
    terms: dict[str, float]
    """The theorem's general bound at these values, term by term."""
    tuned_bound: float
    """The theorem's closing rate with the constants that substitution gives, never below `bound`."""
    left_out: tuple[str, ...]
    """Starting terms that were not given and count as 0 in both bounds."""
    violations: tuple[str, ...]
    """Conditions of the theorem that these values do not meet: then the bounds promise nothing."""
    largest_eta_hat: float
    largest_eta_a: float
    """The largest steps the theorem admits, at this m and gamma."""
    proof_gaps: tuple[str, ...]
    """Conditions that the proof uses, the statement omits, and these values do not meet."""
    proof_eta_hat: float
    proof_eta_a: float
    """The largest steps that the proof supports, at this gamma and m."""

    @property
    def largest_gamma(self) -> float:
        """The largest gamma the theorem admits, which is the paper's choice."""
        return self.gamma

    @property
    def bound(self) -> float:
        """The sum of `terms`."""
        return math.fsum(self.terms.values())

    @property
    def safe_eta_hat(self) -> float:
        """The paper's eta_hat, lowered to what both statement and proof admit."""
        return min(self.eta_hat, self.largest_eta_hat, self.proof_eta_hat)

    @property
    def safe_eta_a(self) -> float:
        """The paper's eta_a, lowered to what both statement and proof admit."""
        return min(self.eta_a, self.largest_eta_a, self.proof_eta_a)


def c0(gamma: float, rho: float, L: float) -> float:
    r"""Return $C_0 = (3 - 4 \gamma \rho) / (2 (3 - 4 \gamma \rho + 4 \gamma^2 L^2))$, equation (cH_can).

    >>> c0(gamma=0.1, rho=0.0, L=0.0)
    0.5
    """
    a = 3 - 4 * gamma * rho
    return a / (2 * (a + 4 * (gamma * L) ** 2))


def nonconvex(
    L: float,
    rho: float,
    sigma2: float,
    delta_psi: float,
    n: int,
    Q: int,
    T: int,
    *,
    normal_map2: float | None = None,
    shift2: float | None = None,
    gradients2: float | None = None,
) -> Steps:
    r"""Return the steps and the bound of Theorem 1, for L-smooth $f_i$ and a $\rho$-weakly convex $\phi$.

    With $K = L + \rho$, $\hat\eta = \eta_a \eta_s Q$ and $\delta = 1 - \gamma \rho$, whenever

    $$
    \gamma \le \frac{1}{5 K}, \qquad \hat\eta \le \frac{\delta}{100 m \sqrt{L^2 + 1/\gamma^2}}, \qquad
        \eta_a \le \frac{\delta}{100 Q \sqrt{m (L^2 + 1/\gamma^2)}},
    $$

    the general bound (ncvx) on $\frac{1}{T} \sum_t E|F_{nor}(z_t)|^2$ is the sum of `terms`:

    $$
    & \frac{27 \Delta_\psi}{\hat\eta T} + \frac{27 \gamma C_0 |F_{nor}(z_0)|^2}{2 \hat\eta T}
        && \text{gap, normal map} \\
    & + \frac{330 \sigma^2}{m n Q} + \frac{110000 \eta_a^2 Q L^2 \sigma^2}{\delta^2} && \text{noise, drift} \\
    & + \frac{2 L^2 |x_0 - z_0|^2 + 2 \mean |\nabla f_i(x_0)|^2}{\delta^2 T} && \text{shift, gradients}
    $$

    The choice (ncvx_teta), returned here, is $\gamma = 1/(5 K)$,
    $m = \lceil \sqrt{\sigma^2 T / (9 K \Delta_\psi n Q)} \rceil$ and

    $$
    \hat\eta &= 1 / (320 \sqrt{\sigma^2 T K / (n Q \Delta_\psi)}), \\
    \eta_a &= 1 / (380 (\sigma^2 T Q^3 K^3 / (n \Delta_\psi))^{1/4} + 240 \sqrt{K T Q \sigma^2 / \Delta_\psi}).
    $$

    `tuned_bound` is (ncvx_order) with the constants that (teta_res) gives, and with the terms of the start: the term
    of the normal map falls like $1/\sqrt T$ here, and (ncvx_order) omits it. It is

    $$
    9630 \sqrt{K \Delta_\psi \sigma^2 / (n Q T)}
        + \frac{110000}{57600} \frac{L^2 \Delta_\psi}{K \delta^2 T} + \text{normal map, shift, gradients}.
    $$

    For $\sigma = 0$: $m = 1$ and the largest steps that the theorem admits. `docs/theory.md` lists where statement and
    proof differ. Numbers out of their range raise InputError.

    L, rho:      smoothness of every $f_i$; weak convexity of $\phi$.
    sigma2:      bound on $E|g_i - \nabla f_i|^2$.
    delta_psi:   $\Delta_\psi = \psi(x_0) - \inf \psi$.
    n, Q, T:     clients, local steps, rounds.
    normal_map2: $|F_{nor}(z_0)|^2$. Default: its bound, 2 gradients2 + 2 shift2 / $\gamma^2$.
    shift2:      $|x_0 - z_0|^2$.
    gradients2:  $\mean |\nabla f_i(x_0)|^2$.

    >>> steps = nonconvex(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10, T=90_000)
    >>> steps.gamma, steps.m, steps.violations
    (0.2, 10, ())
    >>> nonconvex(L=1.0, rho=0.0, sigma2=1.0, delta_psi=1.0, n=10, Q=10, T=100).violations[0]
    'eta_hat = 0.003125 exceeds (1 - gamma rho) / (100 m sqrt(L^2 + 1/gamma^2)) = 0.00196116'

    Reference: Theorem 1, equations (ncvx) to (ncvx_order), and its proof.
    """
    positive(L=L)
    nonnegative(rho=rho, sigma2=sigma2, delta_psi=delta_psi)
    at_least_one(n=n, Q=Q, T=T)
    if sigma2 > 0:
        positive(delta_psi=delta_psi)
    left_out = _missing(shift2=shift2, gradients2=gradients2)
    if left_out and normal_map2 is None:
        left_out = ("normal_map2", *left_out)
    shift2, gradients2 = shift2 or 0.0, gradients2 or 0.0
    K = L + rho
    gamma = 1 / (5 * K)
    if normal_map2 is None:
        normal_map2 = 2 * gradients2 + 2 * shift2 / gamma**2
    c = 1 - gamma * rho
    root = math.hypot(L, 1 / gamma)
    m = max(1, math.ceil(math.sqrt(sigma2 * T / (9 * K * delta_psi * n * Q)))) if sigma2 > 0 else 1
    largest_eta_hat = c / (100 * m * root)
    largest_eta_a = c / (100 * Q * math.sqrt(m) * root)
    if sigma2 > 0:
        eta_hat = 1 / (320 * math.sqrt(sigma2 * T * K / (n * Q * delta_psi)))
        eta_a = 1 / (
            380 * (sigma2 * T * Q**3 * K**3 / (n * delta_psi)) ** 0.25 + 240 * math.sqrt(K * T * Q * sigma2 / delta_psi)
        )
    else:
        eta_hat, eta_a = largest_eta_hat, largest_eta_a
    terms = {
        "gap": 27 * delta_psi / (eta_hat * T),
        "normal map": 27 * gamma * c0(gamma, rho, L) * normal_map2 / (2 * eta_hat * T),
        "noise": 330 * sigma2 / (m * n * Q),
        "drift": 110000 * eta_a**2 * Q * L**2 * sigma2 / c**2,
        "shift": 2 * L**2 * shift2 / (c**2 * T),
        "gradients": 2 * gradients2 / (c**2 * T),
    }
    start = terms["normal map"] + terms["shift"] + terms["gradients"]
    rate = 9630 * math.sqrt(K * delta_psi * sigma2 / (n * Q * T))
    tuned = rate + 110000 / 57600 * L**2 * delta_psi / (K * c**2 * T) + start
    proof_eta_hat = c**2 / (70 * m * (L + 2 / gamma))
    violations = _exceeded(
        ("eta_hat", eta_hat, "(1 - gamma rho) / (100 m sqrt(L^2 + 1/gamma^2))", largest_eta_hat),
        ("eta_a", eta_a, "(1 - gamma rho) / (100 Q sqrt(m (L^2 + 1/gamma^2)))", largest_eta_a),
    )
    proof_gaps = _exceeded(("m", m, "T", T), ("eta_hat", eta_hat, "(1 - gamma rho) / (70 m L_F)", proof_eta_hat))
    found = gamma, m, eta_hat, eta_a, eta_hat / (eta_a * Q), terms, tuned if sigma2 > 0 else math.fsum(terms.values())
    limits = violations, largest_eta_hat, largest_eta_a, proof_gaps, proof_eta_hat, largest_eta_a
    return Steps(*found, left_out, *limits)


def pl(
    L: float,
    rho: float,
    mu: float,
    sigma2: float,
    n: int,
    Q: int,
    T: int,
    eta_s: float = 1.0,
    *,
    lyapunov_gap: float | None = None,
) -> Steps:
    r"""Return the steps and the bound of Theorem 2, where $2 \mu (\psi - \psi^*) \le \text{dist}(0, \partial \psi)^2$.

    With $K = L + \rho + \mu$, $\hat\eta = \eta_a \eta_s Q$ and $\delta = 1 - \gamma \rho$, whenever

    $$\gamma \le 1/(5 K), \qquad \hat\eta \le 1/(120 m K), \qquad \eta_a \le 1/(96 Q K),$$

    the general bound (linear) on $E \psi(x_T) - \psi^*$ is the sum of `terms`, start, noise and drift:

    $$
    \exp\Bigl(\frac{-2 \hat\eta \mu T}{9 (1 + \gamma \mu C_0)}\Bigr) (E \mathcal{L}_0 - \psi^*)
        + \frac{36 \sigma^2}{m n \mu Q} + \frac{12100 \eta_a^2 Q L^2 \sigma^2}{\mu \delta^2}
    $$

    The choice (PL_params), returned here, is $\gamma = 1/(5 K)$, $m = \lceil \mu T / (L + \rho) \rceil$ and
    $\eta_a = \log(n Q T) / (120 Q K T)$. `tuned_bound` is (pl_order) with the constants of that choice, and with the
    start, which (pl_order) omits although it does not vanish at its rate:

    $$
    \frac{36 (L + \rho) \sigma^2}{n Q T \mu^2}
        + \frac{12100}{14400} \frac{\log(n Q T)^2 L^2 \sigma^2}{Q T^2 \mu K^2 \delta^2} + \text{start}.
    $$

    For $\sigma = 0$: $m = 1$ and the largest steps that the theorem admits at this eta_s. `docs/theory.md` lists where
    statement and proof differ. Numbers out of their range raise InputError.

    L, rho, mu:   smoothness of every $f_i$; weak convexity of $\phi$; PL constant of $\psi$.
    sigma2:       bound on $E|g_i - \nabla f_i|^2$.
    n, Q, T:      clients, local steps, rounds.
    eta_s:        the server's step, free in the theorem.
    lyapunov_gap: $E \mathcal{L}_0 - \psi^*$, see `reproduction/lyapunov.py` in the repository.

    >>> steps = pl(L=1.0, rho=0.0, mu=0.01, sigma2=1.0, n=10, Q=10, T=1000)
    >>> steps.m, round(steps.eta_a * 1e6, 3), steps.violations
    (10, 9.499, ())
    >>> pl(L=1.0, rho=0.0, mu=0.5, sigma2=1.0, n=10, Q=10, T=1000).violations
    ('eta_hat = 6.39607e-05 exceeds 1 / (120 m (L + rho + mu)) = 1.11111e-05',)

    Reference: Theorem 2, equations (linear) to (pl_order), and its proof.
    """
    positive(L=L, mu=mu, eta_s=eta_s)
    nonnegative(rho=rho, sigma2=sigma2)
    at_least_one(n=n, Q=Q, T=T)
    left_out = _missing(lyapunov_gap=lyapunov_gap)
    K = L + rho + mu
    gamma = 1 / (5 * K)
    c = 1 - gamma * rho
    m = max(1, math.ceil(mu * T / (L + rho))) if sigma2 > 0 else 1
    largest_eta_hat = 1 / (120 * m * K)
    largest_eta_a = 1 / (96 * Q * K)
    log = math.log(n * Q * T)
    eta_a = log / (120 * Q * K * T) if sigma2 > 0 else min(largest_eta_a, largest_eta_hat / (eta_s * Q))
    eta_hat = eta_a * eta_s * Q
    stretch = 1 + gamma * mu * c0(gamma, rho, L)
    terms = {
        "start": math.exp(-2 * eta_hat * mu * T / (9 * stretch)) * (lyapunov_gap or 0.0),
        "noise": 36 * sigma2 / (m * n * mu * Q),
        "drift": 12100 * eta_a**2 * Q * L**2 * sigma2 / (mu * c**2),
    }
    rate = 36 * (L + rho) * sigma2 / (n * Q * T * mu**2)
    tuned = rate + 12100 / 14400 * (log * L) ** 2 * sigma2 / (Q * T**2 * mu * K**2 * c**2) + terms["start"]
    root = math.hypot(L, 1 / gamma)
    proof_eta_hat = c / (70 * m * root)  # the proof's other limit, (1 + gamma mu C_0) / (10 m mu), is larger
    proof_eta_a = c / (70 * Q * math.sqrt(m) * root)
    violations = _exceeded(
        ("eta_hat", eta_hat, "1 / (120 m (L + rho + mu))", largest_eta_hat),
        ("eta_a", eta_a, "1 / (96 Q (L + rho + mu))", largest_eta_a),
    )
    proof_gaps = _exceeded(
        ("eta_hat", eta_hat, "(1 - gamma rho) / (70 m sqrt(L^2 + 1/gamma^2)) of Lemma 4", proof_eta_hat),
        ("eta_a", eta_a, "(1 - gamma rho) / (70 Q sqrt(m (L^2 + 1/gamma^2))) of Lemma 4", proof_eta_a),
    )
    limits = violations, largest_eta_hat, largest_eta_a, proof_gaps, proof_eta_hat, proof_eta_a
    return Steps(gamma, m, eta_hat, eta_a, eta_s, terms, tuned, left_out, *limits)


@dataclass(frozen=True)
class Rounds:
    """A communication complexity by its terms, as `rounds_to` returns it; the first falls as $1/(n Q)$.

    >>> Rounds({"noise": 2.0, "gap": 1.0}, linear_until=2.0).total
    3.0
    """

    terms: dict[str, float]
    linear_until: float
    """The largest n Q for which the first term is still at least the sum of the others: speedup is linear up to it."""

    @property
    def total(self) -> float:
        return math.fsum(self.terms.values())


def rounds_to(
    eps: float,
    *,
    L: float,
    rho: float,
    sigma2: float,
    n: int,
    Q: int,
    delta_psi: float | None = None,
    mu: float | None = None,
    shift2: float = 0.0,
    gradients2: float = 0.0,
) -> Rounds:
    r"""Return the rounds to an accuracy: for nonconvex f given `delta_psi`, under the PL condition given `mu`.

    Constants and logarithms are 1, as in the paper. Nonconvex, $\frac{1}{T} \sum_t E|F_{nat}(x_t)|^2 \le \epsilon^2$
    (Remark 1), with the terms noise, gap and start:

    $$
    \frac{(L + \rho) \Delta_\psi \sigma^2}{n Q \epsilon^4} + \frac{(L + \rho) \Delta_\psi}{\epsilon^2}
        + \frac{\mean |\nabla f_i(x_0)|^2 + L^2 |x_0 - z_0|^2}{\epsilon^2}
    $$

    PL, $E \psi(x_T) - \psi^* \le \epsilon$ (Remark 3), with the terms noise and drift:

    $$\frac{(L + \rho) \sigma^2}{n Q \epsilon \mu^2} + \sqrt{\frac{L^2 \sigma^2}{\epsilon \mu (L + \rho + \mu)^2}}$$

    The noise term is the only one that n and Q lower, so `linear_until` is the n Q at which it equals the rest. Both or
    neither of `delta_psi` and `mu`, and numbers out of their range, raise InputError.

    >>> need = rounds_to(0.1, L=1.0, rho=0.0, sigma2=1.0, n=5, Q=2, delta_psi=1.0)
    >>> {name: round(value) for name, value in need.terms.items()}, round(need.linear_until)
    ({'noise': 1000, 'gap': 100, 'start': 0}, 100)
    """
    positive(eps=eps, L=L)
    nonnegative(rho=rho, sigma2=sigma2, shift2=shift2, gradients2=gradients2)
    at_least_one(n=n, Q=Q)
    if (delta_psi is None) == (mu is None):
        raise InputError("give delta_psi for the nonconvex setting or mu for the PL setting, one of the two")
    if mu is not None:
        positive(mu=mu)
        one = (L + rho) * sigma2 / (eps * mu**2)
        rest = {"drift": math.sqrt(L**2 * sigma2 / (eps * mu)) / (L + rho + mu)}
    else:
        assert delta_psi is not None
        nonnegative(delta_psi=delta_psi)
        one = (L + rho) * delta_psi * sigma2 / eps**4
        rest = {"gap": (L + rho) * delta_psi / eps**2, "start": (gradients2 + L**2 * shift2) / eps**2}
    others = math.fsum(rest.values())
    until = one / others if others else 0.0
    return Rounds({"noise": one / (n * Q), **rest}, until)


def _exceeded(*conditions: tuple[str, float, str, float]) -> tuple[str, ...]:
    # A value computed as the limit itself must not fail by its last bit.
    return tuple(
        f"{name} = {value:g} exceeds {formula} = {limit:g}"
        for name, value, formula, limit in conditions
        if value > limit * (1 + 1e-12)
    )


def _missing(**given: float | None) -> tuple[str, ...]:
    return tuple(name for name, value in given.items() if value is None)


def positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value:g}; it must be finite and above 0")


def nonnegative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value:g}; it must be finite and at least 0")


def at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value != int(value) or value < 1:
            raise InputError(f"{name} is {value}; it must be a whole number, 1 or more")
