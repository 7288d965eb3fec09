"""The paper's experiments: one file per figure, with what the paper claims of it and the verdict."""

from fednmap.paper import flamby, local_stepsize, mobilenet, nn, sampling, sensitivity, speedup_n, speedup_q, table1
from fednmap.paper.figure import Figure

FIGURES: dict[str, Figure] = {
    "nn": nn.FIGURE,
    "speedup-n": speedup_n.FIGURE,
    "speedup-q": speedup_q.FIGURE,
    "local-stepsize": local_stepsize.FIGURE,
    "sensitivity": sensitivity.FIGURE,
    "mobilenet": mobilenet.FIGURE,
    "table": table1.FIGURE,
    "flamby-heart": flamby.HEART,
    "flamby-tcga": flamby.TCGA,
    "sampling": sampling.FIGURE,
}

__all__ = ["FIGURES", "Figure"]
