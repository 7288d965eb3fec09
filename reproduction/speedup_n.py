"""Linear speedup in the number of clients n: Q = 10, eta_a = 0.1, eta_s = 1, gamma = 4 for all n."""

from __future__ import annotations

from functools import partial

from reproduction import shallow, slopes
from reproduction.figure import Figure
from reproduction.trials import Trial

CLIENTS = {"quick": (5, 20), "paper": (5, 10, 20, 50, 100)}
ROUNDS = 300


def jobs(scale: str, trials: int) -> list[Trial]:
    return [
        shallow.job(n=n, Q=10, eta_a=0.1, rounds=ROUNDS, trial=trial) for trial in range(trials) for n in CLIENTS[scale]
    ]


FIGURE = Figure(
    name="speedup-n",
    number="Figure 3",
    title="Linear speedup of FedNMap in the number of clients",
    jobs=jobs,
    judge=partial(slopes.judge_speedup, factor="n", paper="-1.436, theory -0.5", shown="throughout the rounds"),
    draw=partial(slopes.draw_speedup, factor="n"),
    choices=f"{shallow.CHOICES}\n\nQ = 10, eta_a = 0.1, {ROUNDS} rounds; the numbers of clients are chosen here.",
    trials={"quick": 2, "paper": 3},
)
