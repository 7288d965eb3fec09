"""Pictures of runs, as PNG or PDF."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fednmap.runs.folder import RunFolder

PANELS = (
    ("stationarity", r"$\|F_{nat}(x)\|^2$", 1.0, True),
    ("objective", r"objective $\psi(x)$", 1.0, False),
    ("zeros", "zero weights (%)", 100.0, False),
    ("test_accuracy", "test accuracy (%)", 100.0, False),
)
AXES = (("round", "communication rounds", 1.0), ("bytes_up", "megabytes sent by the clients", 1e-6))


def comparison(folder: RunFolder, path: Path) -> None:
    """Each quantity against rounds and against megabytes sent; mean line and band from least to most over trials."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    config = folder.config()
    measured = folder.curves()
    runs = {m: [c for job, c in measured.items() if job.method == m] for m in config.algorithms}
    panels = [p for p in PANELS if any(p[0] in curves for trials in runs.values() for curves in trials)]
    figure, axes = plt.subplots(2, len(panels), figsize=(3.6 * len(panels), 6), squeeze=False, layout="constrained")
    for row, (key_x, label_x, scale_x) in zip(axes, AXES, strict=True):
        for axis, (key, label, scale, log) in zip(row, panels, strict=True):
            for k, (method, trials) in enumerate(runs.items()):
                if not trials:
                    continue
                length = min(len(curves["round"]) for curves in trials)
                x = scale_x * np.array(trials[0][key_x][:length])
                y = scale * np.array([curves[key][:length] for curves in trials])
                style = ("-", "--", "-.", ":")[k % 4]
                axis.plot(x, y.mean(0), style, color=f"C{k}", label=method, linewidth=1.6)
                if len(trials) > 1:
                    axis.fill_between(x, y.min(0), y.max(0), color=f"C{k}", alpha=0.2, linewidth=0)
            axis.set_xlabel(label_x)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            if log and any(line.get_ydata().max() > 0 for line in axis.get_lines()):
                axis.set_yscale("log")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 8))
    figure.suptitle(f"{config.data}, {config.model}, {config.reg}, {config.clients} clients", fontsize="medium")
    figure.savefig(path, dpi=130)
    plt.close(figure)
