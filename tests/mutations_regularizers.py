"""Does a mistake in a regularizer get noticed? Run by hand: `python tests/mutations_regularizers.py [class ...]`.

Each line of MUTATIONS damages one regularizer in memory, by one changed sign, constant or dropped term, and runs
`check_regularizer` on it. Printed: class, damage, the property that failed. A damage that survives means that the
check is too weak; the exit code is then 1. Damage that leaves value and prox in agreement, so that phi is sound but not
the documented one, is for regularizers/test_brute_force.py, which knows the formulas.
"""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

import fednmap.regularizers
from fednmap.testing import check_regularizer

FOLDER = Path(fednmap.regularizers.__file__).parent
LABELS = torch.tensor([0, 1, 0, -1, 1, 1])
PLANE = torch.tensor([[1.0, -2.0, 0.5, 1.0, 0.3, 1.0]], dtype=torch.float64)
ON_PLANE = torch.tensor([[0.7, 0, 0, 0, 0, 0], [0, -0.35, 0, 0, 0, 0], [0, 0, 1.4, 0, 0, 0]], dtype=torch.float64)
ON_SIMPLEX = torch.tensor([[0.9, 0, 0, 0, 0, 0], [0.1, 0.2, 0.3, 0.1, 0.1, 0.1], [0, 0, 0, 0, 0, 0.9]])

# file, class, arguments, line before, line after
MUTATIONS: list[tuple[str, str, tuple[Any, ...], str, str]] = [
    (
        "norms",
        "L1",
        (0.3,),
        "self.check_step(step) * weights_for(self, self.weight, v",
        "weights_for(self, self.weight, v",
    ),
    ("norms", "L1", (0.3,), "else weight * x.abs().sum(-1)", "else x.abs().sum(-1)"),
    ("norms", "L1", (torch.linspace(0, 1, 6),), "v - v.clamp", "v + v.clamp"),
    ("norms", "ElasticNet", (0.3, 0.2), "1 + 2 * step", "1 + step"),
    ("norms", "ElasticNet", (0.3, 0.2), "softshrink(v, step * self.nu1)", "softshrink(v, step * self.nu2)"),
    ("norms", "SquaredL2", (0.4,), "1 + 2 *", "1 +"),
    ("norms", "L2", (0.5,), "1 - threshold / norm", "1 + threshold / norm"),
    ("norms", "L2", (0.5,), ".clamp_min_(0)", ""),
    ("norms", "LInf", (0.7,), "v.clamp(-tau, tau)", "v - v.clamp(-tau, tau)"),
    ("norms", "LInf", (0.7,), "(-total), total)", "(-total), 2 * total)"),
    ("norms", "LInf", (0.7,), "add_(top).clamp_min_(0)", "add_(top).abs_()"),
    ("groups", "GroupLasso", (0.4, LABELS), "factor.new_ones", "factor.new_zeros"),
    ("groups", "GroupLasso", (0.4, LABELS), "squares[..., : self.count].sqrt()", "squares[..., : self.count]"),
    ("groups", "GroupLasso", (0.4, 2), "self.size)).sqrt_()", "self.size))"),
    ("groups", "SparseGroupLasso", (0.1, 0.3, LABELS), "self._parts.norms(u), step", "self._parts.norms(v), step"),
    ("groups", "SparseGroupLasso", (0.1, 0.3, LABELS), "softshrink(v, step * self.nu1)", "v.clone()"),
    ("norms", "Slope", (0.5, 0.2), "descending=True)\n        fit", "descending=False)\n        fit"),
    ("norms", "Slope", (0.5, 0.2), ".clamp_min_(0)\n        return", "\n        return"),
    ("norms", "Slope", (0.5, 0.2), "increasing=False", "increasing=True"),
    ("norms", "Slope", (0.5, 0.2), "torch.where(flat.isnan(), floor, flat)", "flat.nan_to_num(0.0)"),
    ("norms", "Slope", (0.5, 0.2), "size - step * self", "size - self"),
    ("norms", "TotalVariation", (0.4,), "<= -weight:", "<= weight:"),
    ("norms", "TotalVariation", (0.4,), "shift_lo = 1.0, -weight - y[j + 1]", "shift_lo = 1.0, -y[j + 1]"),
    ("norms", "TotalVariation", (0.4,), "-slope_hi, weight - shift_hi", "slope_hi, weight - shift_hi"),
    ("norms", "TotalVariation", (0.4,), "min(max(x[j + 1], low[j]), high[j])", "max(x[j + 1], low[j])"),
    ("norms", "Nuclear", (0.5, (2, 3)), "softshrink(sigma, threshold)", "softshrink(sigma, self.weight)"),
    ("norms", "Nuclear", (0.5, (2, 3)), "sigma.sum(-1)", "sigma.amax(-1)"),
    ("constraints", "Box", (-0.1, 0.3), "v.clamp(self.lo, self.hi)", "v.clamp(-self.hi, self.hi)"),
    ("constraints", "NonNegative", (), "v.clamp_min(0)", "v.abs()"),
    ("constraints", "LInfBall", (0.3,), "v.clamp(-self.radius, self.radius)", "v.clamp(-1, 1) * self.radius"),
    ("constraints", "L2Ball", (0.7,), "norm.clamp_min(self.radius)", "norm"),
    ("constraints", "L1Ball", (0.7,), "torch.where(outside, ", "torch.where(outside | True, "),
    ("constraints", "L1Ball", (0.7,), ".copysign_(v)", ""),
    (
        "constraints",
        "L1Ball",
        (0.7,),
        "project_simplex(size, self.radius), size)",
        "size * self.radius / size.sum(-1, keepdim=True), size)",
    ),
    ("constraints", "Simplex", (0.9,), "x.mul_(total / x.sum(-1, keepdim=True))", "x * total"),
    ("constraints", "Simplex", (0.9,), "clamp_min_(-total)", "clamp_min_(-total / 2)"),
    ("constraints", "Halfspace", (PLANE[0], 0.3), ".clamp_min_(0) * unit", " * unit"),
    ("constraints", "Halfspace", (PLANE[0], 0.3), "a / a.square().sum()", "a / a.square().sum().sqrt()"),
    ("constraints", "Affine", (PLANE, torch.tensor([0.7], dtype=torch.float64)), "(v @ A.T - b) @", "(v @ A.T + b) @"),
    (
        "constraints",
        "Affine",
        (PLANE, torch.tensor([0.7], dtype=torch.float64)),
        "for _ in range(2):\n            v = v - (v",
        "for _ in range(1):\n            v = 0 * v - (0 * v",
    ),
    ("nonconvex", "MCP", (0.3, 2.0), "alpha=step / gap)\n\n", "alpha=1 / gap)\n\n"),
    ("nonconvex", "MCP", (0.3, 2.0), "soft.clamp(-gap * self.lam, gap * self.lam)", "soft"),
    ("nonconvex", "MCP", (0.3, 2.0), '"rho", 1 / self.theta', '"rho", 0.9 / self.theta'),
    ("nonconvex", "MCP", (0.3, 2.0), "(2 * self.theta)", "self.theta"),
    ("nonconvex", "SCAD", (0.3, 2.5), "(1 + step) * self.lam", "step * self.lam"),
    ("nonconvex", "SCAD", (0.3, 2.5), "gap = self.a - 1 - step", "gap = self.a - step"),
    ("nonconvex", "SCAD", (0.3, 2.5), '"rho", 1 / (self.a - 1)', '"rho", 1 / self.a'),
    ("nonconvex", "LogSum", (0.3, 0.7), "self.eps - threshold", "self.eps + threshold"),
    ("nonconvex", "LogSum", (0.3, 0.7), ".add_(gap**2)", ""),
    ("nonconvex", "LogSum", (0.3, 0.7), '"rho", self.lam / self.eps**2', '"rho", self.lam / self.eps'),
    ("nonconvex", "TransformedL1", (0.3, 1.2), "27 / 4", "27 / 2"),
    ("nonconvex", "TransformedL1", (0.3, 1.2), "div_(3)", "div_(2)"),
    ("nonconvex", "TransformedL1", (0.3, 1.2), '"rho", 2 * self.lam', '"rho", self.lam'),
    ("nonconvex", "L0", (0.3, True), "math.sqrt(2 * ", "math.sqrt("),
    ("nonconvex", "TopK", (2, True), "v.abs().topk", "v.topk"),
    ("layers", "Scaled", (fednmap.regularizers.MCP(0.3, 2.0), 0.4), "float(step) * self.factor", "step"),
    (
        "layers",
        "Scaled",
        (fednmap.regularizers.MCP(0.3, 2.0), 0.4),
        "self.phi.rho * self.factor",
        "self.phi.rho / 2 * self.factor",
    ),
    (
        "layers",
        "Masked",
        (fednmap.regularizers.L1(0.3), LABELS == 1),
        "out = v.clone()\n        if",
        "out = torch.zeros_like(v)\n        if",
    ),
    ("layers", "Masked", (fednmap.regularizers.L2(0.3), LABELS == 1), "start = end", "start = 0"),
]


def damaged(file: str, before: str, after: str) -> types.ModuleType:
    source = (FOLDER / f"{file}.py").read_text()
    if before not in source:
        raise ValueError(f"{file}.py does not contain {before!r}")
    module = types.ModuleType(f"damaged_{file}")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(before, after), f"damaged {file}.py", "exec"), module.__dict__)
    return module


def main(only: list[str]) -> int:
    warnings.simplefilter("ignore")
    survived = 0
    for file, name, arguments, before, after in MUTATIONS:
        if only and name not in only:
            continue
        module = damaged(file, before, after)
        points = {"Affine": ON_PLANE, "Simplex": ON_SIMPLEX}.get(name)
        try:
            check_regularizer(getattr(module, name)(*arguments), points=points)
            found = "SURVIVED"
            survived += 1
        except Exception as error:
            text = str(error).replace("\n", " ")
            found = f"{type(error).__name__}: ...{text[text.find('): ') + 3 :][:60]}"
        print(f"{name:18}{before.strip()[:42]!r:46}-> {after.strip()[:36]!r:40}{found}", flush=True)
    print(f"{survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
