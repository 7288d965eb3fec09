"""Adapters between unlike clients: a small GPT, pre-trained here, adapted by LoRA to eight kinds of text.

    python benchmarks/lora.py [--rounds 30] [--json FILE]

A GPT-2 of transformers (2 layers, width 64, characters) is made from its configuration and pre-trained on this
repository's Markdown pages. Eight clients have the sources of eight packages of Python's standard library; the last
fifth of each is for testing. LoRA of rank 8 on all linear layers; 5 local steps, batches of 8; every method with the
better of two step sizes, by the training loss. Needs `fednmap[peft]`.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import arguments, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fednmap import run
from fednmap.algorithms import FedAvg, FedNMap
from fednmap.core import Algorithm
from fednmap.models.lora import ranks
from fednmap.problems import Network
from fednmap.regularizers import Zero, rank_components

PACKAGES = ("asyncio", "email", "encodings", "html", "http", "sqlite3", "tkinter", "xml")
WORDS, LENGTH, LIMIT, RANK, Q, BATCH = 128, 64, 60_000, 8, 5, 8


def letters(text: str) -> Tensor:
    """Sequences of characters; what is not ASCII becomes a question mark."""
    codes = torch.tensor([min(ord(c), 128) % 128 or 63 for c in text[:LIMIT]])
    count = (len(codes) - 1) // LENGTH
    return codes[: count * LENGTH + 1].unfold(0, LENGTH + 1, LENGTH)


def texts(folder: Path, pattern: str) -> Tensor:
    return letters("\n".join(p.read_text(errors="replace") for p in sorted(folder.rglob(pattern))))


def pair(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def pretrained(steps: int) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **still))
    data, optimiser = texts(Path(__file__).parents[1] / "docs", "*.md"), torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        x, y = pair(data[torch.randint(0, len(data), (32,))])
        loss = cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model  # type: ignore[no-any-return]


def adapted(base: nn.Module, rank: int, *, frozen_a: bool = False) -> nn.Module:
    import peft

    torch.manual_seed(1)
    layers = ["c_attn", "c_proj", "c_fc"]
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, fan_in_fan_out=True)
    module = peft.get_peft_model(copy.deepcopy(base), config)
    for name, p in module.named_parameters():
        if frozen_a and "lora_A" in name:
            p.requires_grad_(False)  # FFA-LoRA: with one A for all, the mean of B A is the product of the means
    return module  # type: ignore[no-any-return]


def pruned(module: nn.Module, keep: int) -> None:
    """Keep the `keep` components that are longest, and set the others to zero."""
    named = dict(module.named_parameters())
    names = [name for name in named if "lora_A" in name]
    sizes = [named[a].norm(dim=1) * named[a.replace("lora_A", "lora_B")].norm(dim=0) for a in names]
    least = torch.cat(sizes).sort(descending=True).values[keep - 1]
    for a, size in zip(names, sizes, strict=True):
        named[a].data[size < least] = 0


def main() -> int:
    given = arguments(__doc__, rounds=30, steps=300)
    warnings.simplefilter("ignore")
    base, library = pretrained(given.steps), Path(sysconfig.get_paths()["stdlib"])
    shards = [texts(library / name, "*.py") for name in PACKAGES]
    train, test = zip(*((s[: len(s) * 4 // 5], s[len(s) * 4 // 5 :]) for s in shards), strict=True)

    def losses(module: nn.Module) -> list[float]:
        with torch.no_grad():
            each = ((module(pair(s)[0]).logits.movedim(-1, 1), pair(s)[1]) for s in test)
            return [float(cross_entropy(*both)) for both in each]

    rows: list[dict[str, Any]] = []

    def report(name: str, module: nn.Module, sent: int) -> None:
        found = losses(module)
        left = sum(ranks(module).values()) if sent else 0
        worst = max(found)
        row = {"method": name, "test loss": sum(found) / len(found), "worst client": worst, "components": left}
        rows.append(row | {"kB up, client and round": sent / 1000})
        print(rows[-1], flush=True)

    def trained(name: str, module: nn.Module, make: Any, step_sizes: tuple[float, ...] = (0.3, 1.0)) -> nn.Module:
        problem = Network(module, cross_entropy, [pair(s) for s in train], batch_size=BATCH, forward="token_logits")
        options: dict[str, Any] = {"rounds": given.rounds, "every": given.rounds, "measure_gamma": 1.0}
        tried = [run(make(problem, eta), problem, **options) for eta in step_sizes]
        best = min(tried, key=lambda result: result.final["objective"])
        report(name, best.module(), 4 * problem.dim)
        return best.module()

    def fedavg(problem: Network, eta: float) -> Algorithm:
        return FedAvg(Zero(), eta_a=eta, Q=Q)

    def fednmap(weight: float) -> Any:
        def make(problem: Network, eta: float) -> Algorithm:
            phi = rank_components(weight, problem.architecture) if weight else Zero()
            return FedNMap(phi, eta_a=eta, Q=Q)

        return make

    report("pre-trained", base, 0)
    plain = trained("FedAvg-LoRA", adapted(base, RANK), fedavg)
    trained("FFA-LoRA", adapted(base, RANK, frozen_a=True), fedavg)
    trained("FedNMap", adapted(base, RANK), fednmap(0.0))
    sparse = trained("FedNMap, rank lasso", adapted(base, RANK), fednmap(0.003))
    left = sum(ranks(sparse).values())
    pruned(plain, max(1, left))
    report("FedAvg-LoRA, pruned to as many", plain, 4 * sum(p.numel() for p in plain.parameters() if p.requires_grad))
    trained("FedAvg-LoRA, rank 2", adapted(base, 2), fedavg)
    trained("FedNMap, rank 2", adapted(base, 2), fednmap(0.0))
    table("lora", rows)
    write(given.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
