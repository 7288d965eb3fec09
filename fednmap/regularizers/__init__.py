"""Regularizers phi: value and prox together. Each is one small class; see `fednmap.core.Regularizer`."""

from fednmap.regularizers.box import Box
from fednmap.regularizers.l1 import L1, ElasticNet
from fednmap.regularizers.zero import Zero

__all__ = ["L1", "Box", "ElasticNet", "Zero"]
