"""Problems: n clients' losses as gradient oracles on one flat vector."""

from fednmap.problems.finite_sum import FiniteSum
from fednmap.problems.least_squares import LeastSquares
from fednmap.problems.logistic import Logistic
from fednmap.problems.network import Network
from fednmap.problems.pooled import Pooled

__all__ = ["FiniteSum", "LeastSquares", "Logistic", "Network", "Pooled"]
