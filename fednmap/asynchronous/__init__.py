"""Asynchronous methods: the server takes replies as they come, on a virtual clock."""

from fednmap.asynchronous.delays import Delays, delays_of, factors, trace
from fednmap.asynchronous.event_loop import Ledger, draw
from fednmap.asynchronous.method import Asynchronous, FedAsync, FedBuff, rule_of, safe_step, times_counted

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
