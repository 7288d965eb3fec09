"""Networks by name."""

from fednmap.models.build import MODELS, build, cnn, linear, mlp
from fednmap.models.mobilenet import mobilenet_v3_small

__all__ = ["MODELS", "build", "cnn", "linear", "mlp", "mobilenet_v3_small"]
