"""`fednmap example`: files to try the other commands on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednmap.data.heart_disease import hospital_files
from fednmap.names import InputError, choose

EXAMPLES = {"hospitals": hospital_files}


def example(
    name: Annotated[str, typer.Argument(help="hospitals: heart-disease patients, one CSV file per hospital.")],
    out: Annotated[Path | None, typer.Option(help="Where the files go; default a folder of that name.")] = None,
) -> None:
    """Write the files of an example, to try other commands on: hospitals."""
    write = choose("example", name, EXAMPLES)
    folder = out or Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and not empty; name another one by --out")
    try:
        made = write(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}; name another folder by --out") from None
    for path in made:
        print(path)
