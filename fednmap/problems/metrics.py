"""What is measured of a network's outputs, by name: functions of (outputs, targets), of all samples together.

Outputs are (N, classes, ...), targets (N, ...); labels that are ignored (-100) are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

Measure = Callable[[Tensor, Tensor], float]
IGNORED = -100


def accuracy(out: Tensor, y: Tensor) -> float:
    """Return the share of labels whose output is the largest.

    >>> accuracy(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))
    0.5
    """
    out, y = _labelled(out, y)
    return float((out.argmax(1) == y).double().mean())


def perplexity(out: Tensor, y: Tensor) -> float:
    """Return exp of the mean cross-entropy of the labels.

    >>> round(perplexity(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64)), 6)
    3.0
    """
    return float(cross_entropy(out.double(), y, ignore_index=IGNORED).exp())


def f1(out: Tensor, y: Tensor) -> float:
    """Return the mean over the classes of 2 tp / (2 tp + fp + fn)."""
    from sklearn.metrics import f1_score

    out, y = _labelled(out, y)
    return float(f1_score(y.numpy(), out.argmax(1).numpy(), average="macro", zero_division=0.0))


def auc(out: Tensor, y: Tensor) -> float:
    """The area under the ROC curve; of several classes the mean over each against the rest. NaN if a class is absent.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    from sklearn.metrics import roc_auc_score

    if out.ndim == 1 or out.shape[1] == 1:
        one, y = out.flatten().double().cpu(), y.flatten().long().cpu()
        scores = torch.stack([-one, one], 1)
    else:
        scores, y = _labelled(out, y)
        scores = scores.double().softmax(1)
    found = [y == k for k in range(scores.shape[1])]
    if not all(bool(one.any()) for one in found):
        return float("nan")
    found = found[1:] if len(found) == 2 else found
    each = [roc_auc_score(one.numpy(), scores[:, k - len(found)].numpy()) for k, one in enumerate(found)]
    return float(sum(each) / len(each))


def _labelled(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, classes) and labels (N,) on the CPU, without those that are ignored."""
    out, y = out.movedim(1, -1).flatten(0, -2).cpu(), y.flatten().cpu()
    return out[y != IGNORED], y[y != IGNORED]


METRICS: dict[str, Measure] = {"accuracy": accuracy, "auc": auc, "f1": f1, "perplexity": perplexity}
