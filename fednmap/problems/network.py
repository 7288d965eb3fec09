"""Any torch module as a function of one flat vector."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector

from fednmap.data.clients import ClientData, Pairs
from fednmap.data.sparse import is_sparse
from fednmap.names import InputError
from fednmap.problems import batch_norm, probe
from fednmap.problems.dense import Dense
from fednmap.problems.finite_sum import FiniteSum, Weight, like
from fednmap.problems.folded import MOST, ROWS, SIDE_BY_SIDE, alike, by_few, side_by_side
from fednmap.problems.probe import Loss
from fednmap.problems.views import HALF, Here, channels_last, fixed, places, used_dtype

ACTIVATION_BYTES = 64 << 20  # of the samples handled at once, when all data is gone through
STACK_BYTES = 64 << 20  # of activations, of the clients that are computed in one stack
ALIKE = 1e-8
"""Relative difference, at most, of what is the same but for rounding, in double precision."""


class Network(FiniteSum):
    """f_i(x) = mean_j loss(module_x(a_j), b_j): x holds the module's parameters, in the order of `named_parameters()`.

    module: any torch.nn.Module without randomness in its forward pass; it is copied, its parameters are the start.
            Parameters with requires_grad=False stay as they are and are not part of x. A module in half precision
            computes in it; x, gradients and losses are float32.
    loss:   loss(outputs, targets), the mean over the batch, such as torch.nn.functional.cross_entropy.
    data:   one pair (inputs, targets) per client.
    minibatches, local_steps: how samples are drawn, see `FiniteSum`.

    Batch norm in training mode normalises by the statistics of the minibatch in gradients, and of fixed chunks of a
    client's rows, `batch_size` each, in `loss` and `gradient`; these are then exact for that choice of chunks. Running
    statistics are not part of x: `calibrate` estimates them once, after training. A batch norm layer in eval mode is
    frozen: it normalises by the running statistics that it has, which do not change.

    >>> module = nn.Linear(2, 1, bias=False)
    >>> data = [(torch.eye(2), torch.zeros(2, 1)), (torch.ones(3, 2), torch.ones(3, 1))]
    >>> problem = Network(module, nn.functional.mse_loss, data, batch_size=None)
    >>> problem.n, problem.dim
    (2, 2)
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        data: Pairs,
        *,
        batch_size: int | None = 32,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
    ) -> None:
        probe.check_kinds(module, loss)
        given = ClientData.of(data)
        if is_sparse(given.x):
            raise InputError(
                "x is sparse, and networks compute on dense tables; use a linear model, or give x.toarray() "
                "(on the command line svm:PATH,dense=true) if there is room"
            )
        targets = probe.labels(loss, given.y)
        rows = given if targets is given.y else ClientData(given.x, targets, given.sizes)
        super().__init__(
            rows, batch_size=batch_size, seed=seed, weights=weights, minibatches=minibatches, local_steps=local_steps
        )
        self.normalised = bool(batch_norm.layers(module))
        if self.normalised and batch_size is None:
            raise InputError("batch norm needs a batch_size, its statistics are a batch's; or use group norm")
        self._original, self._loss = copy.deepcopy(module), loss
        shared = {id(p): p for p in self._original.parameters()}
        shared |= {
            id(p): nn.Parameter(channels_last(p.detach()), requires_grad=False)
            for p in self._original.parameters()
            if p.ndim == 4 and not p.requires_grad
        }
        working = copy.deepcopy(self._original, shared)  # parameters are not copied, but for frozen kernels
        batch_norm.drop_running(working)
        probe.make_dense(working)
        self._here = here = Here(working)
        self._places = places(here.module)
        named = dict(here.module.named_parameters())
        self._names = [name for name, p in named.items() if p.requires_grad]
        if not self._names:
            raise InputError(f"{type(module).__name__} has no parameters to train; give a module with some")
        self._shapes = [p.shape for p in here.leaves]
        self._numels = [p.numel() for p in here.leaves]
        self._fixed = fixed(working)
        self._half = {name: p.dtype for name, p in named.items() if p.dtype in HALF}
        first = next(p.dtype for p in named.values() if p.is_floating_point())
        self._enters = first if first in HALF else None
        start = parameters_to_vector(here.leaves).detach()
        self.start = start.float() if start.dtype in HALF else start.clone()
        self.dim = self.start.numel()
        all_trained = len(self._names) == len(named)
        self._dense = Dense.of(module, self.data.x[0]) if all_trained and not self._half else None
        self._classifies = loss is nn.functional.cross_entropy and not self.data.y.is_floating_point()
        self._grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
        # convolutions that are not folded are fastest one client at a time
        self._one_by_one = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        self._folds = self._one_by_one and here.folded is not None and (batch_size or ROWS + 1) <= ROWS
        self._folds = self._folds and self.n > 1 and self.data.x.is_floating_point() and not self._half
        self._activations: probe.Activations | None = None
        self._try()

    def _try(self) -> None:
        """A few samples go through the module and the loss: what does not fit is refused before anything runs."""

        def module(inputs: Tensor) -> Tensor:
            return self.outputs(self.start, like(inputs, self.start))

        few = probe.rows(self.data)
        a, b = like(self.data.x[few], self.start), like(self.data.y[few], self.start)
        out = probe.outputs(module, a)
        if self.normalised:
            probe.check_single(module, self.data, self.batch_size)
        else:
            probe.check_alone(module, a, out, coarse=bool(self._half))
        probe.check_labels(self._loss, out, self.data.y)
        tried = probe.with_every_label(out, b, self.data.y)
        probe.check_loss(self._loss, *tried)
        self._shape, self._class_axis = out.shape[1:], probe.class_axis(self._loss, *tried)
        if not self.normalised:
            self._activations = probe.activations(lambda rows: self._saved(a[:rows]), len(a))
        if self._folds:
            four = torch.arange(4, device=a.device) % len(a)  # of two alone batch norm would round coarsely
            self._folds = self._folds_right(a[four], b[four])
        elif self.n > 1 and not self._dense and not self._one_by_one:
            try:
                self._stacked(self.start.expand(2, -1), torch.stack([a, a]), torch.stack([b, b]), 1 / len(a))
            except RuntimeError:  # recurrent layers, among others, cannot be computed for a stack of clients
                self._one_by_one = True

    @torch.enable_grad()
    def _saved(self, a: Tensor) -> int:
        """Bytes that a backward pass from the outputs of these inputs would need, without parameters."""
        here = self._here
        here.become(self.start)
        held = {v.untyped_storage().data_ptr() for v in (*here.module.parameters(), *here.module.buffers())}
        return probe.saved_bytes(lambda: here.module(channels_last(self._entering(a))), held)

    @torch.no_grad()
    def _folds_right(self, a: Tensor, b: Tensor) -> bool:
        """Whether any number of clients, at unlike points and with unlike samples, have the gradients of each alone.

        Also where parameters are 0 at the start, and their layers without effect.
        """
        assert self._here.folded is not None
        folded, random = self._here.folded, torch.Generator().manual_seed(0)

        def unlike(v: Tensor, least: float) -> Tensor:
            apart = torch.randn(MOST, *v.shape, generator=random, dtype=torch.float32, device="cpu")
            return torch.addcmul(v.double(), 0.1 * v.abs() + least, apart.to(v))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of shapes that differ
            try:
                x, a = unlike(self.start, 0.01), unlike(a, 0.0)
                b, weight = like(b, x).expand(MOST, *b.shape), 1 / b.shape[0]
                found = torch.cat(self._folded_slopes(x, a, b, weight), 1)
                alone = torch.stack([self._value_and_gradient(*one)[1] for one in islice(_apart(x, a, b, weight), 3)])
                every = range(1, MOST + 1)
                outs = [folded.outputs(self._leaves(x[:k]), a[:k], self._shape) for k in every]
                ones = torch.cat([folded.outputs(self._leaves(v), u, self._shape) for v, u in _singly(x, a)])
                return _same(found[:3], alone) and all(_same(out, ones[: len(out)]) for out in outs)
            except Exception:  # a forward pass of the user's own may fail in any way
                return False
            finally:
                self._here.become(self.start)

    @property
    def chunk(self) -> int:
        """Clients computed side by side: few if they are folded, one if they are computed one by one."""
        if self._folds or self._one_by_one:
            return SIDE_BY_SIDE if self._folds else 1
        if self._dense is not None or self._activations is None:
            return super().chunk
        batch = self.batch_size or min(int(self._sizes.max()), self.rows_at_once())
        return max(1, min(super().chunk, STACK_BYTES // self._activations(batch)))

    def rows_at_once(self) -> int:
        """As many as have their activations in bounded memory; batch norm needs large chunks, as statistics."""
        rows = super().rows_at_once()
        if self._activations is None:
            return rows
        return max(1, min(rows, ACTIVATION_BYTES // max(1, self._activations.row)))

    def subsample(self) -> Self:
        few = super().subsample()
        return self if self.normalised and int(few._sizes.min()) < (self.batch_size or 1) else few

    def made_of(self) -> dict[str, Any]:
        return super().made_of() | {"module": self._original, "loss": self._loss}

    def exact(self) -> Self:
        """The same with exact client gradients; with batch norm itself, its statistics are a minibatch's."""
        if self.normalised:
            return self
        exact = super().exact()
        exact._folds = self._folds and int(self._sizes.max()) <= ROWS
        return exact

    @property
    def architecture(self) -> nn.Module:
        """A copy of the module as it was given."""
        return copy.deepcopy(self._original)

    def module(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters x, in eval mode; calibrated if it has batch norm."""
        return self.calibrate(x) if self.normalised else self._copy(x).eval()

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> nn.Module:
        """`module(x)` with running statistics from the clients' data.

        Every client goes through its rows in chunks of the batch size and averages the means and variances that each
        batch norm layer meets; the average of the clients' averages is kept.
        """
        trained = self._copy(x)
        weights = [1 / self.n] * self.n if self.weights is None else self.weights.tolist()
        clients = [
            batch_norm.statistics(trained, (self._entering(like(self.data.x[rows], x)) for rows in self._chunks_of(i)))
            for i in range(self.n)
        ]
        batch_norm.install(trained, clients, weights)
        return trained.eval()

    def _copy(self, x: Tensor) -> nn.Module:
        trained = copy.deepcopy(self._original)
        trained = trained if self._half else trained.to(x.dtype)
        trained.load_state_dict(self.parameters(x.detach().clone()), strict=False)
        return trained

    def _chunks(self) -> Iterator[slice]:
        if not self.normalised:
            return super()._chunks()
        return chain.from_iterable(map(self._chunks_of, range(self.n)))

    def _chunks_of(self, client: int) -> Iterator[slice]:
        """A client's rows, `batch_size` at a time; what is left over joins the last chunk."""
        step, first, size = self.batch_size or 1, int(self._offsets[client]), int(self._sizes[client])
        starts = [*range(first, first + max(1, size // step) * step, step), first + size]
        return (slice(a, b) for a, b in pairwise(starts))

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """The flat vector x as named tensors."""
        pieces = x.split(self._numels, -1)
        return {name: v.view(shape) for name, v, shape in zip(self._names, pieces, self._shapes, strict=True)}

    def _values(self, x: Tensor) -> dict[str, Tensor]:
        """The parameters x, and what is fixed, in the precisions in which the module computes."""
        trained = self.parameters(x)
        trained |= {name: trained[name].to(dtype) for name, dtype in self._half.items() if name in trained}
        return trained | {name: v.to(used_dtype(v, x)) for name, v in self._fixed.items()}

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The way back: named tensors as one vector."""
        return torch.cat([parameters[name].flatten() for name in self._names])

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        values = self._values(x)
        named = {place: values[name] for place, name in self._places.items() if name in values}
        named |= {name: v for name, v in values.items() if name not in named}  # buffers
        out: Tensor = functional_call(self._here.module, named, (self._entering(inputs),), tie_weights=False)
        return self._leaving(out, x)

    def _entering(self, inputs: Tensor) -> Tensor:
        """Real inputs in the precision of the module's first parameter, if that is half."""
        return inputs if self._enters is None or not inputs.is_floating_point() else inputs.to(self._enters)

    def _leaving(self, out: Tensor, x: Tensor) -> Tensor:
        """Outputs in the precision of x: a loss, and a sum of losses, is too coarse in half."""
        return out.to(x.dtype) if self._half and isinstance(out, Tensor) else out

    @torch.no_grad()
    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """A label or number for each input; batch norm uses the statistics of large chunks of the inputs."""
        outs = (self.outputs(x, like(part, x)) for part in inputs.split(self.rows_at_once()))
        if self.data.y.is_floating_point():
            return torch.cat(list(outs)).squeeze(-1)
        return torch.cat([out.argmax(self._class_axis) for out in outs])

    @torch.no_grad()
    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return self._weighted(self.outputs(x, a), b, weight)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        x, stacked = x.detach(), a.ndim > self.data.x.ndim
        if self._dense:
            a = a.flatten(2 if stacked else 1)
            return self._dense.gradient(x, a, lambda out: self._slope(out, b, weight))
        if not stacked:
            return self._value_and_gradient(x, a, b, weight)[1]
        if self._folds and len(a) > side_by_side(a.shape[1]):
            return torch.cat([self.batch_gradient(*few) for few in by_few(x, a, b, weight)])
        if self._folds and len(a) > 1:
            return torch.cat(self._folded_slopes(x, a, b, weight), 1)
        if len(a) > 1 and not self._one_by_one:
            return self._stacked(x.expand(len(a), -1), a, b, weight)
        each = [self._value_and_gradient(*one)[1] for one in _apart(x, a, b, weight)]
        return torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0)

    @property
    def adding(self) -> bool:
        return self._dense is not None or self._one_by_one

    def add_gradient(self, z: Tensor, x: Tensor, a: Tensor, b: Tensor, weight: Weight, scale: float) -> None:
        x, stacked = x.detach(), a.ndim > self.data.x.ndim
        if z.stride(-1) != 1:
            z.add_(self.batch_gradient(x, a, b, weight), alpha=scale)
        elif self._dense:
            self._dense.gradient(x, a.flatten(2 if stacked else 1), lambda out: self._slope(out, b, weight), z, scale)
        elif stacked and self._folds and len(a) > side_by_side(a.shape[1]):
            for into, few in zip(z.split(side_by_side(a.shape[1])), by_few(x, a, b, weight), strict=True):
                self.add_gradient(into, *few, scale)
        elif stacked and self._folds and len(a) > 1:
            torch._foreach_add_(z.split(self._numels, 1), self._folded_slopes(x, a, b, weight), alpha=scale)
        else:
            for into, one in zip(z, _apart(x, a, b, weight), strict=True) if stacked else ((z, (x, a, b, weight)),):
                slopes = self._value_and_slopes(*one)[1]
                torch._foreach_add_(into.split(self._numels), [v.reshape(-1) for v in slopes], alpha=scale)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not (self._folds and self.normalised):
            return super().value_and_gradient(x)
        x, loss, gradient = x.detach(), x.new_zeros(()), torch.zeros_like(x)
        for batches in alike(self._everything(x)):  # whose statistics are their own, as clients' are
            value, slopes = self._folded_value_and_slopes(x, *batches)
            loss = loss + value
            torch._foreach_add_(gradient.split(self._numels), [v.sum(0).view(-1) for v in slopes])
        return loss, gradient

    def batch_value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        x = x.detach()
        if not self._dense:
            return self._value_and_gradient(x, a, b, weight)
        value = x.new_zeros(())

        def slope(out: Tensor) -> Tensor:
            nonlocal value
            value, found = self._value_and_slope(out, b, weight)
            return found

        gradient = self._dense.gradient(x, a.flatten(1), slope)
        return value, gradient

    def _value_and_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        total, slopes = self._value_and_slopes(x, a, b, weight)
        return total, torch.cat([v.reshape(-1) for v in slopes])

    @torch.enable_grad()
    def _value_and_slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One client: the loss, and its gradient with respect to each of the module's parameters."""
        here = self._here
        here.become(x)
        a, asked = channels_last(self._entering(a)), list[Tensor](here.leaves)
        if self._grouped and a.is_floating_point():
            a = a.detach().requires_grad_()
            asked.append(a)  # torch 2.13 crashes in group norm, channels-last, whose input has no gradient
        total = self._weighted(self._leaving(here.module(a), x), b, weight)
        slopes = torch.autograd.grad(total, asked, materialize_grads=True)[: len(here.leaves)]
        return total.detach(), tuple(v.to(x.dtype) for v in slopes) if self._half else slopes

    def _folded_slopes(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> list[Tensor]:
        """Several clients in one pass: gradients with respect to each of the module's parameters, (k, its size)."""
        return [v.flatten(1) for v in self._folded_value_and_slopes(x, a, b, weight)[1]]

    @torch.enable_grad()
    def _folded_value_and_slopes(
        self, x: Tensor, a: Tensor, b: Tensor, weight: Weight
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert self._here.folded is not None
        leaves = [v.requires_grad_() for v in self._leaves(x.expand(len(a), -1))]
        out = self._here.folded.outputs(leaves, a, self._shape)
        if isinstance(weight, Tensor):
            total = self._weighted(out.flatten(0, 1), b.flatten(0, 1), weight.flatten())
        else:
            total = self._loss(out.flatten(0, 1), b.flatten(0, 1)) * len(out)
        return total.detach(), torch.autograd.grad(total, leaves, materialize_grads=True)

    def _leaves(self, x: Tensor) -> list[Tensor]:
        """The module's parameters at k points x, (k, ...) each."""
        return [v.unflatten(1, shape) for v, shape in zip(x.split(self._numels, 1), self._shapes, strict=True)]

    @torch.enable_grad()
    def _stacked(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """The forward pass is batched over clients; one backward pass then serves all of them."""
        x = x.requires_grad_()
        axes = (0, 0, 0, 0 if isinstance(weight, Tensor) else None)
        each = vmap(lambda x, a, b, weight: self._weighted(self.outputs(x, a), b, weight), axes)(x, a, b, weight)
        return torch.autograd.grad(each.sum(), x)[0]

    def _slope(self, out: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """Gradient with respect to the outputs."""
        if self._classifies and not isinstance(weight, Tensor):  # written out: autograd would cost more than this
            share = torch.softmax(out.mT.contiguous(), -2)  # over the last axis it takes five times as long
            labels = b.unsqueeze(-2)
            return share.scatter_add_(-2, labels, minus_one(out.dtype, out.device).expand(labels.shape)).mul_(weight).mT
        return self._differentiated(out, b, weight)

    @torch.enable_grad()
    def _value_and_slope(self, out: Tensor, b: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """The loss of one batch, and its gradient with respect to the outputs."""
        if self._classifies and isinstance(weight, Tensor):
            with torch.no_grad():
                share = nn.functional.log_softmax(out, -1)
                value = -(weight * share.gather(-1, b.unsqueeze(-1)).squeeze(-1)).sum()
                minus = torch.full((), -1.0, dtype=out.dtype, device=out.device).expand(len(b), 1)
                return value, share.exp_().scatter_add_(-1, b.unsqueeze(-1), minus).mul_(weight.unsqueeze(-1))
        out = out.detach().requires_grad_()
        total = self._weighted(out, b, weight)
        return total.detach(), torch.autograd.grad(total, out)[0]

    @torch.enable_grad()
    def _differentiated(self, out: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """The samples of all clients in one batch, since each counts by itself."""
        out = out.detach().requires_grad_()
        batch = b.shape[: out.ndim - 1]
        joined, targets = out.flatten(0, -2), b.reshape(-1, *b.shape[len(batch) :])
        if isinstance(weight, Tensor):
            total = self._weighted(joined, targets, weight.flatten())
        else:
            total = self._loss(joined, targets) * (len(joined) * weight)
        return torch.autograd.grad(total, out)[0]

    def _weighted(self, out: Tensor, b: Tensor, weight: Weight) -> Tensor:
        if not isinstance(weight, Tensor):  # equal weights 1/B: the loss's own mean
            return self._loss(out, b)
        return (weight * probe.by_sample(self._loss, out, b)).sum()


@cache
def minus_one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1.0, dtype=dtype, device=device)


def _apart(x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Iterator[tuple[Tensor, Tensor, Tensor, Weight]]:
    """Clients side by side, one by one: alone the plain kernels are faster."""
    weights = weight if isinstance(weight, Tensor) else [weight] * len(a)
    return zip(x.expand(len(a), -1), a, b, weights, strict=True)


def _singly(*stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(v.split(1) for v in stacks), strict=True)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool(torch.dist(found, wanted) <= ALIKE * wanted.norm())
