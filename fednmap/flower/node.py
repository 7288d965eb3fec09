"""`flower-supernode` with a warm worker: the same node, without a new Python for every message.

Flower starts a process for each message, and that process imports torch: seconds of work before the first gradient.
Here one process imports everything once and forks for each message; it speaks Flower's own protocol between node and
worker (`--isolation process`). An idle node looks for messages every 0.3 s, not every 3 s. A node of Flower's ends
when its SuperLink was killed and started again, which does not know it; this one registers again. Its port serves the
processes of its own user alone (`fednmap.flower.loopback`).

Use `python -m fednmap.flower.node OPTIONS` in place of `flower-supernode OPTIONS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import httpx
import sklearn.datasets  # noqa: F401  # slow to import, and many a `load` does
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import run_clientapp

import fednmap.flower.client  # torch and all of ours
import fednmap.flower.tables  # noqa: F401  # and what tables need
from fednmap.flower import loopback
from fednmap.names import InputError

POLL, LONGEST = 0.1, 1.0  # seconds between looks for a message: a tenth of the time since the last one, within these
AGAIN = 2.0  # seconds before a node registers again with a SuperLink that has forgotten it
DEFAULT_PORT = "9094"


def main(arguments: list[str]) -> int:
    """Start the node, serve it until it ends; its exit code."""
    if "--isolation" in arguments or "--ssl-certfile" in arguments:
        raise InputError("a warm node talks to its own worker on loopback: leave out --isolation and --ssl-certfile")
    port = arguments[arguments.index("--port") + 1] if "--port" in arguments else DEFAULT_PORT
    command = [sys.executable, "-I", loopback.__file__, "flower-supernode", *arguments]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    while True:
        node = subprocess.Popen([*command, "--isolation", "process", "--host", "127.0.0.1"])
        try:
            serve(f"127.0.0.1:{port}", node)
            if code := node.wait():
                return code
            print("the SuperLink was started again and does not know this node. Registering again", flush=True)
            time.sleep(AGAIN)
        except KeyboardInterrupt:
            node.terminate()
            return node.wait()


def serve(address: str, node: subprocess.Popen[bytes]) -> None:
    """Take messages from the node at `address` and fork for each, until the node ends."""
    once = make_simple_http_retry_invoker()
    once.max_tries = 1  # the loop below tries again, for as long as the node lives
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        retry_invoker=once,
    )
    pulls: Any = pull_and_inflate_object_from_tree
    pulls.__kwdefaults__["initial_backoff"] = POLL  # seconds between tries; Flower waits 1 s in every message
    children: set[int] = set()
    last = time.monotonic()
    while node.poll() is None:
        token = ""
        with suppress(httpx.HTTPError):  # the node is not up yet, or about to end
            token = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])).token
        if token:
            child = os.fork()
            if child == 0:
                _answer(address, token)
            children.add(child)
            last = time.monotonic()
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(min(max(POLL, (time.monotonic() - last) / 10), LONGEST))


def _answer(address: str, token: str) -> None:
    """In the forked process: one message, then the end, without the parent's clean-up."""
    code = 1
    try:
        run_clientapp(address, token, insecure=True, parent_pid=os.getppid())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
