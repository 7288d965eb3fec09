"""Regularizers phi: value and prox together. Each is one small class; see `fednmap.core.Regularizer`."""

from fednmap.regularizers.affine import Affine, Halfspace
from fednmap.regularizers.balls import L1Ball, L2Ball, Simplex
from fednmap.regularizers.box import Box, LInfBall, NonNegative
from fednmap.regularizers.calculus import Masked, Scaled, Separable
from fednmap.regularizers.concave import LogSum, TransformedL1
from fednmap.regularizers.folded_concave import MCP, SCAD
from fednmap.regularizers.groups import GroupLasso, SparseGroupLasso
from fednmap.regularizers.l1 import L1, ElasticNet
from fednmap.regularizers.l2 import L2, SquaredL2
from fednmap.regularizers.layers import PerLayer, matrix, restrict, rows
from fednmap.regularizers.linf import LInf
from fednmap.regularizers.nonconvex import L0, TopK
from fednmap.regularizers.nuclear import Nuclear
from fednmap.regularizers.parse import REGULARIZERS, parse
from fednmap.regularizers.slope import Slope
from fednmap.regularizers.total_variation import TotalVariation
from fednmap.regularizers.zero import Zero

__all__ = [
    "L0",
    "L1",
    "L2",
    "MCP",
    "REGULARIZERS",
    "SCAD",
    "Affine",
    "Box",
    "ElasticNet",
    "GroupLasso",
    "Halfspace",
    "L1Ball",
    "L2Ball",
    "LInf",
    "LInfBall",
    "LogSum",
    "Masked",
    "NonNegative",
    "Nuclear",
    "PerLayer",
    "Scaled",
    "Separable",
    "Simplex",
    "Slope",
    "SparseGroupLasso",
    "SquaredL2",
    "TopK",
    "TotalVariation",
    "TransformedL1",
    "Zero",
    "matrix",
    "parse",
    "restrict",
    "rows",
]
