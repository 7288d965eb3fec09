"""Group sparsity: whole rows, filters or features are zero together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softshrink

from fednmap.core import Regularizer
from fednmap.names import InputError
from fednmap.regularizers.norms import shrinkage
from fednmap.regularizers.parameters import nonnegative, weights, weights_for

GroupSpec = int | Tensor | Sequence[Sequence[int]]
"""How groups are given: the size of consecutive groups of equal size; a tensor with the group number of
each coordinate, -1 for none; or the lists of coordinates, one per group."""


@dataclass(frozen=True, eq=False)
class GroupLasso(Regularizer):
    r"""The group lasso $\phi(x) = \sum_g w_g |x_g|_2$ over disjoint groups; one weight for all, or a tensor.

    $$\prox(v, s)_g = \max(1 - s w_g / |v_g|_2, 0) \, v_g$$

    Coordinates in no group are left alone.

    `groups` is the size of consecutive groups, a tensor with the group number of each coordinate (-1 for
    none), or a list of lists of coordinates. For the rows and filters of a network see `PerLayer`.

    Reference: Yuan and Lin, Model selection and estimation in regression with grouped variables, JRSS B
    2006; their weights are the square roots of the group sizes.

    >>> GroupLasso(1.0, [[0, 2], [1]]).prox(torch.tensor([3.0, 0.5, 4.0]), 1.0)
    tensor([2.4000, 0.0000, 3.2000])
    """

    weight: float | Tensor
    groups: GroupSpec
    _parts: Groups = field(init=False, repr=False)

    def __post_init__(self) -> None:
        weights(self, "weight")
        object.__setattr__(self, "_parts", as_groups(self.groups))

    def value(self, x: Tensor) -> Tensor:
        norms = self._parts.norms(x)
        return (weights_for(self, self.weight, norms, "groups") * norms).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        norms = self._parts.norms(v)
        threshold = self.check_step(step) * weights_for(self, self.weight, norms, "groups")
        return self._parts.scale(v, shrinkage(norms, threshold))


@dataclass(frozen=True, eq=False)
class SparseGroupLasso(Regularizer):
    r"""The sparse group lasso $\phi(x) = \nu_1 |x|_1 + \nu_2 \sum_g |x_g|_2$: few groups, and few entries in those.

    $\prox(v, s)_g = \max(1 - s \nu_2 / |u_g|_2, 0) \, u_g$ with $u = \text{soft}(v, s \nu_1)$: both proxes in turn.
    The l1 part acts on every coordinate, also on one in no group. `groups` as in `GroupLasso`.

    Reference: Simon, Friedman, Hastie and Tibshirani, A sparse-group lasso, JCGS 2013.

    >>> SparseGroupLasso(1.0, 1.0, 2).prox(torch.tensor([4.0, 5.0, 1.5, 0.3]), 1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.0000])
    """

    nu1: float
    nu2: float
    groups: GroupSpec
    _parts: Groups = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nonnegative(self, "nu1", "nu2")
        object.__setattr__(self, "_parts", as_groups(self.groups))

    def value(self, x: Tensor) -> Tensor:
        return self.nu1 * x.abs().sum(-1) + self.nu2 * self._parts.norms(x).sum(-1)

    def prox(self, v: Tensor, step: float | Tensor) -> Tensor:
        step = self.check_step(step)
        u = softshrink(v, step * self.nu1)
        return self._parts.scale(u, shrinkage(self._parts.norms(u), step * self.nu2))


@dataclass(frozen=True)
class EqualGroups:
    """Consecutive groups of one size: a reshape."""

    size: int
    length: int | None = None
    """Of the vectors; None if any multiple of the size will do."""

    def norms(self, x: Tensor) -> Tensor:
        """Return |x_g|_2 for every group: (..., p) -> (..., groups)."""
        # A product with ones adds up short rows twice as fast as a reduction does.
        return (self._split(x).square() @ x.new_ones(self.size)).sqrt_()

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        """Return x_g times factor_g for every group; coordinates in no group as they are."""
        return (self._split(x) * factor.unsqueeze(-1)).flatten(-2)

    def _split(self, x: Tensor) -> Tensor:
        if self.length is not None:
            check_length(x, self.length)
        if x.shape[-1] % self.size:
            raise InputError(f"groups of size {self.size} do not divide a vector of length {x.shape[-1]}")
        return x.reshape(*x.shape[:-1], -1, self.size)


@dataclass(frozen=True, eq=False)
class LabelledGroups:
    """Any disjoint groups: one scattered sum and one lookup, whatever their sizes."""

    labels: Tensor
    """The group of each coordinate; `count` stands for none."""
    count: int

    def norms(self, x: Tensor) -> Tensor:
        squares = x.new_zeros((*x.shape[:-1], self.count + 1))
        squares.index_add_(-1, self._on(x), x.square())
        return squares[..., : self.count].sqrt()

    def scale(self, x: Tensor, factor: Tensor) -> Tensor:
        factor = torch.cat([factor, factor.new_ones((*factor.shape[:-1], 1))], -1)
        return factor.index_select(-1, self._on(x)).mul_(x)

    def _on(self, x: Tensor) -> Tensor:
        check_length(x, len(self.labels))
        return self.labels.to(x.device)


def check_length(x: Tensor, length: int) -> None:
    """Refuse a vector that the groups were not given for: some of its coordinates would be in a wrong group."""
    if x.shape[-1] != length:
        raise InputError(
            f"the groups cover {length} coordinates, the vector has {x.shape[-1]}; give the group number of every "
            "coordinate in a tensor, -1 for none"
        )


Groups = EqualGroups | LabelledGroups


def as_groups(groups: GroupSpec) -> Groups:
    """Return the groups in the form that is fastest for them."""
    if isinstance(groups, int | np.integer):
        if isinstance(groups, bool) or groups < 1:
            raise InputError(f"a group has at least one coordinate, given size {groups}")
        return EqualGroups(int(groups))
    labels = groups if isinstance(groups, Tensor) else _labels(groups)
    if labels.ndim != 1 or labels.is_floating_point() or len(labels) == 0 or bool((labels < -1).any()):
        raise InputError("group numbers are a 1-D tensor of integers, -1 for no group")
    count = int(labels.max()) + 1 if isinstance(groups, Tensor) else len(groups)  # the last ones may be empty
    if count and len(labels) % count == 0:
        size = len(labels) // count
        if bool((labels == torch.arange(len(labels), device=labels.device) // size).all()):
            return EqualGroups(size, len(labels))
    return LabelledGroups(torch.where(labels < 0, count, labels), count)


def _labels(groups: Sequence[Sequence[int]]) -> Tensor:
    sizes = torch.tensor([len(group) for group in groups], device="cpu")
    coordinates = torch.cat([torch.as_tensor(group, dtype=torch.long, device="cpu") for group in groups])
    if bool((coordinates < 0).any()) or int(coordinates.bincount().max()) > 1:
        raise InputError("groups are disjoint lists of coordinates >= 0; one is repeated or negative")
    labels = torch.full((int(coordinates.max()) + 1,), -1, device="cpu")
    labels[coordinates] = torch.arange(len(groups), device="cpu").repeat_interleave(sizes)
    return labels
