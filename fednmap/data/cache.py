"""Where a public data set's files are: the folder in FEDNMAP_DATA, the user's cache, else a download."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from fednmap.names import InputError

LARGEST = 2**28  # bytes; the largest published file has 47 MB
_FRESH = "delete it and put a fresh copy there"


def folders(name: str) -> list[Path]:
    """Return the folders searched for the data set `name`, in order; the last one is where downloads go."""
    import pooch

    found = [Path(pooch.os_cache("fednmap")) / name]
    if root := os.environ.get("FEDNMAP_DATA"):
        if not Path(root).is_dir():
            raise InputError(f"FEDNMAP_DATA is {root!r}, which is not a folder; correct or unset it")
        found.insert(0, Path(root) / name)
    return found


def find(name: str, files: Iterable[str]) -> Path | None:
    """Return the first of `files` that there is in the folders of the data set `name`."""
    candidates = list(files)
    return next((d / f for d in folders(name) for f in candidates if (d / f).is_file()), None)


def download(name: str, file: str, md5: str, addresses: Iterable[str]) -> Path:
    """Return `file` from the first of `addresses` that answers with this md5, kept in the user's cache."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    target, reasons = folders(name)[-1], []
    for address in addresses:
        source = pooch.create(target, base_url=address, registry={file: f"md5:{md5}"}, retry_if_failed=2)
        bar = _DownloadBar(file)
        try:
            with bar.progress:
                return Path(source.fetch(file, downloader=pooch.HTTPDownloader(bar, chunk_size=1 << 16)))
        except (OSError, ValueError) as error:  # texts of many lines; those of the network are long
            network = isinstance(error, OSError) and not error.errno
            reasons.append(f"{address + file}: {type(error).__name__ if network else str(error).splitlines()[0]}")
    places = " or ".join(map(str, folders(name)))
    raise InputError(
        f"{file} of {name} is not here and the download failed ({'; '.join(reasons)}); put it into {places}"
    )


def check(path: Path | str, contents: bytes, digest: str, kind: str = "md5") -> None:
    """Refuse contents whose digest is not the published one."""
    found = hashlib.new(kind, contents, usedforsecurity=False).hexdigest()
    if found != digest:
        raise InputError(f"{path} is truncated, changed or another file ({kind} {found}, published {digest}); {_FRESH}")


def read(path: Path, digest: str, kind: str = "md5") -> bytes:
    """Return the contents of a file, unpacked if its name ends in .gz; refused if they have not this digest."""
    import gzip
    import zlib

    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            contents = file.read(LARGEST + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is truncated or not a gzip file ({error}); {_FRESH}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {_FRESH}") from None
    if len(contents) > LARGEST:
        raise InputError(f"{path} holds more than {LARGEST >> 20} MB, and the published file does not; {_FRESH}")
    check(path, contents, digest, kind)
    return contents


class _DownloadBar:
    """A progress bar on the terminal, in the form that pooch expects."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        console = Console(stderr=True)
        columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task(label)
        self.total = 0

    def update(self, count: int) -> None:
        self.progress.update(self.task, total=self.total, advance=count)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        self.progress.refresh()
