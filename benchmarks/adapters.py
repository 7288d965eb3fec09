"""LoRA adapters of a small language model, federated over eight unlike texts: loss, worst client, bytes, ranks kept.

    python benchmarks/adapters.py [--seeds 3] [--rounds 40] [--json FILE]

Needs `fednmap[peft]`. The texts are files of Python's standard library, byte by byte. A causal transformer of GPT-2's
architecture, made from its configuration, is trained on general modules. It is then adapted to eight shards of other
kinds, one per client: documentation, HTML, tables of characters, a changelog, and so on. Every tenth block of a shard
is for the test. All runs have the same number of rounds.

FedAvg averages A and B (LoRA, rank 8 or 2); FFA-LoRA trains B alone. "rank lasso" is a group lasso over the rank
components; with "refit" it ends after half of the rounds, and what it kept is trained on without it. "product" is the
penalty w/2 (|A|^2 + |B|^2), whose minimum over all factors of one product is w times the nuclear norm of B A; after
half of the rounds the products are cut to as many components as the rank lasso kept, and trained on without it.
"pruned" is FedAvg of rank 8 cut to as many, not trained on. kB are those of one client's uplinks.
"""

from __future__ import annotations

import copy
import statistics
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import arguments, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fednmap import run
from fednmap.algorithms import FedAvg, FedNMap
from fednmap.models import lora
from fednmap.problems import Network
from fednmap.regularizers import SquaredL2, Zero, rank_components

warnings.simplefilter("ignore")
import peft  # noqa: E402
import transformers as hf  # noqa: E402

LENGTH, WORDS, MOST = 32, 128, 900
GENERAL = ("argparse.py", "collections/__init__.py", "os.py", "subprocess.py", "inspect.py", "typing.py", "tarfile.py")
SHARDS = {
    "documentation": ("pydoc_data/topics.py",),
    "HTML": ("idlelib/help.html",),
    "tables of characters": (
        "encodings/cp037.py",
        "encodings/cp1250.py",
        "encodings/mac_roman.py",
        "encodings/koi8_r.py",
    ),
    "names of entities": ("html/entities.py",),
    "turtle": ("turtle.py",),
    "email": ("email/_header_value_parser.py", "email/message.py"),
    "changes": ("idlelib/News3.txt", "idlelib/NEWS.txt", "idlelib/HISTORY.txt"),
    "macros": ("opcode.py", "token.py", "sre_constants.py", "stat.py", "symbol.py", "errno.py", "locale.py"),
}
LAYERS = ["c_attn", "c_proj", "c_fc"]
Q, BATCH, ETA = 5, 8, 0.5


def blocks(files: tuple[str, ...]) -> Tensor:
    """Blocks of LENGTH + 1 bytes of these files of the standard library; what is not ASCII is left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((root / file).read_bytes() for file in files if (root / file).exists())
    codes = torch.tensor([c for c in text if c < WORDS])
    return codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def model() -> Any:
    sizes = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **off))


def pretrained(steps: int) -> Any:
    torch.manual_seed(0)
    module, text = model(), blocks(GENERAL)
    optimiser = torch.optim.AdamW(module.parameters(), 3e-3)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, steps)
    for _ in range(steps):
        rows = text[torch.randint(len(text), (32,))]
        loss = cross_entropy(module(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        plan.step()
    print(f"pre-trained on {text.numel():,} bytes: loss {float(loss):.3f}")
    return module


def adapted(base: Any, rank: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LAYERS, fan_in_fan_out=True)
    return peft.get_peft_model(copy.deepcopy(base), config)


@dataclass
class Study:
    base: Any
    rounds: int
    seed: int

    def __post_init__(self) -> None:
        each = [blocks(files)[:MOST] for files in SHARDS.values()]
        self.test = [rows[::10] for rows in each]
        self.train = [rows[torch.arange(len(rows)) % 10 > 0] for rows in each]

    def problem(self, module: nn.Module) -> Network:
        data = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in self.train]
        return Network(module, cross_entropy, data, batch_size=BATCH, seed=self.seed, forward="token_logits")

    def trained(self, module: nn.Module, method: str, rounds: int, phi: Any = None) -> tuple[Any, float]:
        """The module after so many rounds, and the bytes that a client sent."""
        kinds: dict[str, Any] = {"FedAvg": FedAvg, "FedNMap": FedNMap}
        algorithm = kinds[method](Zero() if phi is None else phi, eta_a=ETA, Q=Q)
        result = run(algorithm, self.problem(module), rounds=rounds, every=rounds, measure_gamma=1.0, threads=1)
        return result.module(), result.final["bytes_up"] / len(self.train)

    @torch.no_grad()
    def judged(self, module: Any, sent: float) -> dict[str, float]:
        """Test loss of all clients, of the worst, components that are left, and bytes."""
        each = [
            float(cross_entropy(module(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())) for rows in self.test
        ]
        kept = sum(lora.ranks(module).values())
        return {"loss": statistics.fmean(each), "worst": max(each), "kept": kept, "kB": sent / 1e3}

    def smaller(self, module: Any) -> Any:
        """The module with the components that are left, to be trained further."""
        with tempfile.TemporaryDirectory() as folder:
            lora.save(module, folder)
            return peft.PeftModel.from_pretrained(copy.deepcopy(self.base), folder, is_trainable=True)

    def figures(self) -> dict[str, dict[str, float]]:
        found, half = {"the base model": self.judged(adapted(self.base, 1, self.seed), 0.0)}, self.rounds // 2
        for rank in (8, 2):
            for method in ("FedAvg", "FedNMap"):
                module, sent = self.trained(adapted(self.base, rank, self.seed), method, self.rounds)
                found[f"{method}, rank {rank}"] = self.judged(module, sent)
                if (method, rank) == ("FedAvg", 8):
                    eight = module
        fixed = adapted(self.base, 8, self.seed)
        for name, p in fixed.named_parameters():
            p.requires_grad_("lora_B" in name)
        found["FFA-LoRA, rank 8"] = self.judged(*self.trained(fixed, "FedAvg", self.rounds))
        for weight in (0.003, 0.01):
            start = adapted(self.base, 8, self.seed)
            phi = rank_components(weight, start)
            module, sent = self.trained(start, "FedNMap", self.rounds, phi)
            found[f"FedNMap, rank lasso {weight:g}"] = self.judged(module, sent)
            module, sent = self.trained(start, "FedNMap", half, phi)
            kept = sum(lora.ranks(module).values())
            if not kept:
                continue
            again, more = self.trained(self.smaller(module), "FedNMap", self.rounds - half)
            found[f"FedNMap, rank lasso {weight:g}, refit"] = self.judged(again, sent + more)
            start = adapted(self.base, 8, self.seed)
            module, sent = self.trained(start, "FedNMap", half, SquaredL2(weight / 2))
            again, more = self.trained(self.smaller(cut(module, kept)), "FedNMap", self.rounds - half)
            found[f"FedNMap, product {weight:g}, as many, refit"] = self.judged(again, sent + more)
            found[f"FedAvg, rank 8, pruned to as many as {weight:g}"] = self.judged(cut(eight, kept), 0.0)
        return found


@torch.no_grad()
def cut(module: Any, count: int) -> Any:
    """A copy with the `count` largest singular values of all products B A, times their scale, and no others."""
    module = copy.deepcopy(module)
    pairs = list(lora.factors(module).values())
    parts = [torch.linalg.svd(b @ a, full_matrices=False) for a, b in pairs]
    least = torch.cat([s[: len(a)] for (_, s, _), (a, _) in zip(parts, pairs, strict=True)]).sort(descending=True)[0][
        count - 1
    ]
    for (u, s, v), (a, b) in zip(parts, pairs, strict=True):
        root = torch.where(s >= least, s, 0)[: len(a)].sqrt()
        a.copy_(root.unsqueeze(1) * v[: len(a)])
        b.copy_(u[:, : len(a)] * root)
    return module


def main() -> int:
    given = arguments(__doc__, seeds=3, rounds=40, steps=800)
    base = pretrained(given.steps)
    runs = []
    for seed in range(given.seeds):
        runs.append(Study(base, given.rounds, seed).figures())
        table(f"seed {seed}", [{"run": name} | found for name, found in runs[-1].items()])
        sys.stdout.flush()
    names = [name for name in runs[0] if all(name in found for found in runs)]
    rows = []
    for name in names:
        row: dict[str, Any] = {"run": name}
        for key in ("loss", "worst", "kept", "kB"):
            values = [found[name][key] for found in runs]
            row[key] = statistics.fmean(values)
            if key in ("loss", "worst"):
                row[f"{key} min"], row[f"{key} max"] = min(values), max(values)
        rows.append(row)
    table(f"{given.seeds} seeds, {given.rounds} rounds, {len(SHARDS)} clients", rows)
    write(given.json, rows=rows, runs=runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
