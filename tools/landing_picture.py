"""Draw the picture of the site's first page from the run folder of `fednmap compare`: narrow, to be legible on a phone.

python tools/landing_picture.py RUN docs/images/landing.png
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METHODS = {
    "fednmap": ("FedNMap", "-", 2.6),
    "zhang": ("Zhang", "--", 1.6),
    "fedcanon": ("FedCanon", (0, (1, 1)), 1.6),
    "fedda": ("FedDA", ":", 1.8),
    "fedavg": ("FedAvg", "-.", 1.6),
    "fedavg-pruned": ("FedAvg, pruned", (0, (5, 2, 1, 2)), 1.6),
}
PANELS = {"objective": ("objective f + φ", 1.0), "zeros": ("zero weights, %", 100.0)}


def main(run: Path, picture: Path) -> None:
    curves = defaultdict(list)
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            curves[row["method"], row["metric"]].append((int(row["round"]), float(row["value"])))
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(4.4, 5.4), sharex=True, layout="constrained")
    for axis, (key, (label, factor)) in zip(axes, PANELS.items(), strict=True):
        for name, (method, style, width) in METHODS.items():
            rounds, values = zip(*curves[name, key], strict=True)
            axis.plot(rounds, [factor * v for v in values], linestyle=style, linewidth=width, label=method)
        axis.set_title(label, loc="left", fontsize=11)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 2.5)
    axes[-1].set_xlabel("rounds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(picture, dpi=180)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
