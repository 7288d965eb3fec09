"""LoRA adapters of a peft model: the ranks that are left."""

from __future__ import annotations

from torch import Tensor, nn

from fednmap.names import InputError

A, B = ".lora_A", ".lora_B"


def factors(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return a (r, inputs) and B (outputs, r) of each adapter, by the name of the layer that it adapts.

    >>> layer = nn.ModuleDict({"lora_A": nn.Linear(3, 2, bias=False), "lora_B": nn.Linear(2, 4, bias=False)})
    >>> [tuple(v.shape) for v in factors(nn.ModuleDict({"query": layer}))["query"]]
    [(2, 3), (4, 2)]
    """
    named = {name: p.detach() for name, p in module.named_parameters() if p.ndim == 2}
    pairs = {name.split(A)[0]: (v, named[name.replace(A, B)]) for name, v in named.items() if f"{A}." in name}
    if not pairs:
        raise InputError("expected a module with LoRA adapters, got none; add them by peft.get_peft_model")
    return pairs


def ranks(module: nn.Module) -> dict[str, int]:
    """Return the number of nonzero rank components of each adapter: row of A and column of B both not zero."""
    return {name: len(_kept(a, b)) for name, (a, b) in factors(module).items()}


def _kept(a: Tensor, b: Tensor) -> Tensor:
    return ((a != 0).any(1) & (b != 0).any(0)).nonzero().flatten()
