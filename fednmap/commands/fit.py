"""`fednmap fit` and `fednmap predict`: a linear model of tables, one file per site."""

from __future__ import annotations

import sys
import time as clock
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Column
from rich.table import Table as Shown

from fednmap import tables
from fednmap.commands.options import Json, Out, Quiet
from fednmap.estimators import folder as kept
from fednmap.estimators.coefficients import coefficient_rows
from fednmap.estimators.cv_estimators import FederatedCoxRegressionCV, FederatedGLMCV
from fednmap.estimators.families import FAMILIES
from fednmap.estimators.fit_config import check_goals, complete, counts, labels, listed, numbers, ordered_classes, times
from fednmap.estimators.glm import FederatedGLM
from fednmap.estimators.model_selection import SELECT
from fednmap.estimators.path import path as walk_path
from fednmap.estimators.penalties import GROUPED, WITHOUT_WEIGHT, penalty_name, told_lam
from fednmap.estimators.plots import plot_cv, plot_path
from fednmap.estimators.survival import FederatedCoxRegression
from fednmap.names import InputError, choose
from fednmap.report.coefficients import without_coefficient_intervals
from fednmap.report.lines import made_by
from fednmap.report.terminal import console
from fednmap.runs.files import clear_errors, json_text, write_atomically
from fednmap.runs.folder import provenance
from fednmap.tables.table import is_words

MANY_CLASSES = 50


def fit(
    data: Annotated[str, typer.Option(help="csv:FOLDER or csv:a.csv,b.parquet: one file per site.")],
    target: Annotated[
        str | None, typer.Option(help="The column to predict; for a Cox model --time and --event.")
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="gaussian, logistic, poisson, huber or cox. Default: from the target.")
    ] = None,
    penalty: Annotated[
        str, typer.Option(help="none, l1, ridge, elastic-net, mcp, scad, group-lasso, nonnegative, box:lo,hi, ...")
    ] = "l1",
    lam: Annotated[float | None, typer.Option(help="Weight of the penalty. (default 0.01)")] = None,
    path: Annotated[bool, typer.Option("--path", help="Also fit 50 models from lambda_max down.")] = False,
    cv: Annotated[
        str | None, typer.Option(help="Choose lam: a number of folds within sites, or leave-one-site-out.")
    ] = None,
    positive: Annotated[
        str | None, typer.Option(help="Of two labels, the one that is modelled. Default: the last by name.")
    ] = None,
    select: Annotated[str, typer.Option(help="The rule of the choice: min, 1se, bic, ebic.")] = "min",
    time: Annotated[str | None, typer.Option(help="Cox: the column of times.")] = None,
    event: Annotated[str | None, typer.Option(help="Cox: the column of events, 1 or 0.")] = None,
    drop_columns: Annotated[str | None, typer.Option(help="Columns to leave out, separated by commas.")] = None,
    categorical: Annotated[
        str | None, typer.Option(help="Columns whose numbers are codes, separated by commas.")
    ] = None,
    l1_ratio: Annotated[float, typer.Option(help="The share of l1 in elastic-net and sparse-group-lasso.")] = 0.5,
    impute: Annotated[str, typer.Option(help="What fills a gap in a number: mean or median.")] = "mean",
    standardize: Annotated[bool, typer.Option(help="Penalise coefficients of standardised columns.")] = True,
    weights: Annotated[str, typer.Option(help="samples counts every row once, sites every site alike.")] = "samples",
    ties: Annotated[str, typer.Option(help="Cox: efron or breslow.")] = "efron",
    tol: Annotated[float, typer.Option(help="|F_nat| at which a fit ends.")] = 1e-6,
    max_rounds: Annotated[int, typer.Option(help="Rounds of one fit, at most.")] = 1000,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit one linear model to tables, one file per site. A simulation: this process reads all files."""
    began, place = clock.perf_counter(), _place(out)
    sites = tables.read_sites(data, listed(drop_columns))
    choice = _choice(cv, select, lam, penalty)
    y, family, goals = _targets(sites, target, family, time, event)
    classes = ordered_classes(target, np.unique(y), positive) if family == "logistic" else ()
    if positive is not None and not classes:
        raise InputError(f"expected --positive with family logistic, got family {family}; leave --positive out")
    if len(classes) == 2:
        y = (y == classes[1]).astype(float)
    features = {name: t.without(goals) for name, t in sites.items()}
    preprocessor = tables.FederatedPreprocessor(impute, categorical=listed(categorical)).fit(features)
    columns = [str(name) for name in preprocessor.get_feature_names_out()]
    X = np.concatenate([preprocessor.transform(t) for t in features.values()])
    where = np.concatenate([np.full(t.rows, name, object) for name, t in features.items()])
    _say(quiet, f"{len(sites)} sites, {len(X)} rows, {len(columns)} columns; family {family}, penalty {penalty}")
    _say(quiet, "simulated: this process reads all files; between machines: fednmap flower new --template tables")
    if len(classes) == 2:
        _say(quiet, _modelled(goals[0], classes))
    common: dict[str, Any] = {
        "penalty": penalty,
        "l1_ratio": l1_ratio,
        "groups": preprocessor.groups() if penalty_name(penalty) in GROUPED else None,
        "standardize": standardize,
        "tol": tol,
        "max_rounds": max_rounds,
        "weights": weights,
    }
    if choice and family == "cox":
        estimator: Any = FederatedCoxRegressionCV(ties=ties, **choice, **common)
    elif choice:
        estimator = FederatedGLMCV(family, **choice, **common)
    elif family == "cox":
        estimator = FederatedCoxRegression(lam=lam, ties=ties, **common)
    else:
        estimator = FederatedGLM(family, lam=lam, **common)
    frame = _frame(X, columns)
    if choice:
        _say(quiet, f"choosing lam by {select}" + (f", {cv}" if cv else ""))
        estimator.on_fold = lambda k, of, name: _say(quiet, f"fold {k} of {of}: {name}")
        if any(s.kind == "number" and s.missing for s in preprocessor.statistics_):
            estimator.refill = _refill(preprocessor, list(features.values()))
    estimator.fit(frame, y, where)
    found = None
    if choice:
        found = estimator.path_
    elif path:
        _say(quiet, "the path")
        found = walk_path(estimator, frame, y, where)
    _say(quiet, f"{_cost(estimator)} ({clock.perf_counter() - began:.1f} s)")
    errors = None
    twins = [f"{a} and {b}" for a, b in _same(frame)]
    notes = [f"{'; '.join(twins)} are the same in every row: no fit can tell them apart"] if twins else []
    if penalty == "none":
        try:
            errors = estimator.inference(frame, y, where)
        except InputError as error:
            notes.append(f"no standard errors: {error}")
    for note in notes:
        _say(False, f"fednmap: warning: {note}")
    _write(place, locals())


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a `fednmap fit`.")],
    table: Annotated[
        Path, typer.Argument(help="A .csv or .parquet file with the columns of the model; others are not looked at.")
    ],
    id: Annotated[str | None, typer.Option(help="A column of the file to write before the predictions.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the predictions here; default: print them.")] = None,
) -> None:
    """Predict the rows of a new file with a fitted model."""
    model = kept.load(run)
    found: dict[str, list[Any]] = model.predict(tables.read(table, only={s.column for s in model.statistics}))
    if id is not None:
        if id in found:
            raise InputError(f"expected an --id column that is not predicted, got {id!r}; rename the column")
        found = {id: tables.read_as_text(table, id), **found}
    if len(model.classes) == 2:
        _say(False, _modelled(model.target, model.classes))
    text = kept.as_csv(list(found), [list(row) for row in zip(*found.values(), strict=True)])
    if out is None:
        print(text, end="")
    else:
        with clear_errors(out.parent):
            write_atomically(out, text.encode())


def _targets(
    sites: dict[str, tables.Table], target: str | None, family: str | None, time: str | None, event: str | None
) -> tuple[Any, str, list[str]]:
    """y of all rows, the family, and the columns that y is made of."""
    check_goals(family, target, time, event)
    if time is not None and event is not None:
        return np.concatenate([times(t, time, event) for t in sites.values()]), "cox", [time, event]
    assert target is not None  # checked above
    parts = {t.name: complete(t, target) for t in sites.values()}
    words = [name for name, values in parts.items() if is_words(values)]
    if words and len(words) < len(parts):
        other = next(name for name in parts if name not in words)
        raise InputError(
            f"the target {target!r} holds words at site {words[0]!r} and numbers at site {other!r}; use one kind"
        )
    y = np.concatenate(list(parts.values()))
    if family is None:
        family = "logistic" if words or len(np.unique(y)) == 2 else "gaussian"
    choose("family", family, FAMILIES)
    if words and family != "logistic":
        raise InputError(f"the target {target!r} holds words, and family {family} needs numbers; use logistic")
    if family != "logistic":
        read = counts if family == "poisson" else numbers
        return np.concatenate([read(t, target) for t in sites.values()]), family, [target]
    y = np.concatenate([labels(t, target) for t in sites.values()]).astype(str)
    most = len(np.unique(y))
    if most > MANY_CLASSES:
        raise InputError(
            f"the target {target!r} has {most} different values; logistic tells classes apart, for numbers use "
            "--family gaussian"
        )
    return y, family, [target]


def _refill(preprocessor: tables.FederatedPreprocessor, sites: list[tables.Table]) -> Any:
    """A function from a mask of rows to the matrix of all rows, with gaps filled by what those of the mask say."""
    ends = np.cumsum([t.rows for t in sites])[:-1]

    def matrix(mask: Any) -> Any:
        told = preprocessor.refilled([t.some(part) for t, part in zip(sites, np.split(mask, ends), strict=True)])
        return np.concatenate([told.transform(t) for t in sites])

    return matrix


def _choice(cv: str | None, select: str, lam: float | None, penalty: str) -> dict[str, Any]:
    """The options of an estimator that chooses lam; empty where lam is given."""
    if select not in SELECT:
        raise InputError(f"select is {select!r}; choose from {', '.join(SELECT)}")
    if cv is None and select == "1se":
        raise InputError("--select 1se compares held-out losses; add --cv 5, or --cv leave-one-site-out")
    if cv is not None and select not in ("min", "1se"):
        raise InputError(f"--select {select} is a criterion without folds; leave --cv out")
    if cv is None and select == "min":
        return {}
    if lam is not None:
        raise InputError("--cv and --select choose lam; leave --lam out")
    if penalty_name(penalty) in WITHOUT_WEIGHT:
        raise InputError(f"penalty {penalty!r} has no weight to choose; leave --cv and --select out")
    return {"cv": int(cv) if cv is not None and cv.isdecimal() else cv or 5, "select": select}


def _frame(X: Any, columns: list[str]) -> Any:
    """The matrix with names, so that messages can say them."""
    import polars

    return polars.DataFrame({name: X[:, j] for j, name in enumerate(columns)})


def _same(frame: Any) -> list[tuple[str, str]]:
    """Columns that are the same in every row, with the first that they are the same as."""
    seen: dict[bytes, str] = {}
    twins = []
    for name in frame.columns:
        first = seen.setdefault(frame[name].to_numpy().tobytes(), name)
        if first != name:
            twins.append((first, name))
    return twins


def _chosen(estimator: Any) -> tuple[list[str], list[list[Any]]]:
    """What lam was chosen by, at every lam: the criterion, or held-out losses."""
    if estimator.select not in ("min", "1se"):
        both = zip(estimator.lambdas_, estimator.criterion_, strict=True)
        return ["lam", estimator.select], [[float(lam), float(value)] for lam, value in both]
    columns = (estimator.lambdas_, estimator.cv_mean_, estimator.cv_se_, *estimator.cv_losses_)
    return ["lam", "mean", "se", *estimator.folds_], np.stack(columns, 1).tolist()


def _place(out: Path | None) -> Path:
    place = out or Path("runs") / clock.strftime("%Y%m%d-%H%M%S-fit")
    if place.exists() and not place.is_dir():
        raise InputError(f"{place} is a file; name a folder with --out")
    if place.exists() and any(place.iterdir()):
        raise InputError(f"{place} exists already; choose another folder with --out")
    return place


def _modelled(target: str, classes: tuple[str, ...]) -> str:
    return f"modelled: {target} = {classes[1]}, against {classes[0]}"


def _cost(estimator: Any) -> str:
    """What the fit took: rounds of `estimators.path_solver`, which the Flower app does not use."""
    spent = f"{estimator.n_iter_} rounds, {estimator.bytes_sent_ / 1e6:.3g} MB"
    return f"simulated: {spent}; the Flower app uses another solver, with other counts"


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        print(line, file=sys.stderr)


def _write(place: Path, made: dict[str, Any]) -> None:
    """The model, the tables, the pictures and the page of a fit; what a person sees of it."""
    estimator, family, found, errors = (made[name] for name in ("estimator", "family", "found", "errors"))
    coef = np.atleast_2d(estimator.coef_)
    level = -estimator.centre_ if family == "cox" else estimator.intercept_  # hazards are relative to the mean row
    intercept = np.atleast_1d(np.asarray(level, float))
    classes = made["classes"]
    lam = estimator.lam_ if made["choice"] else told_lam(made["penalty"], made["lam"])
    target = " and ".join(made["goals"])
    model = kept.FittedModel(family, target, tuple(made["columns"]), coef, intercept, classes, made["preprocessor"])
    about = {
        "environment": provenance({}),
        "data": made["data"],
        "simulated": True,
        "penalty": made["penalty"],
        "lam": lam,
        "standardize": made["standardize"],
        "weights": made["weights"],
        "rounds": estimator.n_iter_,
        "bytes_sent": estimator.bytes_sent_,
        "objective": estimator.objective_,
        "converged": bool(estimator.converged_),
        "sites": estimator.site_report_,
    }
    if made["choice"] and estimator.select in ("min", "1se"):
        about |= {"lam_min": estimator.lam_min_, "lam_1se": estimator.lam_1se_}
    kept.save(place, about, model)
    head, rows = coefficient_rows(model, found, errors)
    pictures = []
    with clear_errors(place):
        write_atomically(place / "coefficients.csv", kept.as_csv(head, rows).encode())
        if found is not None:
            spread = np.asarray(made["X"]).std(0)
            plot_path(found, place / "path.png", lam, spread)
            pictures.append(place / "path.png")
            names = [f"{c}: {n}" for c in found.classes for n in found.names] if found.classes else list(found.names)
            walked = [[float(v), *map(float, c.flatten())] for v, c in zip(found.lambdas, found.coefs, strict=True)]
            write_atomically(place / "path.csv", kept.as_csv(["lam", *names], walked).encode())
        if made["choice"]:
            write_atomically(place / "cv.csv", kept.as_csv(*_chosen(estimator)).encode())
            plot_cv(estimator, place / "cv.png")
            pictures.append(place / "cv.png")
        sites = [[s["site"], s["rows"], s["weight"], s["loss"]] for s in estimator.site_report_]
        sent = [[s.column, s.kind, s.sent, s.missing] for s in made["preprocessor"].statistics_]
        summary = (
            f"{family}, penalty {made['penalty']}, lam {'-' if lam is None else f'{lam:.4g}'}, "
            f"objective {estimator.objective_:.6g}"
        )
        about_classes = [f"Coefficients are for {target} = {classes[1]}."] if len(classes) == 2 else []
        intervals = [] if errors is None else ["Low and high are the ends of 95 % intervals."]
        lines = [summary, _cost(estimator), *made["notes"], *about_classes, *intervals]
        shown_head, shown_rows = without_coefficient_intervals(head, rows)
        text = kept.page(
            f"{target}: {len(sites)} sites",
            [*lines, *made_by(about["environment"])],
            {
                "Coefficients": (shown_head, shown_rows),
                "Sites": (["site", "rows", "weight", "loss"], sites),
                "What the sites sent about the columns": (["column", "kind", "sent", "gaps"], sent),
            },
            pictures,
        )
        write_atomically(place / "report.html", text.encode())
    if made["json"]:
        print(
            json_text(about | {"folder": str(place), "coefficients": [dict(zip(head, r, strict=True)) for r in rows]})
        )
        return
    shown = Shown(*(Column(name, overflow="fold") for name in shown_head))
    for row in shown_rows:
        shown.add_row(*("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row))
    screen = console()
    screen.print(shown)
    for line in lines:
        screen.print(line, highlight=False, soft_wrap=True)
    screen.print(f"folder: {place}", highlight=False, soft_wrap=True)
