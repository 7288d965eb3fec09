"""Regularizers on a network: which of its parameters, and which regularizer on which.

A network is the flat vector of its `named_parameters()` in order, each flattened row by row; those that are frozen
(requires_grad=False) are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Size, Tensor, nn

from fednmap.core import Regularizer
from fednmap.names import InputError, unknown
from fednmap.regularizers.calculus import Masked, Separable
from fednmap.regularizers.groups import GroupLasso

Rule = Regularizer | Callable[[Size], Regularizer]
"""A regularizer for each parameter by itself, or what makes one from the parameter's shape."""


@dataclass(frozen=True, eq=False)
class PerLayer(Regularizer):
    """phi(x) = the sum over a network's parameters of the regularizer given for each by name pattern.

    Each parameter is regularised by itself, as the vector of its entries, with the first rule in
    {pattern: regularizer} that fits its name (shell wildcards); one that no rule fits is left alone. A
    rule may also be a function of the parameter's shape, such as `rows(0.1)` or
    `lambda shape: Nuclear(0.1, matrix(shape))`.

    >>> from fednmap.regularizers import L1
    >>> phi = PerLayer({"weight": L1(1.0)}, nn.Linear(2, 1))
    >>> phi.prox(torch.tensor([3.0, 0.2, 0.5]), 1.0)
    tensor([2.0000, 0.0000, 0.5000])
    """

    rules: InitVar[Mapping[str, Rule]]
    module: InitVar[nn.Module]
    layers: Mapping[str, tuple[slice, Regularizer]] = field(init=False)
    rho: float = field(init=False, repr=False)
    _parts: Separable = field(init=False, repr=False)

    def __post_init__(self, rules: Mapping[str, Rule], module: nn.Module) -> None:
        where, layers = slices(module), {}
        for pattern in rules:
            matching(where, pattern)
        for name, parameter in trained(module).items():
            rule = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
            if rule is not None:
                phi = rule if isinstance(rule, Regularizer) else rule(parameter.shape)
                layers[name] = where[name], phi
        parts = Separable(tuple(layers.values()), size(module))
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "rho", parts.rho)
        object.__setattr__(self, "_parts", parts)

    def value(self, x: Tensor) -> Tensor:
        return self._parts.value(x)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return self._parts.prox(v, step)


def rows(weight: float) -> Callable[[Size], GroupLasso]:
    """The rule "the rows of a matrix, the filters of a convolution are groups", for `PerLayer`.

    >>> phi = PerLayer({"weight": rows(1.0)}, nn.Linear(2, 2))
    >>> phi.prox(torch.tensor([3.0, 4.0, 0.3, 0.4, 9.0, 9.0]), 1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.0000, 9.0000, 9.0000])
    """
    return lambda shape: GroupLasso(weight, row_length(shape))


def row_length(shape: Size) -> int:
    """Entries in one row or filter."""
    return shape.numel() // shape[0]


def matrix(shape: Size) -> tuple[int, int]:
    """A parameter as a matrix: one row per output."""
    return shape[0], row_length(shape)


def restrict(phi: Regularizer, module: nn.Module, only: str) -> Regularizer:
    """phi on some of a network's parameters only, the rest left alone.

    `only` is "weights" (parameters with two or more axes, so neither biases nor norm layers) or a name
    pattern with shell wildcards. A `PerLayer` keeps its parts there; any other phi sees the chosen
    parameters as one vector.

    >>> from fednmap.regularizers import L1
    >>> restrict(L1(1.0), nn.Linear(2, 1), "weights").prox(torch.tensor([3.0, 0.2, 0.5]), 1.0)
    tensor([2.0000, 0.0000, 0.5000])
    """
    where = slices(module)
    names = weights(module) if only == "weights" else matching(where, only)
    if isinstance(phi, PerLayer):
        parts = tuple(part for name, part in phi.layers.items() if name in names)
        if not parts:
            raise InputError(f"nothing is left to regularise: {only!r} meets none of {', '.join(phi.layers)}")
        return Separable(parts, size(module))
    if not names:
        raise InputError("this network has no parameter with two or more axes; give a name pattern instead")
    mask = torch.zeros(size(module), dtype=torch.bool, device="cpu")
    for name in names:
        mask[where[name]] = True
    return Masked(phi, mask)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the flat vector holds."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def size(module: nn.Module) -> int:
    """The length of the flat vector."""
    return sum(parameter.numel() for parameter in trained(module).values())


def weights(module: nn.Module) -> list[str]:
    """Names of the parameters with two or more axes."""
    return [name for name, parameter in trained(module).items() if parameter.ndim >= 2]


def slices(module: nn.Module) -> dict[str, slice]:
    """Where each parameter lies in the flat vector."""
    where, start = {}, 0
    for name, parameter in trained(module).items():
        where[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return where


def matching(names: Mapping[str, slice], pattern: str) -> list[str]:
    """The names that fit a pattern; at least one must."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise unknown("parameter pattern", pattern, names)
    return found
