"""`flower-superlink` and `flower-supernode` whose loopback port serves processes of this user alone.

In Flower 1.41 whoever reaches the port of a SuperLink may submit an app, any code, and whoever reaches that of a node
may take its messages; on loopback that is every user of the machine. Linux says whose a local connection is
(/proc/net/tcp). A request of another user, or of another machine, is refused with status 403.

Use `python -m fednmap.flower.loopback flower-superlink --host 127.0.0.1 OPTIONS` in place of `flower-superlink`. Run as
a script it imports Flower alone.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONNECTIONS = Path("/proc/net/tcp")
ESTABLISHED = "01"
IDLE = 0.3  # seconds; Flower 1.41 lets an idle node sleep for 3 s, which then is most of a short round

Address = tuple[str, int]
App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

log = logging.getLogger("flwr")


def user_of(client: Address, server: Address) -> int | None:
    """The user whose process has opened the connection from `client` to `server`, both of this machine.

    None if there is no such connection here, or it is being closed: of such a one the system tells no user.
    """
    ends = [_as_listed(client), _as_listed(server)]
    for line in CONNECTIONS.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends and fields[3] == ESTABLISHED and fields[9] != "0":
            return int(fields[7])
    return None


def tells_users() -> bool:
    """Whether this system says whose a connection is."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return CONNECTIONS.exists() and user_of(client.getsockname(), server.getsockname()) == os.getuid()


def own_user_only(app: App) -> App:
    """The ASGI app for requests of this user's processes; others are refused."""

    async def guarded(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or user_of(scope["client"], scope["server"]) == os.getuid():
            await app(scope, receive, send)
            return
        log.warning("refused a connection of another user, from %s:%s", *scope["client"])
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"this port serves the processes of one user alone\n"})

    return guarded


def main(command: str, *options: str) -> None:
    """Run the command `flower-superlink` or `flower-supernode` with these options."""
    sys.argv = [command, *options]
    if command == "flower-superlink":
        from flwr.superlink import main as link
        from flwr.superlink.cli.flower_superlink import flower_superlink

        link.create_app = _guarded(link.create_app)  # type: ignore[assignment]
        flower_superlink()
        return
    from flwr.supernode import main as node
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    node.create_app = _guarded(node.create_app)  # type: ignore[assignment]
    if "process" in options:  # the isolation of a warm node
        clock = SimpleNamespace(**vars(time))
        clock.sleep = lambda seconds: time.sleep(min(seconds, IDLE))
        start_client_internal.time = clock  # type: ignore[attr-defined, assignment]
    flower_supernode()


def _guarded(create_app: Callable[..., App]) -> Callable[..., App]:
    return lambda *given, **named: own_user_only(create_app(*given, **named))


def _as_listed(address: Address) -> str:
    """As the system lists an IPv4 address: bytes in the machine's order, hexadecimal.

    >>> _as_listed(("127.0.0.1", 80)) in ("0100007F:0050", "7F000001:0050")
    True
    """
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


if __name__ == "__main__":
    main(*sys.argv[1:])
