"""Differential privacy, robust aggregation, attacks, and a monitor of uplinks."""

from fednmap.privacy.accounting import Epsilon, epsilon, noise_for
from fednmap.privacy.client_level import Privacy, share_of_noise
from fednmap.privacy.example_level import Counted, PrivateRows
from fednmap.privacy.robust import (
    Attack,
    Centre,
    GeometricMedian,
    Median,
    Monitor,
    NormClip,
    Score,
    Trimmed,
    centre_of,
)
from fednmap.simulation.uplink import Chain

__all__ = [
    "Attack",
    "Centre",
    "Chain",
    "Counted",
    "Epsilon",
    "GeometricMedian",
    "Median",
    "Monitor",
    "NormClip",
    "Privacy",
    "PrivateRows",
    "Score",
    "Trimmed",
    "centre_of",
    "epsilon",
    "noise_for",
    "share_of_noise",
]
