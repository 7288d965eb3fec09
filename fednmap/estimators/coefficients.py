"""The table of coefficients."""

from __future__ import annotations

from typing import Any

import numpy as np

from fednmap.estimators.folder import FittedModel

RATIOS = {"logistic": "odds ratio", "cox": "hazard ratio", "poisson": "rate ratio"}


def coefficient_rows(model: FittedModel, path: Any, errors: Any) -> tuple[list[str], list[list[Any]]]:
    """Name, coefficient, its ratio, its standard error and interval, and the lam at which it enters.

    With errors the ratio has an interval of its own; "low" and "high" are the coefficient's.
    """
    ratio = RATIOS.get(model.family)
    head = [*(["class"] if len(model.coef) > 1 else []), "name", "coefficient"]
    head += [ratio] if ratio else []
    head += [f"{ratio} low", f"{ratio} high"] if ratio and errors is not None else []
    head += ["standard error", "low", "high", "p"] if errors is not None else []
    head += ["enters at lam"] if path is not None else []
    rows = []
    for k, coefs in enumerate(model.coef):
        constant = [] if model.family == "cox" else [("(intercept)", float(model.intercept[k]))]
        for j, (name, value) in enumerate([*zip(model.columns, map(float, coefs), strict=True), *constant]):
            if errors is not None:
                value = float(errors.estimate[_place(k, j, *model.coef.shape)])  # NaN for an aliased column
            value += 0.0  # no minus before a zero
            row: list[Any] = [*([model.classes[k]] if len(model.coef) > 1 else []), name, value]
            row += [_exp(value)] if ratio else []
            if errors is not None:
                at = _place(k, j, *model.coef.shape)
                row += [_exp(float(v[at])) for v in (errors.low, errors.high)] if ratio else []
                row += [float(v[at]) for v in (errors.error, errors.low, errors.high, errors.p_value)]
            if path is not None:
                enters = path.enters[j] if j < len(model.columns) else np.nan
                row.append(None if np.isnan(enters) else float(enters))
            rows.append(row)
    return head, rows


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _place(k: int, j: int, classes: int, columns: int) -> int:
    """Where coefficient j of class k, or its intercept, is among the errors: class by class, then the intercepts."""
    return k * columns + j if j < columns else classes * columns + k
