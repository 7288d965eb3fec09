"""Contract checks for plug-ins: run them on your own methods and regularizers, as our tests do on ours."""

from fednmap.testing.algorithm import check_algorithm, check_decentralized, heterogeneous, optimum, smoothness
from fednmap.testing.regularizer import check_regularizer

__all__ = ["check_algorithm", "check_decentralized", "check_regularizer", "heterogeneous", "optimum", "smoothness"]
