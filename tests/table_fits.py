"""Fits of the hospitals' tables between machines, in one process; and all rows in one place."""

import numpy as np
from flower_grid import FakeGrid

from fednmap.flower import table_app
from fednmap.tables import FederatedPreprocessor, read, read_sites

NAMES = ("basel", "bern", "chur", "zug")


def fit(hospitals, load=None, fault=None, about=None, server=None, **settings):
    """The app in one process: its closing numbers and its run folder.

    server: settings that the server alone has.
    """
    folder = hospitals.parent
    given = {"names": ",".join(NAMES), "run-folder": str(folder / "run"), "deadline": 5.0}
    given |= {key.replace("_", "-"): v for key, v in settings.items()}
    app = table_app.client_app(load or (lambda context: read(hospitals / f"{context.node_config['client']}.csv")))
    grid = FakeGrid({101 + i: name for i, name in enumerate(NAMES)}, app, given, folder / "states", fault)
    grid.about = about or {}
    return table_app.fit(grid, *table_app.read(given | (server or {}))), folder / "run"


def pooled(hospitals, goals, drop, **options):
    """All rows in one place, as the estimators take them."""
    sites = read_sites(f"csv:{hospitals}")
    features = {name: t.without([*goals, *drop]) for name, t in sites.items()}
    preprocessor = FederatedPreprocessor(**options).fit(features)
    X = np.concatenate([preprocessor.transform(t) for t in features.values()])
    y = np.concatenate([np.stack([t[g] for g in goals], 1) for t in sites.values()])
    where = np.repeat(list(sites), [t.rows for t in sites.values()])
    return X, y[:, 0] if len(goals) == 1 else y, where, list(preprocessor.get_feature_names_out())
