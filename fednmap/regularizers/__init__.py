"""Regularizers phi: value and prox together. Each is one small class; see `fednmap.core.Regularizer`."""

from fednmap.regularizers.constraints import Affine, Box, Halfspace, L1Ball, L2Ball, LInfBall, NonNegative, Simplex
from fednmap.regularizers.groups import GroupLasso, SparseGroupLasso
from fednmap.regularizers.layers import Masked, PerLayer, Scaled, Separable, matrix, rank_components, restrict, rows
from fednmap.regularizers.nonconvex import L0, MCP, SCAD, LogSum, TopK, TransformedL1
from fednmap.regularizers.norms import L1, L2, ElasticNet, LInf, Nuclear, Slope, SquaredL2, Zero
from fednmap.regularizers.parse import REGULARIZERS, parse
from fednmap.regularizers.total_variation import TotalVariation

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
    "rank_components",
    "restrict",
    "rows",
]
