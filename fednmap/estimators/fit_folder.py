"""The run folder of a fit: the fit itself, its tables and pictures, its page and its model card."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Any

import numpy as np
import torch

from fednmap.estimators.evaluation import Evaluation, evaluate
from fednmap.estimators.fit_config import FitConfig, folds
from fednmap.estimators.fitted_model import FittedModel, save
from fednmap.estimators.model_selection import CrossValidated
from fednmap.estimators.path import RegularizationPath
from fednmap.estimators.penalties import told_lam
from fednmap.estimators.rows import Floats
from fednmap.names import InputError
from fednmap.report import page
from fednmap.report.closing import made_by
from fednmap.report.coefficients import readable
from fednmap.report.data_table import DataTable
from fednmap.report.plots import legend, picture
from fednmap.runs.atomic_files import clear_errors, write_atomically
from fednmap.runs.folder import Job, Model, RunFolder
from fednmap.tables import FederatedFormula, FederatedPreprocessor

PICTURES = {
    "path.png": "Coefficients along lam",
    "cv.png": "The choice of lam",
    "evaluation.png": "Calibration and ROC of rows that were held out",
    "forest.png": "Estimates by site: joint, and meta-analyses with fixed and random effects",
}
HELD_OUT = "Predictions of rows that were held out"
NAMED = 12  # columns in the legend of a path: those with the largest coefficients

CARD = """# {title}

fednmap {version}, begun {began}: `{command}`

## Data

{data}: {rows} rows of {sites} sites. {columns} columns of the model, made of {given} columns of the tables.

{by_site}

## Model

{model}. {nonzero} of {size} coefficients are not zero. {weights} count the same. {rounds} rounds, {ended}.
The coefficients are in `coefficients.csv`.

## Predictions

{predictions}

## What the sites revealed

{revealed} counts and sums of the columns below, and in every round a gradient or a loss.

{sent}

## Limits

{limits}
"""


def fit_into(
    folder: RunFolder,
    config: FitConfig,
    estimator: Any,
    encoder: FederatedPreprocessor | FederatedFormula,
    classes: tuple[str, ...],
    given: tuple[Any, ...],
    *,
    data: str,
    began: float,
    mean: Floats,
    spread: Floats,
    notes: Sequence[str] = (),
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, DataTable], list[str]]:
    """Fit an estimator to rows, and write the run folder: how it was made, its tables by title, and what to print.

    given: what `estimator.fit` takes. data: where the rows come from, "own" between machines. began: `time.monotonic`
    at the begin. mean, spread: of the columns. say, warn: called with a line about what is done, or goes wrong.
    """
    chosen, place, notes = isinstance(estimator, CrossValidated), folder.path, list(notes)
    estimator.fit(*given)
    path = estimator.path_ if chosen else estimator.path(*given) if config.path else None
    seconds = time.monotonic() - began
    cost = f"{estimator.n_iter_} rounds"  # between machines messages are a little longer than their vectors
    cost += "" if data == "own" else f", {estimator.bytes_sent_ / 1e6:.3g} MB of vectors"
    cost = f"{'between machines' if data == 'own' else 'simulated'}: {cost}"
    say(f"{cost} ({seconds:.1f} s)")

    def attempt(what: str, wanted: bool, make: Callable[[], Any]) -> Any:
        try:
            return make() if wanted else None
        except InputError as error:
            notes.append(f"no {what}: {error}")

    wanted = config.penalty == "none" or config.cov_type is not None
    errors = attempt("standard errors", wanted, lambda: estimator.inference(*given, cov_type=config.cov_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of columns, which the table of coefficients shows
        compared = attempt("comparison of sites", config.heterogeneity, lambda: estimator.heterogeneity(*given))
    if config.evaluate is not None:
        say(f"evaluation: {config.evaluate}")
    cv = folds(config.evaluate or "")
    evaluated = attempt("evaluation", config.evaluate is not None, lambda: evaluate(estimator, *given, cv=cv))
    for note in notes:
        warn(note)
    coef = np.atleast_2d(estimator.coef_)
    level = estimator.intercept_  # hazards are relative to the mean row
    if config.family == "cox":
        level = -vars(estimator).get("centre_", float((coef @ mean)[0]))
    model = FittedModel(
        config.family,
        " and ".join(config.goals),
        tuple(str(name) for name in encoder.get_feature_names_out()),
        coef,
        np.atleast_1d(np.asarray(level, float)),
        classes,
        encoder,
        tuple(vars(estimator).get("constants_", ())),
        config.offset,
        config.exposure,
        vars(estimator).get("site_effects_"),
    )
    about = {
        "environment": folder.environment(),
        "data": data,
        "simulated": data != "own",
        "penalty": config.penalty,
        "lam": estimator.lam_ if chosen else told_lam(config.penalty, config.lam),
        "standardize": config.standardize,
        "weights": config.weights,
        "rounds": estimator.n_iter_,
        "bytes_sent": estimator.bytes_sent_,
        "objective": estimator.objective_,
        "converged": bool(estimator.converged_),
        "ended": "converged" if estimator.converged_ else "not converged; raise --rounds",
        "sites": estimator.site_report_,
    }
    if chosen and estimator.select in ("min", "1se"):
        about |= {"lam_min": estimator.lam_min_, "lam_1se": estimator.lam_1se_}
    tables = {"Coefficients": model.coefficient_table(path, errors, penalised=config.penalty != "none")}
    lam = "-" if about["lam"] is None else f"{about['lam']:.4g}"
    lines = [f"{config.family}, penalty {config.penalty}, lam {lam}, objective {estimator.objective_:.6g}"]
    if not chosen and lam != "-" and config.lam is None:
        lines.append("lam is the default; --cv 5 or --cv leave-one-site-out chooses it")
    if config.site_effects == "random":
        about |= {"mu": estimator._known_mu(), "site_variance": estimator.site_effects_.variance}
        lines.append(f"variance of the sites' intercepts: {about['site_variance']:.4g}, mu {about['mu']:.4g}")
    lines += [cost, *notes]
    lines += [f"Coefficients are for {model.target} = {model.classes[1]}."] if len(model.classes) == 2 else []
    if errors is not None:
        of = "" if config.penalty == "none" else " of the estimates without the penalty, and so are errors and p"
        lines.append(f"Low and high are the ends of 95 % intervals{of}.")
    save(place, about, model)
    with clear_errors(place):
        write_atomically(place / "coefficients.csv", tables["Coefficients"].csv().encode())
        if errors is not None:
            write_atomically(place / "summary.txt", f"{errors.summary()}\n".encode())
        if path is not None:
            plot_path(path, place / "path.png", about["lam"], spread)
            names = [f"{c}: {n}" for c in path.classes for n in path.names] if path.classes else list(path.names)
            walked = [[float(v), *map(float, c.flatten())] for v, c in zip(path.lambdas, path.coefs, strict=True)]
            write_atomically(place / "path.csv", DataTable(["lam", *names], walked).csv().encode())
        if chosen:
            if estimator.select in ("min", "1se"):
                head, by = ["mean", "se", *estimator.folds_], [estimator.cv_mean_, estimator.cv_se_]
                by += [*estimator.cv_losses_]
            else:
                head, by = [estimator.select], [estimator.criterion_]
            tried = DataTable(["lam", *head], np.stack([estimator.lambdas_, *by], 1).tolist())
            write_atomically(place / "cv.csv", tried.csv().encode())
            plot_cv(estimator, place / "cv.png")
        if model.effects is not None:
            tables["The sites' own coefficients"] = own = model.effects.table(model.coef)
            write_atomically(place / "sites.csv", own.csv().encode())
        if compared is not None:
            lines.append(compared.verdict())
            table = compared.table()
            tables["Heterogeneity"] = table.without([f"{name} error" for name in ("joint", "fixed", "random")])
            write_atomically(place / "heterogeneity.csv", table.csv().encode())
            compared.plot(place / "forest.png")
        if evaluated is not None:
            tables[HELD_OUT] = evaluated.table()
            write_atomically(place / "evaluation.csv", evaluated.table().csv().encode())
            if evaluated.calibration_curve is not None:
                evaluated.plot(place / "evaluation.png")
        title = folder.about().model or ""
        write_atomically(place / "model_card.md", model_card(about, config, model, title, evaluated).encode())
    _write_page(folder, model, estimator, tables, lines)
    _finish(folder, model, estimator, about, seconds)  # last: a folder without it is fitted again
    folder.write_checksums("report.html")
    return about, tables, lines


def _finish(folder: RunFolder, model: FittedModel, estimator: Any, about: dict[str, Any], seconds: float) -> None:
    """The closing numbers and the model, as every run folder has them."""
    job = Job(f"fit-{model.family}", 0)
    record = {
        "objective": float(estimator.objective_),
        "zeros": float((model.coef == 0).mean()),
        "train_seconds": seconds,
        "eval_seconds": 0.0,
        "bytes_up": estimator.bytes_sent_ / 2,  # points go down, gradients of the same size up
        "bytes_down": estimator.bytes_sent_ / 2,
    }
    folder.delete_after(job, -1)
    folder.append(job, {"round": float(estimator.n_iter_), **record})
    closing = record | {"rounds": estimator.n_iter_, "seconds": seconds, "ended": about["ended"]}
    x = torch.from_numpy(np.concatenate([model.coef.flatten(), model.intercept]))
    labels = () if model.family == "ordinal" else model.classes
    saved = Model({"x": x}, (len(model.columns),), model.columns, labels, intercept=True)
    folder.finish(job, closing | ({} if about["lam"] is None else {"lam": about["lam"]}), saved)


def _write_page(
    folder: RunFolder, model: FittedModel, estimator: Any, tables: dict[str, DataTable], lines: list[str]
) -> None:
    """report.html: coefficients, sites, what the sites sent, pictures."""
    names = ("site", "rows", "weight", "loss")
    sites = DataTable(names, [[site[name] for name in names] for site in estimator.site_report_])
    sent = [[s.column, s.kind, s.sent, s.missing] for s in model.statistics]
    parts = {title: readable(part) for title, part in tables.items()} | {"Sites": sites}
    parts["What the sites sent about the columns"] = DataTable(("column", "kind", "sent", "gaps"), sent)
    body = [f"<h2>{title}</h2>{part.html()}" for title, part in parts.items()]
    for file, title in PICTURES.items():
        if (folder.path / file).exists():
            body.append(f"<h2>{title}</h2>{page.picture(folder.path / file)}")
    title = f"{model.target}: {len(sites.rows)} sites"
    page.write_page(folder.path / "report.html", title, [*lines, *made_by(folder.environment())], body)


def model_card(
    about: dict[str, Any], config: FitConfig, model: FittedModel, title: str, evaluated: Evaluation | None
) -> str:
    """Return the card as Markdown; about: how the model was made."""
    made, names = about["environment"], ("site", "rows", "weight", "loss")
    sites = DataTable(names, [[site[name] for name in names] for site in about["sites"]])
    filled = [s.column for s in model.statistics if s.kind == "number" and s.missing]
    of = " here" if config.cov_type is None else ": those here are of the estimates without the penalty"
    limits = {
        "It describes the rows above. Other patients, times or ways to measure may differ.": True,
        "A level that no site had is refused, not guessed.": any(s.levels for s in model.statistics),
        f"Gaps in {', '.join(filled)} are filled by the {config.impute} of all sites.": filled,
        f"Penalised coefficients are shrunk, and have no intervals{of}.": config.penalty != "none",
        "How well it predicts was not measured on rows that it had not seen.": evaluated is None,
        "The choice of lam has seen the rows that were held out: measures are a little too good.": evaluated
        and config.choice(),
        "Hazard ratios are relative to the mean row; every site has its own baseline hazard.": model.family == "cox",
        "A new site has the shared coefficients.": config.site_effects in ("random", "sparse"),
    }
    chosen = f", chosen by {config.select}{f' of --cv {config.cv}' if config.cv else ''}" if config.choice() else ""
    lam = "" if about["lam"] is None else f", lam {about['lam']:.4g}{chosen}"
    predictions = "Not measured; `--evaluate 5` does."
    if evaluated is not None:
        words = f"Rows that were held out (`--evaluate {config.evaluate}`), with {100 * evaluated.level:g} % intervals:"
        predictions = f"{words}\n\n{evaluated.table().markdown()}"
    return CARD.format(
        title=title,
        version=made.get("fednmap"),
        began=made.get("began"),
        command=" ".join(made.get("command", ())),
        data=about["data"],
        rows=sum(site["rows"] for site in about["sites"]),
        sites=len(sites.rows),
        columns=len(model.columns),
        given=len(model.statistics),
        by_site=sites.markdown(),
        model=f"{config.family.capitalize()}, penalty {config.penalty}{lam}",
        nonzero=int((model.coef != 0).sum()),
        size=model.coef.size,
        weights=config.weights.replace("samples", "rows").capitalize(),
        ended=about["ended"],
        rounds=about["rounds"],
        predictions=predictions,
        revealed="One process read all files. Between machines sites would have revealed"
        if about["simulated"]
        else "They revealed",
        sent=DataTable(("column", "sent"), [(s.column, s.sent) for s in model.statistics]).markdown(),
        limits="\n".join(f"- {words}" for words, holds in limits.items() if holds),
    )


def plot_path(path: RegularizationPath, file: str | File, chosen: float | None = None, scale: Any = None) -> None:
    """Coefficients against lam, the largest with their names; `chosen` marks a lam.

    scale: factors for the columns, such as their deviations, so that coefficients are comparable.
    """
    factor = np.ones(path.coefs.shape[2]) if scale is None else np.asarray(scale, float)
    lambdas = np.clip(path.lambdas, 1e-300, None)
    ends: list[tuple[float, str, Any]] = []
    with picture(file) as (_, axes):
        axis = axes[0, 0]
        for k in range(path.coefs.shape[1]):
            curves = path.coefs[:, k] * factor
            prefix = f"{path.classes[k]}: " if path.classes else ""
            for place, j in enumerate(np.argsort(-np.abs(curves[-1]))):
                if not curves[:, j].any():
                    continue
                is_named = place < max(2, NAMED // path.coefs.shape[1])
                style = ("-", "--")[len(ends) // 10 % 2]  # ten colours
                look = {"color": f"C{len(ends) % 10}", "linestyle": style} if is_named else {"color": "0.75"}
                (line,) = axis.plot(lambdas, curves[:, j], linewidth=1.2, **look)
                if is_named:
                    ends.append((float(curves[-1, j]), f"{prefix}{path.names[j]}", line))
        if ends:  # in the order in which the curves end
            named = [(name, line) for _, name, line in sorted(ends, key=lambda end: -end[0])]
            legend(axis, named, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="x-small", frameon=False)
        _along_lambda(axis, chosen, None)
        axis.set_ylabel("coefficient" if scale is None else "coefficient per standard deviation")


def plot_cv(fitted: Any, file: str | File) -> None:
    """The held-out loss against lam with one standard error, or the criterion; the choices are marked."""
    lambdas = np.clip(fitted.lambdas_, 1e-300, None)
    with picture(file) as (_, axes):
        axis = axes[0, 0]
        if fitted.select in ("bic", "ebic"):
            axis.plot(lambdas, fitted.criterion_, "o-", markersize=3)
            axis.set_ylabel(fitted.select.upper())
            _along_lambda(axis, fitted.lam_, None)
            return
        folds = zip(fitted.cv_losses_, fitted.folds_, strict=True)
        lines = [(name, axis.plot(lambdas, losses, linewidth=0.7, alpha=0.6)[0]) for losses, name in folds]
        mean = axis.errorbar(lambdas, fitted.cv_mean_, fitted.cv_se_, fmt="o-", color="black", markersize=3)
        axis.set_ylabel("held-out loss")
        legend(axis, [*lines, ("mean", mean)], fontsize="x-small")
        _along_lambda(axis, fitted.lam_min_, fitted.lam_1se_)


def _along_lambda(axis: Any, chosen: float | None, other: float | None) -> None:
    axis.set_xscale("log")
    axis.invert_xaxis()
    axis.set_xlabel("lam")
    axis.grid(alpha=0.3)
    for lam, style in ((chosen, "--"), (other, ":")):
        if lam:
            axis.axvline(lam, color="grey", linestyle=style, linewidth=1)
