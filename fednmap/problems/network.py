"""Any torch module as a function of one flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector

from fednmap.names import InputError
from fednmap.problems import batch_norm
from fednmap.problems.dense import Dense
from fednmap.problems.finite_sum import FiniteSum, Weight, like

Loss = Callable[[Tensor, Tensor], Tensor]


class Network(FiniteSum):
    """f_i(x) = mean_j loss(module_x(a_j), b_j): x holds the module's parameters, in the order of `named_parameters()`.

    module: any torch.nn.Module without randomness in its forward pass; it is copied, its parameters are the start.
    loss:   loss(outputs, targets), the mean over the batch, such as torch.nn.functional.cross_entropy.
    data:   one pair (inputs, targets) a client.

    Batch norm normalises by the statistics of the minibatch in gradients, and of fixed chunks of a client's rows,
    `batch_size` each, in `loss` and `gradient`; these are then exact for that choice of chunks. Running statistics
    are not part of x: `calibrate` estimates them once, after training.

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
        data: Sequence[tuple[Tensor, Tensor]],
        *,
        batch_size: int | None = 32,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__(data, batch_size=batch_size, seed=seed, weights=weights)
        self.normalised = bool(batch_norm.layers(module))
        if self.normalised and batch_size is None:
            raise InputError("batch norm needs a batch_size, its statistics are a batch's; or use group norm")
        self._original, self._module, self._loss = copy.deepcopy(module), batch_norm.without_running(module), loss
        self._names = [name for name, _ in module.named_parameters()]
        self._shapes = [p.shape for p in module.parameters()]
        self._numels = [p.numel() for p in module.parameters()]
        if not self._names:
            raise InputError(f"{type(module).__name__} has no parameters to train")
        self.start = parameters_to_vector(module.parameters()).detach().clone()
        self.dim = self.start.numel()
        self._dense = Dense.of(module, self.data.x[0])
        labels = not self.data.y.is_floating_point() and int(self.data.y.min()) >= 0
        self._classifies = loss is nn.functional.cross_entropy and labels
        self._leaves = list(self._module.requires_grad_().parameters())
        self._convolves = any(isinstance(layer, nn.Conv2d) for layer in module.modules())

    @property
    def chunk(self) -> int:
        """Clients computed side by side; convolutions are fastest one client at a time."""
        return 1 if self._convolves else super().chunk

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
            batch_norm.statistics(trained, (like(self.data.x[rows], x) for rows in self._chunks_of(i)))
            for i in range(self.n)
        ]
        batch_norm.install(trained, clients, weights)
        return trained.eval()

    def _copy(self, x: Tensor) -> nn.Module:
        trained = copy.deepcopy(self._original).to(x.dtype)
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

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The way back: named tensors as one vector."""
        return torch.cat([parameters[name].flatten() for name in self._names])

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        return functional_call(self._module, self.parameters(x), (inputs,))  # type: ignore[no-any-return]

    @torch.no_grad()
    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """A label or number for each input; batch norm uses the statistics of large chunks of the inputs."""
        out = torch.cat([self.outputs(x, part) for part in inputs.split(self._rows_at_once())])
        return out.squeeze(-1) if self.data.y.is_floating_point() else out.argmax(-1)

    @torch.no_grad()
    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return self._weighted(self.outputs(x, a), b, weight)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        x, stacked = x.detach(), a.ndim > self.data.x.ndim
        if self._dense:
            a = a.flatten(2 if stacked else 1)
            return self._dense.gradient(x, a, lambda out: self._slope(out, b, weight))
        if not stacked:
            return self._gradient(x, a, b, weight)
        if len(a) == 1:  # alone: the plain kernels are faster than those for a stack
            one = weight[0] if isinstance(weight, Tensor) else weight
            return self._gradient(x.reshape(-1), a[0], b[0], one).unsqueeze(0)
        return self._stacked(x.expand(len(a), -1), a, b, weight)

    @torch.enable_grad()
    def _gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        """One client: the module's own parameters become views of x, which costs nothing."""
        for leaf, value in zip(self._leaves, self.parameters(x).values(), strict=True):
            leaf.data = _channels_last(value)
        total = self._weighted(self._module(_channels_last(a)), b, weight)
        return torch.cat([v.reshape(-1) for v in torch.autograd.grad(total, self._leaves, materialize_grads=True)])

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
            minus = torch.full((), -1.0, dtype=out.dtype, device=out.device).expand(*b.shape[:-1], 1, b.shape[-1])
            return share.scatter_add_(-2, b.unsqueeze(-2), minus).mul_(weight).mT
        return self._differentiated(out, b, weight)

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
        each = vmap(lambda o, target: self._loss(o.unsqueeze(0), target.unsqueeze(0)))(out, b)
        return (weight * each).sum()


def _channels_last(v: Tensor) -> Tensor:
    """Pictures and kernels in the layout in which convolutions are fastest on a CPU."""
    if v.ndim != 4:
        return v
    _, channels, height, width = v.shape
    if v.is_contiguous() and (channels == 1 or height == width == 1):  # the numbers are in that order already
        return v.as_strided(v.shape, (channels * height * width, 1, width * channels, channels))
    return v.to(memory_format=torch.channels_last)
