"""One try on a few samples: whether a module and a loss are what `Network` can train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from fednmap.data.clients import ClientData
from fednmap.data.records import Records, Tree, leaves, mapped
from fednmap.names import InputError
from fednmap.problems.label_loss import LabelLoss
from fednmap.problems.minibatch import seeded

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor], Tensor]

LABELS_SEEN = 1_000_000  # at most, of targets that have many each


def tried(what: str, compute: Callable[[], T]) -> T:
    """Return the result of the user's own code; a failure is an `InputError` that begins with `what`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of shapes that differ; they are refused if it matters
        try:
            return compute()
        except Exception as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(f"{what}: {line}") from error


def check_kinds(module: object, loss: object) -> None:
    """Check the kinds of the arguments."""
    if not isinstance(module, nn.Module):
        raise InputError(f"module is a {type(module).__name__}; give Network(module, loss, data) a torch.nn.Module")
    if not callable(loss) or isinstance(loss, type):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise InputError(f"loss is {what}; give a function of (outputs, targets), such as cross_entropy")


def labels(loss: Loss, y: Tensor) -> Tensor:
    """Whole-number targets as int64, which torch's losses take; whole floats too, where the loss is for labels."""
    if y.is_floating_point() and LabelLoss.of(loss) is not None and y.ndim == 1 and torch.equal(y, y.round()):
        return y.to(torch.int64)
    return y if y.is_floating_point() else y.to(torch.int64)


def rows(data: ClientData | Records) -> Tensor:
    """A few samples, with different targets where there are any; of one client where samples are read by client."""
    if isinstance(data, Records):
        size = int(data.sizes[0])
        return torch.tensor(sorted({0, size // 3, size // 2, size - 1}), device="cpu")
    summed = data.y.reshape(len(data.y), -1).double().sum(1)
    ends = {0, int(summed.argmin()), int(summed.argmax()), len(summed) - 1}
    return torch.tensor(sorted(ends), device=summed.device)


@torch.no_grad()
def check_single(module: Callable[[Tree], object], sample: Tree, sizes: Tensor, batch_size: int | None) -> None:
    """Batch norm may meet one sample alone, which has no variance unless it is a picture."""
    if batch_size != 1 and int(sizes.min()) > 1:
        return
    try:
        module(sample)
    except ValueError:
        who = "batch_size is 1" if batch_size == 1 else f"client {int(sizes.argmin())} holds one sample"
        raise InputError(f"{who}, and batch norm needs two; merge or drop it, or use group norm") from None


@torch.no_grad()
def outputs(module: Callable[[Tree], Tensor], inputs: Tree) -> tuple[Tensor, bool]:
    """Return what the module gives for the inputs, one tensor by samples, and whether it draws random numbers for it.

    These must be torch's: a function of the inputs and torch.manual_seed.
    """
    given = leaves(inputs)
    what = f"the module cannot take samples of shape {mapped(lambda v: tuple(v.shape), inputs)}"
    versions, found = [v._version for v in given], list[Tensor]()
    for _ in range(2):
        with seeded(0, given[0].device):
            before = _random_state(given[0])
            found.append(tried(what, lambda: module(inputs)))
            random = not torch.equal(before, _random_state(given[0]))
    out, again = found
    if not isinstance(out, Tensor):
        have = f" with {', '.join(map(str, out))}" if isinstance(out, Mapping) else ""
        raise InputError(
            f"the module returns a {type(out).__name__}{have}; give forward='logits', 'first', or a function of "
            "(module, inputs) that returns one tensor"
        )
    if not torch.equal(out.nan_to_num(), again.nan_to_num()):
        raise InputError("the module draws random numbers that torch.manual_seed does not decide; draw them by torch")
    if [v._version for v in given] != versions:
        raise InputError("the module overwrites its inputs (a first layer with inplace=True?); use inplace=False")
    if not out.ndim or len(out) != len(given[0]):
        shape, count = tuple(out.shape), len(given[0])
        raise InputError(f"the module gives outputs of shape {shape} for {count} samples; expected one row each")
    return out, random


@torch.no_grad()
def check_alone(module: Callable[[Tree], Tensor], inputs: Tree, out: Tensor, *, coarse: bool = False) -> None:
    """Outputs of a sample must not depend on the others of its batch, unless by a batch norm that torch knows."""
    last = mapped(lambda v: v[-1:], inputs)
    whole, alone = out[-1:], tried("the module cannot take a sample alone", lambda: module(last))
    tolerance = 0.05 if coarse else 1e-3  # half precision has two digits
    same = alone.shape == whole.shape and bool((alone - whole).norm() <= tolerance * whole.norm() + 1e-6)
    if not same and bool(torch.isfinite(whole).all()):
        raise InputError(
            "a sample's output depends on the others of its batch; use torch's batch norm for that, and "
            "batch_first=True in recurrent layers and attention"
        )


def with_every_label(out: Tensor, targets: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets, of which any fit each other, such that all labels occur, or the first hundred."""
    if y.is_floating_point():
        return out, targets
    few = y[:: max(1, y.numel() // LABELS_SEEN)]
    labels, where = few.reshape(-1).unique(return_inverse=True)
    first = where.new_full(labels.shape, few.numel())
    first.scatter_reduce_(0, where, torch.arange(few.numel(), device=where.device), "amin")
    rows = torch.cat([targets, few[first[:100] // max(1, few[0].numel())].to(targets.device)])
    return out[torch.arange(len(rows), device=out.device) % len(out)], rows


def check_labels(loss: Loss, out: Tensor, y: Tensor) -> None:
    """Labels are numbers of outputs, where the loss is for labels."""
    known = LabelLoss.of(loss)
    if known is None or y.is_floating_point() or out.ndim < 2:
        return
    count, wrong = out.shape[1], y[((y < 0) | (y >= out.shape[1])) & (y != known.ignored)]
    if count == 1:
        raise InputError("one output is too few for cross-entropy, its loss is always 0; give one output per label")
    if len(wrong):
        raise InputError(
            f"label {int(wrong[0])} with {count} outputs; labels must be 0 to {count - 1}, or {known.ignored}"
        )


@torch.enable_grad()
def check_loss(loss: Loss, out: Tensor, y: Tensor) -> None:
    """Check that the loss of a batch is the mean of its samples' losses, each of one output and its target.

    Values and slopes are compared: where targets are broadcast against outputs, the slopes differ. Of torch's losses of
    labels the mean is weighted by what the labels count, see `label_loss`.
    """
    known = None if y.is_floating_point() else LabelLoss.of(loss)
    count = torch.ones(len(y), device=y.device) if known is None else known.counts(y)
    out = out.detach().requires_grad_()
    what = f"the loss cannot take outputs of shape {tuple(out.shape)} and {y.dtype} targets of shape {tuple(y.shape)}"
    whole = tried(what, lambda: loss(out, y))
    if not (isinstance(whole, Tensor) and whole.ndim == 0 and whole.requires_grad):
        found = f"tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else type(whole).__name__
        raise InputError(f"the loss returns a {found}; expected one differentiable number (reduction='mean')")
    each = tried(what, lambda: by_sample(loss, out, y) if known is None else known.by_sample(out, y))
    mean = (each * (count / count.sum()).to(each)).sum()
    slope, mean_slope = tried(what, lambda: [torch.autograd.grad(v, out)[0] for v in (whole, mean)])
    whole, each, mean = whole.detach(), each.detach(), mean.detach()
    tolerance = max(1e-5, 30 * torch.finfo(out.dtype).eps)
    same = bool((whole - mean).abs() <= tolerance * each.abs().mean())
    same = same and bool((slope - mean_slope).norm() <= tolerance * mean_slope.norm())
    if same or not torch.isfinite(whole):  # a start that overflows is not for here to judge
        return
    if out.shape != y.shape and y.is_floating_point():
        raise InputError(
            f"outputs have shape {tuple(out.shape)} and targets {tuple(y.shape)}, so that samples mix; give both one "
            "shape, for example targets.unsqueeze(1)"
        )
    raise InputError(
        f"the loss of {len(out)} samples is {float(whole):g}, the mean of their losses {float(mean):g}; they must "
        "agree: use reduction='mean'; class weights and labels that are ignored go with torch.nn.CrossEntropyLoss"
    )


@torch.enable_grad()
def class_axis(loss: Loss, out: Tensor, y: Tensor) -> int:
    """Return the axis of the outputs that holds the classes: 1 for torch's losses; for your own loss 1 or the last.

    Where the shapes leave both open, by the slopes: a loss falls as the output of the right class grows.
    """
    if y.is_floating_point() or LabelLoss.of(loss) is not None or out.ndim < 3:
        return 1 if out.ndim > 1 else -1
    fits = [axis for axis in (1, -1) if out.select(axis, 0).shape == y.shape]
    if len(fits) < 2:
        return fits[0] if fits else -1
    out = out.detach().requires_grad_()
    slope = torch.autograd.grad(loss(out, y), out)[0]
    known = (y >= 0) & (y < out.shape[-1])  # others, such as -100, are left out by the loss
    right = torch.where(known, y, 0)
    first, last = (float(slope.gather(axis, right.unsqueeze(axis)).squeeze(axis)[known].sum()) for axis in (1, -1))
    return 1 if first < last else -1


def by_sample(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, (B,)."""
    return vmap(lambda o, target: loss(o.unsqueeze(0), target.unsqueeze(0)))(out, y)


def hooked(layer: nn.Module) -> bool:
    """Return whether more happens in a layer than its class says."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def _random_state(inputs: Tensor) -> Tensor:
    states = [torch.get_rng_state()]
    if inputs.device.type != "cpu":
        states.append(torch.get_device_module(inputs.device).get_rng_state(inputs.device))
    return torch.cat(states)
