"""The earlier name of `fednmap.theory.steps_from_smoothness`."""

import warnings

from fednmap.theory import steps_from_smoothness as new

NAMES = {"at_once": new.steps_from_smoothness, "AtOnce": new.StepsFromSmoothness}


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"theory.at_once is now {new.__name__}; use that", DeprecationWarning, stacklevel=2)
    return NAMES[name]
