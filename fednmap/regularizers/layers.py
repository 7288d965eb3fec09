"""Regularizers made of others: scaled, on some coordinates only, different ones on different parts of a network.

A network is the flat vector of its `named_parameters()` in order, each flattened row by row; those that are frozen
(requires_grad=False) are not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Size, Tensor, nn

from fednmap.core import Regularizer
from fednmap.names import InputError, unknown
from fednmap.regularizers.groups import GroupLasso
from fednmap.regularizers.parameters import positive, regularizer, shown

Rule = Regularizer | Callable[[Size], Regularizer]
"""A regularizer for each parameter by itself, or what makes one from the parameter's shape."""
FEW = 256
"""Up to so many runs of consecutive coordinates are copied as slices, more through an index."""


@dataclass(frozen=True)
class Scaled(Regularizer):
    r"""A regularizer times a factor, $c \, \phi(x)$ with $c > 0$; its rho is $c \rho$, its prox $\prox_\phi(v, s c)$.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 2.1.

    >>> from fednmap.regularizers import L1
    >>> Scaled(L1(1.0), 0.5).prox(torch.tensor([3.0, 0.2]), 1.0)
    tensor([2.5000, 0.0000])
    """

    phi: Regularizer
    factor: float
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        regularizer(self, "phi")
        positive(self, "factor")
        object.__setattr__(self, "rho", self.phi.rho * self.factor)

    def value(self, x: Tensor) -> Tensor:
        return self.factor * self.phi.value(x)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        return self.phi.prox(v, float(step) * self.factor)


@dataclass(frozen=True, eq=False)
class Masked(Regularizer):
    r"""$\phi$ on the coordinates where the mask is True, in order, as one vector; the others are left alone.

    For a network's weights without its biases and norm layers the mask comes from `restrict`.

    >>> from fednmap.regularizers import L1
    >>> Masked(L1(1.0), torch.tensor([True, False])).prox(torch.tensor([3.0, -0.2]), 1.0)
    tensor([ 2.0000, -0.2000])
    """

    phi: Regularizer
    mask: Tensor
    rho: float = field(init=False, repr=False)
    _index: Tensor = field(init=False, repr=False)
    _runs: tuple[slice, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        regularizer(self, "phi")
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 1 or not bool(mask.any()):
            raise InputError(f"Masked needs a 1-D tensor of bools with a True in it, given {shown(mask)}")
        index = self.mask.nonzero().squeeze(-1)
        edges = torch.cat([index[:1], index[1:][index.diff() > 1]])
        ends = torch.cat([index[:-1][index.diff() > 1], index[-1:]]) + 1
        few = len(edges) <= FEW
        runs = tuple(slice(a, b) for a, b in zip(edges.tolist(), ends.tolist(), strict=True)) if few else ()
        object.__setattr__(self, "rho", self.phi.rho)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_runs", runs)

    def value(self, x: Tensor) -> Tensor:
        return self.phi.value(self._take(x))

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        part = self.phi.prox(self._take(v), step)
        out = v.clone()
        if not self._runs:
            return out.index_copy_(-1, self._index.to(v.device), part)
        start = 0
        for run in self._runs:
            end = start + run.stop - run.start
            out[..., run] = part[..., start:end]
            start = end
        return out

    def _take(self, x: Tensor) -> Tensor:
        if x.shape[-1] != len(self.mask):
            raise InputError(f"the mask has {len(self.mask)} coordinates, the vector {x.shape[-1]}")
        if not self._runs:
            return x.index_select(-1, self._index.to(x.device))
        return torch.cat([x[..., run] for run in self._runs], -1)


@dataclass(frozen=True, eq=False)
class Separable(Regularizer):
    r"""Parts on disjoint slices, $\phi(x) = \sum_k \phi_k(x_k)$; coordinates in no slice are left alone.

    The prox is that of each part on its slice; rho is the largest of the parts.

    Reference: Parikh and Boyd, Proximal algorithms, 2014, section 2.1.

    >>> from fednmap.regularizers import L1, Box
    >>> phi = Separable([(slice(0, 1), L1(1.0)), (slice(1, 3), Box(0, 1))])
    >>> phi.prox(torch.tensor([3.0, -0.2, 2.0]), 1.0)
    tensor([2., 0., 1.])
    """

    parts: Sequence[tuple[slice, Regularizer]]
    length: int | None = field(default=None, repr=False)
    """Of the vectors, where it is known; any other is refused."""
    rho: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for where, phi in self.parts:
            if not isinstance(phi, Regularizer):
                raise InputError(f"Separable needs pairs (slice, regularizer), given {shown(phi)}")
            if not isinstance(where, slice) or where.stop is None:
                raise InputError(f"Separable needs slices with an end, such as slice(0, 2), given {shown(where)}")
        covered = 0
        for where in sorted((where for where, _ in self.parts), key=lambda where: where.start or 0):
            if where.step not in (None, 1) or not covered <= (where.start or 0) < where.stop:
                raise InputError(f"Separable needs disjoint slices of one step, given {where}")
            covered = where.stop
        object.__setattr__(self, "rho", max((phi.rho for _, phi in self.parts), default=0.0))

    def value(self, x: Tensor) -> Tensor:
        return sum((phi.value(self._slice(x, where)) for where, phi in self.parts), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        out = v.clone()
        for where, phi in self.parts:
            out[..., where] = phi.prox(self._slice(v, where), step)
        return out

    def _slice(self, x: Tensor, where: slice) -> Tensor:
        if where.stop > x.shape[-1]:
            raise InputError(f"the vector has {x.shape[-1]} coordinates, a part of Separable ends at {where.stop}")
        if self.length not in (None, x.shape[-1]):
            raise InputError(f"the vector has {x.shape[-1]} coordinates, expected {self.length}, as the network has")
        return x[..., where]


@dataclass(frozen=True, eq=False)
class PerLayer(Regularizer):
    """The sum over a network's parameters of the regularizer given for each by name pattern.

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
    """Return the rule "the rows of a matrix, the filters of a convolution are groups", for `PerLayer`.

    >>> phi = PerLayer({"weight": rows(1.0)}, nn.Linear(2, 2))
    >>> phi.prox(torch.tensor([3.0, 4.0, 0.3, 0.4, 9.0, 9.0]), 1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.0000, 9.0000, 9.0000])
    """
    return lambda shape: GroupLasso(weight, row_length(shape))


def rank_components(weight: float, module: nn.Module) -> GroupLasso:
    """Return a group lasso over the rank components of a module's LoRA adapters: each layer keeps the rank it needs.

    An adapter is B A with A (r, inputs), called NAME.lora_A..., and B (outputs, r), NAME.lora_B...; component k, which
    is kept or switched off as a whole, is row k of A and column k of B. Other parameters are in no group. Where A or B
    is frozen, a component is what is trained of it. A module without trained adapters raises InputError.

    >>> module = nn.ModuleDict({"lora_A": nn.Linear(3, 2, bias=False), "lora_B": nn.Linear(2, 4, bias=False)})
    >>> rank_components(1.0, module).value(torch.ones(14))  # two components of 3 + 4 ones
    tensor(5.2915)
    """
    where, numbers = slices(module), torch.full((size(module),), -1, device="cpu")
    count, first = 0, dict[str, int]()
    for name, parameter in trained(module).items():
        factor = next((f for f in ("lora_A", "lora_B") if f in name.split(".")), None)
        if factor is None or parameter.ndim != 2:
            continue
        rank, layer = parameter.shape[0 if factor == "lora_A" else 1], name.replace(factor, "")
        if layer not in first:
            first[layer], count = count, count + rank
        each = first[layer] + torch.arange(rank, device="cpu")
        spread = each.unsqueeze(1 if factor == "lora_A" else 0).expand(parameter.shape)
        numbers[where[name]] = spread.reshape(-1)
    if not count:
        raise InputError("expected a module with trained lora_A or lora_B, got none; add adapters by peft first")
    return GroupLasso(weight, numbers)


def row_length(shape: Size) -> int:
    """Entries in one row or filter."""
    return shape.numel() // shape[0]


def matrix(shape: Size) -> tuple[int, int]:
    """Return a parameter's shape as a matrix: one row per output.

    >>> matrix(Size([8, 3, 5, 5]))
    (8, 75)
    """
    return shape[0], row_length(shape)


def restrict(phi: Regularizer, module: nn.Module, only: str) -> Regularizer:
    """Return phi on some of a network's parameters only, the rest left alone.

    `only` is "weights" (parameters with two or more axes, so neither biases nor norm layers) or a name
    pattern with shell wildcards. A `PerLayer` keeps its parts there; any other phi sees the chosen
    parameters as one vector. A pattern that fits no parameter raises InputError.

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
    """Return the parameters that the flat vector holds."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def size(module: nn.Module) -> int:
    """Return the length of the flat vector."""
    return sum(parameter.numel() for parameter in trained(module).values())


def weights(module: nn.Module) -> list[str]:
    """Names of the parameters with two or more axes."""
    return [name for name, parameter in trained(module).items() if parameter.ndim >= 2]


def slices(module: nn.Module) -> dict[str, slice]:
    """Return where each parameter lies in the flat vector."""
    where, start = {}, 0
    for name, parameter in trained(module).items():
        where[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return where


def matching(names: Mapping[str, slice], pattern: str) -> list[str]:
    """Return the names that fit a pattern; at least one must."""
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise unknown("parameter pattern", pattern, names)
    return found
