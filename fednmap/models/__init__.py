"""Networks by name."""

from fednmap.models.build import MODELS, build
from fednmap.models.cnn import cnn
from fednmap.models.linear import linear
from fednmap.models.mlp import mlp
from fednmap.models.mobilenet import mobilenet_v3_small

__all__ = ["MODELS", "build", "cnn", "linear", "mlp", "mobilenet_v3_small"]
