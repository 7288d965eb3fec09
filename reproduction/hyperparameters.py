"""The hyper-parameters of a method, as the tables of trials record them."""

from __future__ import annotations

from dataclasses import fields

from fednmap.algorithms import FedCanon
from fednmap.core import Algorithm


def hyperparameters(algorithm: Algorithm) -> dict[str, str]:
    """Return each field's name and value in words; FedCanon's default alpha as the number that it stands for."""
    found = {field.name: str(getattr(algorithm, field.name)) for field in fields(algorithm)}  # type: ignore[arg-type]
    return found | {"alpha": str(algorithm.server_step)} if isinstance(algorithm, FedCanon) else found
