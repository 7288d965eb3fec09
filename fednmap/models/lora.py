"""LoRA adapters of a peft model: the ranks that are left, and a folder that peft reads."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednmap.names import InputError

A, B = ".lora_A", ".lora_B"


def factors(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """A (r, inputs) and B (outputs, r) of each adapter, by the name of the layer that it adapts.

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
    """How many rank components of each adapter are not zero: those whose row of A and column of B both are not."""
    return {name: len(_kept(a, b)) for name, (a, b) in factors(module).items()}


def save_adapter(module: Any, folder: str | Path) -> dict[str, int]:
    """Write the adapters of a peft model as a folder for peft.PeftModel.from_pretrained; return their ranks.

    Components that are zero are left out, so a layer's rank is what it kept, or 1 if it kept none. The outputs do not
    change: the folder's `rank_pattern` and `alpha_pattern` give every layer its rank and its old scale.
    """
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        raise InputError("adapter folders need packages that are not installed: pip install 'fednmap[peft]'") from None
    from safetensors.torch import save_file

    if not isinstance(module, PeftModel):
        raise InputError(f"expected a peft model, got a {type(module).__name__}; use result.module() of a run on one")
    config = copy.deepcopy(module.peft_config[module.active_adapter])
    state = {name: v.detach().cpu() for name, v in get_peft_model_state_dict(module).items()}
    left: dict[str, int] = {}
    for name in [name for name in state if f"{A}." in name]:
        a, b = state[name], state[name.replace(A, B)]
        kept = _kept(a, b)
        kept = kept if len(kept) else torch.zeros(1, dtype=torch.int64, device="cpu")
        state[name], state[name.replace(A, B)] = a[kept].contiguous(), b[:, kept].contiguous()
        layer = name.split(A)[0].removeprefix("base_model.model.")
        power = math.sqrt if config.use_rslora else float
        left[layer] = len(kept)
        config.alpha_pattern[layer] = config.lora_alpha * power(len(kept)) / power(len(a))
    config.rank_pattern, config.inference_mode = dict(left), True
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(state, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    return left


def _kept(a: Tensor, b: Tensor) -> Tensor:
    return ((a != 0).any(1) & (b != 0).any(0)).nonzero().flatten()
