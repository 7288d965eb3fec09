"""Any torch module as a function of one flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor, nn

from fednmap.core import Oracle, ProblemInfo
from fednmap.data.clients import ClientData
from fednmap.data.records import Records, Tree, leaves, mapped
from fednmap.data.sparse import is_sparse
from fednmap.names import InputError, choose
from fednmap.problems import probe
from fednmap.problems.finite_sum import FiniteSum, Samples, Weight, like
from fednmap.problems.kernels import Kernel, KernelOracle, SeededKernel, choose_kernel
from fednmap.problems.label_loss import LabelLoss
from fednmap.problems.metrics import METRICS, Measure
from fednmap.problems.module_loss import (
    Forward,
    Layout,
    ModuleLoss,
    batch_norm_layers,
    calibrate,
    channels_last,
    contiguous,
    forward_of,
)
from fednmap.problems.probe import Loss

ACTIVATION_BYTES = 64 << 20  # of the samples handled in one pass over all data


class Network(FiniteSum):
    r"""A torch module and a loss: $f_i(x) = \mean_j \text{loss}(\text{module}_x(a_j), b_j)$.

    x holds the module's parameters, in the order of `named_parameters()`.


    module: any torch.nn.Module; it is copied, its parameters are the start. Parameters with requires_grad=False stay
            as they are and are not part of x. A module in half precision computes in it; x, gradients and losses are
            float32.
    loss:   loss(outputs, targets), the mean over the batch, such as torch.nn.functional.cross_entropy. With class
            weights or ignored labels (torch.nn.CrossEntropyLoss(weight=, ignore_index=), -100 by default) f_i is the
            weighted mean over the labels that count, see `fednmap.problems.label_loss`.
    data:   per client a pair (inputs, targets), a map-style Dataset or a DataLoader, see `fednmap.data.records`. Inputs
            are a tensor, or a tuple or dict of tensors. uint8 inputs are pixels: they enter as value / 255.
    forward: what is taken of the module: "call" (it returns one tensor), "first", "logits", "token_logits" (classes in
            axis 1), or a function forward(module, inputs) that returns one tensor.
    minibatches, local_steps: how samples are drawn, see `FiniteSum`.
    accumulate: minibatches per local step, computed one after another; the gradient is their mean.
    clip_norm: the largest norm of a local step's gradient; longer ones are scaled. The clipped gradients, and the fixed
            point, are then not those of f.
    autocast: compute the forward pass under torch.autocast in this precision, such as torch.bfloat16; x, gradients and
            losses are float32.

    Dropout in training mode draws its masks by (seed, client, round, step), so every way of running gives the same
    trajectory; `loss` and `gradient` are those of the module in eval mode. Random transforms of a Dataset are addressed
    likewise if they use torch's generator.

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
        data: Any,
        *,
        batch_size: int | None = 32,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
        minibatches: str = "replacement",
        local_steps: int | None = None,
        forward: str | Forward = "call",
        accumulate: int = 1,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        probe.check_kinds(module, loss)
        if not isinstance(accumulate, int) or accumulate < 1 or (accumulate > 1 and batch_size is None):
            raise InputError(f"expected accumulate >= 1, and 1 without a batch_size, got {accumulate!r}")
        if clip_norm is not None and not 0 < clip_norm < float("inf"):
            raise InputError(f"expected clip_norm to be finite and above 0, or None, got {clip_norm!r}")
        rows = _rows(loss, data, batch_size)
        if batch_norm_layers(module):
            if batch_size is None:
                raise InputError("batch norm needs a batch_size, its statistics are a batch's; or use group norm")
            rows = rows.in_batches(batch_size)
        super().__init__(
            rows,
            batch_size=batch_size,
            seed=seed,
            weights=weights,
            sample_weights=_counts(loss, rows),
            minibatches=minibatches,
            local_steps=None if local_steps is None else local_steps * accumulate,
        )
        self.accumulate, self.clip_norm = accumulate, clip_norm
        self._original = copy.deepcopy(module)
        self._options: dict[str, Any] = {"forward": forward_of(forward), "autocast": autocast}
        self._set_kernels(loss)

    def _set_kernels(self, loss: Loss) -> None:
        """Try a few samples in the module and the loss, refuse what does not fit, and choose how to compute the rest.

        The local steps have the module as it was given. A module that draws random numbers has another kernel for all
        that is measured, with the module in eval mode.
        """
        a, b = self.data.batch(probe.rows(self.data))
        steps, out, random = self._tried(loss, a, b, training=True)
        function = steps
        if random:
            if self.batch_size is None:
                raise InputError(
                    "the module draws random numbers (dropout in training mode?), and batch_size=None asks for exact "
                    "gradients; give a batch_size, or call module.eval()"
                )
            function, out, always = self._tried(loss, a, b, training=False)
            if always:
                raise InputError("the module draws random numbers in eval mode too; use dropout(..., self.training)")
        self._function, self.start, self.dim = function, function.start, function.start.numel()
        a, b = self._inputs(a, self.start), like(b, self.start)
        outputs = partial(function.outputs, self.start)
        if self.data.batch_rows:
            probe.check_single(outputs, mapped(lambda v: v[:1], a), self.data.sizes, self.batch_size)
        else:
            probe.check_alone(outputs, a, out, coarse=function.half or self._options["autocast"] is not None)
        y = self.data.y if isinstance(self.data, ClientData) else b
        probe.check_labels(loss, out, y)
        tried = probe.with_every_label(out, b, y)
        probe.check_loss(loss, *tried)
        self._class_axis = None if b.is_floating_point() else probe.class_axis(loss, *tried)
        function.output_shape = steps.output_shape = out.shape[1:]
        # batch norm needs large chunks, as statistics
        self._activation_bytes = 0 if self.data.batch_rows else function.row_bytes(a)
        self._kernel: Kernel = SeededKernel(function)
        if self.data.stackable:
            self._kernel = choose_kernel(function, a, b, clients=self.n, rows=self.batch_size)
        self._steps = SeededKernel(steps) if random else self._kernel
        self.concurrent = self._steps.concurrent

    def _tried(
        self, loss: Loss, a: Tree, b: Tensor, *, training: bool, layout: Layout = channels_last
    ) -> tuple[ModuleLoss, Tensor, bool]:
        """The module with the loss, its outputs for samples a, and whether it draws random numbers for them."""
        known = None if b.is_floating_point() or self._counts is None else LabelLoss.of(loss)
        options = self._options | {"by_sample": None if known is None else known.by_sample}
        function = ModuleLoss(self._original, loss, a, b, **options, training=training, layout=layout)
        x = function.start
        try:
            return function, *probe.outputs(lambda inputs: function.outputs(x, function.inputs(inputs, x)), a)
        except InputError:  # a module that uses `view` needs the default layout
            if layout is contiguous:
                raise
            return self._tried(loss, a, b, training=training, layout=contiguous)

    @property
    def chunk(self) -> int:
        """Clients computed in one call, as the kernel has it; their activations take bounded memory."""
        rows = self.batch_size or int(self.data.sizes.max())
        most = ACTIVATION_BYTES // max(1, rows * self._activation_bytes)
        return self._steps.chunk(max(1, min(super().chunk, most)), rows)

    def rows_at_once(self) -> int:
        return max(1, min(super().rows_at_once(), ACTIVATION_BYTES // max(1, self._activation_bytes)))

    @property
    def steps_per_round(self) -> int | None:
        steps = super().steps_per_round
        return None if steps is None else steps // self.accumulate

    @property
    def exact_gradients(self) -> bool:
        return super().exact_gradients and self.clip_norm is None

    def info(self) -> ProblemInfo:
        return replace(super().info(), module=self.module)

    def made_of(self) -> dict[str, Any]:
        given = {"accumulate": (self.accumulate, 1), "clip_norm": (self.clip_norm, None)}
        given |= {name: (value, _PLAIN[name]) for name, value in self._options.items()}
        changed = {name: value for name, (value, default) in given.items() if value is not default}
        return super().made_of() | {"module": self._original, "loss": self._function.loss} | changed

    def exact(self) -> Self:
        """Return the same with exact client gradients; with batch norm itself, its statistics are a minibatch's."""
        return self if self.data.batch_rows else super().exact()._changed(accumulate=1, clip_norm=None)

    @property
    def architecture(self) -> nn.Module:
        """A copy of the module as it was given."""
        return copy.deepcopy(self._original)

    def module(self, x: Tensor) -> nn.Module:
        """Return a copy of the module with the parameters x, in eval mode; calibrated if it has batch norm."""
        return self.calibrate(x)

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> nn.Module:
        """Return `module(x)` with running statistics from the clients' data, if batch norm layers need them.

        Every client goes through its rows in chunks of the batch size and averages the means and variances that each
        batch norm layer meets; the average of the clients' averages is kept.
        """
        function, trained, step = self._function, copy.deepcopy(self._original), self.rows_at_once()
        trained = trained if function.half else trained.to(x.dtype)
        trained.load_state_dict(self.parameters(x.detach().clone()), strict=False)
        batches = ((self._read(rows, x)[0] for rows in self.data.chunks_of(i, step)) for i in range(self.n))
        calibrate(trained, function.forward, batches, self._client_weights().tolist())
        return trained.eval()

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return the flat vector x as named tensors."""
        return self._function.parameters(x)

    def flat(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the inverse of `parameters`: named tensors as one vector."""
        return self._function.flat(parameters)

    def outputs(self, x: Tensor, inputs: Tree) -> Tensor:
        """Return the module's outputs at x."""
        return self._function.outputs(x, self._inputs(inputs, x))

    @torch.no_grad()
    def predict(self, x: Tensor, inputs: Tree) -> Tensor:
        """Return a label or number for each input; batch norm uses the statistics of large chunks of the inputs."""
        step, axis = self.rows_at_once(), self._class_axis
        starts = range(0, len(leaves(inputs)[0]), step)
        outs = (self.outputs(x, mapped(itemgetter(slice(c, c + step)), inputs)) for c in starts)
        return torch.cat([out.squeeze(-1) if axis is None else out.argmax(axis) for out in outs])

    def metric(self, measure: str | Measure, data: Any) -> Metric:
        """Return `measure` on these data as a function of the model x, as `fednmap.run` takes it in `metrics`.

        measure: "accuracy", "auc", "f1", "perplexity", or a function of (outputs, targets) of all samples.
        data:    test samples, in a form that a client's may have.

        >>> data = [(torch.eye(2), torch.tensor([0, 1]))]
        >>> problem = Network(nn.Linear(2, 2), nn.functional.cross_entropy, data)
        >>> problem.metric("accuracy", data[0])(torch.tensor([1.0, 0, 0, 1, 0, 0]))
        1.0
        """
        chosen = choose("metric", measure, METRICS) if isinstance(measure, str) else measure
        return Metric(self, chosen, _rows(self._function.loss, [data], None))

    def _inputs(self, a: Tree, x: Tensor) -> Tree:
        return self._function.inputs(a, x)

    @torch.no_grad()
    def batch_loss(self, x: Tensor, a: Tree, b: Tensor, weight: Weight) -> Tensor:
        return self._function(x, a, b, weight)

    def batch_gradient(self, x: Tensor, a: Tree, b: Tensor, weight: Weight) -> Tensor:
        return self._kernel.value_and_gradient(x, a, b, weight)[1]

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernel.total(x, self._everything(x))

    def oracle(self, clients: Tensor, t: int) -> Oracle:
        made = self._steps.oracle(super().oracle, clients, t, (self.seed, self.first))
        return _accumulated(made, self.accumulate, self.clip_norm)

    def _oracle(self, samples: Callable[[Tensor, int], Samples], clients: Tensor) -> Oracle:
        return KernelOracle(self._steps, samples, clients.shape)


@dataclass(frozen=True, eq=False)
class Metric:
    """A measure of a network's outputs on some data, as a function of the model x."""

    problem: Network
    measure: Measure
    data: ClientData | Records

    @torch.no_grad()
    def __call__(self, x: Tensor) -> float:
        step = self.problem.rows_at_once()
        parts = [self.data.batch(slice(c, c + step)) for c in range(0, self.data.rows, step)]
        outs = torch.cat([self.problem.outputs(x, a) for a, _ in parts])
        return float(self.measure(outs, torch.cat([b for _, b in parts]).to(outs.device)))


_PLAIN: dict[str, Any] = {"forward": forward_of("call"), "autocast": None}


def _rows(loss: Loss, data: Any, batch_size: int | None) -> ClientData | Records:
    """The clients' data; labels are whole numbers."""
    if Records.needed(data):
        return Records.of(data, batch_size)
    given = ClientData.of(data)
    if is_sparse(given.x):
        raise InputError(
            "x is sparse, and networks compute on dense tables; use a linear model, or give x.toarray() "
            "(on the command line svm:PATH,dense=true) if there is room"
        )
    targets = probe.labels(loss, given.y)
    return given if targets is given.y else ClientData(given.x, targets, given.sizes)


def _counts(loss: Loss, rows: ClientData | Records) -> Tensor | None:
    """What each row counts in its client's mean; None if all count the same.

    Records are read once for it, if the loss has class weights or a sample has several labels.
    """
    known = LabelLoss.of(loss)
    if known is None:
        return None
    if isinstance(rows, ClientData):
        targets = [rows.y]
    else:
        one = rows.batch(slice(0, 1))[1]
        if one.ndim == 1 and known.weight is None:
            rows.refused = known.ignored
            return None
        targets = [one] if one.is_floating_point() else [y for _, y in rows.parts()]
    if targets[0].is_floating_point():
        return None
    found = torch.cat([known.counts(y) for y in targets])
    return None if bool((found == found[0]).all()) and float(found[0]) > 0 else found


def _accumulated(g: Oracle, count: int, clip_norm: float | None) -> Oracle:
    """The mean of `count` minibatches' gradients, not longer than clip_norm."""
    if count == 1 and clip_norm is None:
        return g

    def mean(x: Tensor, q: int) -> Tensor:
        total: Tensor = g(x, q * count)
        for k in range(1, count):
            total = total + g(x, q * count + k)
        total = total / count
        if clip_norm is not None:
            total = total * (clip_norm / total.norm(dim=-1, keepdim=True).clamp_min(clip_norm))
        return total

    return mean
