"""The model card of a fit: what was fitted to what, how well it predicts, what the sites told, and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fednmap.estimators.evaluation import Evaluation
from fednmap.estimators.fit_config import FitConfig
from fednmap.report.data_table import DataTable

if TYPE_CHECKING:
    from fednmap.estimators.fitted_model import FittedModel

CARD = """# {title}

{made}

## Data

{data}. {rows} rows of {sites} sites; {columns} columns of the model, from {given} of the tables.

{by_site}

## Model

- Family {family}; weights: {weights} count the same.
- Penalty {penalty}, lam {lam}{choice}. {nonzero} of {size} coefficients are not zero.
- {ended}, after {rounds} rounds.

`coefficients.csv` has the coefficients, `model.json` all that `fednmap predict` needs.

## Predictions

{predictions}

## What the sites told

{told}

| sent before the fit | columns |
|---|---|
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
    sent: dict[str, list[str]] = {}
    for s in model.statistics:
        sent.setdefault(s.sent, []).append(s.column)
    limits = ["It describes the rows above. Other patients, times or ways to measure may differ."]
    limits += ["A level that no site had is refused, not guessed."] if any(s.levels for s in model.statistics) else []
    filled = [s.column for s in model.statistics if s.kind == "number" and s.missing]
    limits += [f"Gaps in {', '.join(filled)} are filled by the {config.impute} of all sites."] if filled else []
    if config.penalty != "none":
        limits.append("Penalised coefficients are shrunk, and have no intervals here.")
    if evaluated is None:
        limits.append("How well it predicts was not measured on rows that it had not seen.")
    elif config.choice():
        limits.append("The choice of lam used the rows that were held out afterwards: measures are a little too good.")
    if model.family == "cox":
        limits.append("Hazard ratios are relative to the mean row; every site has a baseline hazard of its own.")
    if config.site_effects == "sparse":
        limits.append("A new site has the shared coefficients.")
    simulated = "One process read all files. Between machines sites would have told" if about["simulated"] else "Told"
    rounds = f"{simulated} the sums below, and in {about['rounds']} rounds their gradients, as long as the model."
    lam = about["lam"]
    return CARD.format(
        title=title,
        made=f"fednmap {made.get('fednmap', '')}, begun {made.get('began', '')}: `{' '.join(made.get('command', ()))}`",
        data=f"`{about['data']}`",
        rows=sum(site["rows"] for site in about["sites"]),
        sites=len(sites.rows),
        columns=len(model.columns),
        given=len(model.statistics),
        by_site=sites.markdown(),
        family=config.family,
        weights="rows" if config.weights == "samples" else "sites",
        penalty=config.penalty,
        lam="-" if lam is None else f"{lam:.4g}",
        choice=f", chosen by {config.select}{f' of cv {config.cv}' if config.cv else ''}" if config.choice() else "",
        nonzero=int((model.coef != 0).sum()),
        size=model.coef.size,
        ended=about["ended"].capitalize(),
        rounds=about["rounds"],
        predictions="Not measured; `--evaluate 5` does."
        if evaluated is None
        else f"Every row predicted by a model without its fold (`--evaluate {config.evaluate}`); "
        f"{100 * evaluated.level:g} % intervals.\n\n{evaluated.table().markdown()}",
        told=rounds,
        sent="\n".join(f"| {words} | {', '.join(columns)} |" for words, columns in sent.items()),
        limits="\n".join(f"- {line}" for line in limits),
    )
