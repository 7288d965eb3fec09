"""What a site says of itself before the first round, and what does not fit together."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import zip_longest
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fednmap.flower.local import LocalProblem

TEXT = 200  # characters of a name, a version or a reason, as they are repeated

Number = Annotated[int, Field(strict=True, ge=0)]
Word = Annotated[str, Field(strict=True), AfterValidator(lambda text: text[:TEXT])]

ALIKE = {
    "fednmap": "fednmap {}",
    "columns": "{} columns",
    "inputs": "samples have shape {}",
    "labels": "{} labels",
    "metrics": "{} metrics",
    "dimension": "the model has {} parameters",
    "dtype": "computes in {}",
}
"""What all sites must have alike, in words."""


def versions() -> dict[str, str]:
    """On this machine."""
    return {"fednmap": version("fednmap"), "torch": str(torch.__version__), "python": platform.python_version()}


class Site(BaseModel):
    """What a site says of itself: sizes, names and versions, nothing of the data's values.

    dimension: of the model.
    inputs:    shape of one sample.
    columns:   names of the features; () where the site names none.
    labels:    names of the classes, in the order of their numbers; () where the site names none.
    metrics:   names of the site's own metrics.
    """

    model_config = ConfigDict(frozen=True)

    dimension: Number
    dtype: Word
    inputs: tuple[Number, ...]
    columns: tuple[Word, ...]
    labels: tuple[Word, ...]
    metrics: tuple[Word, ...]
    samples: Number
    test_samples: Number
    fednmap: Word
    torch: Word
    python: Word

    @classmethod
    def of(cls, local: LocalProblem) -> Site:
        return cls(
            dimension=len(local.start),
            dtype=str(local.start.dtype).removeprefix("torch."),
            inputs=local.problem.data.shape,
            columns=local.columns,
            labels=local.labels,
            metrics=tuple(local.metrics),
            samples=local.samples,
            test_samples=0 if local.test is None else len(local.test[1]),
            **versions(),
        )


def usual(sites: Mapping[str, Site]) -> Site:
    """What most sites say, field by field; of equally many, the first. The version is this machine's."""
    said = {name: Counter(getattr(site, name) for site in sites.values()) for name in Site.model_fields}
    most = {name: counts.most_common(1)[0][0] for name, counts in said.items()}
    return Site(**most | {"fednmap": versions()["fednmap"]})


def mismatches(sites: Mapping[str, Site], expected: Site) -> dict[str, str]:
    """Site -> what of it is not as expected; sites that fit are left out.

    >>> sizes = {"dimension": 20, "dtype": "float32", "inputs": (20,), "samples": 100, "test_samples": 0}
    >>> a = Site(**sizes, columns=(), labels=(), metrics=(), fednmap="1.0", torch="2.9", python="3.11")
    >>> mismatches({"a": a, "b": a.model_copy(update={"dimension": 19, "inputs": (19,)}), "c": a}, a)
    {'b': 'samples have shape (19,), expected (20,); the model has 19 parameters, expected 20'}
    """
    found = {name: "; ".join(_differences(site, expected)) for name, site in sites.items()}
    return {name: words for name, words in found.items() if words}


def _differences(site: Site, expected: Site) -> Iterator[str]:
    for field, words in ALIKE.items():
        given, due = getattr(site, field), getattr(expected, field)
        if given != due and field in ("columns", "labels", "metrics"):
            k, has, wants = next((k, a, b) for k, (a, b) in enumerate(zip_longest(given, due)) if a != b)
            yield f"{words.format(len(given))}, expected {len(due)}: number {k} is {has!r}, expected {wants!r}"
        elif given != due:
            yield f"{words.format(given)}, expected {due}"
