"""What is measured of a model x: objective, stationarity, sparsity, accuracy, bytes. The same for every method.

`QUANTITIES` says how each is called, written and judged wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fednmap.core import Problem, Regularizer, info_of
from fednmap.core import nbytes as nbytes


class Quantity(NamedTuple):
    """A measured number: its name in records and files, and how it is shown."""

    key: str
    label: str
    """A few letters, for tables and lines."""
    title: str
    """In words, for the axis of a curve."""
    unit: str = ""
    scale: float = 1.0
    """From the number that is kept to the one that is shown."""
    digits: str = ".4g"
    better: int = 0
    """-1 where less is better, 1 where more is, 0 where neither is."""
    log: bool = False
    """Whether it falls by orders of magnitude."""
    cost: bool = False
    """Whether it is what the run has spent, or another fact of it, not a property of the model: it has no curve."""
    shown: bool = True
    """In tables and curves; else only in files."""
    brief: bool = False
    """Also in the line that shows the progress of a run."""
    tex: str = ""
    html: str = ""
    meaning: str = ""
    """In a sentence, for a glossary."""

    @property
    def head(self) -> str:
        """Label and unit, as the head of a column."""
        return " ".join(word for word in ((self.unit, self.label) if self.cost else (self.label, self.unit)) if word)

    @property
    def axis(self) -> str:
        """Title and unit, as the label of an axis."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def text(self, value: float | None) -> str:
        """Return the number as it is shown; `-` where there is none."""
        if value is None or math.isnan(value):
            return "-"
        text = f"{self.scale * value:{self.digits}}"
        return text if len(text) <= 10 else f"{self.scale * value:.3e}"

    def words(self, value: float | None) -> str:
        """Return the number with its label and unit, in a line of several."""
        words = (self.text(value), self.head) if self.cost else (self.label, self.text(value), self.unit)
        return " ".join(word for word in words if word)


QUANTITIES = {
    q.key: q
    for q in (
        Quantity(
            "objective",
            "psi",
            "objective ψ(x)",
            digits=".4f",
            better=-1,
            log=True,
            brief=True,
            meaning="f(x) + phi(x): the mean of the clients' losses on all training data, plus the regularizer.",
        ),
        Quantity(
            "stationarity",
            "|F_nat|^2",
            "|F_nat(x)|²",
            digits=".2e",
            better=-1,
            log=True,
            brief=True,
            tex=r"$\|F_{nat}(x)\|^2$",
            html="|F<sub>nat</sub>(x)|²",
            meaning="F_nat(x) = (x - prox(x - gamma grad f(x), gamma)) / gamma, squared: how far x is from being "
            "stationary; 0 exactly where no small step improves psi. One gamma for all methods, shown with the table.",
        ),
        Quantity("consensus", "apart", "consensus error, mean |x_i - x|²", digits=".2e", better=-1, log=True),
        Quantity("loss", "loss", "loss f(x)", digits=".4f", better=-1, log=True, shown=False),
        Quantity(
            "zeros", "zeros", "zero weights", "%", 100, ".1f", 1, brief=True, meaning="Weights that are exactly 0."
        ),
        Quantity(
            "hoyer",
            "Hoyer",
            "Hoyer sparsity",
            digits=".3f",
            better=1,
            meaning="(sqrt(p) - |x|_1 / |x|_2) / (sqrt(p) - 1): 0 if all weights are alike, 1 for a single one; "
            "small weights count as nearly none.",
        ),
        Quantity("test_accuracy", "acc.", "test accuracy", "%", 100, ".1f", 1, brief=True),
        Quantity("support_precision", "precision", "support, precision", digits=".3f", better=1),
        Quantity("support_recall", "recall", "support, recall", digits=".3f", better=1),
        Quantity("epsilon", "epsilon", "privacy spent, ε", digits=".3g"),
        Quantity("epsilon_rdp", "epsilon (RDP)", "privacy spent, ε by RDP", digits=".3g", shown=False),
        Quantity("virtual_time", "virtual time", "virtual time", digits=".1f", cost=True),
        Quantity("staleness", "late", "steps that replies were late, mean", digits=".2f", cost=True),
        Quantity("staleness_max", "latest", "steps that replies were late, at most", cost=True, shown=False),
        Quantity("counted_least", "least", "replies of the client that counted least", cost=True, shown=False),
        Quantity("counted_most", "most", "replies of the client that counted most", cost=True, shown=False),
        Quantity("bytes_up", "up", "sent by the clients", "MB", 1e-6, ".2f", -1, cost=True, brief=True),
        Quantity("bytes_down", "down", "sent to the clients", "MB", 1e-6, ".2f", -1, cost=True),
        Quantity("seconds", "", "time", "s", digits=".1f", cost=True),
        Quantity("train_seconds", "training", "time of training", "s", digits=".1f", cost=True, shown=False),
        Quantity("eval_seconds", "measuring", "time of measuring", "s", digits=".1f", cost=True, shown=False),
        Quantity("round", "round", "communication rounds", cost=True, shown=False),
        Quantity("rounds", "rounds", "communication rounds", cost=True, shown=False),
        Quantity("measure_gamma", "gamma", "gamma of |F_nat|²", cost=True, shown=False),
        Quantity("wire_up", "up, wire", "received by the server", "MB", 1e-6, ".2f", -1, cost=True, shown=False),
        Quantity("wire_down", "down, wire", "sent by the server", "MB", 1e-6, ".2f", -1, cost=True, shown=False),
        Quantity("eval_wire_up", "up, measuring", "received to measure", "MB", 1e-6, ".2f", cost=True, shown=False),
        Quantity("eval_wire_down", "down, measuring", "sent to measure", "MB", 1e-6, ".2f", cost=True, shown=False),
        Quantity("replies_counted", "counted", "replies counted", cost=True, shown=False),
        Quantity("replies_lost", "lost", "replies lost", cost=True, shown=False),
        Quantity("clients_measured", "measured", "clients measured", cost=True, shown=False),
    )
}
"""What the library measures, in the order in which it is shown."""


def quantity(key: str) -> Quantity:
    """Return how a number is shown: by the catalogue, or for your own metric under its name.

    >>> quantity("zeros").words(0.25)
    'zeros 25.0 %'
    """
    return QUANTITIES.get(key) or Quantity(key, key, key, brief=True)


def quantities(keys: Iterable[str]) -> list[Quantity]:
    """Return those of these keys that are shown: quantities of the model, your own metrics, then costs.

    >>> [q.key for q in quantities(["seconds", "mine", "zeros", "round"])]
    ['zeros', 'mine', 'seconds']
    """
    asked = list(dict.fromkeys(keys))
    places = {key: place for place, key in enumerate(QUANTITIES)}
    found = [q for q in map(quantity, asked) if q.shown]
    return sorted(found, key=lambda q: (q.cost, places.get(q.key, len(places) + asked.index(q.key))))


def rise(first: float, last: float) -> str:
    """Return what to say of a run whose psi ended above its start by more than rounding; nothing of any other.

    >>> rise(2.5, 2.5), rise(2.5, 40.0)
    ('', 'psi ended at 40, above its start of 2.5: the model got worse; use a smaller eta_a')
    """
    if not last > first + 1e-6 * abs(first):
        return ""
    return f"psi ended at {last:.4g}, above its start of {first:.4g}: the model got worse; use a smaller eta_a"


def objective(problem: Problem, phi: Regularizer, x: Tensor) -> Tensor:
    r"""Return $\psi(x) = f(x) + \phi(x)$.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> objective(LeastSquares([(torch.eye(2), torch.ones(2))]), L1(0.1), torch.ones(2))
    tensor(0.2000)
    """
    return problem.loss(x) + phi.value(x)


def hessian_norms(gradient: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, iterations: int) -> Tensor:
    r"""Return $|H|$ at x for each row of a stack of functions with these gradients, by power iteration from v (k, p).

    $H v = (g(x + e v) - g(x - e v)) / (2 e)$ with $e = \epsilon^{1/3} \max(1, |x|)$: two gradients per iteration.

    >>> hessian_norms(lambda x: 3 * x, torch.zeros(2), torch.ones(1, 2), iterations=1).round()
    tensor([3.])
    """
    e = torch.finfo(x.dtype).eps ** (1 / 3) * max(1.0, float(x.norm()))
    for _ in range(iterations):
        v = v / v.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        v = (gradient(x + e * v) - gradient(x - e * v)) / (2 * e)
    size: Tensor = v.norm(dim=-1)
    return size


@torch.no_grad()
def problem_gamma(problem: Problem, phi: Regularizer, x: Tensor, iterations: int = 8) -> float:
    r"""Return the default gamma of the natural residual: 1 / L, at most 0.5 / rho; 1 where f is linear at x.

    L is the smoothness of f at x, the problem's first point, by a few power iterations, in two digits. It is a property
    of the problem, the same for every method and step size. Very large data are sampled by a fixed rule: see
    `FiniteSum.subsample`.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import Zero
    >>> problem_gamma(LeastSquares([(2 * torch.eye(2), torch.ones(2))]), Zero(), torch.zeros(2))
    0.5
    """
    smaller = info_of(problem).subsample
    problem = problem if smaller is None else smaller()
    first = torch.randn(
        1, x.numel(), generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )
    L = float(hessian_norms(lambda u: problem.gradient(u[0])[None], x, first.to(x), iterations))
    gamma = float(f"{1 / L:.2g}") if 0 < L < math.inf else 1.0
    return min(gamma, 0.5 / phi.rho) if 0 < phi.rho < math.inf else gamma


def residual(x: Tensor, gradient: Tensor, phi: Regularizer, gamma: float) -> Tensor:
    r"""Return $(x - \prox_{\gamma \phi}(x - \gamma g)) / \gamma$ for the gradient g of f at x.

    In float64: the difference of two float32 numbers has an error of $10^{-7} |x|$, which $1 / \gamma$ magnifies.

    >>> from fednmap.regularizers import L1
    >>> residual(torch.zeros(2), torch.tensor([0.1, 3.0]), L1(1.0), 0.5)
    tensor([0., 2.])
    """
    if x.device.type == "mps":  # which has no float64
        return (x - phi.prox(x - gamma * gradient, gamma)) / gamma
    wide = x.double()
    return ((wide - phi.prox(wide - gamma * gradient.double(), gamma)) / gamma).to(x.dtype)


def natural_residual(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> Tensor:
    r"""Return $F_{nat}(x) = (x - \prox_{\gamma \phi}(x - \gamma \nabla f(x))) / \gamma$: 0 at stationary points only.

    It shrinks as gamma grows: use one gamma for everything that is compared.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import Zero
    >>> natural_residual(LeastSquares([(torch.eye(2), torch.ones(2))]), Zero(), torch.ones(2), 1.0)
    tensor([0., 0.])
    """
    return residual(x, problem.gradient(x), phi, gamma)


def normal_map(problem: Problem, phi: Regularizer, z: Tensor, gamma: float) -> Tensor:
    r"""Return $F_{nor}(z) = \nabla f(x) + (z - x) / \gamma$ with $x = \prox_{\gamma \phi}(z)$.

    Its norm is at least $(1 - \gamma \rho) |F_{nat}(x)|$.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> normal_map(LeastSquares([(torch.eye(1), torch.ones(1))]), L1(1.0), torch.tensor([3.0]), 1.0)
    tensor([2.])
    """
    x = phi.prox(z, gamma)
    return problem.gradient(x) + (z - x) / gamma


def stationarity(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> Tensor:
    """Return $|F_{nat}(x)|^2$, which the paper plots.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import Zero
    >>> stationarity(LeastSquares([(torch.eye(2), torch.ones(2))]), Zero(), torch.zeros(2), 1.0)
    tensor(0.5000)
    """
    return natural_residual(problem, phi, x, gamma).square().sum()


def zeros(x: Tensor) -> Tensor:
    """Return the share of coordinates that are exactly zero.

    >>> zeros(torch.tensor([0.0, 1.0]))
    tensor(0.5000)
    """
    return (x == 0).to(x.dtype).mean()


def hoyer(x: Tensor) -> Tensor:
    r"""Return Hoyer's sparsity $(\sqrt p - |x|_1 / |x|_2) / (\sqrt p - 1)$.

    0 when all magnitudes are equal, 1 for a single nonzero coordinate and, by convention, for the vector 0.

    >>> hoyer(torch.tensor([3.0, 0.0, 0.0, 0.0])), hoyer(torch.ones(4))
    (tensor(1.), tensor(0.))
    """
    size = x.abs()
    largest, root = size.max(), x.numel() ** 0.5
    if x.numel() == 1 or largest == 0:
        return x.new_tensor(1.0)
    size = size / largest  # the ratio stays, and no square overflows or vanishes
    ratio = size.sum() / size.norm()
    sparsity: Tensor = (root - ratio) / (root - 1)
    return sparsity.clamp(0, 1)


def support(x: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return precision and recall of the nonzero coordinates of x, as guesses of those of `truth`.

    A share of no coordinates is 1.

    >>> support(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0]))
    (0.5, 1.0)
    """
    found, true = x != 0, truth != 0
    hits = int((found & true).sum())
    return (hits / int(found.sum()) if found.any() else 1.0, hits / int(true.sum()) if true.any() else 1.0)


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Return the share of labels that were predicted.

    >>> accuracy(torch.tensor([1, 2]), torch.tensor([1, 3]))
    0.5
    """
    return float((predictions == labels).double().mean())


EVALUATED = ("objective", "loss", "stationarity", "zeros", "hoyer")
"""What `evaluate` measures."""


@torch.no_grad()
def evaluate(problem: Problem, phi: Regularizer, x: Tensor, gamma: float) -> dict[str, float]:
    """Return the numbers that a run reports of a model: those of `EVALUATED`.

    >>> from fednmap.problems import LeastSquares
    >>> from fednmap.regularizers import L1
    >>> evaluate(LeastSquares([(torch.eye(2), torch.ones(2))]), L1(0.1), torch.zeros(2), 1.0)["zeros"]
    1.0
    """
    together = info_of(problem).value_and_gradient
    loss, gradient = (problem.loss(x), problem.gradient(x)) if together is None else together(x)
    return numbers(x, float(loss), gradient, phi, gamma)


def numbers(x: Tensor, loss: float, gradient: Tensor | None, phi: Regularizer, gamma: float) -> dict[str, float]:
    """Return the numbers of `evaluate` for a known loss and gradient; without a gradient no stationarity.

    >>> from fednmap.regularizers import Zero
    >>> numbers(torch.ones(2), 0.5, None, Zero(), 1.0)["objective"]
    0.5
    """
    found = {"objective": loss + float(phi.value(x)), "loss": loss}
    if gradient is not None:
        found["stationarity"] = float(residual(x, gradient, phi, gamma).square().sum())
    return found | {"zeros": float(zeros(x)), "hoyer": float(hoyer(x))}
