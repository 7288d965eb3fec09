"""Networks by name."""

from fednmap.models.build import MODELS, build
from fednmap.models.mobilenet import mobilenet_v3_small
from fednmap.models.sequential import cnn, linear, mlp

__all__ = ["MODELS", "build", "cnn", "linear", "mlp", "mobilenet_v3_small"]
