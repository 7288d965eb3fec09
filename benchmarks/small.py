"""What Python costs per round: 4 hospitals, 13 features, Q = 10, against the same method as a tight loop in numpy.

    python benchmarks/small.py [--jax FOLDER] [--json FILE]

Logistic regression with an L1 term by FedNMap, float32; with minibatches of 32 rows, which both draw by the same rule,
and with exact gradients. The loop in numpy computes the four clients at once, as the library does, and nothing else:
no records of rounds, no bytes, no test for divergence. With --jax, the site-packages of an environment that has it, the
same rounds as one compiled `lax.scan`. Processor time of one thread, microseconds per round, the fastest repeat.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measuring import arguments, in_turn, table, write

from fednmap import simulate
from fednmap.algorithms import FedNMap
from fednmap.problems import Logistic
from fednmap.problems.minibatch import sample_numbers
from fednmap.regularizers import L1

SIZES = (303, 294, 123, 200)
FEATURES, Q, ETA, LAM, BATCH = 13, 10, 0.05, 0.01, 32
ROUNDS = 200


def hospitals() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=FEATURES)
    data = []
    for i, m in enumerate(SIZES):
        a = rng.normal(size=(m, FEATURES)) + 0.2 * i
        data.append((a.astype(np.float32), (a @ truth + rng.normal(size=m) > 0).astype(np.int64)))
    return data


def library(batch: int | None) -> Callable[[], Any]:
    problem = Logistic(hospitals(), batch_size=batch)
    method = FedNMap(L1(LAM), eta_a=ETA, Q=Q)

    def run() -> Any:
        for one in simulate(method, problem, rounds=ROUNDS, threads=1):
            server = one.server
        return method.model(server).numpy()

    return run


def loop(batch: int | None) -> Callable[[], Any]:
    """FedNMap by its box, four clients side by side."""
    data, n = hospitals(), len(SIZES)
    longest = max(SIZES)
    a = np.zeros((n, longest, FEATURES), np.float32)
    y = np.zeros((n, longest), np.float32)
    weight = np.zeros((n, longest), np.float32)
    for i, (rows, labels) in enumerate(data):
        a[i, : len(rows)], y[i, : len(rows)], weight[i, : len(rows)] = rows, labels, 1 / len(rows)
    sizes, ids, each = np.array(SIZES), np.arange(n), np.arange(n)[:, None]
    gamma = 4 * ETA * Q
    threshold = np.float32(gamma * LAM)

    def prox(z: Any) -> Any:
        return z - np.clip(z, -threshold, threshold)

    def run() -> Any:
        z, h, h_i = np.zeros(FEATURES, np.float32), np.zeros(FEATURES, np.float32), np.zeros((n, FEATURES), np.float32)
        for t in range(ROUNDS):
            pull = (z - prox(z)) / gamma
            d = pull + h - h_i
            z_i = np.broadcast_to(z, (n, FEATURES))
            if batch is not None:
                drawn = sample_numbers(0, ids, t, np.arange(Q), batch, sizes)
            for q in range(Q):
                rows, labels, share = (
                    (a, y, weight) if batch is None else (a[each, drawn[q]], y[each, drawn[q]], np.float32(1 / batch))
                )
                eta = np.matmul(rows, prox(z_i)[..., None])[..., 0]
                r = share * (1 / (1 + np.exp(-eta)) - labels)
                z_i = z_i - ETA * (np.matmul(r[:, None], rows)[:, 0] + d)
            y_i = (z - z_i) / (ETA * Q)
            h_i = y_i - d
            mean = y_i.mean(0)
            z, h = z - Q * ETA * mean, h + (mean - pull - h)
        return prox(z)

    return run


def compiled(batch: int | None) -> Callable[[], Any]:
    """The same as one `lax.scan`; its minibatches are jax's own."""
    import jax
    import jax.numpy as jnp

    data, n = hospitals(), len(SIZES)
    longest = max(SIZES)
    a = np.zeros((n, longest, FEATURES), np.float32)
    y, weight = np.zeros((n, longest), np.float32), np.zeros((n, longest), np.float32)
    for i, (rows, labels) in enumerate(data):
        a[i, : len(rows)], y[i, : len(rows)], weight[i, : len(rows)] = rows, labels, 1 / len(rows)
    a, y, weight, sizes = jnp.array(a), jnp.array(y), jnp.array(weight), jnp.array(SIZES)[:, None]
    gamma = 4 * ETA * Q

    def prox(z: Any) -> Any:
        return z - jnp.clip(z, -gamma * LAM, gamma * LAM)

    def gradient(x: Any, key: Any) -> Any:
        if batch is None:
            rows, labels, share = a, y, weight
        else:
            drawn = (jax.random.uniform(key, (n, batch)) * sizes).astype(int)
            rows, labels, share = a[jnp.arange(n)[:, None], drawn], y[jnp.arange(n)[:, None], drawn], 1 / batch
        r = share * (jax.nn.sigmoid(jnp.einsum("nbd,nd->nb", rows, x)) - labels)
        return jnp.einsum("nb,nbd->nd", r, rows)

    def round(state: Any, key: Any) -> Any:
        z, h, h_i = state
        pull = (z - prox(z)) / gamma
        d = pull + h - h_i

        def step(z_i: Any, key: Any) -> Any:
            return z_i - ETA * (gradient(prox(z_i), key) + d), None

        z_i, _ = jax.lax.scan(step, jnp.broadcast_to(z, (n, FEATURES)), jax.random.split(key, Q))
        y_i = (z - z_i) / (ETA * Q)
        mean = y_i.mean(0)
        return (z - Q * ETA * mean, h + (mean - pull - h), y_i - d), None

    @jax.jit
    def whole(key: Any) -> Any:
        zero = jnp.zeros(FEATURES)
        state, _ = jax.lax.scan(round, (zero, zero, jnp.zeros((n, FEATURES))), jax.random.split(key, ROUNDS))
        return prox(state[0])

    return lambda: np.asarray(whole(jax.random.key(0)))


def main() -> None:
    given = arguments(__doc__, jax="", repeats=7)
    if given.jax:
        sys.path.append(given.jax)
    rows = []
    for name, batch in (("minibatches of 32", BATCH), ("exact gradients", None)):
        jobs = {"library": library(batch), "numpy": loop(batch)} | ({"jax": compiled(batch)} if given.jax else {})
        assert np.allclose(jobs["library"](), jobs["numpy"](), atol=1e-4), "not the same trajectory"
        seconds = in_turn(jobs, given.repeats, time.process_time)
        figures = {f"{job}, us": 1e6 * value / ROUNDS for job, value in seconds.items()}
        rows.append({"gradients": name, **figures, "library / numpy": seconds["library"] / seconds["numpy"]})
    table(f"4 hospitals, {FEATURES} features, Q = {Q}: one round", rows)
    print(f"torch {torch.__version__}, numpy {np.__version__}")
    write(given.json, small=rows)


if __name__ == "__main__":
    main()
