"""The rows that clients draw, step by step."""

from fednmap.problems.minibatch import blocks, by_step


def minibatches(*address, **options):
    """rows(q): the rows of the clients' minibatches in local step q; arguments as for `blocks`."""
    return by_step(blocks(*address, **options))
