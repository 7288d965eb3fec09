"""Who holds which samples: the data of n clients, one client's rows after another's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fednmap.names import InputError


@dataclass(frozen=True, eq=False)
class ClientData(Sequence[tuple[Tensor, Tensor]]):
    """n clients' samples as two tensors; client i holds rows offsets[i] .. offsets[i] + sizes[i].

    Behaves as a sequence of pairs (x_i, y_i), which is also what `of` takes.
    """

    x: Tensor
    y: Tensor
    sizes: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.x) != int(self.sizes.sum()):
            raise InputError(
                f"{len(self.x)} rows of x, {len(self.y)} of y, {int(self.sizes.sum())} by the sizes: must agree"
            )
        empty = (self.sizes < 1).nonzero()
        if len(empty):
            raise InputError(f"client {int(empty[0])} holds no sample; every client needs at least one")
        for name, values in (("x", self.x), ("y", self.y)):
            if (
                values.is_floating_point()
                and not bool(torch.isfinite(values.sum()))
                and not bool(torch.isfinite(values).all())
            ):
                row = int((~torch.isfinite(values)).reshape(len(values), -1).any(1).nonzero()[0])
                raise InputError(
                    f"{name} holds NaN or infinity (first in row {row}); clean or impute the data before training"
                )

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> ClientData:
        """From one pair (x_i, y_i) a client."""
        if isinstance(pairs, ClientData):
            return pairs
        if not len(pairs):
            raise InputError("no clients: give one pair (x, y) for each")
        for i, (x, y) in enumerate(pairs):
            if len(x) != len(y):
                raise InputError(f"client {i} has {len(x)} rows of x and {len(y)} of y; they must agree")
        x, y = (torch.cat([pair[k] for pair in pairs]) for k in (0, 1))
        return cls(x, y, torch.tensor([len(pair[0]) for pair in pairs]))

    @classmethod
    def split(cls, x: Tensor, y: Tensor, parts: Sequence[Tensor]) -> ClientData:
        """From pooled data and, for each client, the indices of its rows (see `fednmap.data.partition`)."""
        order = torch.cat(list(parts))
        return cls(x[order], y[order], torch.tensor([len(part) for part in parts]))

    def mixed(self, seed: int = 0) -> ClientData:
        """The same with each client's rows shuffled."""
        generator = torch.Generator().manual_seed(seed)
        pairs = zip(self.offsets.tolist(), self.sizes.tolist(), strict=True)
        order = torch.cat([first + torch.randperm(size, generator=generator) for first, size in pairs])
        return ClientData(self.x[order], self.y[order], self.sizes)

    @property
    def offsets(self) -> Tensor:
        return self.sizes.cumsum(0) - self.sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        rows = slice(int(self.offsets[i]), int(self.offsets[i] + self.sizes[i]))
        return self.x[rows], self.y[rows]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = self.sizes.tolist()
        return iter(list(zip(self.x.split(sizes), self.y.split(sizes), strict=True)))
