"""The files of a Flower app: pyproject.toml with every setting, and the two apps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fednmap.flower.settings import Federation
from fednmap.runs.configuration import Config


def run_settings(config: Config, federation: Federation) -> dict[str, Any]:
    """The run configuration that `fednmap.flower.settings.read` turns back into the two records."""
    values = config.model_dump(exclude={"algorithms", "set", "clients", "drop", "trials"}) | federation.model_dump(
        mode="json"
    )
    values |= {"algorithm": config.algorithms[0], "names": ",".join(federation.names)}
    values["set"] = " ".join(f"{key}={_word(v)}" for key, v in config.set.items())
    return {key.replace("_", "-"): "" if v is None else v for key, v in values.items()}


def write_trial(folder: Path, run_config: Mapping[str, Any]) -> Path:
    """The app of `fednmap flower up`."""
    package = folder / "fednmap_trial"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A trial of a federation on one machine."""\n')
    for half in ("client", "server"):
        (package / f"{half}_app.py").write_text(
            f"from fednmap.flower.trial import {half} as app\n\n__all__ = ['app']\n"
        )
    project = {
        "project": {"name": "fednmap-trial", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fednmap",
                    "components": {
                        "serverapp": "fednmap_trial.server_app:app",
                        "clientapp": "fednmap_trial.client_app:app",
                    },
                    "config": dict(run_config),
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
