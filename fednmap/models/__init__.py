"""Networks by name."""

from fednmap.models.mlp import mlp

__all__ = ["mlp"]
