"""Problems: n clients' losses as gradient oracles on one flat vector."""

from fednmap.problems import families
from fednmap.problems.cox import Cox
from fednmap.problems.finite_sum import FiniteSum
from fednmap.problems.glm import GLM, LeastSquares, Logistic
from fednmap.problems.network import Network
from fednmap.problems.pooled import Pooled

__all__ = ["GLM", "Cox", "FiniteSum", "LeastSquares", "Logistic", "Network", "Pooled", "families"]
