"""The model card of a fit: what was fitted to what, how well it predicts, what the sites revealed, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fednmap.estimators.evaluation import Evaluation
from fednmap.estimators.fit_config import FitConfig
from fednmap.report.data_table import DataTable

if TYPE_CHECKING:
    from fednmap.estimators.fitted_model import FittedModel

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

{told} counts and sums of the columns below, and in every round a gradient or a loss.

{sent}

## Limits

{limits}
"""


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
        "A new site has the shared coefficients.": config.site_effects == "sparse",
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
        told="One process read all files. Between machines sites would have revealed"
        if about["simulated"]
        else "They revealed",
        sent=DataTable(("column", "sent"), [(s.column, s.sent) for s in model.statistics]).markdown(),
        limits="\n".join(f"- {words}" for words, holds in limits.items() if holds),
    )
