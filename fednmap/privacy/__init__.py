"""What leaves the clients, and whom to trust with it: differential privacy, robust centres, attacks, a monitor."""

from fednmap.privacy.accounting import epsilon, noise_for
from fednmap.privacy.client_level import Privacy

__all__ = ["Privacy", "epsilon", "noise_for"]
