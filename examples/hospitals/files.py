"""The heart-disease patients as four hospitals have them: one CSV file each, with words, codes and gaps."""

import sys
from pathlib import Path

from fednmap.data import cache
from fednmap.data.heart_disease import ADDRESSES, HOSPITALS

COLUMNS = [
    *("age", "sex", "chest_pain", "pressure", "cholesterol", "sugar", "ecg"),
    *("heart_rate", "angina", "st_depression", "slope", "vessels", "thal"),
]
WORDS = {
    "sex": {"0": "female", "1": "male"},
    "chest_pain": {"1": "typical", "2": "atypical", "3": "not anginal", "4": "none"},
    "ecg": {"0": "normal", "1": "ST-T abnormal", "2": "thick left ventricle"},
    "sugar": {"0": "low", "1": "above 120"},
    "angina": {"0": "no", "1": "under exercise"},
    "outcome": {"0": "healthy"},
}
MOSTLY_MISSING = ("slope", "vessels", "thal")


def write(folder: Path) -> list[Path]:
    """HOSPITAL.csv for each of the four, from the public files; a gap is a question mark, as there."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for hospital, md5 in HOSPITALS.items():
        file = f"processed.{hospital}.data"
        path = cache.find("heart_disease", [file]) or cache.download("heart_disease", file, md5, ADDRESSES)
        lines = [",".join([*(name for name in COLUMNS if name not in MOSTLY_MISSING), "outcome"])]
        for line in cache.read(path).decode().split():
            row = dict(zip([*COLUMNS, "outcome"], line.split(","), strict=True))
            if hospital == "switzerland" and row["cholesterol"] == "0":
                row["cholesterol"] = "?"  # not measured there, and written as 0
            lines.append(",".join(word(name, cell) for name, cell in row.items() if name not in MOSTLY_MISSING))
        made.append(folder / f"{hospital}.csv")
        made[-1].write_text("\n".join(lines) + "\n")
    return made


def word(column: str, cell: str) -> str:
    """A code as what it stands for."""
    plain = cell.removesuffix(".0")
    if column not in WORDS or plain == "?":
        return cell
    return WORDS[column].get(plain, "sick" if column == "outcome" else cell)


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals")):
        print(path)
