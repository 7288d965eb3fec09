"""The heart-disease patients as four hospitals have them: one CSV file each, with words, codes and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fednmap.data.heart_disease import HOSPITALS, cells

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


def hospital_files(folder: Path, left_out: Sequence[str] = LEFT_OUT) -> list[Path]:
    """Writes HOSPITAL.csv for each of the four into `folder`; what is missing is an empty cell."""
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
