"""Models and inputs that `Network` takes: whether it agrees with a plain torch loop, and what it costs beside one.

    python benchmarks/models.py [--json FILE] [--only WORD]

Each case is trained by FedAvg with 4 clients, 4 local steps, batches of 8: by `fednmap.simulate`, and by a loop over
clients and steps with torch.optim.SGD that takes the same minibatches and seeds. `difference` is that of the two models
after two rounds, over how far they have moved, in float64 (with autocast in float32). `ratio` is the processor time of
a round over the loop's, in float32, the fastest of the repeats, in turn. `lines` are those of the call
Network(module, loss, data, ...) with `options`. Models of transformers are made from their configurations, at random,
and need `fednmap[peft]`; without it those cases are left out.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from measuring import arguments, in_turn, table, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset

from fednmap import simulate
from fednmap.algorithms import FedAvg
from fednmap.models import cnn, mlp, mobilenet_v3_small
from fednmap.problems import Network
from fednmap.problems.minibatch import blocks, by_step, step_seed
from fednmap.regularizers import Zero

CLIENTS, ROWS, BATCH, Q, ETA = 4, 24, 8, 4, 0.01
WORDS, LENGTH = 64, 16
HUGGING = all(importlib.util.find_spec(name) for name in ("transformers", "peft"))


@dataclass
class Case:
    module: nn.Module
    data: list[Any]
    loss: Any = cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    shown: str = ""
    lines: int = 1
    plain: Callable[[nn.Module, Any], Tensor] = lambda module, inputs: module(inputs)
    mean: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """The loss of a minibatch of client i, if it is not `loss`."""


def pairs(make: Callable[[], tuple[Any, Any]]) -> list[Any]:
    return [make() for _ in range(CLIENTS)]


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 64), torch.randint(0, 10, (ROWS,))


def pictures(side: int = 16, kind: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 256, (ROWS, 3, side, side), dtype=torch.uint8)
    return (x if kind == torch.uint8 else x / 255), torch.randint(0, 10, (ROWS,))


def tokens() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def masked() -> tuple[dict[str, Tensor], Tensor]:
    """Sentences of several lengths; labels behind their ends are ignored."""
    x, y = tokens()
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (ROWS, 1))).long()
    return {"input_ids": x, "attention_mask": mask}, torch.where(mask.bool(), y, -100)


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.one, self.two, self.p = nn.LayerNorm(width), nn.LayerNorm(width), p
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (u.unflatten(-1, (4, -1)).transpose(1, 2) for u in self.qkv(self.one(x)).chunk(3, -1))
        p = self.p if self.training else 0.0
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.two(x))


class NanoGPT(nn.Module):
    """As in nanoGPT: the embedding is also the last layer."""

    def __init__(self, p: float = 0.0, width: int = 64) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(Block(width, p), Block(width, p))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.word.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        out: Tensor = self.head(self.blocks(x))
        return out.transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.word, self.cells = nn.Embedding(WORDS, 32), nn.LSTM(32, 32, 2, batch_first=True, dropout=p)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(self.word(ids))[0])
        return out.transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=p, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.word(ids)))
        return out.transpose(1, 2)


class TwoTowers(nn.Module):
    """Two inputs by name, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.text, self.head = nn.Linear(64, 32), nn.EmbeddingBag(WORDS, 32), nn.Linear(32, 10)

    def forward(self, numbers: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        h = (self.table(numbers) + self.text(ids)).tanh()
        return self.head(h), h


class Tied(nn.Module):
    """An autoencoder whose decoder is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(16, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T) @ self.weight


class Read(Dataset[Any]):
    """Pictures that are made when they are read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] / 255, self.y[i]


class Sentences(Read):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i, : 4 + i % 12], self.y[i, 0]


def padded(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return ids, torch.stack([y for _, y in items])


def transfer() -> nn.Module:
    module = cnn((3, 16, 16), 10)
    module[:6].requires_grad_(False)
    return module


def counted(loss: Callable[..., Tensor], data: list[Any], count: Callable[[Tensor], Tensor]) -> Any:
    """The mean over what counts: a client's labels count in all what they count in its data."""
    totals = [float(count(y).sum()) for _, y in data]
    return lambda out, y, i: ROWS / BATCH * loss(out, y, reduction="sum") / totals[i]


def cases() -> dict[str, Callable[[], Case]]:
    by_name = {"forward": "token_logits"}

    def weighted() -> Case:
        weight = torch.linspace(0.5, 2.0, 10)
        data, loss = pairs(numbers), nn.CrossEntropyLoss(weight=weight)
        mean = counted(partial(cross_entropy, weight=weight), data, lambda y: weight[y])
        return Case(mlp(64, 10), data, loss, mean=mean)

    def ignored() -> Case:
        data = [(x, torch.where(torch.rand(y.shape) < 0.3, -100, y)) for x, y in pairs(tokens)]
        return Case(NanoGPT(), data, mean=counted(cross_entropy, data, lambda y: y >= 0))

    def towers() -> Case:
        data = [({"numbers": x, "ids": ids}, y) for (x, y), (ids, _) in zip(pairs(numbers), pairs(tokens), strict=True)]
        first = {"forward": "first"}
        return Case(TwoTowers(), data, options=first, shown='forward="first"', plain=lambda m, a: m(**a)[0])

    def steps() -> Case:
        options = {"clip_norm": 0.5}
        return Case(NanoGPT(0.1), pairs(tokens), options=options, shown="clip_norm=0.5")

    def cast() -> Case:
        def plain(m: nn.Module, a: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = m(a)
            return out.float()

        options = {"autocast": torch.bfloat16}
        return Case(NanoGPT(), pairs(tokens), options=options, shown="autocast=torch.bfloat16", plain=plain)

    found: dict[str, Callable[[], Case]] = {
        "fully connected": lambda: Case(mlp(64, 10), pairs(numbers)),
        "dropout": lambda: Case(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10)), pairs(numbers)
        ),
        "convolutions": lambda: Case(cnn((3, 16, 16), 10), pairs(pictures)),
        "uint8 pictures": lambda: Case(
            cnn((3, 16, 16), 10), pairs(partial(pictures, kind=torch.uint8)), plain=lambda m, a: m(a / 255)
        ),
        "MobileNetV3-Small, group norm": lambda: Case(mobilenet_v3_small(10, "group"), pairs(partial(pictures, 32))),
        "frozen backbone": lambda: Case(transfer(), pairs(pictures)),
        "tied autoencoder": lambda: Case(Tied(), [(x, x) for x, _ in pairs(numbers)], mse_loss),
        "LSTM": lambda: Case(Recurrent(), pairs(tokens)),
        "LSTM, dropout": lambda: Case(Recurrent(0.2), pairs(tokens)),
        "TransformerEncoder, dropout": lambda: Case(Encoder(0.1), pairs(tokens)),
        "nanoGPT, tied": lambda: Case(NanoGPT(), pairs(tokens)),
        "nanoGPT, tied, dropout": lambda: Case(NanoGPT(0.1), pairs(tokens)),
        "nanoGPT, clipped steps": steps,
        "nanoGPT, bf16 autocast": cast,
        "nanoGPT, ignored labels": ignored,
        "class weights": weighted,
        "dict inputs, tuple outputs": towers,
        "Dataset, read one by one": lambda: Case(
            cnn((3, 16, 16), 10), [Read(*p) for p in pairs(partial(pictures, kind=torch.uint8))]
        ),
        "DataLoader, padded batches": lambda: Case(
            nn.Sequential(nn.EmbeddingBag(WORDS, 32, padding_idx=0), nn.Linear(32, WORDS)),
            [DataLoader(Sentences(*p), BATCH, collate_fn=padded) for p in pairs(tokens)],
        ),
    }
    if not HUGGING:
        return found
    import peft
    import transformers as hf

    def gpt2(p: float) -> Any:
        options = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, **options)
        )

    def last(m: nn.Module, a: Any) -> Tensor:
        out: Tensor = (m(**a) if isinstance(a, dict) else m(a)).logits
        return out.movedim(-1, 1)

    text = {"options": by_name, "shown": 'forward="token_logits"', "plain": last}
    labels = {"options": {"forward": "logits"}, "shown": 'forward="logits"'}

    def llama() -> Case:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = hf.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
        return Case(hf.LlamaForCausalLM(config), pairs(tokens), **text)

    def bert() -> Any:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        return hf.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=10, **sizes)

    def classifier() -> Case:
        data = [(a, y[:, 0] % 10) for a, y in pairs(masked)]
        return Case(hf.BertForSequenceClassification(bert()), data, **labels, plain=lambda m, a: m(**a).logits)

    def fill() -> Case:
        data = pairs(masked)
        return Case(hf.BertForMaskedLM(bert()), data, **text, mean=counted(cross_entropy, data, lambda y: y >= 0))

    def vit() -> Case:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.1, **sizes)
        data = pairs(partial(pictures, kind=torch.uint8))
        return Case(hf.ViTForImageClassification(config), data, **labels, plain=lambda m, a: m(a / 255).logits)

    def lora() -> Case:
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        return Case(peft.get_peft_model(gpt2(0.0), config), pairs(tokens), **text | {"plain": last})

    return found | {
        "GPT-2": lambda: Case(gpt2(0.0), pairs(tokens), **text),
        "GPT-2, dropout": lambda: Case(gpt2(0.1), pairs(tokens), **text),
        "Llama-like": llama,
        "BERT classifier, dict, dropout": classifier,
        "BERT words, dict, ignored labels": fill,
        "ViT, uint8, dropout": vit,
        "GPT-2 with LoRA, adapter dropout": lora,
    }


class Loop:
    """FedAvg as one writes it in torch."""

    def __init__(self, case: Case, problem: Network) -> None:
        self.case, self.problem = case, problem
        self.module = copy.deepcopy(case.module)
        self.leaves = [p for p in self.module.parameters() if p.requires_grad]

    def batch(self, i: int, rows: Tensor) -> tuple[Any, Tensor]:
        client = self.case.data[i]
        if isinstance(client, DataLoader):
            return client.collate_fn([client.dataset[int(j)] for j in rows])
        if isinstance(client, Dataset):
            x, y = zip(*(client[int(j)] for j in rows), strict=True)
            return torch.stack(x), torch.stack(y)
        a, y = client
        return ({k: v[rows] for k, v in a.items()} if isinstance(a, dict) else a[rows]), y[rows]

    def round(self, t: int) -> None:
        begin, case = [p.detach().clone() for p in self.leaves], self.case
        mean = [torch.zeros_like(p) for p in begin]
        problem, optimiser = self.problem, torch.optim.SGD(self.leaves, ETA)
        for i in range(CLIENTS):
            for p, v in zip(self.leaves, begin, strict=True):
                p.data.copy_(v)
            one = torch.tensor(i)
            rows = by_step(blocks(0, one, t, BATCH, problem.data.sizes, problem.data.offsets))
            for q in range(Q):
                torch.manual_seed(step_seed(0, i, t, q))
                a, y = self.batch(i, rows(q) - problem.data.offsets[i])
                out = case.plain(self.module, a)
                loss = case.loss(out, y) if case.mean is None else case.mean(out, y, i)
                optimiser.zero_grad()
                loss.backward()
                if "clip_norm" in case.options:
                    nn.utils.clip_grad_norm_(self.leaves, case.options["clip_norm"])
                optimiser.step()
            for m, p in zip(mean, self.leaves, strict=True):
                m.add_(p.data, alpha=1 / CLIENTS)
        for p, m in zip(self.leaves, mean, strict=True):
            p.data.copy_(m)


def made(make: Callable[[], Case]) -> tuple[Case, Network, FedAvg, Loop]:
    torch.manual_seed(0)
    case = make()
    problem = Network(case.module, case.loss, case.data, batch_size=BATCH, **case.options)
    return case, problem, FedAvg(Zero(), eta_a=ETA, Q=Q), Loop(case, problem)


def tried(name: str, make: Callable[[], Case], repeats: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float32 if "bf16" in name else torch.float64)
    case, problem, method, loop = made(make)
    *_, last = simulate(method, problem, rounds=2)
    for t in range(2):
        loop.round(t)
    x, expected = method.model(last.server), torch.cat([p.detach().flatten() for p in loop.leaves])
    difference = float((x - expected).norm() / (expected - problem.start).norm())
    torch.set_default_dtype(torch.float32)
    case, problem, method, loop = made(make)
    jobs = {
        "ours": lambda: list(simulate(method, problem, rounds=4)),
        "loop": lambda: [loop.round(t) for t in range(4)],
    }
    seconds = in_turn(jobs, repeats)
    return {
        "case": name,
        "parameters": problem.dim,
        "lines": case.lines,
        "options": case.shown or "-",
        "difference": difference,
        "ratio": seconds["ours"] / seconds["loop"],
    }


def main() -> int:
    given = arguments(__doc__, repeats=5, only="")
    warnings.simplefilter("ignore")
    rows = [tried(name, make, given.repeats) for name, make in cases().items() if given.only in name]
    table("models", rows)
    write(given.json, rows=rows)
    limits = {"nanoGPT, bf16 autocast": 1e-2, "nanoGPT, clipped steps": 1e-6}  # torch adds 1e-6 to the norm it clips
    close = all(row["difference"] < limits.get(row["case"], 1e-8) for row in rows)
    print(f"\n{len(rows)} cases, all agree with the loop: {close}")
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
