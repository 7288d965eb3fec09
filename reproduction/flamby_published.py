"""What FLamby publishes of its two tabular sets, by seed, per cent: cited data, nothing of it is computed here.

du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare Settings,
NeurIPS 2022; repository owkin/FLamby (MIT), folder flamby/results, files heart_seed42.csv to heart_seed46.csv and
tcga_seed42.csv to tcga_seed46.csv; step sizes as in those files. `mean` is the mean over the centres' tests.
"""

from __future__ import annotations

from typing import NamedTuple

SEEDS = (42, 43, 44, 45, 46)


class Published(NamedTuple):
    """One method: its numbers for the seeds 42 to 46, and the parameters they were made with."""

    mean: tuple[float, ...]
    pooled: tuple[float, ...]
    eta_a: float
    second: float | None = None
    """The server's step of SCAFFOLD, FedAdam, FedYogi and FedAdagrad, mu of FedProx."""


PUBLISHED: dict[str, dict[str, Published]] = {
    "heart": {
        "pooled training": Published((73.91, 73.43, 73.67, 73.43, 73.19), (79.13, 79.53, 79.53, 79.92, 79.53), 0.001),
        "best local": Published((70.94, 73.27, 69.38, 74.83, 72.64), (77.95, 77.56, 79.13, 78.35, 79.13), 0.001),
        "Cyclic": Published((72.40, 72.95, 67.51, 75.28, 70.87), (77.56, 80.31, 78.74, 78.74, 77.17), 0.01),
        "FedAvg": Published((69.15, 71.98, 64.27, 69.43, 67.65), (75.20, 76.38, 76.38, 70.08, 75.98), 0.001),
        "FedProx": Published((69.15, 71.98, 64.27, 69.43, 67.65), (75.20, 76.38, 76.38, 70.08, 75.98), 0.001, 0.01),
        "SCAFFOLD": Published((68.91, 71.98, 64.27, 69.19, 67.65), (75.20, 76.38, 76.38, 70.08, 75.98), 0.001, 1.0),
        "FedAdagrad": Published(
            (72.40, 71.94, 75.13, 73.50, 72.71), (78.35, 76.77, 78.35, 79.92, 75.98), 0.003162, 0.316228
        ),
        "FedYogi": Published((72.40, 71.94, 75.13, 73.50, 72.71), (78.35, 76.77, 78.35, 79.92, 75.98), 0.003162, 0.01),
        "FedAdam": Published((72.12, 71.15, 74.61, 73.22, 71.67), (77.56, 76.77, 77.95, 80.31, 76.77), 0.01, 0.01),
    },
    "tcga": {
        "pooled training": Published((77.98, 74.08, 61.73, 69.70, 54.48), (79.63, 77.99, 60.95, 78.24, 55.24), 0.1),
        "best local": Published((76.04, 69.19, 74.70, 75.47, 79.40), (75.60, 64.47, 74.95, 72.56, 76.19), 0.1),
        "Cyclic": Published((69.85, 67.36, 67.44, 58.58, 65.89), (69.23, 68.53, 71.90, 52.97, 67.73), 0.01),
        "FedAvg": Published((81.17, 40.81, 81.48, 82.03, 80.47), (80.26, 42.27, 80.81, 82.89, 81.43), 0.1),
        "FedProx": Published((79.87, 42.96, 80.75, 82.83, 78.11), (77.58, 42.78, 79.63, 80.84, 77.51), 0.1, 0.1),
        "SCAFFOLD": Published((68.99, 71.03, 65.78, 73.17, 64.48), (69.71, 65.79, 75.13, 70.92, 68.21), 0.01, 1.0),
        "FedAdagrad": Published((81.95, 81.63, 80.88, 80.90, 81.11), (83.11, 83.70, 82.42, 83.22, 84.43), 0.01, 1.0),
        "FedYogi": Published((80.73, 77.69, 84.08, 83.62, 81.46), (83.85, 82.09, 85.60, 86.15, 83.37), 0.01, 0.1),
        "FedAdam": Published((80.73, 77.69, 84.08, 83.62, 81.46), (83.81, 82.09, 85.60, 86.19, 83.37), 0.01, 0.1),
    },
}
CENTRAL = ("pooled training", "best local")
"""Not federated: what the methods are to be read against."""
