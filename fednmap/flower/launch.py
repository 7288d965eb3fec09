"""SuperLink and SuperNodes on this machine, on loopback, in folders of their own; all of them end with the launcher.

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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import tomli_w

from fednmap.flower import loopback
from fednmap.names import InputError

HOST = "127.0.0.1"
IN_USE, LISTENS = "address already in use", "Uvicorn running on"  # what Flower says of a port
GUARDED = (sys.executable, "-I", loopback.__file__)
NAME = "fednmap"  # of the connection in Flower's configuration


class Launcher:
    """Starts Flower's processes, each in a process group of its own, and stops them all on the way out.

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
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not loopback.tells_users():
            raise InputError(
                "expected the system to say whose a local connection is (sock_diag), got no answer: every user of this "
                "machine could use the ports of Flower; run it on Linux"
            )
        script = Path(__file__).with_name("watchdog.py")
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", str(script)], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.processes):
            self.stop(name, wait=False)
        end = time.monotonic() + 5
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        for name in list(self.processes):
            self.kill(name)
        if self._watchdog is not None:
            self._watchdog.communicate()
            self._watchdog = None

    def superlink(self, *security: str) -> None:
        """Start the SuperLink and wait until it answers.

        Somebody else may have taken the port since it was found free: another one is tried, unless nodes know it.

        security: Flower's options for TLS; by default none is used.
        """
        while not self._superlink(security or ("--insecure",)):
            if len(self.processes) > 1 or IN_USE not in self.log("superlink"):
                raise OSError(f"the SuperLink did not start:\n{self.log('superlink')[-2000:]}")
            self._log("superlink").unlink()
            self.port = free_port()
        connection = {"root-certificates": str(self.authority)} if self.authority else {"insecure": True}
        known = {"default": NAME, NAME: connection | {"address": f"{HOST}:{self.port}"}}
        (self._home("cli") / "config.toml").write_text(tomli_w.dumps({"superlink": known}))

    def _superlink(self, security: Iterable[str]) -> bool:
        """Whether it answers in the end: this one, and not somebody else's at the same port."""
        said = len(self.log("superlink"))
        options = ["--host", HOST, "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.start("superlink", [*GUARDED, "flower-superlink", *security, *options])
        end = time.monotonic() + 120
        while not (LISTENS in self.log("superlink")[said:] and self._healthy()):
            if self.processes["superlink"].poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.2)
        return True

    def supernode(self, client: str, state_dir: Path, key: Path | None = None, **more: str) -> None:
        """Start the node of `client`; with its key it proves its name, and over TLS that it is registered.

        more: what its app is told besides, such as file='/data/patients.csv'.
        """
        security = ["--root-certificates", str(self.authority)] if self.authority else ["--insecure"]
        told = {"client": client, "state-dir": str(state_dir.resolve()), **more}
        if key:
            told["key"] = str(key.resolve())
            security += ["--auth-supernode-private-key", str(key)] if self.authority else []
        where = ["--superlink", f"{HOST}:{self.port}", "--port", str(free_port())]
        about = " ".join(f"{name}='{value}'" for name, value in told.items())
        node = [sys.executable, "-m", "fednmap.flower.node"] if self.warm else [*GUARDED, "flower-supernode"]
        self.start(client, [*node, *security, *where, "--node-config", about])

    def run(self, app: Path, **settings: Any) -> subprocess.Popen[bytes]:
        """Submit an app; the process returned lasts as long as the run, its log holds what the server says."""
        given = [tomli_w.dumps({key.replace("_", "-"): v}).strip() for key, v in settings.items()]
        overrides = [part for line in given for part in ("-c", line.replace(" = ", "=", 1))]
        return self.start("run", ["flwr", "run", str(app), NAME, "--stream", *overrides])

    def flwr(self, *arguments: str) -> str:
        """Flower's own command, such as `flwr supernode register KEY fednmap`; what it printed."""
        done = subprocess.run(
            [_command("flwr"), *arguments], env=self._environment("cli"), capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise OSError(f"flwr {' '.join(arguments)} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
        return done.stdout

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """A process with its own log, group and Flower home; a former one of that name must have ended."""
        if name in self.processes:
            self.kill(name)
        home = "cli" if name == "run" else name
        with self._log(name).open("ab") as file:
            process = subprocess.Popen(
                [_command(command[0]), *command[1:]],
                env=self._environment(home),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        self._tell(f"+{process.pid}")
        return process

    def stop(self, name: str, wait: bool = True) -> None:
        """Ask a process and all it started to end."""
        self._signal(name, signal.SIGTERM)
        if wait:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(5)
            self.kill(name)

    def kill(self, name: str) -> None:
        """End a process and all it started, at once."""
        self._signal(name, signal.SIGKILL)
        process = self.processes.pop(name)
        process.wait()
        self._tell(f"-{process.pid}")

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

    def _tell(self, line: str) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            raise RuntimeError("use the launcher in a with statement: it ends what it started")
        self._watchdog.stdin.write(f"{line}\n".encode())
        self._watchdog.stdin.flush()

    def _log(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
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
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
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


def _command(name: str) -> str:
    """Flower's command beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name
