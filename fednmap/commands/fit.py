"""`fednmap fit` and `fednmap predict`: a linear model of tables, one file per site."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box

from fednmap import tables
from fednmap.commands.options import Json, Out, Quiet, with_config
from fednmap.estimators import fit_folder, fitted_model
from fednmap.estimators.family_problems import FAMILIES
from fednmap.estimators.fit_config import FitConfig, complete, listed, with_formula, with_weight
from fednmap.estimators.penalties import told_lam
from fednmap.names import InputError, choose
from fednmap.report.coefficients import readable
from fednmap.report.data_table import DataTable
from fednmap.report.terminal import console
from fednmap.runs.atomic_files import clear_errors, finite, json_text, locked, write_atomically
from fednmap.runs.folder import RunFolder
from fednmap.tables.table import as_word, is_words

MADE_IN = "fit"
"""What run.toml says of the folder of a fit."""
COLUMNS = ("target", "time", "event", "entry", "strata", "trials_column", "offset", "exposure")
"""Settings that name a column that every file must have."""


@with_config(words={"family": "Default: from the target."}, settings=FitConfig, family=None)
def fit(
    values: dict[str, Any],
    data: Annotated[str, typer.Option(help="csv:FOLDER or csv:a.csv,b.parquet: one file per site.")],
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit one linear model to tables, one file per site. A simulation: this process reads all files.

    Example: fednmap fit --data csv:hospitals/ --target outcome --cv 5 --out heart
    """
    began = time.monotonic()
    if out is not None and out.exists() and not out.is_dir():  # before the tables are read
        raise InputError(f"{out} is a file; name a folder with --out")
    if out is not None and out.exists() and any(out.iterdir()) and not _unfinished(out):
        raise InputError(f"{out} exists already; choose another folder with --out")
    values = with_weight(with_formula(values))
    needed = [values[name] for name in COLUMNS if name in values]
    sites = tables.read_sites(data, listed(values.get("exclude")), needed)
    if "formula" in values:
        sites = _complete_rows(sites, values["formula"], quiet)
    config = FitConfig.make(**_family(sites, values))
    y = np.concatenate([config.y(t) for t in sites.values()])
    classes = config.classes(map(str, y)) if y.dtype.kind == "O" else ()
    if classes:
        y = (y == classes[1]).astype(float) if len(classes) == 2 and config.family == "logistic" else y.astype(str)
    features = {name: config.features(t) for name, t in sites.items()}
    encoder = config.encoder().fit(features)
    columns = [str(name) for name in encoder.get_feature_names_out()]
    X = np.concatenate([encoder.transform(t) for t in features.values()])
    where = np.concatenate([np.full(t.rows, name, object) for name, t in features.items()])
    size = f"{len(sites)} sites, {len(X)} rows, {len(columns)} columns"
    _say(quiet, f"{size}; family {config.family}, penalty {config.penalty}")
    _say(quiet, "simulated: this process reads all files; between machines: fednmap flower new --template tables")
    if len(classes) == 2:
        _say(quiet, _modelled(config.goals[0], classes))
    estimator, choice = config.estimator(encoder, classes), config.choice()
    frame = _frame(X, columns, config, sites)
    if choice:
        estimator.on_fold = lambda k, of, name: _say(
            quiet, f"fold {k} of {of}" + ("" if name == f"fold {k}" else f": {name}")
        )
    if isinstance(encoder, tables.FederatedPreprocessor) and any(
        s.kind == "number" and s.missing for s in encoder.statistics_
    ):
        estimator.refill = _refill(encoder, list(features.values()))
    estimator._mu(len(classes) if len(classes) > 2 else 1)
    folder = _folder(out, config, data, classes, len(sites))
    with locked(folder.path):
        folder.repair()
        folder.check_data_digest(_digest(sites))
        if choice:
            _say(quiet, f"choosing lam by {config.select}" + (f", {config.cv}" if config.cv else ""))
        about, parts, lines = fit_folder.fit_into(
            folder,
            config,
            estimator,
            encoder,
            classes,
            (frame, y, where),
            data=data,
            began=began,
            mean=X.mean(0),
            spread=X.std(0),
            notes=_twins(X, columns),
            say=lambda line: _say(quiet, line),
            warn=lambda line: _say(False, f"fednmap: warning: {line}"),
        )
    table = parts.pop("Coefficients")
    if json:
        coefficients = [dict(zip(table.head, row, strict=True)) for row in table.rows]
        print(json_text(about | {"folder": str(folder.path), "coefficients": coefficients}))
        return
    screen = console()
    for title, part in {"": readable(table), **parts}.items():
        screen.print(part.text(title, lines=box.HEAVY_HEAD))
    for line in [*lines, f"folder: {folder.path}"]:
        screen.print(line, highlight=False, soft_wrap=True)


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a `fednmap fit`.")],
    table: Annotated[
        Path, typer.Argument(help="A .csv or .parquet file with the columns of the model; others are not looked at.")
    ],
    id: Annotated[str | None, typer.Option(help="A column of the file to write before the predictions.")] = None,
    site: Annotated[
        str | None, typer.Option(help="Use this site's own coefficients (a fit with --site-effects).")
    ] = None,
    effects: Annotated[
        Path | None, typer.Option(help="Use a site's own coefficients, from the file that its node has written.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the predictions here; default: print them.")] = None,
) -> None:
    """Predict the rows of a new file with a fitted model."""
    model = fitted_model.load(run)
    if effects is not None:
        if site is not None:
            raise InputError("expected --site or --effects, got both; the file says which site it is")
        model, site = fitted_model.with_effects(model, effects)
    found: dict[str, list[Any]] = model.predict(tables.read(table, only=model.needed), site)
    if id is not None:
        if id in found:
            raise InputError(f"expected an --id column that is not predicted, got {id!r}; rename the column")
        found = {id: tables.read_as_text(table, id), **found}
    if len(model.classes) == 2:
        _say(False, _modelled(model.target, model.classes))
    text = DataTable(list(found), list(zip(*found.values(), strict=True))).csv()
    if out is None:
        print(text, end="")
    else:
        with clear_errors(out.parent):
            write_atomically(out, text.encode())


def _family(sites: dict[str, tables.Table], values: dict[str, Any]) -> dict[str, Any]:
    """The settings with the family that was named, or that suits the target."""
    target, family = values.get("target"), values.get("family")
    if target is None:
        return values if family or "time" not in values else values | {"family": "cox"}
    parts = {t.name: complete(t, target) for t in sites.values()}
    words = [name for name, column in parts.items() if is_words(column)]
    if words and len(words) < len(parts):
        other = next(name for name in parts if name not in words)
        raise InputError(
            f"the target {target!r} holds words at site {words[0]!r} and numbers at site {other!r}; use one kind"
        )
    if family is None:
        two = words or len(np.unique(np.concatenate(list(parts.values())))) == 2
        return values | {"family": "logistic" if two else "gaussian"}
    choose("family", family, FAMILIES)
    if words and family not in ("logistic", "ordinal"):
        raise InputError(f"the target {target!r} holds words, and family {family} needs numbers; use logistic")
    return values


def _complete_rows(sites: dict[str, tables.Table], formula: str, quiet: bool) -> dict[str, tables.Table]:
    """The rows without gaps in the columns of a formula, as R has them."""
    encoder = tables.FederatedFormula(formula)
    kept = {name: t.some(encoder.complete(t)) for name, t in sites.items()}
    if empty := [name for name, t in kept.items() if not t.rows]:
        raise InputError(f"site {empty[0]!r} has no row without gaps in the columns of the formula; leave it out")
    left_out = sum(t.rows for t in sites.values()) - sum(t.rows for t in kept.values())
    if left_out:
        _say(quiet, f"{left_out} rows with gaps are left out")
    return kept


def _folder(out: Path | None, config: FitConfig, data: str, classes: tuple[str, ...], sites: int) -> RunFolder:
    """A new run folder, or that of the same fit if it was stopped; run.toml says what is fitted."""
    settings = {"data": data, **config.model_dump()}
    target = " and ".join(config.goals) + (f" = {classes[1]}" if len(classes) == 2 else "")
    lam = None if config.choice() else told_lam(config.penalty, config.lam)
    about = {
        "made_in": MADE_IN,
        "data": data,
        "model": f"{config.family} of {target}",
        "penalty": f"penalty {config.penalty}" + ("" if lam is None else f", lam {lam:.4g}"),
        "clients": sites,
        "algorithms": [f"fit-{config.family}"],
        "settings": settings,
    }
    if out is None or not (out / "run.toml").exists():
        return RunFolder.create(out, about, "fit")
    folder = RunFolder.open(out)
    if words := folder.changed(finite(settings), frozenset()):
        raise InputError(f"{out} holds a fit that was stopped, of other settings ({words}); choose another folder")
    folder.remove_checksums()
    return folder


def _unfinished(path: Path) -> bool:
    """Whether the folder is that of a fit that was stopped before its end."""
    try:
        folder = RunFolder.open(path)
    except InputError:  # stopped before its first file was complete
        return all(p.name[0] == "." for p in path.iterdir())
    return folder.about().made_in == MADE_IN and not folder.is_complete()


def _digest(sites: dict[str, tables.Table]) -> str:
    """Of all cells, by site and column."""
    found = hashlib.sha256()
    for name, table in sites.items():
        for column, values in table.columns.items():
            found.update(repr((name, column, values.tolist())).encode())
    return found.hexdigest()


def _refill(preprocessor: tables.FederatedPreprocessor, sites: list[tables.Table]) -> Any:
    """A function from a mask of rows to the matrix of all rows, with gaps filled by what those of the mask say."""
    ends = np.cumsum([t.rows for t in sites])[:-1]

    def matrix(mask: Any) -> Any:
        told = preprocessor.refilled([t.some(part) for t, part in zip(sites, np.split(mask, ends), strict=True)])
        return np.concatenate([told.transform(t) for t in sites])

    return matrix


def _frame(X: Any, columns: list[str], config: FitConfig, sites: dict[str, tables.Table]) -> Any:
    """The matrix with names, so that messages can say them; and the columns of offsets and strata."""
    try:
        import polars
    except ModuleNotFoundError:
        raise InputError("fednmap fit needs polars: pip install 'fednmap[tables]'") from None
    named = dict(zip(columns, X.T, strict=True))
    if (offset := config.offset or config.exposure) is not None:
        named[offset] = np.concatenate([config.offsets(t) for t in sites.values()])
    if config.strata is not None:
        named[config.strata] = [as_word(v) for t in sites.values() for v in complete(t, config.strata)]
    return polars.DataFrame(named)


def _twins(X: Any, columns: list[str]) -> list[str]:
    """A note about columns that are the same in every row, with the first that they are the same as."""
    seen: dict[bytes, str] = {}
    first = {name: seen.setdefault(values.tobytes(), name) for name, values in zip(columns, X.T, strict=True)}
    twins = [f"{other} and {name}" for name, other in first.items() if other != name]
    return [f"{'; '.join(twins)} are the same in every row: no fit can separate them"] if twins else []


def _modelled(target: str, classes: tuple[str, ...]) -> str:
    return f"modelled: {target} = {classes[1]}, against {classes[0]}"


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        print(line, file=sys.stderr)
