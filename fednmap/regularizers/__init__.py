"""Regularizers phi: value and prox together. Each is one small class; see `fednmap.core.Regularizer`.

By name, for the command line: `l1:0.001`, `mcp:0.01,3`, `group-lasso:0.01`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from torch import Size, nn

from fednmap.core import Regularizer
from fednmap.names import InputError, called, look_up, parted
from fednmap.regularizers.constraints import Affine, Box, Halfspace, L1Ball, L2Ball, LInfBall, NonNegative, Simplex
from fednmap.regularizers.groups import GroupLasso, SparseGroupLasso
from fednmap.regularizers.layers import (
    Masked,
    PerLayer,
    Scaled,
    Separable,
    matrix,
    rank_components,
    restrict,
    row_length,
    rows,
    weights,
)
from fednmap.regularizers.nonconvex import L0, MCP, SCAD, LogSum, TopK, TransformedL1
from fednmap.regularizers.norms import L1, L2, ElasticNet, LInf, Nuclear, Slope, SquaredL2, TotalVariation, Zero

__all__ = [
    "L0",
    "L1",
    "L2",
    "MCP",
    "REGULARIZERS",
    "SCAD",
    "Affine",
    "Box",
    "ElasticNet",
    "GroupLasso",
    "Halfspace",
    "L1Ball",
    "L2Ball",
    "LInf",
    "LInfBall",
    "LogSum",
    "Masked",
    "NonNegative",
    "Nuclear",
    "PerLayer",
    "Scaled",
    "Separable",
    "Simplex",
    "Slope",
    "SparseGroupLasso",
    "SquaredL2",
    "TopK",
    "TotalVariation",
    "TransformedL1",
    "Zero",
    "matrix",
    "parse",
    "rank_components",
    "restrict",
    "rows",
]

REGULARIZERS: dict[str, type[Regularizer]] = {
    "none": Zero,
    "l1": L1,
    "elastic-net": ElasticNet,
    "squared-l2": SquaredL2,
    "l2": L2,
    "linf": LInf,
    "group-lasso": GroupLasso,
    "sparse-group-lasso": SparseGroupLasso,
    "slope": Slope,
    "total-variation": TotalVariation,
    "nuclear": Nuclear,
    "box": Box,
    "nonnegative": NonNegative,
    "l2-ball": L2Ball,
    "l1-ball": L1Ball,
    "linf-ball": LInfBall,
    "simplex": Simplex,
    "mcp": MCP,
    "scad": SCAD,
    "log-sum": LogSum,
    "transformed-l1": TransformedL1,
    "l0": L0,
    "topk": TopK,
}

FROM_SHAPE: dict[str, Callable[[Size], Any]] = {
    "group-lasso": row_length,
    "sparse-group-lasso": row_length,
    "nuclear": matrix,
}
"""Where the last argument comes from the shape of each weight of a network."""


LARGEST = 1e30  # times a step it is still a number in float32


def parse(spec: str, module: nn.Module | None = None) -> Regularizer:
    """Return the regularizer that `name:number,number,...` stands for; the numbers are the constructor's, in order.

    `group-lasso`, `sparse-group-lasso` and `nuclear` act on the rows, filters or matrix of each weight of
    `module` (its parameters with two or more axes). `l0` and `topk` need the word `allow_nonconvex` at
    the end. Your own is package.module:Name:number,... What does not fit raises InputError.

    >>> parse("mcp:0.01,3")
    MCP(lam=0.01, theta=3)
    >>> parse("lasso:0.1")
    Traceback (most recent call last):
    fednmap.names.InputError: unknown regularizer 'lasso'; did you mean 'group-lasso'? choose from box, elastic-net, ...
    """
    name, rest = parted(spec.strip(), REGULARIZERS)
    kind = look_up("regularizer", name, REGULARIZERS, Regularizer)
    if name not in REGULARIZERS:
        return called(spec, kind, (), rest)
    words = [word.strip() for word in rest.split(",")] if rest else []
    arguments = [True if word == "allow_nonconvex" and kind in (L0, TopK) else _number(spec, word) for word in words]

    def build(*structure: Any) -> Regularizer:
        try:
            inspect.signature(kind).bind(*arguments, *structure)
        except TypeError:
            raise InputError(f"{spec!r} does not fit {signature(name)!r}") from None
        return kind(*arguments, *structure)

    if name not in FROM_SHAPE:
        return build()
    if module is None:
        raise InputError(
            f"{name!r} takes its structure from the weights of a network, and there is none here; "
            f"use {kind.__name__} in Python, or a regularizer without structure"
        )
    rules = {weight: build(FROM_SHAPE[name](module.get_parameter(weight).shape)) for weight in weights(module)}
    if not rules:
        raise InputError(f"{name!r} acts on parameters with two or more axes, and this network has none")
    return PerLayer(rules, module)


def signature(name: str) -> str:
    """Return how a name is used, as `mcp:lam,theta`, with what may be left out in brackets."""
    parameters = list(inspect.signature(REGULARIZERS[name]).parameters.values())
    if name in FROM_SHAPE:
        parameters = parameters[:-1]
    words = [p.name if p.default is p.empty else f"[{p.name}]" for p in parameters]
    return f"{name}:{','.join(words)}" if words else name


def _number(spec: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise InputError(f"{word!r} in {spec!r} is not a number") from None
    if LARGEST < abs(number) < math.inf:
        raise InputError(f"expected numbers of at most {LARGEST:g} in {spec!r:.60}, got {number:g}; use a smaller one")
    return int(number) if number.is_integer() else number
