"""`flower-superlink` and `flower-supernode` whose loopback port serves processes of this user alone.

In Flower whoever reaches the port of a SuperLink may submit an app, any code, and whoever reaches that of a node
may take its messages; on loopback that is every user of the machine. Linux says whose a local connection is. A request
of another user, or of another machine, is refused with status 403.

Flower's commands are taken as pip installs them, and their server, uvicorn, is given the guarded app: nothing here
knows Flower's modules. Use `python -m fednmap.flower.loopback flower-superlink --host 127.0.0.1 OPTIONS` in place of
`flower-superlink`. Run as a script it imports Flower alone.
"""

import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import Any

IDLE = 0.3  # seconds that a node sleeps at most; Flower's sleeps for 3 s if idle, most of a short round
FASTER, WAITS = 10, (0.5, 12.0)  # Flower's waits between these are cut to a tenth; its heartbeat waits longer
SOCK_DIAG, BY_FAMILY, REQUEST, ESTABLISHED = 4, 20, 1, 1  # numbers of Linux: netlink family, message, flag, TCP state
ANY = b"\xff" * 8  # no cookie: the addresses alone name the connection

Address = tuple[str, int]
App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
Command = Callable[[], object]

log = logging.getLogger("flwr")


def user_of(client: Address, server: Address) -> int | None:
    """The user whose process has opened the connection from `client` to `server`, both of this machine.

    Asks the kernel for this one socket (man 7 sock_diag): microseconds, where a read of /proc/net/tcp takes
    milliseconds. None if there is no such connection, if it is being closed, or if the system does not say.
    """
    try:
        hosts = socket.inet_aton(client[0]), socket.inet_aton(server[0])
        ends = struct.pack("!HH4s12x4s12x", client[1], server[1], *hosts)
        request = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << ESTABLISHED) + ends + bytes(4) + ANY
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(struct.pack("=IHHII", 16 + len(request), BY_FAMILY, REQUEST, 1, 0) + request)
            reply = kernel.recv(4096)
    except (OSError, struct.error, AttributeError):  # other addresses than IPv4; outside Linux there is no netlink
        return None
    if len(reply) < 88 or struct.unpack_from("=H", reply, 4) != (BY_FAMILY,):
        return None
    family, state = struct.unpack_from("=BB", reply, 16)
    user, inode = struct.unpack_from("=II", reply, 80)
    if (family, state) != (socket.AF_INET, ESTABLISHED) or reply[20:56] != ends or not inode:
        return None
    return int(user)


def tells_users() -> bool:
    """Whether this system says whose a connection is."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        return user_of(client.getsockname(), server.getsockname()) == os.getuid()


def own_user_only(app: App) -> App:
    """The ASGI app for requests of this user's processes; others are refused."""

    async def guarded(scope: dict[str, Any], receive: Any, send: Any) -> None:
        client, server = scope.get("client"), scope.get("server")
        if scope["type"] == "lifespan" or (client and server and user_of(client, server) == os.getuid()):
            await app(scope, receive, send)
            return
        log.warning("refused a connection of another user, from %s", client)
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"this port serves the processes of one user alone\n"})

    return guarded


def command(name: str) -> Command:
    """The function of a command that pip has installed."""
    found: Command = next(iter(entry_points(group="console_scripts", name=name))).load()
    return found


def guard_servers() -> None:
    """Every server that this process starts from now on serves its own user alone."""
    import uvicorn

    configure: Any = uvicorn.Config.__init__

    def guarded(self: uvicorn.Config, app: Any, *given: Any, **named: Any) -> None:
        if not callable(app):
            raise TypeError(f"expected the app to serve, got {app!r}, which cannot be guarded")
        configure(self, own_user_only(app), *given, **named)

    uvicorn.Config.__init__ = guarded  # type: ignore[method-assign]


def wait_less() -> None:
    """Shorten Flower's short waits in this process, and nobody else's.

    Who pulls a message whose parts are still on their way waits 1 s for each, which is most of a short round.
    """
    wait: Any = threading.Event.wait

    def shorter(self: threading.Event, timeout: float | None = None) -> bool:
        flower = str(sys._getframe(1).f_globals.get("__name__")).startswith("flwr.")
        short = flower and timeout is not None and WAITS[0] <= timeout <= WAITS[1]
        return bool(wait(self, timeout / FASTER if short and timeout else timeout))

    threading.Event.wait = shorter  # type: ignore[method-assign]


def main(name: str, *options: str) -> None:
    """Run the command `flower-superlink` or `flower-supernode` with these options."""
    sys.argv = [name, *options]
    guard_servers()
    if name == "flower-supernode":
        wait_less()
        sleep: Any = time.sleep
        time.sleep = lambda seconds: sleep(min(float(seconds) / FASTER, IDLE))
    command(name)()


if __name__ == "__main__":
    main(*sys.argv[1:])
