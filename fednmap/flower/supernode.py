"""`flower-supernode` that looks for messages three times per second; run as a script, so that it imports Flower alone.

Flower 1.41 lets an idle node sleep for 3 s, which then is most of a short round.
"""

import sys
import time
from types import SimpleNamespace

from flwr.supernode import start_client_internal
from flwr.supernode.cli.flower_supernode import flower_supernode

IDLE = 0.3  # seconds


def main() -> None:
    clock = SimpleNamespace(**vars(time))
    clock.sleep = lambda seconds: time.sleep(min(seconds, IDLE))
    start_client_internal.time = clock  # type: ignore[attr-defined, assignment]
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
