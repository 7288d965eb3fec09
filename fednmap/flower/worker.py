"""A process that stays for a run, so that a client's data is loaded once and not once per message.

Flower starts a process for each message. On a node of `fednmap.flower.node` the first of them forks a worker, which
holds the data from then on; the others send their message to it over a socket that this user alone can open. Elsewhere
a message is answered where it arrives.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fednmap.names import InputError

PLACE = "FEDNMAP_NODE"  # variable: folder of the node's sockets, whose name ends with the number of the node's process
LOOK = 1.0  # seconds between looks whether the node is still there

Handler = Callable[[Message, Context], Message]


def resident(answer: Handler) -> Handler:
    """The handler of all messages, in the worker of the message's run."""

    def handler(message: Message, context: Context) -> Message:
        if PLACE not in os.environ:
            return answer(message, context)
        with _worker(Path(os.environ[PLACE]) / f"run-{context.run_id}", answer) as worker:
            worker.send((message, context))
            said, context.state = worker.recv()
        if isinstance(said, Exception):
            raise said
        return Message(said, reply_to=message)

    return handler


def _worker(path: Path, answer: Handler) -> Connection:
    """A connection to the worker of a run, which is started unless it runs; workers of other runs end."""
    with suppress(FileNotFoundError, ConnectionRefusedError):
        return Client(str(path), "AF_UNIX")
    for other in path.parent.glob("run-*"):
        other.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        if os.fork() == 0:
            try:
                _serve(listener, path, answer)
            finally:
                os._exit(0)
    return Client(str(path), "AF_UNIX")


def _serve(listener: socket.socket, path: Path, answer: Handler) -> None:
    """Answer messages until the node ends or another run begins."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # Flower's handlers would speak for the message that was
    os.closerange(3, listener.fileno())  # neither are the connections of the process that was forked ours
    os.closerange(listener.fileno() + 1, 4096)
    node = Path("/proc") / path.parent.name.rpartition("-")[2]
    listener.settimeout(LOOK)
    while path.exists() and node.exists():
        with suppress(TimeoutError, EOFError, ConnectionError):
            accepted, _ = listener.accept()
            accepted.setblocking(True)
            with Connection(accepted.detach()) as connection:
                message, context = connection.recv()
                try:
                    said: Any = answer(message, context).content
                except Exception as error:  # Flower sends its words
                    traceback.print_exc()
                    said = error if type(error) is InputError else RuntimeError(f"{type(error).__name__}: {error}")
                connection.send((said, context.state))
