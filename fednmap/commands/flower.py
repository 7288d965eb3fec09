"""`fednmap flower`: federations between real machines, and a trial of one on this machine."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fednmap.commands.options import ConfigFile, Json, Out, Quiet, Set, _flag, with_config
from fednmap.commands.tune import settle, take_auto
from fednmap.names import InputError
from fednmap.report.closing import closing_table
from fednmap.report.plots import comparison
from fednmap.report.progress import describe
from fednmap.report.terminal import console as make_console
from fednmap.runs.atomic_files import clear_errors, from_json, from_toml, json_text
from fednmap.runs.configuration import Config, code_in, parse_set
from fednmap.runs.experiment import prepare, settled
from fednmap.runs.folder import RunFolder

if TYPE_CHECKING:
    from fednmap.flower.launch import Launcher

app = typer.Typer(help="Federations between real machines, on Flower.", no_args_is_help=True)

CLIENTS = "client-0,client-1,client-2"
TRIAL: dict[str, Any] = {"clients": 3, "rounds": 10}
SIMULATED = (
    *("trials", "drop", "chunk", "checkpoint_every", "eval_last", "eval_samples"),
    *("delays", "slowdown"),  # of a virtual clock
)
LOOK = 0.5  # seconds between looks at the run folder


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to make; its name becomes the app's.")],
    template: Annotated[
        str, typer.Option(help="plain: any problem; tables: a linear model of tables, one file per site.")
    ] = "plain",
) -> None:
    """Write a small Flower app: fill in one function, `load`, and run it."""
    from fednmap.flower.new import write

    with clear_errors(folder):
        write(folder, template)
    if template == "tables":
        print(f"wrote {folder}: set target, family and penalty in its pyproject.toml, then follow its README.md")
        return
    print(f"wrote {folder}: fill in `load` in {folder.name.replace('-', '_')}/client_app.py, then follow its README.md")


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder for certificates and keys; must not hold any.")],
    names: Annotated[str, typer.Option(help="The clients' names, separated by commas.")] = CLIENTS,
    host: Annotated[str, typer.Option(help="The server's name or address, as the nodes reach it.")] = "127.0.0.1",
    days: Annotated[int, typer.Option(help="Validity of the certificates.")] = 365,
    clients: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Make a certificate authority, the server's certificate and one key per node, for a private federation."""
    _needs_flower()
    from fednmap.flower.identity import make

    if clients is not None:  # a former name, which elsewhere is a number
        warnings.warn("--clients is now --names; use that name", FutureWarning, stacklevel=1)
        names = clients
    with clear_errors(folder):
        made = make(folder, [name.strip() for name in names.split(",")], host, days)
    for path, purpose in made.items():
        print(f"{path}  {purpose}")


clients_app = typer.Typer(help="Whose key is whose: the file clients.toml of a server.", no_args_is_help=True)
app.add_typer(clients_app, name="clients")

ClientsFile = Annotated[Path, typer.Argument(help="The file clients.toml.")]
Client = Annotated[str, typer.Argument(help="The client's name.")]
PublicKey = Annotated[
    Path, typer.Argument(help="Its node's public key, as `fednmap flower keys` or ssh-keygen writes it.")
]


@clients_app.command("list")
def list_clients(file: ClientsFile) -> None:
    """Names and fingerprints, and keys that are revoked."""
    known = _identities(file, must_exist=True).read()
    for name, key in known.clients.items():
        print(f"{name}  {key}")
    for key in known.revoked:
        print(f"revoked  {key}")


@clients_app.command()
def add(file: ClientsFile, name: Client, key: PublicKey) -> None:
    """Enter a client that is new; the file is made if there is none."""
    print(f"{name}  {_identities(file).add(name, _public_key(key))}")


@clients_app.command()
def rotate(file: ClientsFile, name: Client, key: PublicKey) -> None:
    """Another key for a client; the former one is revoked, from the next round on."""
    print(f"{name}  {_identities(file, must_exist=True).rotate(name, _public_key(key))}")


@clients_app.command()
def revoke(file: ClientsFile, name: Client) -> None:
    """Revoke a client's key, from the next round on."""
    print(f"revoked  {_identities(file, must_exist=True).revoke(name)}  of {name}")


def _identities(file: Path, must_exist: bool = False) -> Any:
    _needs_flower()
    from fednmap.flower.identity import Identities

    return Identities(file, pin=not must_exist)


def _public_key(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"the public key {file} cannot be read: {error.strerror}") from None


@app.command()
@with_config(hidden=SIMULATED, **TRIAL)
def up(
    values: dict[str, Any],
    algorithm: Annotated[
        str | None, typer.Option(help="Method; see `fednmap list algorithms`. [default: fednmap]")
    ] = None,
    set: Set = None,
    config: ConfigFile = None,
    app: Annotated[
        Path | None, typer.Option(help="Folder of your own app, as `flower new` writes it; its settings count.")
    ] = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the trial in this folder.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which a round ends without those who are late. (default 600)")
    ] = None,
    min_clients: Annotated[
        int | None, typer.Option(help="Replies that a round needs, default all; with fewer it is repeated.")
    ] = None,
    measure_stationarity: Annotated[
        bool | None,
        typer.Option(
            "--measure-stationarity/--no-measure-stationarity",
            help="Clients send exact gradients for |F_nat|^2. (default yes)",
        ),
    ] = None,
    secagg_threshold: Annotated[
        int | None, typer.Option(help="Clients that unmask a sum with --secagg; default more than half.")
    ] = None,
    pin_on_first_use: Annotated[
        bool, typer.Option("--pin-on-first-use", help="Nodes get keys, and prove their names with them.")
    ] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Flower's own nodes: a new Python for every message.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try a federation on this machine: a SuperLink and a node for each client, on loopback.

    Example: fednmap flower up --clients 3 --rounds 20
    """
    _needs_flower()
    from fednmap.flower.settings import FederationSettings, read, run_settings

    own = _given(deadline=deadline, min_clients=min_clients)
    if app is not None or resume is not None:
        typed = values | _given(
            algorithm=algorithm,
            set=set,
            config=config,
            out=out if resume else None,
            measure_stationarity=measure_stationarity,
            secagg_threshold=secagg_threshold,
            pin_on_first_use=pin_on_first_use or None,
        )
        if typed:
            place = "--app takes the settings of its pyproject.toml" if app else "--resume takes those of its folder"
            raise InputError(f"{place}, but for --deadline and --min-clients; leave out {', '.join(map(_flag, typed))}")
        folder, settings, federation = _of_app(app, out, resume, own) if app else _resumed(resume, own)
    else:
        if algorithm:
            values["algorithms"] = (algorithm,)
        base = _base(config) if config else {}
        values, auto = take_auto(TRIAL | base | values | {"set": base.get("set", {}) | parse_set(set)})
        settings, experiment = settle(Config.make(**values), auto, lambda line: print(line, file=sys.stderr))
        # what can be refused is refused before there is a folder
        settings = settled(experiment or prepare(settings)).config
        federation = FederationSettings.make(
            names=tuple(f"client-{i}" for i in range(settings.clients)),
            run_folder=".",
            measure_stationarity=measure_stationarity is not False and not settings.dp_noise,
            secagg_threshold=secagg_threshold,
            **own,
        )
        read(run_settings(settings, federation))
        folder = RunFolder.create(out, settings, "flower")
        placed: dict[str, Any] = {"run_folder": folder.path.resolve()}
        if pin_on_first_use:
            placed |= {"clients_file": folder.path.resolve() / "clients.toml", "pin_on_first_use": True}
        federation = federation.model_copy(update=placed)
    console = make_console(stderr=True, quiet=quiet)
    _closing(folder, _trial(settings, federation, console, warm=not cold, app=app, **own), json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a trial that has not ended.")],
    deadline: Annotated[float | None, typer.Option(help="Seconds of a round, in place of the trial's own.")] = None,
    min_clients: Annotated[int | None, typer.Option(help="Replies that a round needs instead of the trial's.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flower's own nodes: a new Python for every message.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start SuperLink, nodes and server again and continue from the checkpoints: nothing that was counted is lost."""
    _needs_flower()
    run, settings, federation = _resumed(folder, _given(deadline=deadline, min_clients=min_clients))
    _closing(run, _trial(settings, federation, make_console(stderr=True, quiet=quiet), warm=not cold), json)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _resumed(path: Any, own: dict[str, Any]) -> tuple[RunFolder, Config, Any]:
    """The trial in the folder `path`, as it was begun but for `own`."""
    from fednmap.flower.settings import FederationSettings, read, run_settings

    folder, file = RunFolder.open(path.resolve()), path / "federation.json"
    if not file.exists():
        raise InputError(f"{path} is not a run between machines; continue it with fednmap train --resume {path}")
    if folder.running():
        raise InputError(f"{path} is in use by another run; wait for it to end")
    known = {key: value for key, value in from_json(file, dict).items() if key != "run"} | own
    federation = FederationSettings.make(**known | {"run_folder": folder.path, "resume": True})
    if folder.about().made_in == "fit" or (config := folder.config()).data == "own":
        raise InputError(f"{path} is the run of an app; continue it with fednmap flower up --app APP --resume {path}")
    read(run_settings(config, federation))
    return folder, config, federation


def _of_app(app: Path, out: Path | None, resume: Path | None, own: dict[str, Any]) -> tuple[RunFolder, Config, Any]:
    """An app's run folder and settings: a new run, unless one is continued."""
    from fednmap.flower import settings, table_app

    with clear_errors(app):
        found = from_toml(app / "pyproject.toml").get("tool", {}).get("flwr", {}).get("app", {}).get("config")
    if not found:
        raise InputError(f"{app} is no app of `fednmap flower new`: its pyproject.toml has no [tool.flwr.app.config]")
    path = (resume or out or app / str(found.get("run-folder", "run"))).resolve()
    read = table_app.common_settings if "target" in found else settings.read
    if resume is None and path.exists() and (path.is_file() or any(path.iterdir())):
        raise InputError(f"{path} exists; choose another folder with --out, or continue it with --resume {path}")
    own |= {"run_folder": str(path), "resume": resume is not None}
    given = {name.replace("_", "-"): value for name, value in own.items()}
    if missing := ", ".join(given.keys() - found.keys()):  # which Flower could not replace
        raise InputError(f"{app}/pyproject.toml has no setting {missing}; add it to its [tool.flwr.app.config]")
    return RunFolder(path), *read(found | given)


def _closing(folder: RunFolder, result: dict[str, Any], json: bool) -> None:
    if json:
        print(json_text(result))
    else:
        out_console = make_console()
        out_console.print(closing_table([result]))
        out_console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    comparison(folder, folder.path / "plot.png")


def _base(file: Path) -> dict[str, Any]:
    """The settings of a TOML file; code that it names is never loaded."""
    if code := code_in(from_toml(file)):
        raise InputError(
            f"{file} names code, {code[0]}, which a federation's settings cannot; write an app of your own"
        )
    return Config.read(file).model_dump(exclude_unset=True)


def _trial(
    config: Config, federation: Any, console: Console, warm: bool, app: Path | None = None, **changed: Any
) -> dict[str, Any]:
    """Start everything, watch the run folder, stop everything; the closing numbers.

    app:     the user's own app; its clients' states, and tables if there are any, are in its folder.
    changed: settings that take the place of the app's.
    """
    from fednmap.flower.identity import node_key
    from fednmap.flower.launch import Launcher
    from fednmap.flower.local_federation import write_trial
    from fednmap.flower.settings import run_settings

    folder, own = (
        RunFolder(federation.run_folder),
        (app.resolve() / "states" if app else federation.run_folder / "clients"),
    )
    place = Path(tempfile.mkdtemp(prefix="fednmap-flower-"))
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Launcher(place / "flower", warm=warm) as launcher:
            console.print(f"starting a SuperLink and {len(federation.names)} nodes on 127.0.0.1", highlight=False)
            launcher.superlink()

            def node(name: str) -> None:
                table = own.parent / "data" / f"{name}.csv"
                more = {"file": str(table)} if app and table.exists() else {}
                key = node_key(own / "keys" / name) if federation.clients_file else None
                launcher.supernode(name, own, key, **more)

            for name in federation.names:
                node(name)
            if app:
                process = launcher.run(app.resolve(), **changed)
            else:
                process = launcher.run(write_trial(place / "app", run_settings(config, federation)))
            _watch(process, folder, config, console, launcher, node)
            result = next(iter(folder.results()), None)
            if result is None:
                raise OSError(_why(folder, launcher))
            return result
    finally:
        signal.signal(signal.SIGTERM, former)
        for log in (place / "flower").glob("*.log"):
            (folder.path / "logs").mkdir(parents=True, exist_ok=True)
            shutil.copy(log, folder.path / "logs")
        shutil.rmtree(place, ignore_errors=True)


def _watch(
    process: Any,
    folder: RunFolder,
    config: Config,
    console: Console,
    launcher: Launcher,
    start_node: Callable[[str], None],
) -> None:
    """A line for every round and every measurement, until the run has ended, or what it needs has.

    A node that ended is started again; without SuperLink or server everything ends, to be resumed.
    """
    method, shown, measured, began = config.algorithms[0], -1, -1, time.monotonic()
    begun = _status(folder).get("pid")
    while True:
        ended = process.poll() is not None
        gone = [name for name in launcher.ended() if name != "run"]
        if "superlink" in gone or _killed(folder, begun):
            return
        for name in gone:
            console.print(f"{name}: its node has ended and is started again", highlight=False)
            start_node(name)
        done = _status(folder).get("done", -1)
        if done > shown:
            shown = done
            console.print(f"round {done}/{config.rounds}  {time.monotonic() - began:.0f} s", highlight=False)
        records = folder.records(method, 0)
        if records and records[-1]["round"] > measured:
            measured = int(records[-1]["round"])
            console.print(f"after round {measured}: {describe(records[-1])}", highlight=False, soft_wrap=True)
        if ended:
            return
        time.sleep(LOOK)


def _killed(folder: RunFolder, before: object) -> bool:
    """Whether the server of this run, and not that of an earlier one, has begun and is gone without an end.

    Its parent, the SuperLink, may not have taken notice of that yet: then it is a zombie.
    """
    status = _status(folder)
    pid = status.get("pid")
    if not pid or pid == before or status.get("finished") or status.get("error"):
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # not known
        return False


def _status(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / "status.json"
    return dict(from_json(path, dict)) if path.exists() else {}


def _why(folder: RunFolder, launcher: Launcher) -> str:
    said = _status(folder).get("error") or launcher.log("run")[-1500:]
    if "superlink" in launcher.ended():
        said = "the SuperLink has ended"
    elif "run" not in launcher.ended():
        said = "the server has ended"
    place = folder.path
    return f"the run did not finish: {said}\nlogs: {place}/logs; continue with fednmap flower resume {place}"


def _needs_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise InputError('Flower is not installed: pip install "fednmap[flower]"') from None
