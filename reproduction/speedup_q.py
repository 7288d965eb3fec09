"""Linear speedup in the number of local steps Q: n = 30, eta_a = 1/Q, eta_s = 1, gamma = 4 for all Q."""

from __future__ import annotations

from functools import partial

from reproduction import shallow, slopes
from reproduction.figure import Figure
from reproduction.trials import Trial

STEPS = {"quick": (2, 10), "paper": (2, 5, 10, 20)}
ROUNDS = 300


def jobs(scale: str, trials: int) -> list[Trial]:
    return [
        shallow.job(n=30, Q=Q, eta_a=1 / Q, rounds=ROUNDS, trial=trial) for trial in range(trials) for Q in STEPS[scale]
    ]


FIGURE = Figure(
    name="speedup-q",
    number="Figure 4",
    title="Linear speedup of FedNMap in the number of local steps",
    jobs=jobs,
    judge=partial(slopes.judge_speedup, factor="Q", paper="-1.181, theory -0.5", shown="smaller with larger Q"),
    draw=partial(slopes.draw_speedup, factor="Q"),
    choices=f"{shallow.CHOICES}\n\nn = 30, eta_a = 1/Q, {ROUNDS} rounds; the numbers of local steps are chosen here.",
    trials={"quick": 2, "paper": 3},
)
