"""The interactive figures of a page, as Plotly objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import prod
from typing import Any

import numpy as np

from fednmap.report.series import Series, Values, drawn, positive
from fednmap.runs.folder import Model

POINTS = 12_000
"""Points of all curves of one quantity together; more are not visible, and make the page slow."""

DASHES = ("solid", "dash", "dot", "dashdot")
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
ROW_HEIGHT = 340


def curves(series: Sequence[Series]) -> tuple[Any, int]:
    """Return every quantity against rounds, megabytes or seconds; and the most measurements left out of a curve.

    With several trials: the mean, and a band from least to most.
    """
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    points = max(100, POINTS // max(1, len(series)))
    shown = drawn(series)
    rows = max(1, (len(shown) + 1) // 2)
    figure = make_subplots(rows, 2, vertical_spacing=0.32 / rows, horizontal_spacing=0.09)
    along: dict[str, list[Any]] = {name: [] for name in _AXES}
    named: set[str] = set()
    for place, quantity in enumerate(shown):
        title = quantity.html or _text(quantity.axis)
        cell = {"row": place // 2 + 1, "col": place % 2 + 1}
        for k, whole in enumerate(series):
            if not whole.has(quantity.key):
                continue
            one = whole.having(quantity.key)
            line = {"color": COLORS[k % len(COLORS)], "dash": DASHES[k % len(DASHES)], "width": 1.8}
            label = _text(one.label)
            style = {"name": label, "legendgroup": label, "mode": "lines"}
            y = quantity.scale * one.values(quantity.key, points)
            x = {axis: _along(one, axis, points) for axis in _AXES}
            if len(y) > 1:
                band = np.concatenate([y.max(0), y.min(0)[::-1]])
                fill = {"fill": "toself", "opacity": 0.2, "line": {"width": 0, "color": line["color"]}}
                figure.add_scatter(y=band, **style, **fill, showlegend=False, hoverinfo="skip", **cell)
                for axis in _AXES:
                    along[axis].append([*x[axis], *x[axis][::-1]])
            hover = f"<b>%{{fullData.name}}</b><br>%{{x:,.6~g}}<br>{title} %{{y:.4~g}}<extra></extra>"
            new = label not in named
            figure.add_scatter(y=y.mean(0), **style, line=line, showlegend=new, hovertemplate=hover, **cell)
            named.add(label)
            for axis in _AXES:
                along[axis].append(x[axis])
        figure.update_yaxes(title_text=title, title_standoff=4, **cell)
    for trace, x in zip(figure.data, along["rounds"], strict=True):
        trace.x = x
    falling = {k: q for k, q in enumerate(shown) if q.log and positive(series, q.key)}
    scales = {kind: {f"yaxis{k + 1 if k else ''}.type": kind for k in falling} for kind in ("log", "linear")}
    which = _text(", ".join(q.label for q in falling.values()))
    menus = [_buttons(0.0, [(name, "update", [{"x": along[name]}, _titles(len(shown), name)]) for name in _AXES])]
    if falling:
        menus.append(_buttons(0.5, [(f"{which} {kind}", "relayout", [scale]) for kind, scale in scales.items()]))
    figure.update_layout(
        template=go.layout.Template(layout=_LOOK),
        height=ROW_HEIGHT * rows + 90,
        legend={"groupclick": "togglegroup", "y": 1, "yanchor": "top"},
        margin={"l": 60, "r": 10, "t": 70, "b": 50},
        updatemenus=menus,
    )
    figure.update_layout(_titles(len(shown), "rounds"))
    figure.update_layout({name.replace(".", "_"): kind for name, kind in scales["log"].items()})
    figure.update_yaxes(minorloglabels="none")
    longest = max((len(c["round"]) for s in series for c in s.trials), default=0)
    return figure, max(0, longest - points)


def layers(models: Mapping[str, Model]) -> Any | None:
    """Zeros of every layer of every method's model, in percent."""
    import plotly.graph_objects as go

    found = {label: model.parameters for label, model in models.items()}
    names = list(dict.fromkeys(name for parameters in found.values() for name in parameters))
    if not names:
        return None
    zeros = [[100 * float((p[n] == 0).double().mean()) if n in p else None for n in names] for p in found.values()]
    few = len(names) <= 24
    heat = go.Heatmap(
        z=zeros,
        x=list(map(_text, names)),
        y=list(map(_text, models)),
        zmin=0,
        zmax=100,
        colorscale="Blues",
        colorbar={"title": {"text": "zeros (%)"}},
        texttemplate="%{z:.1f}" if few else None,
        hovertemplate="%{y}<br>%{x}: %{z:.2f} % zero<extra></extra>",
    )
    figure = go.Figure(heat)
    figure.update_layout(template=go.layout.Template(layout=_LOOK), height=150 + 30 * len(models), margin={"t": 20})
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    figure.update_xaxes(type="category", automargin=True)
    return figure


def first_layer(models: Mapping[str, Model], at_most: int = 12) -> Any | None:
    """Return a picture per method of the pixels or filters that the first layer reads, white where all is zero."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    pictures = {label: picture for label, model in models.items() if (picture := _picture(model)) is not None}
    pictures = dict(list(pictures.items())[:at_most])
    if not pictures:
        return None
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    titles = [_text(label if len(label) < 34 else f"…{label[-32:]}") for label in pictures]
    figure = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.2 / rows)
    for k, picture in enumerate(pictures.values()):
        heat = go.Heatmap(
            z=np.where(picture == 0, np.nan, picture),
            coloraxis="coloraxis",
            hoverongaps=False,
            hovertemplate="row %{y}, column %{x}: %{z:.3g}<extra></extra>",
        )
        figure.add_trace(heat, k // columns + 1, k % columns + 1)
        axis = "" if k == 0 else str(k + 1)
        figure.layout[f"yaxis{axis}"].update(scaleanchor=f"x{axis}", autorange="reversed", visible=False)
        figure.layout[f"xaxis{axis}"].update(visible=False, constrain="domain")
    figure.update_layout(
        template=go.layout.Template(layout=_LOOK),
        height=280 * rows + 40,
        margin={"t": 40, "b": 10},
        coloraxis={"colorscale": "Viridis", "colorbar": {"title": {"text": "norm"}}},
    )
    return figure


def _picture(model: Model) -> Values | None:
    """|w| of the first layer as a picture: per pixel over all units, or the filters of a convolution in a grid."""
    if len(model.inputs) != 3:
        return None
    channels, height, width = model.inputs
    weight = next(iter(model.parameters.values())).double().numpy()
    if weight.ndim == 4:
        return _mosaic(np.linalg.norm(weight, axis=1))
    if weight.size % prod(model.inputs):
        return None
    return np.asarray(np.linalg.norm(weight.reshape(-1, channels, height, width), axis=(0, 1)))


def _mosaic(filters: Values) -> Values:
    """The filters in rows, with a line of nothing between them."""
    count, height, width = filters.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows = -(-count // columns)
    picture = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1))
    for k, one in enumerate(filters):
        top, left = k // columns * (height + 1), k % columns * (width + 1)
        picture[top : top + height, left : left + width] = one
    return picture


_AXES = {"rounds": "communication rounds", "megabytes": "megabytes sent by the clients", "seconds": "seconds"}
_LOOK: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "plot_bgcolor": "white",
    "paper_bgcolor": "white",
    "xaxis": {"gridcolor": "#e8e8e8", "linecolor": "#999", "zeroline": False},
    "yaxis": {"gridcolor": "#e8e8e8", "linecolor": "#999", "zeroline": False, "exponentformat": "power"},
    "hoverlabel": {"namelength": -1},
}


def _text(words: str) -> str:
    """Words as they are, for Plotly, which reads tags and a few entities, none of quotes."""
    return escape(words, quote=False)


def _along(one: Series, axis: str, points: int) -> list[float]:
    if axis == "rounds":
        return [int(t) for t in one.values("round", points)[0]]
    if axis == "megabytes":
        return [float(f"{v:.6g}") for v in 1e-6 * one.values("bytes_up", points).mean(0)]
    spent = one.values("train_seconds", points) + one.values("eval_seconds", points)
    return [float(f"{v:.6g}") for v in spent.mean(0)]


def _titles(count: int, axis: str) -> dict[str, Any]:
    return {f"xaxis{k + 1 if k else ''}.title.text": _AXES[axis] for k in range(count)}


def _buttons(x: float, choices: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    return {
        "type": "buttons",
        "direction": "right",
        "x": x,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 12},
        "showactive": True,
        "buttons": [{"label": label, "method": method, "args": args} for label, method, args in choices],
    }
