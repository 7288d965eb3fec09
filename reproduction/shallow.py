"""The network of four figures: MNIST, one hidden sigmoid layer, an elastic net, clients sorted by label."""

from __future__ import annotations

from fednmap.runs.configuration import Config
from reproduction.runs import training
from reproduction.trials import Setting, Trial

GAMMA = 4.0
HIDDEN = 32
BATCH = 8
EVERY = 10

CHOICES = f"""\
Given by the paper: MNIST, one hidden sigmoid layer, elastic net 0.001 |x|_1 + 0.01 |x|_2^2, training samples sorted by
label and divided among the clients without overlap, gamma = {GAMMA:g}, eta_s = 1, all clients in every round.

Not given by the paper: the width, the samples per local step and how they are drawn, the rounds, the initialisation,
the scaling of the pixels, whether biases are penalised, and the gamma of the measure |F_nat|^2.

Chosen here: all 60,000 training pictures, cut into n equal parts; {HIDDEN} hidden units; {BATCH} samples per local
step, drawn with replacement, where nothing else is said; pixels in [0, 1]; cross-entropy; all parameters penalised,
biases too; PyTorch's default initialisation. A trial has its own initialisation and its own minibatches, the same for
all methods; the partition is the same in all trials. All methods start at the model x_0 = prox(z_0, gamma), where z_0
is the initialisation.
|F_nat(x_t)|^2 uses the exact gradient on all 60,000 pictures and gamma = {GAMMA:g} for all methods, every {EVERY}
rounds."""


def job(
    *,
    method: str = "FedNMap",
    n: int,
    Q: int,
    eta_a: float,
    batch: int = BATCH,
    rounds: int,
    trial: int,
    hidden: int | None = None,
    gamma: float | None = None,
) -> Trial:
    """|F_nat(x_t)|^2, always with the paper's gamma, and psi(x_t) along one trial.

    hidden, gamma: told in the setting where they are given; all trials of a figure give them, or none.
    """
    setting: Setting = {"method": method, "n": n, "Q": Q, "eta_a": round(eta_a, 6), "batch": batch, "rounds": rounds}
    setting |= {name: value for name, value in (("hidden", hidden), ("gamma", gamma)) if value is not None}
    config = Config.make(
        algorithms=(method.lower(),),
        data="mnist",
        model=f"mlp:{hidden or HIDDEN}:sigmoid",
        partition="sorted",
        penalty="elastic-net:0.001,0.01",
        gamma=gamma or GAMMA,
        measure_gamma=GAMMA,
        clients=n,
        local_steps=Q,
        eta_a=eta_a,
        batch_size=batch,
        rounds=rounds,
        eval_every=EVERY,
        seed=trial,
    )
    return training({**setting, "trial": trial}, config, ("stationarity", "objective"))
