"""Cross-entropy with class weights and ignored labels, as a weighted mean over samples.

Torch's mean over a batch divides by what its labels count in all: sum_j c_j l_j / sum_j c_j, where a label counts its
class's weight, an ignored one 0, and l_j is the loss of sample j. A client's loss is that mean over ALL its samples,
and the gradient of a minibatch of B of its m samples is that of

    (m / B) sum_{j in batch} c_j l_j / sum_{all j} c_j ,

which is unbiased. The ratio within the batch, which a plain loop takes, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss


class LabelLoss:
    """One of torch's two losses of labels, with its options."""

    def __init__(self, function: Callable[..., Tensor], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self.weight: Tensor | None = options.get("weight")
        """Of the classes."""
        self.ignored = int(options.get("ignore_index", -100))

    @classmethod
    def of(cls, loss: Callable[..., Tensor]) -> LabelLoss | None:
        """What `loss` is, if it is the mean of cross_entropy or nll_loss: the function, a partial, or the module."""
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            function = nll_loss if isinstance(loss, nn.NLLLoss) else cross_entropy
            names = ("weight", "ignore_index", "reduction", "label_smoothing")
            loss = partial(function, **{name: getattr(loss, name) for name in names if hasattr(loss, name)})
        given = loss if isinstance(loss, partial) and not loss.args else partial(loss)
        function, options = given.func, dict(given.keywords)
        known = function in (cross_entropy, nll_loss) and options.pop("reduction", "mean") == "mean"
        return cls(function, options) if known else None

    def counts(self, y: Tensor) -> Tensor:
        """Return what the labels of each sample count, (N,), in float64."""
        kept = y != self.ignored
        each = kept.double()
        if self.weight is not None:
            each *= self.weight.double().to(y.device)[torch.where(kept, y, 0)]
        return each.reshape(len(y), -1).sum(1)

    def by_sample(self, out: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of each sample over what counts of it, (B,); 0 where nothing does."""
        options = self._options if self.weight is None else self._options | {"weight": self.weight.to(out)}
        sums = self._function(out, y, reduction="none", **options).reshape(len(y), -1).sum(1)
        return sums / self.counts(y).to(sums).clamp_min(torch.finfo(sums.dtype).tiny)
