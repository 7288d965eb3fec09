"""Asynchronous methods: the server takes replies as they come, on a virtual clock."""

from fednmap.asynchronous.delays import Delays, delays_of, factors, trace
from fednmap.asynchronous.in_flight import Ledger, draw
from fednmap.asynchronous.method import Asynchronous, FedAsync, FedBuff, rule_of, times_counted
from fednmap.asynchronous.step_bound import safe_step

__all__ = [
    "Asynchronous",
    "Delays",
    "FedAsync",
    "FedBuff",
    "Ledger",
    "delays_of",
    "draw",
    "factors",
    "rule_of",
    "safe_step",
    "times_counted",
    "trace",
]
