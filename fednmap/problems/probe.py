"""One try on a few samples: whether a module and a loss are what `Network` can train."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from fednmap.data.clients import ClientData
from fednmap.names import InputError

T = TypeVar("T")
Loss = Callable[[Tensor, Tensor], Tensor]

LABELS_SEEN = 1_000_000  # at most, of targets that have many each


def tried(what: str, compute: Callable[[], T]) -> T:
    """The result of the user's own code; a failure is an `InputError` that begins with `what`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of shapes that differ; they are refused if it matters
        try:
            return compute()
        except Exception as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(f"{what}: {line}") from error


def check_kinds(module: object, loss: object) -> None:
    """Each argument in its place."""
    if not isinstance(module, nn.Module):
        raise InputError(f"module is a {type(module).__name__}; give Network(module, loss, data) a torch.nn.Module")
    if not callable(loss) or isinstance(loss, type):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise InputError(f"loss is {what}; give a function of (outputs, targets), such as cross_entropy")


def labels(loss: Loss, y: Tensor) -> Tensor:
    """Whole-number targets as int64, which torch's losses take; whole floats too, where the loss is for labels."""
    if y.is_floating_point() and _for_labels(loss) and y.ndim == 1 and torch.equal(y, y.round()):
        return y.to(torch.int64)
    return y if y.is_floating_point() else y.to(torch.int64)


def rows(data: ClientData) -> Tensor:
    """A few samples with unlike targets."""
    summed = data.y.reshape(len(data.y), -1).double().sum(1)
    ends = {0, int(summed.argmin()), int(summed.argmax()), len(summed) - 1}
    return torch.tensor(sorted(ends), device=summed.device)


@torch.no_grad()
def check_single(module: Callable[[Tensor], object], data: ClientData, batch_size: int | None) -> None:
    """Batch norm may meet one sample alone, which has no variance unless it is a picture."""
    if batch_size != 1 and int(data.sizes.min()) > 1:
        return
    try:
        module(data.x[:1])
    except ValueError:
        who = "batch_size is 1" if batch_size == 1 else f"client {int(data.sizes.argmin())} holds one sample"
        raise InputError(f"{who}, and batch norm needs two; merge or drop it, or use group norm") from None


@torch.no_grad()
def outputs(module: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """What the module gives for the inputs, if it is one tensor, by samples, and a function of the inputs alone."""
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        before, version = _random_state(inputs), inputs._version
        what = f"the module cannot take samples of shape {tuple(inputs.shape)}"
        out, again = tried(what, lambda: (module(inputs), module(inputs)))
        random = not torch.equal(before, _random_state(inputs))
    one = isinstance(out, Tensor)
    if random or (one and not torch.equal(out.nan_to_num(), again.nan_to_num())):
        raise InputError(
            "the module draws random numbers (dropout in training mode?), so it has no gradient to speak of; call "
            "module.eval(), which also freezes batch norm, or eval() of that layer alone, or take it out"
        )
    if inputs._version != version:
        raise InputError("the module overwrites its inputs (a first layer with inplace=True?); use inplace=False")
    if not one:
        raise InputError(f"the module returns a {type(out).__name__}; wrap it so that it returns one tensor")
    if not out.ndim or len(out) != len(inputs):
        shape = tuple(out.shape)
        raise InputError(f"the module gives outputs of shape {shape} for {len(inputs)} samples; expected one row each")
    return out


@torch.no_grad()
def check_alone(module: Callable[[Tensor], Tensor], inputs: Tensor, out: Tensor, *, coarse: bool = False) -> None:
    """Outputs of a sample must not depend on the others of its batch, unless by a batch norm that torch knows."""
    whole, alone = out[-1:], tried("the module cannot take a sample alone", lambda: module(inputs[-1:]))
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
    rows = torch.cat([targets, few[first[:100] // max(1, few[0].numel())]])
    return out[torch.arange(len(rows), device=out.device) % len(out)], rows


def check_labels(loss: Loss, out: Tensor, y: Tensor) -> None:
    """Labels are numbers of outputs, where the loss is for labels."""
    if not _for_labels(loss) or y.is_floating_point() or out.ndim < 2:
        return
    count, wrong = out.shape[1], y[(y < 0) | (y >= out.shape[1])]
    if count == 1:
        raise InputError("one output is too few for cross-entropy, its loss is always 0; give one output per label")
    if len(wrong):
        raise InputError(f"label {int(wrong[0])} with {count} outputs; labels must be 0 to {count - 1}, none ignored")


@torch.enable_grad()
def check_loss(loss: Loss, out: Tensor, y: Tensor) -> None:
    """The loss of a batch must be the mean of its samples' losses, each of its own output and target.

    Values and slopes are compared: where targets are broadcast against outputs, the slopes differ.
    """
    out = out.detach().requires_grad_()
    what = f"the loss cannot take outputs of shape {tuple(out.shape)} and {y.dtype} targets of shape {tuple(y.shape)}"
    whole = tried(what, lambda: loss(out, y))
    if not (isinstance(whole, Tensor) and whole.ndim == 0 and whole.requires_grad):
        found = f"tensor of shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else type(whole).__name__
        raise InputError(f"the loss returns a {found}; expected one differentiable number (reduction='mean')")
    each = tried(what, lambda: by_sample(loss, out, y))
    slope, mean_slope = tried(what, lambda: [torch.autograd.grad(v, out)[0] for v in (whole, each.mean())])
    whole, each, tolerance = whole.detach(), each.detach(), max(1e-5, 30 * torch.finfo(out.dtype).eps)
    same = bool((whole - each.mean()).abs() <= tolerance * each.abs().mean())
    same = same and bool((slope - mean_slope).norm() <= tolerance * mean_slope.norm())
    if same or not torch.isfinite(whole):  # a start that overflows is not for here to judge
        return
    if out.shape != y.shape and y.is_floating_point():
        raise InputError(
            f"outputs have shape {tuple(out.shape)} and targets {tuple(y.shape)}, so that samples mix; give both one "
            "shape, for example targets.unsqueeze(1)"
        )
    raise InputError(
        f"the loss of {len(out)} samples is {float(whole):g}, the mean of their losses {float(each.mean()):g}; "
        "they must agree: use reduction='mean', without class weights or labels that are ignored"
    )


@torch.enable_grad()
def class_axis(loss: Loss, out: Tensor, y: Tensor) -> int:
    """The axis of the outputs that holds the classes: 1 for torch's losses; for your own loss 1 or the last.

    Where the shapes leave both open, by the slopes: a loss falls as the output of the right class grows.
    """
    if y.is_floating_point() or _for_labels(loss) or out.ndim < 3:
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
    """The loss of each sample, (B,)."""
    return vmap(lambda o, target: loss(o.unsqueeze(0), target.unsqueeze(0)))(out, y)


def hooked(layer: nn.Module) -> bool:
    """Whether more happens in a layer than its class says."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def _for_labels(loss: Loss) -> bool:
    functions = (nn.functional.cross_entropy, nn.functional.nll_loss)
    return loss in functions or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _random_state(inputs: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(inputs.device) if inputs.is_cuda else torch.get_rng_state()
