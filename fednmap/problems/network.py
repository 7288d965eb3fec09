"""Any torch module as a function of one flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData, Pairs
from fednmap.data.sparse import is_sparse
from fednmap.names import InputError
from fednmap.problems import batch_norm, probe
from fednmap.problems.finite_sum import FiniteSum, Samples, Weight, like
from fednmap.problems.kernels import Kernel, choose_kernel
from fednmap.problems.module_loss import ModuleLoss
from fednmap.problems.probe import Loss

ACTIVATION_BYTES = 64 << 20  # of the samples handled in one pass over all data


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
        self._original = copy.deepcopy(module)
        self._function = ModuleLoss(self._original, loss, self.data)
        self.start, self.dim = self._function.start, self._function.start.numel()
        a, b = self._probe()
        self._kernel = choose_kernel(self._function, a, b, clients=self.n, rows=batch_size)

    def _probe(self) -> tuple[Tensor, Tensor]:
        """Try a few samples, which are returned, in the module and the loss; refuse what does not fit."""
        function = self._function

        def module(inputs: Tensor) -> Tensor:
            return function.outputs(self.start, like(inputs, self.start))

        few = probe.rows(self.data)
        a, b = like(self.data.x[few], self.start), like(self.data.y[few], self.start)
        out = probe.outputs(module, a)
        if self.normalised:
            probe.check_single(module, self.data, self.batch_size)
        else:
            probe.check_alone(module, a, out, coarse=function.half)
        probe.check_labels(function.loss, out, self.data.y)
        tried = probe.with_every_label(out, b, self.data.y)
        probe.check_loss(function.loss, *tried)
        function.output_shape, self._class_axis = out.shape[1:], probe.class_axis(function.loss, *tried)
        # batch norm needs large chunks, as statistics
        self._activation_bytes = 0 if self.normalised else function.row_bytes(a)
        return a, b

    @property
    def chunk(self) -> int:
        """Clients computed in one call, as the kernel has it; their activations take bounded memory."""
        rows = self.batch_size or int(self._sizes.max())
        most = ACTIVATION_BYTES // max(1, rows * self._activation_bytes)
        return self._kernel.chunk(max(1, min(super().chunk, most)), rows)

    def rows_at_once(self) -> int:
        return max(1, min(super().rows_at_once(), ACTIVATION_BYTES // max(1, self._activation_bytes)))

    def subsample(self) -> Self:
        few = super().subsample()
        return self if self.normalised and int(few._sizes.min()) < (self.batch_size or 1) else few

    def info(self) -> ProblemInfo:
        return replace(super().info(), module=self.module)

    def made_of(self) -> dict[str, Any]:
        return super().made_of() | {"module": self._original, "loss": self._function.loss}

    def exact(self) -> Self:
        """The same with exact client gradients; with batch norm itself, its statistics are a minibatch's."""
        return self if self.normalised else super().exact()

    @property
    def architecture(self) -> nn.Module:
        """A copy of the module as it was given."""
        return copy.deepcopy(self._original)

    def module(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters x, in eval mode; calibrated if it has batch norm."""
        return self.calibrate(x)

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> nn.Module:
        """`module(x)` with running statistics from the clients' data, if there are batch norm layers that need them.

        Every client goes through its rows in chunks of the batch size and averages the means and variances that each
        batch norm layer meets; the average of the clients' averages is kept.
        """
        trained = copy.deepcopy(self._original)
        trained = trained if self._function.half else trained.to(x.dtype)
        trained.load_state_dict(self.parameters(x.detach().clone()), strict=False)
        if self.normalised:
            batches = (
                (self._function.entering(like(self.data.x[rows], x)) for rows in self._chunks_of(i))
                for i in range(self.n)
            )
            batch_norm.calibrate(trained, batches, self._client_weights().tolist())
        return trained.eval()

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
        return self._function.parameters(x)

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `parameters`: named tensors as one vector."""
        return self._function.flat(parameters)

    def outputs(self, x: Tensor, inputs: Tensor) -> Tensor:
        """The module's outputs at x."""
        return self._function.outputs(x, inputs)

    @torch.no_grad()
    def predict(self, x: Tensor, inputs: Tensor) -> Tensor:
        """A label or number for each input; batch norm uses the statistics of large chunks of the inputs."""
        outs = (self.outputs(x, like(part, x)) for part in inputs.split(self.rows_at_once()))
        if self.data.y.is_floating_point():
            return torch.cat(list(outs)).squeeze(-1)
        return torch.cat([out.argmax(self._class_axis) for out in outs])

    @torch.no_grad()
    def batch_loss(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return self._function(x, a, b, weight)

    def batch_gradient(self, x: Tensor, a: Tensor, b: Tensor, weight: Weight) -> Tensor:
        return self._kernel.value_and_gradient(x, a, b, weight)[1]

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.total(x, self._everything(x))

    def _oracle(self, samples: Callable[[Tensor, int], Samples], clients: Tensor) -> Oracle:
        return _KernelOracle(self._kernel, samples, clients.shape)


class _KernelOracle:
    """The gradients on samples(x, q), those of local step q; a `core.AccumulatingOracle`."""

    def __init__(self, kernel: Kernel, samples: Callable[[Tensor, int], Samples], stack: tuple[int, ...]) -> None:
        self._kernel, self._samples, self.stack = kernel, samples, stack

    def __call__(self, x: Tensor, q: int) -> Tensor:
        return self._kernel.value_and_gradient(x, *self._samples(x, q))[1]

    def add(self, z: Tensor, x: Tensor, q: int, scale: float) -> None:
        self._kernel.add_gradient(z, x, *self._samples(x, q), scale)
