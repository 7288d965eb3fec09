"""`fednmap example`: four files that `fit` reads, and what is refused."""

import csv

from public_data import needs

from fednmap.data.heart_disease import COLUMNS, LEFT_OUT
from fednmap.tables import read_sites


def test_hospitals_are_four_files_that_fit_reads(command, tmp_path):
    needs("heart_disease", "processed.va.data")
    code, out, err = command("example", "hospitals")
    assert (code, err) == (0, "")
    assert out.split() == [f"hospitals/{name}.csv" for name in ("cleveland", "hungarian", "switzerland", "va")]
    sites = read_sites("csv:hospitals/")
    assert {name: table.rows for name, table in sites.items()} == dict(
        cleveland=303, hungarian=294, switzerland=123, va=200
    )
    assert [*sites["va"].columns] == [name for name in COLUMNS if name not in LEFT_OUT]
    with open(tmp_path / "hospitals" / "va.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["outcome"] for row in rows} == {"healthy", "sick"}
    assert {row["sex"] for row in rows} == {"female", "male"}
    assert any(row["pressure"] == "" for row in rows)
    assert all("?" not in row.values() for row in rows)


def test_what_is_refused(command, tmp_path):
    code, _, err = command("example", "hospital")
    assert code == 2
    assert "hospitals" in err
    (tmp_path / "hospitals").mkdir()
    (tmp_path / "hospitals" / "mine.csv").write_text("a\n1\n")
    code, _, err = command("example", "hospitals")
    assert code == 2
    assert "not empty" in err
    assert [p.name for p in (tmp_path / "hospitals").iterdir()] == ["mine.csv"]
    code, _, err = command("example", "hospitals", "--out", "hospitals/mine.csv")
    assert (code, "--out" in err) == (2, True)
