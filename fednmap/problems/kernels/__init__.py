"""How the gradients of a network are computed: one kernel for each kind of module, chosen once."""

from __future__ import annotations

from torch import Tensor, nn

from fednmap.problems.kernels.autograd import Kernel, KernelOracle, OneByOneKernel, SeededKernel, VmapKernel
from fednmap.problems.kernels.dense import DenseKernel
from fednmap.problems.kernels.folded import ROWS, FoldedKernel
from fednmap.problems.module_loss import ModuleLoss

__all__ = ["DenseKernel", "FoldedKernel", "Kernel", "KernelOracle", "SeededKernel", "VmapKernel", "choose_kernel"]


def choose_kernel(function: ModuleLoss, a: Tensor, b: Tensor, *, clients: int, rows: int | None) -> Kernel:
    """Return the fastest kernel that computes this module.

    a, b: a few samples and targets, on which a kernel is tried.
    rows: of a minibatch; None for exact gradients.
    """
    dense = DenseKernel.of(function, a[0])
    if dense is not None:
        return dense
    if any(isinstance(layer, nn.Conv2d) for layer in function.module.modules()):
        tried = clients > 1 and rows is not None and rows <= ROWS
        folded = FoldedKernel.of(function, a, b) if tried else None
        return OneByOneKernel(function) if folded is None else folded  # vmap is slower for convolutions
    stacked = VmapKernel(function)
    works = not function.half and (clients == 1 or stacked.works(a, b))  # stacks would compute in the precision of x
    return stacked if works else OneByOneKernel(function)
