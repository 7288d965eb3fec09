"""TCGA-BRCA: survival of breast-cancer patients in six regions, a natural split."""

from __future__ import annotations

import csv
import io

import numpy as np
import torch

from fednmap.data import cache
from fednmap.data.dataset import Dataset
from fednmap.names import InputError

PATIENTS, DIVISION = "brca.csv", "train_test_split.csv"
SHA256 = {
    PATIENTS: "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
    DIVISION: "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
}
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
SOURCE = "flamby/datasets/fed_tcga_brca in the repository owkin/FLamby"
TERMS = "https://gdc.cancer.gov/access-data/data-access-processes-and-tools"


def tcga_brca() -> Dataset:
    """Time to death or censoring: 1,088 patients of six regions (the clients), 39 clinical features as they are.

    Targets have two columns, as `fednmap.problems.Cox` takes them: time in days, and event, 1 where the patient died
    and 0 where the time is censored. Rows, columns and the test part are those of Fed-TCGA-BRCA. The files are not
    downloaded: the terms of the GDC apply, and nobody may try to identify a patient.

    References: Liu et al., An integrated TCGA pan-cancer clinical data resource, Cell, 2018; du Terrail et al., FLamby,
    NeurIPS 2022.
    """
    head, *rows = csv.reader(io.StringIO(_text(PATIENTS)))
    columns = {name: j for j, name in enumerate(head)}
    features = tuple(name for name in head if name not in ("pid", "E", "T"))
    parts = {row["pid"]: row["fold2"] for row in csv.DictReader(io.StringIO(_text(DIVISION)))}
    rows = [row for row in rows if row[columns["pid"]] in parts]  # the others are of none of the regions
    kind, region = zip(*(parts[row[columns["pid"]]].split("_") for row in rows), strict=True)
    numbers = np.array([[row[columns[name]] for name in (*features, "T", "E")] for row in rows], dtype=np.float32)
    x, y = torch.from_numpy(numbers[:, :-2]), torch.from_numpy(numbers[:, -2:])
    clients, test = torch.tensor([int(i) for i in region]), torch.tensor([word == "test" for word in kind])
    return Dataset(
        *(x[~test], y[~test], x[test], y[test], clients[~test], clients[test]), features=features, sites=REGIONS
    )


def _text(file: str) -> str:
    path = cache.find("tcga_brca", [file])
    if path is None:
        places = " or ".join(str(folder) for folder in cache.folders("tcga_brca"))
        raise InputError(f"{file} of tcga-brca is not here; read {TERMS}, then put {SOURCE} into {places}")
    return cache.read(path, SHA256[file], "sha256").decode()
