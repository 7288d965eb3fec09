"""UCI heart disease: patients of four hospitals, a natural split; also divided and normalised as FLamby does it, and as
four CSV files with words, codes and gaps.

FLamby: du Terrail et al., FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic Healthcare
Settings, NeurIPS 2022; the rules are those of its code (owkin/FLamby) and of owkin/benchmark_flamby.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fednmap.data import cache
from fednmap.data.dataset import Dataset, hold_out
from fednmap.names import choose

# md5 as FLamby publishes them.
HOSPITALS = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
ADDRESSES = ("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",)
SLOPE, CA, THAL = 10, 11, 12
CHEST_PAIN, REST_ECG = 2, 6
FACTORS = (
    "age",
    "male",
    "blood pressure at rest",
    "cholesterol",
    "blood sugar above 120 mg/dl",
    "highest heart rate",
    "pain under exercise",
    "ST depression under exercise",
    "chest pain: atypical angina",
    "chest pain: not anginal",
    "chest pain: none",
    "ECG at rest: ST-T abnormal",
    "ECG at rest: thick left ventricle",
)

TRAIN = 0.66
SPLIT_SEED = 43
EPSILON = 1e-9
"""Added to a deviation before it divides."""
NORMALISED = {"flamby": False, "flamby-pooled": True}
"""Variant -> whether all hospitals share mean and deviation."""

COLUMNS = (
    *("age", "sex", "chest_pain", "pressure", "cholesterol", "sugar", "ecg"),
    *("heart_rate", "angina", "st_depression", "slope", "vessels", "thal", "outcome"),
)
LEFT_OUT = ("slope", "vessels", "thal", "cholesterol")
"""Mostly missing; and cholesterol, which Switzerland did not measure and wrote as 0."""
WORDS = {
    "sex": {"0": "female", "1": "male"},
    "chest_pain": {"1": "typical", "2": "atypical", "3": "not anginal", "4": "none"},
    "sugar": {"0": "low", "1": "above 120"},
    "ecg": {"0": "normal", "1": "ST-T abnormal", "2": "thick left ventricle"},
    "angina": {"0": "no", "1": "under exercise"},
    "outcome": {"0": "healthy", "1": "sick", "2": "sick", "3": "sick", "4": "sick"},
}


def heart_disease(variant: str | None = None, /) -> Dataset:
    """Heart disease or none: 740 patients of four hospitals (the clients), 13 features, 2 labels.

    The columns slope, ca and thal, mostly missing, are dropped, then every row with a missing value; the
    kinds of chest pain and of resting ECG become indicators. Features have mean 0 and deviation 1 over
    all training rows. Every fifth row of every hospital is for the test.

    variant: "flamby" divides and normalises the same rows as Fed-Heart-Disease, each hospital by the mean and deviation
             of that hospital's training rows; "flamby-pooled" by those of all training rows.

    Reference: Janosi et al., Heart disease, UCI machine learning repository, 1988; the choice of rows and
    columns is that of du Terrail et al., FLamby, NeurIPS 2022.
    """
    if variant is not None:
        pooled = choose("variant of heart-disease", variant, NORMALISED)  # before files are looked for
        x, y, clients = patients()
        test = held_out(y, clients, 1 - TRAIN, SPLIT_SEED, TRAIN)
        x = _normalised(x, ~test, torch.zeros_like(clients) if pooled else clients)
        return _described(Dataset(x[~test], y[~test], x[test], y[test], clients[~test], clients[test]))
    data = hold_out(*patients())
    mean, deviation = data.x_train.mean(0), data.x_train.std(0)
    return _described(replace(data, x_train=(data.x_train - mean) / deviation, x_test=(data.x_test - mean) / deviation))


def patients() -> tuple[Tensor, Tensor, Tensor]:
    """Features as they are, labels and hospitals of the patients with no missing value, in the files' order."""
    rows, clients = [], []
    for i, hospital in enumerate(HOSPITALS):
        table = np.array(cells(hospital))
        table = np.delete(table, (SLOPE, CA, THAL), axis=1)
        table = table[~(table == "?").any(axis=1)].astype(np.float32)
        rows.append(torch.from_numpy(table))
        clients.append(torch.full((len(table),), i, device="cpu"))
    pooled = torch.cat(rows)
    plain = [j for j in range(pooled.shape[1] - 1) if j not in (CHEST_PAIN, REST_ECG)]
    kinds = [one_hot(pooled[:, j].long() - pooled[:, j].long().min())[:, 1:] for j in (CHEST_PAIN, REST_ECG)]
    return torch.cat([pooled[:, plain], *kinds], dim=1), (pooled[:, -1] > 0).long(), torch.cat(clients)


def cells(hospital: str) -> list[list[str]]:
    """Return the cells of a hospital's file, row by row; "?" is missing."""
    name, file, md5 = "heart_disease", f"processed.{hospital}.data", HOSPITALS[hospital]
    path = cache.find(name, [file]) or cache.download(name, file, md5, ADDRESSES)
    return [line.split(",") for line in cache.read(path, md5).decode().split()]


def _described(data: Dataset) -> Dataset:
    return replace(data, features=FACTORS, labels=("healthy", "sick"), sites=tuple(HOSPITALS))


def held_out(labels: Tensor, clients: Tensor, test: float, seed: int, train: float | None = None) -> Tensor:
    """Return which rows are for the test, a mask: drawn by client, by label if each has more than two of its rows."""
    from sklearn.model_selection import train_test_split  # takes a second to import

    kept = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    for i in torch.unique(clients):
        rows = (clients == i).nonzero().squeeze(1).numpy()
        _, counts = torch.unique(labels[rows], return_counts=True)
        by_label = labels[rows].numpy() if len(counts) > 1 and bool((counts > 2).all()) else None
        _, chosen = train_test_split(rows, test_size=test, train_size=train, random_state=seed, stratify=by_label)
        kept[chosen] = True
    return kept


def _normalised(x: Tensor, train: Tensor, groups: Tensor) -> Tensor:
    """Each group less the mean of its training rows, over their deviation."""
    found = torch.empty_like(x)
    for i in torch.unique(groups):
        mine = groups == i
        known = x[mine & train]
        found[mine] = (x[mine] - known.mean(0)) / (known.std(0) + EPSILON)
    return found


def hospital_files(folder: Path, left_out: Sequence[str] = LEFT_OUT) -> list[Path]:
    """Write HOSPITAL.csv for each of the four into `folder`; what is missing is an empty cell."""
    tables = {hospital: _table(hospital, left_out) for hospital in HOSPITALS}
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for hospital, lines in tables.items():
        made.append(folder / f"{hospital}.csv")
        made[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return made


def _table(hospital: str, left_out: Sequence[str]) -> list[str]:
    lines = [",".join(name for name in COLUMNS if name not in left_out)]
    for found in cells(hospital):
        row = dict(zip(COLUMNS, found, strict=True))
        if hospital == "switzerland" and row["cholesterol"] == "0":
            row["cholesterol"] = "?"
        lines.append(",".join(_word(name, cell) for name, cell in row.items() if name not in left_out))
    return lines


def _word(column: str, cell: str) -> str:
    """A code as what it stands for."""
    plain = "" if cell == "?" else cell.removesuffix(".0")
    return WORDS.get(column, {}).get(plain, plain)
