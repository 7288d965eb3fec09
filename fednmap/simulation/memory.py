"""Freed blocks stay with the process: the next step finds its pages mapped instead of new ones from the system."""

from __future__ import annotations

import ctypes
import sys

import torch

LARGE = 16 << 20  # bytes of a block above which glibc needs mallopt; below it adapts when a block is freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def reuse_freed_memory(size: int) -> None:
    """Let glibc keep freed blocks of `size` bytes; where these are large, all up to 1 GB until the process ends."""
    torch.empty(
        31 << 20, dtype=torch.uint8, device="cpu"
    )  # freed immediately: it raises the thresholds, to 32 MB at most
    if size > LARGE and sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 1 << 30)
            mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
