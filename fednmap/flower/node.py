"""`flower-supernode` with warm processes: the same node, without a new Python for every message.

Flower starts the command `flwr-clientapp` for each message, which imports Flower, torch and the app: seconds of work
before the first gradient. Here one process has imported them; the node finds, first in its PATH, a `flwr-clientapp`
that lets this process fork, and the fork runs Flower's own command. Should a Flower start its processes otherwise, the
node works as Flower's does. Data stays loaded in a worker (`fednmap.flower.worker`). A node of Flower's ends when its
SuperLink was killed and started again, which does not know it; this one registers again. Its port serves only
processes of the same user (`fednmap.flower.loopback`).

Use `python -m fednmap.flower.node OPTIONS` in place of `flower-supernode OPTIONS`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import httpx
import sklearn.datasets  # noqa: F401  # slow to import, and many a `load` does

import fednmap.flower.client  # torch and all of ours
import fednmap.flower.table_app  # noqa: F401  # and what tables need
from fednmap.flower import loopback
from fednmap.flower.worker import PLACE
from fednmap.names import InputError

LOOK = 0.5  # seconds between looks whether the node is still there
AGAIN = 2.0  # seconds before a node registers again with a SuperLink that has forgotten it
COMMAND = "flwr-clientapp"
POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # Flower's variable: seconds between looks for a message

SHIM = """#!{python} -IS
import os, socket, sys
try:
    warm = socket.socket(socket.AF_UNIX)
    warm.connect({path!r})
except OSError:
    os.execv({cold!r}, sys.argv)
socket.send_fds(warm, ["\\0".join(sys.argv[1:]).encode()], [0, 1, 2])
sys.exit(int(warm.recv(8) or b"1"))
"""


def main(arguments: list[str]) -> int:
    """Start the node, serve it until it ends; its exit code."""
    if "--isolation" in arguments or "--ssl-certfile" in arguments:
        raise InputError("a warm node talks to its own worker on loopback: leave out --isolation and --ssl-certfile")
    command = [sys.executable, "-I", loopback.__file__, "flower-supernode", *arguments, "--host", "127.0.0.1"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    place = Path(tempfile.mkdtemp(prefix="fednmap-node-", suffix=f"-{os.getpid()}"))
    try:
        with socket.socket(socket.AF_UNIX) as requests:
            environment = _prepare(place, requests)
            while True:
                node = subprocess.Popen(command, env=environment)
                try:
                    serve(requests, node)
                except KeyboardInterrupt:
                    node.terminate()
                    return node.wait()
                if code := node.wait():
                    return code
                print("the SuperLink was started again and does not know this node. Registering again", flush=True)
                time.sleep(AGAIN)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _prepare(place: Path, requests: socket.socket) -> dict[str, str]:
    """Listen for requests, write the command that makes them; the environment in which it is found."""
    requests.bind(str(place / "warm"))
    requests.listen()
    requests.settimeout(LOOK)
    cold = Path(sys.executable).parent / COMMAND
    shim = place / "bin" / COMMAND
    shim.parent.mkdir()
    shim.write_text(SHIM.format(python=sys.executable, path=str(place / "warm"), cold=str(cold)))
    shim.chmod(0o700)
    os.environ[PLACE] = str(place)  # of the forks
    places = [str(shim.parent)] * os.access(shim, os.X_OK) + [str(cold.parent)]  # a folder may forbid to run anything
    path = os.pathsep.join([*places, os.environ.get("PATH", "")])
    return {POLL: "0.2"} | os.environ | {"PATH": path}


def serve(requests: socket.socket, node: subprocess.Popen[bytes]) -> None:
    """Fork for each message of the node, until it ends."""
    run = loopback.command(COMMAND)
    httpx.Client().close()  # the first one imports httpcore and trio: more than half of what a fork does
    children: set[int] = set()
    while node.poll() is None:
        with suppress(TimeoutError):
            connection, _ = requests.accept()
            with connection:
                words, files, *_ = socket.recv_fds(connection, 65536, 3)
                child = os.fork()
                if child == 0:
                    requests.close()
                    _answer(run, connection, words.decode().split("\0"), files)
            for file in files:
                os.close(file)
            children.add(child)
        children = {child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)}


def _answer(run: loopback.Command, asked: socket.socket, arguments: list[str], files: list[int]) -> None:
    """In the forked process: run Flower's command, send its exit code, and end without the parent's clean-up."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
        loopback.wait_less()
        sys.argv = [COMMAND, *arguments]
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):
            asked.send(str(code).encode())
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
