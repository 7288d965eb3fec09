"""What the folder of a fit holds: the model with its names, the table of its coefficients, and pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import numpy as np
import torch

from fednmap.estimators.family_problems import FAMILIES, RATIOS, expected, family, threshold_names
from fednmap.estimators.fit_config import FitConfig, numbers
from fednmap.estimators.model_selection import CrossValidated
from fednmap.estimators.path import RegularizationPath
from fednmap.estimators.penalties import told_lam
from fednmap.estimators.rows import Floats
from fednmap.estimators.site_effects import SiteEffects
from fednmap.names import InputError, choose
from fednmap.problems.families import Ordinal
from fednmap.report import page
from fednmap.report.closing import made_by
from fednmap.report.coefficients import readable
from fednmap.report.data_table import DataTable
from fednmap.report.plots import legend, picture
from fednmap.runs.atomic_files import clear_errors, from_json, to_json, write_atomically
from fednmap.runs.folder import SUMS, Job, Model, RunFolder
from fednmap.tables import FederatedFormula, FederatedPreprocessor, Statistic, table

MODEL = "model.json"
VERSION = 1
PICTURES = {
    "path.png": "Coefficients along lam",
    "cv.png": "The choice of lam",
    "forest.png": "Estimates by site: joint, and meta-analyses with fixed and random effects",
}
NAMED = 12  # columns in the legend of a path: those with the largest coefficients


@dataclass(frozen=True, eq=False)
class FittedModel:
    """What predicts: coefficients by name, and how a table becomes their columns."""

    family: str
    target: str
    columns: tuple[str, ...]
    coef: Floats
    """(K, p)"""
    intercept: Floats
    classes: tuple[str, ...]
    preprocessor: FederatedPreprocessor | FederatedFormula
    constants: tuple[float, ...] = ()
    """What the family estimates once for all rows."""
    offset: str | None = None
    exposure: str | None = None
    """The column that is added to every score, itself or its logarithm."""
    effects: SiteEffects | None = None
    """What the sites have of their own, where they differ."""

    @property
    def needed(self) -> set[str]:
        """The columns of a table that predictions need."""
        own = [name for name in (self.offset, self.exposure) if name is not None]
        return {*own, *(s.column for s in self.statistics)}

    @property
    def levels(self) -> tuple[tuple[str, ...], list[float]]:
        """The names and values of the intercepts; of ordered labels the thresholds, of a Cox model none."""
        if self.family == "ordinal":
            return threshold_names(self.classes), Ordinal(len(self.classes)).fitted(
                float(self.intercept[0]), np.array(self.constants)
            )["thresholds_"].tolist()
        level = [] if self.family == "cox" else self.intercept.tolist()
        return ("(intercept)",) * len(level), level

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What is known of the columns of a table that the model reads."""
        return self.preprocessor.statistics_

    def check(self) -> None:
        """Raise ValueError if the parts do not fit together."""
        (outputs, p), kinds = self.coef.shape, len(self.classes)
        parts: list[Any] = [self.coef, self.intercept, self.constants]
        fits = list(self.preprocessor.get_feature_names_out()) == list(self.columns)
        fits &= self.intercept.shape == (outputs,)
        if self.family in ("logistic", "ordinal"):
            fits &= kinds == (outputs if outputs > 1 else 2 if self.family == "logistic" else len(self.constants) + 2)
        if (own := self.effects) is not None:
            parts += [own.intercept, own.deviation]
            fits &= own.deviation.shape == (len(own.sites), p) and own.intercept.shape == (len(own.sites),)
        fits &= all(name is None or isinstance(name, str) for name in (self.offset, self.exposure))
        if not fits or not all(np.isfinite(part).all() for part in parts):
            raise ValueError("its parts do not fit together")

    def predict(self, rows: Any, site: str | None = None) -> dict[str, list[Any]]:
        """Return columns of predictions: numbers; labels and probabilities; the hazard ratio.

        rows: a frame or a `fednmap.tables.Table`; site: whose own coefficients to use, default the shared ones.
        """
        rows = table(rows, only=self.needed)
        X = self.preprocessor.transform(rows)
        scores = X @ self.coef.T + self.intercept
        if site is not None:
            if self.effects is None or site not in self.effects.sites:
                known = "none" if self.effects is None else ", ".join(self.effects.sites)
                raise InputError(f"expected a site with its own coefficients ({known}), got {site!r}; leave site out")
            shared = 0.0 if self.family == "cox" else self.intercept
            scores[:, 0] += self.effects.added(X, np.full(len(X), site), shared)
        if self.offset is not None:
            scores = scores + numbers(rows, self.offset, None)[:, None]
        if self.exposure is not None:
            scores = scores + np.log(numbers(rows, self.exposure, "exposures"))[:, None]
        kind = Ordinal(len(self.classes)) if self.family == "ordinal" else family(self.family)
        mean = expected(kind, scores[:, 0] if scores.shape[1] == 1 else scores, self.constants)
        if self.family in ("logistic", "ordinal"):
            each = np.stack([1 - mean, mean], 1) if mean.ndim == 1 else mean
            labels = [self.classes[k] for k in each.argmax(1)]
            shares = {f"P({name})": each[:, k].tolist() for k, name in enumerate(self.classes)}
            return {self.target: labels, **shares}
        name = {"cox": "hazard ratio", "binomial": "P(success)"}.get(self.family, self.target)
        return {name: mean.tolist()}

    def coefficient_table(self, path: Any = None, errors: Any = None) -> DataTable:
        """Name, coefficient, its ratio, its standard error and interval, and the lam at which it enters.

        With errors the ratio has an interval of its own; "low" and "high" are the coefficient's.
        """
        ratio, (outputs, p) = RATIOS.get(self.family), self.coef.shape
        titles, level = self.levels
        if errors is not None and len(errors.estimate) == self.coef.size:  # intercepts are the sites' own
            titles, level = (), []
        # class by class, then the intercepts, as errors have them; an aliased column has NaN there
        value = np.array([*self.coef.flatten(), *level]) if errors is None else errors.estimate
        table: dict[str, Any] = {}
        if outputs > 1:
            table["class"] = [name for name in self.classes for _ in range(p)] + [*self.classes]
        table |= {"name": [*self.columns] * outputs + [*titles], "coefficient": value}
        with np.errstate(over="ignore"):
            if ratio:
                table[ratio] = np.exp(value)
            if ratio and errors is not None:
                table |= {f"{ratio} low": np.exp(errors.low), f"{ratio} high": np.exp(errors.high)}
        if errors is not None:
            table |= {"standard error": errors.error, "low": errors.low, "high": errors.high, "p": errors.p_value}
        if path is not None:
            enters = [None if np.isnan(lam) else lam for lam in path.enters.tolist()]
            table["enters at lam"] = enters * outputs + [None] * len(level)
        each = list(zip(*((v + 0.0).tolist() if isinstance(v, np.ndarray) else v for v in table.values()), strict=True))
        each_level = len(level) // outputs
        ends = [range(outputs * p + k * each_level, outputs * p + (k + 1) * each_level) for k in range(outputs)]
        order = [j for k in range(outputs) for j in (*range(k * p, k * p + p), *ends[k])]
        return DataTable([*table], [list(each[j]) for j in order])


def save(folder: File, about: dict[str, Any], model: FittedModel) -> None:
    """Write the model; `about` says how it was made."""
    kind = model.preprocessor
    said = about | {
        "version": VERSION,
        "family": model.family,
        "target": model.target,
        "columns": list(model.columns),
        "coef": model.coef.tolist(),
        "intercept": model.intercept.tolist(),
        "classes": list(model.classes),
        "constants": list(model.constants),
        "offset": model.offset,
        "exposure": model.exposure,
        **({} if isinstance(kind, FederatedPreprocessor) else {"formula": kind.formula, "state": kind.state_}),
        "statistics": [asdict(s) for s in model.statistics],
    }
    if model.effects is not None:
        own = zip(model.effects.sites, model.effects.intercept.tolist(), model.effects.deviation.tolist(), strict=True)
        said["site_effects"] = {site: {"intercept": a, "deviation": d} for site, a, d in own}
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MODEL, to_json(said))


def load(folder: str | File) -> FittedModel:
    """Return the model in the folder of a `fednmap fit`, which predicts rows of a frame.

    Raises InputError if the folder holds no model, or another one than was written.
    """
    folder = File(folder)
    if not (folder / MODEL).is_file():
        raise InputError(f"{folder} holds no {MODEL}; give the folder of a `fednmap fit`")
    said, changed = from_json(folder / MODEL, dict), RunFolder(folder).changed_files()
    if lines := [line for line in changed if line.startswith(MODEL) or SUMS in line]:
        raise InputError(f"{folder}: {lines[0]}; put it back from a copy, or fit again")
    try:
        choose("family", said["family"], FAMILIES)
        effects, own = None, said.get("site_effects")
        if own is not None:
            parts = (np.array([site[name] for site in own.values()], float) for name in ("intercept", "deviation"))
            effects = SiteEffects(tuple(own), tuple(said["columns"]), *parts)
        statistics = [Statistic(**s | {"levels": tuple(s["levels"])}) for s in said["statistics"]]
        model = FittedModel(
            said["family"],
            str(said["target"]),
            tuple(said["columns"]),
            np.array(said["coef"], float).reshape(-1, len(said["columns"])),
            np.array(said["intercept"], float),
            tuple(map(str, said["classes"])),
            FederatedFormula(str(said["formula"])).know(statistics, said["state"])
            if "formula" in said
            else FederatedPreprocessor().know(statistics),
            tuple(map(float, said.get("constants", ()))),
            said.get("offset"),
            said.get("exposure"),
            effects,
        )
        model.check()
        return model
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / MODEL} was changed or is of another version ({error})") from None


def about(folder: RunFolder, config: FitConfig, data: str, estimator: Any, simulated: bool = True) -> dict[str, Any]:
    """How the model was made, for its file and as the closing numbers."""
    chosen = isinstance(estimator, CrossValidated)
    said = {
        "environment": folder.environment(),
        "data": data,
        "simulated": simulated,
        "penalty": config.penalty,
        "lam": estimator.lam_ if chosen else told_lam(config.penalty, config.lam),
        "standardize": config.standardize,
        "weights": config.weights,
        "rounds": estimator.n_iter_,
        "bytes_sent": estimator.bytes_sent_,
        "objective": estimator.objective_,
        "converged": bool(estimator.converged_),
        "sites": estimator.site_report_,
    }
    if chosen and estimator.select in ("min", "1se"):
        said |= {"lam_min": estimator.lam_min_, "lam_1se": estimator.lam_1se_}
    return said


def finish(folder: RunFolder, model: FittedModel, estimator: Any, lam: float | None, seconds: float) -> dict[str, Any]:
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
    ended = "converged" if estimator.converged_ else "not converged; raise --rounds"
    closing = record | {"rounds": estimator.n_iter_, "seconds": seconds, "ended": ended}
    x = torch.from_numpy(np.concatenate([model.coef.flatten(), model.intercept]))
    labels = () if model.family == "ordinal" else model.classes
    saved = Model({"x": x}, (len(model.columns),), model.columns, labels, intercept=True)
    return folder.finish(job, closing | ({} if lam is None else {"lam": lam}), saved)


def write_tables(place: File, table: DataTable, path: Any, chosen: Any, lam: float | None, spread: Any) -> None:
    """The coefficients, and the path and the choice of lam where there are any."""
    with clear_errors(place):
        write_atomically(place / "coefficients.csv", table.csv().encode())
        if path is not None:
            plot_path(path, place / "path.png", lam, spread)
            names = [f"{c}: {n}" for c in path.classes for n in path.names] if path.classes else list(path.names)
            walked = [[float(v), *map(float, c.flatten())] for v, c in zip(path.lambdas, path.coefs, strict=True)]
            write_atomically(place / "path.csv", DataTable(["lam", *names], walked).csv().encode())
        if chosen is not None:
            if chosen.select in ("min", "1se"):
                head, by = ["mean", "se", *chosen.folds_], [chosen.cv_mean_, chosen.cv_se_, *chosen.cv_losses_]
            else:
                head, by = [chosen.select], [chosen.criterion_]
            tried = DataTable(["lam", *head], np.stack([chosen.lambdas_, *by], 1).tolist())
            write_atomically(place / "cv.csv", tried.csv().encode())
            plot_cv(chosen, place / "cv.png")


def write_page(
    folder: RunFolder, model: FittedModel, estimator: Any, tables: dict[str, DataTable], lines: list[str]
) -> None:
    """report.html: coefficients, sites, what the sites sent, pictures."""
    names = ("site", "rows", "weight", "loss")
    sites = DataTable(names, [[site[name] for name in names] for site in estimator.site_report_])
    sent = DataTable(
        ("column", "kind", "sent", "gaps"), [[s.column, s.kind, s.sent, s.missing] for s in model.statistics]
    )
    parts = {title: readable(part) for title, part in tables.items()}
    parts |= {"Sites": sites, "What the sites sent about the columns": sent}
    body = [f"<h2>{title}</h2>{part.html()}" for title, part in parts.items()]
    for file, title in PICTURES.items():
        if (folder.path / file).exists():
            body.append(f"<h2>{title}</h2>{page.picture(folder.path / file)}")
    title = f"{model.target}: {len(sites.rows)} sites"
    page.write_page(folder.path / "report.html", title, [*lines, *made_by(folder.environment())], body)


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
