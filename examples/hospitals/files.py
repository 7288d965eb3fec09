"""The files of `fednmap example hospitals`, with the column that one of the four hospitals did not measure."""

import sys
from pathlib import Path

from fednmap.data.heart_disease import LEFT_OUT, hospital_files


def write(folder: Path) -> list[Path]:
    """HOSPITAL.csv for each of the four."""
    return hospital_files(folder, [column for column in LEFT_OUT if column != "cholesterol"])


if __name__ == "__main__":
    for path in write(Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals")):
        print(path)
