"""SuperLink and SuperNodes on this machine, on loopback, each in its own folder; all of them end with the launcher.

Their ports serve the processes of this user alone.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import tomli_w

from fednmap.flower import loopback, watchdog
from fednmap.names import InputError

HOST = "127.0.0.1"
IN_USE, LISTENS = "address already in use", "Uvicorn running on"  # what Flower says of a port
GUARDED = (sys.executable, "-I", loopback.__file__)
NAME = "fednmap"  # of the connection in Flower's configuration


class Launcher:
    """Starts Flower's processes, each in its own process group, and stops them all on the way out.

    folder: configuration, logs and Flower's files go there.
    warm:   nodes that import torch once (fednmap.flower.node), not once per message.
    authority: the certificate of the authority, to talk over TLS; none, to talk in the clear on this machine.

    >>> with Launcher(Path("somewhere")) as launcher:   # doctest: +SKIP
    ...     launcher.superlink()
    ...     launcher.supernode("client-0", state_dir=Path("states"))
    ...     launcher.run(app).wait()
    """

    def __init__(self, folder: Path, warm: bool = True, authority: Path | None = None) -> None:
        self.folder, self.warm, self.authority = folder.resolve(), warm, authority
        self._given: set[int] = set()
        self.port = self._unused_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        if not loopback.tells_users():
            raise InputError(
                "expected the system to say whose a local connection is (sock_diag), got no answer: every user of this "
                "machine could use the ports of Flower; run it on Linux"
            )
        return self

    def __exit__(self, *error: object) -> None:
        end = time.monotonic() + 5
        for name in self.processes:
            self._signal(name, signal.SIGTERM)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        for name in list(self.processes):
            self.kill(name)

    def _unused_port(self) -> int:
        """A free port that was not given before: a process may not have opened its own yet."""
        while (port := free_port()) in self._given:
            pass
        self._given.add(port)
        return port

    def superlink(self, *security: str) -> None:
        """Start the SuperLink and wait until it answers: this one, and not somebody else's at the same port.

        Somebody else may have taken the port since it was found free: another one is tried, unless nodes know it.

        security: Flower's options for TLS; by default none is used.
        """
        said, end = len(self.log("superlink")), time.monotonic() + 120
        options = ["--host", HOST, "--port", str(self.port), "--disable-runtime-dependency-installation"]
        process = self.start("superlink", [*GUARDED, "flower-superlink", *(security or ["--insecure"]), *options])
        while not (LISTENS in self.log("superlink")[said:] and self._healthy()):
            if process.poll() is not None and IN_USE in self.log("superlink")[said:] and len(self.processes) == 1:
                self.port = self._unused_port()
                self.superlink(*security)
                return
            if process.poll() is not None or time.monotonic() > end:
                raise OSError(f"the SuperLink did not start:\n{self.log('superlink')[-2000:]}")
            time.sleep(0.2)
        connection = {"root-certificates": str(self.authority)} if self.authority else {"insecure": True}
        known = {"default": NAME, NAME: connection | {"address": f"{HOST}:{self.port}"}}
        (self._home("cli") / "config.toml").write_text(tomli_w.dumps({"superlink": known}))

    def supernode(self, client: str, state_dir: Path, key: Path | None = None, **more: str) -> None:
        """Start the node of `client`; with its key it proves its name, and over TLS that it is registered.

        more: further settings of its app, such as file='/data/patients.csv'.
        """
        security = ["--root-certificates", str(self.authority)] if self.authority else ["--insecure"]
        told = {"client": client, "state-dir": str(state_dir.resolve()), **more}
        if key:
            told["key"] = str(key.resolve())
            security += ["--auth-supernode-private-key", str(key)] if self.authority else []
        where = ["--superlink", f"{HOST}:{self.port}", "--port", str(self._unused_port())]
        about = " ".join(f"{name}='{value}'" for name, value in told.items())
        node = [sys.executable, "-m", "fednmap.flower.node"] if self.warm else [*GUARDED, "flower-supernode"]
        self.start(client, [*node, *security, *where, "--node-config", about])

    def run(self, app: Path, **settings: Any) -> subprocess.Popen[bytes]:
        """Submit an app; the process returned lasts as long as the run, its log holds what the server says."""
        given = [tomli_w.dumps({key.replace("_", "-"): v}).strip() for key, v in settings.items()]
        overrides = [part for line in given for part in ("-c", line.replace(" = ", "=", 1))]
        return self.start("run", ["flwr", "run", str(app), NAME, "--stream", *overrides])

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """A process with its own log, group and Flower home; a former one of that name must have ended."""
        if name in self.processes:
            self.kill(name)
        environment = self._environment("cli" if name == "run" else name)
        with self._log(name).open("ab") as file:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-I", watchdog.__file__, *command],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def kill(self, name: str) -> None:
        """Kill a process and all it started."""
        self._signal(name, signal.SIGKILL)
        self.processes.pop(name).communicate()

    def ended(self) -> list[str]:
        """Processes that are no more, and were not stopped here."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def log(self, name: str) -> str:
        """What a process has said so far."""
        path = self._log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.processes[name].pid, number)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _home(self, name: str) -> Path:
        """Flower's folder for one process: nodes that share one would unpack the app over each other."""
        home = self.folder / "home" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _environment(self, name: str) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self._home(name)),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            "OMP_NUM_THREADS": "1",  # the nodes share this machine's cores
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "NO_COLOR": "1",
        }

    def _healthy(self) -> bool:
        tls = ssl.create_default_context(cafile=str(self.authority)) if self.authority else None
        with suppress(httpx.HTTPError):
            url = f"{'https' if tls else 'http'}://{HOST}:{self.port}/health"
            return httpx.get(url, verify=tls or False, timeout=5, trust_env=False).status_code == 200
        return False


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])
