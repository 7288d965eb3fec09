"""LoRA adapters of a peft model: the ranks that are left, and their export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
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


def save(module: Any, folder: Path | str) -> dict[str, int]:
    """Write a peft model's adapters as a peft adapter folder, without the rank components that are zero.

    Return the rank of each layer. `peft.PeftModel.from_pretrained(base, folder)` reads it; its outputs are those of
    `module`. An adapter that is zero as a whole keeps one component, since peft has no rank 0.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapter, folder = module.active_adapter, Path(folder)
    tensors = {name: v.detach().cpu() for name, v in get_peft_model_state_dict(module, adapter_name=adapter).items()}
    config, found = copy.deepcopy(module.peft_config[adapter]), dict[str, int]()
    config.inference_mode, config.rank_pattern, config.alpha_pattern = True, {}, {}
    for name, layer in module.base_model.model.named_modules():
        a = f"base_model.model.{name}{A}.weight"
        if a not in tensors:
            continue
        b = a.replace(A, B)
        kept = _kept(tensors[a], tensors[b])
        kept = kept if len(kept) else torch.tensor([0])
        tensors[a], tensors[b] = tensors[a][kept].contiguous(), tensors[b][:, kept].contiguous()
        found[name] = config.rank_pattern[name] = len(kept)
        size = len(kept) ** 0.5 if config.use_rslora else len(kept)
        config.alpha_pattern[name] = layer.scaling[adapter] * size  # peft divides by it again
    if not found:
        raise InputError("expected a peft model with linear LoRA adapters, got none; add them by peft.get_peft_model")
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return found
