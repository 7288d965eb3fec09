"""The list of figures: the paper's, its table, and benchmarks of others."""

from reproduction import (
    flamby,
    local_stepsize,
    mobilenet,
    network_memory,
    nn,
    nn_settings,
    rates,
    sampling,
    sensitivity,
    speedup,
    table1,
    tuned_steps,
)
from reproduction.figure import Figure

FIGURES: dict[str, Figure] = {
    "nn": nn.FIGURE,
    "nn-settings": nn_settings.FIGURE,
    "speedup-n": speedup.IN_N,
    "speedup-q": speedup.IN_Q,
    "local-stepsize": local_stepsize.FIGURE,
    "sensitivity": sensitivity.FIGURE,
    "mobilenet": mobilenet.FIGURE,
    "mobilenet-sparse": mobilenet.SPARSE,
    "table": table1.FIGURE,
    "flamby-heart": flamby.HEART,
    "flamby-tcga": flamby.TCGA,
    "sampling": sampling.FIGURE,
    "tuned-steps": tuned_steps.FIGURE,
    "network-memory": network_memory.FIGURE,
    "rates": rates.FIGURE,
}
