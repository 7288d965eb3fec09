"""The earlier name of `fednmap.theory.steps_from_smoothness`."""

from fednmap.names import renamed

NEW = "fednmap.theory.steps_from_smoothness"
__getattr__ = renamed(__name__, {"at_once": f"{NEW}:steps_from_smoothness", "AtOnce": f"{NEW}:StepsFromSmoothness"})
