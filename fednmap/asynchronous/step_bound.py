"""A server step with a guarantee for asynchronous FedNMap with Q = 1; see docs/asynchronous.md."""

from __future__ import annotations

from fednmap.names import InputError


def safe_step(smoothness: float, staleness: int, *, largest: float | None = None, rho: float = 0.0) -> float:
    """Return the largest server step eta_hat = Q eta_s eta_a for which the theorem of docs/asynchronous.md holds.

    smoothness: the mean of the clients' L_i, at least the smoothness of f.
    staleness:  S, the most versions that a counted reply is late, as the setting `staleness` ensures it.
    largest:    the largest L_i; default: all are `smoothness`.
    rho:        the weak convexity of phi.

    With gamma = eta_hat, Q = 1, exact gradients, every client at work and no reply lost, psi then falls to a stationary
    point in any order of replies. It is a worst case: without a bound on staleness, and on average, larger steps work.

    >>> safe_step(1.0, staleness=0), round(safe_step(1.0, staleness=5), 4)
    (0.4, 0.0444)
    """
    largest = smoothness if largest is None else largest
    if not 0 < smoothness <= largest or staleness < 0 or rho < 0:
        raise InputError(
            f"expected 0 < smoothness <= largest, staleness and rho of at least 0, got {smoothness}, {largest}, "
            f"{staleness} and {rho}"
        )
    return 1 / ((smoothness + rho) / 2 + (smoothness + largest) * (2 * staleness + 1))
