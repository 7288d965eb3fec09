"""Tables as they are: files, gaps, words, and what is refused by name."""

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest

from fednmap import InputError
from fednmap.tables import FederatedPreprocessor, read, read_sites, table
from fednmap.tables.files import read_as_text


def hospitals():
    basel = {"age": [50.0, None, 61.0], "sex": ["f", "m", None], "ecg": ["a", "a", "b"]}
    bern = {"age": [70.0, 64.0, 55.0], "sex": ["f", "m", "m"], "ecg": ["c", "a", "a"]}
    return basel, bern


@pytest.mark.parametrize("frame", [dict, pd.DataFrame, pl.DataFrame])
def test_union_of_levels_and_means_over_sites(frame):
    basel, bern = map(frame, hospitals())
    fitted = FederatedPreprocessor().fit({"basel": basel, "bern": bern})
    assert list(fitted.get_feature_names_out()) == ["age", "age=missing", "sex=m", "sex=missing", "ecg=b", "ecg=c"]
    assert fitted.transform(basel).tolist() == [[50, 0, 0, 0, 0, 0], [60, 1, 1, 0, 0, 0], [61, 0, 0, 1, 1, 0]]
    assert fitted.transform(bern)[0].tolist() == [70, 0, 0, 0, 0, 1]
    assert [s.missing for s in fitted.statistics_] == [1, 1, 0]
    assert fitted.groups()["ecg"] == ["ecg=b", "ecg=c"]


def test_one_frame_with_sites_is_the_same():
    basel, bern = (pd.DataFrame(h) for h in hospitals())
    pooled = pd.concat([basel, bern])
    one = FederatedPreprocessor().fit(pooled, sites=["basel"] * 3 + ["bern"] * 3)
    two = FederatedPreprocessor().fit({"basel": basel, "bern": bern})
    assert one.statistics_ == two.statistics_


def test_medians_by_counts():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=7), rng.normal(3, 2, size=20), rng.normal(size=4)]
    by_counts = FederatedPreprocessor("median").fit({str(k): {"v": part} for k, part in enumerate(parts)})
    assert by_counts.statistics_[0].fill == pytest.approx(np.median(np.concatenate(parts)), abs=1e-12)
    fitted = FederatedPreprocessor("median").fit({"a": {"v": [1.0, 2.0, None]}, "b": {"v": [9.0, 2.0, 30.0]}})
    assert fitted.transform({"v": [None]})[0, 0] == pytest.approx(2.0)


def test_standardised_by_sums():
    rng = np.random.default_rng(1)
    a, b = {"v": rng.normal(5, 2, 40)}, {"v": rng.normal(9, 1, 60)}
    fitted = FederatedPreprocessor(standardize=True).fit({"a": a, "b": b})
    both = np.concatenate([fitted.transform(a), fitted.transform(b)])
    assert both.mean() == pytest.approx(0, abs=1e-12)
    assert both.std() == pytest.approx(1)


def fitted():
    basel, bern = hospitals()
    return FederatedPreprocessor().fit({"basel": basel, "bern": bern})


def sites(**changes):
    """Two sites; `changes` are columns of bern, None to leave one out."""
    basel, bern = hospitals()
    bern = {name: values for name, values in (bern | changes).items() if values is not None}
    basel |= {name: values for name, values in changes.items() if name not in basel}
    return {"basel": basel, "bern": bern}


REFUSED = [
    (lambda: FederatedPreprocessor().fit(sites(age=None)), "column 'age' is missing at site 'bern', and site 'basel'"),
    (
        lambda: FederatedPreprocessor().fit(sites(age=["x", "y", "y"])),
        "words at site 'bern' ('x', 'y') and numbers at site 'basel'",
    ),
    (lambda: FederatedPreprocessor().fit(sites(age=[None] * 3)), "column 'age' has no value at site 'bern'"),
    (lambda: FederatedPreprocessor().fit(sites(age=[1, 2, np.inf])), "column 'age' has infinity at site 'bern', row 2"),
    (lambda: FederatedPreprocessor().fit(sites(pid=["p1", "p2", "p3"])), "column 'pid' looks like an identifier"),
    (
        lambda: FederatedPreprocessor().fit(sites(patient_id=[11, 12, 13])),
        "column 'patient_id' looks like an identifier",
    ),
    (
        lambda: FederatedPreprocessor().fit(sites(seen=["2021-03-04", "2021-03-05", None])),
        "column 'seen' holds dates or times at site 'basel'; turn it into a number, such as days",
    ),
    (
        lambda: FederatedPreprocessor().fit(sites(seen=[datetime.date(2021, 3, k) for k in (1, 2, 2)])),
        "column 'seen' holds dates or times at site 'basel'",
    ),
    (lambda: FederatedPreprocessor("mode").fit(sites()), "unknown way to impute 'mode'"),
    (
        lambda: FederatedPreprocessor(max_levels=1).fit(sites()),
        "2 different words at site 'basel', more than max_levels = 1",
    ),
    (lambda: fitted().transform({"age": [1.0], "sex": ["f"]}), "column 'ecg' is missing; the model was fitted with it"),
    (
        lambda: fitted().transform({"age": [1.0], "sex": ["f"], "ecg": ["z"]}),
        "column 'ecg' has the level 'z' in row 0, which no site had; known are a, b, c",
    ),
    (
        lambda: fitted().transform({"age": ["old"], "sex": ["f"], "ecg": ["a"]}),
        "has 'old' in row 0; the model knows num",
    ),
    (lambda: table(np.ones((2, 2))), "a ndarray has no named columns"),
    (lambda: FederatedPreprocessor().fit({"v": [1.0, 2.0, 3.0]}, sites=[1, 1, np.nan]), "row 2 has no site"),
    (lambda: FederatedPreprocessor().fit({"v": [1.0, 2.0, 3.0]}, sites=["a", None, "b"]), "row 1 has no site"),
    (lambda: FederatedPreprocessor("median").fit({"a": {"v": [1.0, 2.0]}, "b": {"v": []}}), "site 'b' has no rows"),
]


@pytest.mark.parametrize(("attempt", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_line(attempt, message):
    with pytest.raises(InputError) as refused:
        attempt()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_level_called_missing_is_a_gap():
    said = {"basel": {"sex": ["f", "missing", None]}, "bern": {"sex": ["m", "f", "missing"]}}
    fitted = FederatedPreprocessor().fit(said)
    assert list(fitted.get_feature_names_out()) == ["sex=m", "sex=missing"]
    assert fitted.transform(said["basel"]).tolist() == [[0, 0], [0, 1], [0, 1]]
    assert fitted.statistics_[0].missing == 3


def test_columns_that_would_get_one_name_are_refused():
    with pytest.raises(InputError, match="columns 'a' and 'a=b' would both become 'a=b=c'"):
        FederatedPreprocessor().fit({"x": {"a": ["a", "b=c", "a"], "a=b": ["b", "c", "c"]}})


def test_the_median_fills_gaps_that_only_new_rows_have():
    fitted = FederatedPreprocessor("median").fit({"a": {"v": [1.0, 2.0, 3.0]}, "b": {"v": [2.0, 100.0]}})
    assert fitted.transform({"v": [None]})[0, 0] == pytest.approx(2.0)


def test_pandas_na_is_a_gap():
    frame = pd.DataFrame({"v": pd.Series([1, pd.NA, 3], dtype=object), "w": pd.Series(["a", pd.NA, "b"], dtype=object)})
    found = table(frame)
    assert np.isnan(found["v"][1])
    assert found["w"][1] is None


def test_codes_at_one_site_and_words_at_another():
    """Numbers that are codes are levels where the column is said to be categorical: 1 and 1.0 are the same."""
    said = {"a": {"ecg": [1.0, 2.0, 1.0]}, "b": {"ecg": ["1", "unknown", "2", "1"]}}
    fitted = FederatedPreprocessor(categorical=["ecg"]).fit(said)
    assert list(fitted.get_feature_names_out()) == ["ecg=2", "ecg=unknown"]
    assert fitted.transform({"ecg": [2]}).tolist() == [[1, 0]]
    with pytest.raises(InputError, match="name it among the categorical columns"):
        FederatedPreprocessor().fit(said)
    with pytest.raises(InputError, match="'eeg' is to be categorical, and no site has such a column"):
        FederatedPreprocessor(categorical=["eeg"]).fit(said | {"b": {"ecg": [1.0, 2.0, 2.0]}})


def test_a_code_is_the_same_level_whatever_stands_beside_it(tmp_path):
    """A file of codes alone is read as numbers, one with letters among them as words."""
    for name, codes in (("a", "01 02 0A 01"), ("b", "01 02 02"), ("c", "2.0 x 1")):
        (tmp_path / f"{name}.csv").write_text("v,code\n" + "".join(f"1.5,{code}\n" for code in codes.split()))
    sites = read_sites(f"csv:{tmp_path}")
    fitted = FederatedPreprocessor(categorical=["code"]).fit(sites)
    assert fitted.statistics_[1].levels == ("0A", "1", "2", "x")
    assert (
        fitted.transform(sites["a"])[:, 1:].argmax(1).tolist()[:2]
        == fitted.transform(sites["b"])[:2, 1:].argmax(1).tolist()
    )
    plain = FederatedPreprocessor().fit({"a": sites["a"]})
    assert plain.statistics_[1].levels == ("01", "02", "0A")
    assert plain.transform(sites["b"])[:, 1:].tolist() == [[0, 0], [1, 0], [1, 0]]  # 2 is 02
    versions = FederatedPreprocessor().fit({"a": {"v": ["1.1", "1.10", "x"]}})
    assert versions.transform({"v": ["1.1", "1.10"]}).tolist() == [[0, 0], [1, 0]]


def test_decimals_are_numbers(tmp_path):
    pl.DataFrame({"v": [Decimal("1.5"), Decimal("2.25"), None], "w": [1, 2, 3]}).write_parquet(tmp_path / "a.parquet")
    found = read(tmp_path / "a.parquet")["v"]
    assert found[:2].tolist() == [1.5, 2.25]
    assert np.isnan(found[2])


DATES: list[object] = [
    "2021-03-04",
    "2021/03/04",
    "4.3.2021",
    "04-03-2021",
    "03/04/21 10:30",
    "12:30",
    "4 Mar 2021",
    "Mar 4, 2021",
]
DATES += [
    datetime.datetime(2021, 3, 4, 5),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(days=3),
    np.timedelta64(9, "us"),
]
DATES += [pd.Timestamp("2021-03-04"), pd.Timedelta(3, "h"), np.datetime64("2021-03-04")]


@pytest.mark.parametrize("word", DATES)
def test_dates_are_refused(word):
    with pytest.raises(InputError, match="column 'seen' holds dates or times at site 'a'; turn it"):
        FederatedPreprocessor().fit({"a": {"seen": [word, word, word, word, "unknown"]}})


def test_all_refused_columns_are_named_in_one_error():
    frame = {"seen": ["2021-03-04"] * 3, "pid": ["a", "b", "c"], "bmi": [None] * 3, "age": [1, 2, 3]}
    with pytest.raises(InputError, match=r"exclude the column; also refused: 'pid' \(identifier\), 'bmi' \(empty\)"):
        FederatedPreprocessor().fit({"a": frame})


@pytest.mark.parametrize("name", ["PatientID", "patient_no", "Subject", "Unnamed: 0", "case.number", "id"])
def test_identifiers_are_refused_by_their_name(name):
    with pytest.raises(InputError, match=r"looks like an identifier .* exclude the column"):
        FederatedPreprocessor().fit({"a": {name: [17, 3, 5]}})


def test_numbers_that_count_the_rows_are_refused():
    with pytest.raises(InputError, match="column 'k' looks like an identifier"):
        FederatedPreprocessor().fit({"a": {"k": list(range(1, 31))}})


WRITTEN = {
    "crlf": b"age,sex\r\n50,f\r\n60,m\r\n",
    "bom": b"\xef\xbb\xbfage,sex\n50,f\n60,m\n",
    "semicolons": b"age;sex\n50,0;f\n60;m\n",
    "tabs": b"age\tsex\n50\tf\n60\tm\n",
    "quotes": b'"age","sex"\n"50","f"\n"60","m"\n',
    "spaces": b" age , sex\n50,f \n60, m\n",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_the_same_table_however_it_is_written(tmp_path, how):
    (tmp_path / "site.csv").write_bytes(WRITTEN[how])
    found = read(tmp_path / "site.csv")
    assert found["age"].tolist() == [50, 60]
    assert found["sex"].tolist() == ["f", "m"]


@pytest.mark.parametrize("text", ["v, w\n1, a\n2.5 , b\n NA, ?\n", "v; w\n1; a\n2,5; b\n ; NA\n"])
def test_spaces_beside_a_separator_are_not_part_of_a_cell(tmp_path, text):
    """Else numbers would be words, and each of them a level."""
    (tmp_path / "a.csv").write_text(text)
    found = read(tmp_path / "a.csv")
    assert found["v"][:2].tolist() == [1, 2.5]
    assert np.isnan(found["v"][2])
    assert found["w"].tolist() == ["a", "b", None]


@pytest.mark.parametrize("gap", ["NA", "n/a", "#N/A", "<NA>", "NULL"])
def test_a_gap_as_other_programs_write_it_makes_no_words_of_numbers(tmp_path, gap):
    (tmp_path / "a.csv").write_text(f"v,w\n1,a\n{gap},{gap}\n3,b\n")
    found = read(tmp_path / "a.csv")
    assert np.isnan(found["v"]).tolist() == [False, True, False]
    assert found["w"].tolist() == ["a", None, "b"]


def test_an_empty_line_is_no_row(tmp_path):
    (tmp_path / "a.csv").write_text('v,w\n1,a\n\n2,"b\n\nc"\n,\n\n\n')
    found = read(tmp_path / "a.csv")
    assert found["v"][:2].tolist() == [1, 2]
    assert found["w"].tolist() == ["a", "b\n\nc", None]
    (tmp_path / "b.csv").write_text("v,w\n\n\n")
    with pytest.raises(InputError, match="no rows"):
        read(tmp_path / "b.csv")


def test_a_line_with_cells_that_lack_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("u,v,w\n1,2,3\n4,5")
    with pytest.raises(InputError, match=r"a\.csv, row 2: 2 values for 3 columns; truncated"):
        read(tmp_path / "a.csv")


def test_commas_in_quotes_belong_to_the_word(tmp_path):
    (tmp_path / "site.csv").write_text('kind,"age, years"\n"a, b",3\nc,4\n')
    found = read(tmp_path / "site.csv")
    assert found["kind"].tolist() == ["a, b", "c"]
    assert found["age, years"].tolist() == [3, 4]


UNREADABLE = {
    "empty": (b"", "is empty, or its first line is; it must name the columns"),
    "header only": (b"age,sex\n", "has no rows"),
    "latin-1": ("größe,sex\n1,f\n".encode("latin-1"), "is not a CSV file in UTF-8"),
    "no header": (b"50,1\n60,0\n", "begins with numbers (50, ...); its first line must name the columns"),
    "one name twice": (b"a, a\n1,2\n", "has two columns called 'a'; names must differ"),
    "an index": (b",a\n0,2\n", "column 1 has no name; name it, or write the file without an index"),
    "too many cells": (b"a,b\n1,2\n1,2,3\n", "row 2: 3 values for 2 columns; truncated or damaged"),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_files_that_are_not_tables(tmp_path, why):
    written, message = UNREADABLE[why]
    (tmp_path / "site.csv").write_bytes(written)
    with pytest.raises(InputError) as refused:
        read(tmp_path / "site.csv")
    assert message in str(refused.value)
    assert "site.csv" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_is_a_site_per_file(tmp_path):
    basel, bern = hospitals()
    pl.DataFrame(basel).write_csv(tmp_path / "basel.csv", null_value="NA")
    pl.DataFrame(bern).write_parquet(tmp_path / "bern.parquet")
    (tmp_path / "README.txt").write_text("not a site")
    found = read_sites(f"csv:{tmp_path}")
    assert list(found) == ["basel", "bern"]
    assert np.isnan(found["basel"]["age"][1])
    assert found["basel"]["sex"][2] is None
    assert FederatedPreprocessor().fit(found).statistics_ == fitted().statistics_
    both = read_sites(f"csv:{tmp_path}/basel.csv,{tmp_path}/bern.parquet")
    assert list(both) == ["basel", "bern"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_name_of_a_file_is_no_pattern(tmp_path, kind):
    frame = pl.DataFrame({"v": [1.0, 2.0]})
    for name in ("site [1]", "a*"):
        path = tmp_path / f"{name}.{kind}"
        (frame.write_csv if kind == "csv" else frame.write_parquet)(path)
        (frame * 2).write_csv(tmp_path / "ab.csv")
        assert read(path)["v"].tolist() == [1.0, 2.0]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder"):
        read_sites(f"csv:{tmp_path}/nowhere")
    with pytest.raises(InputError, match=r"holds no \.csv or \.parquet file"):
        read_sites(f"csv:{tmp_path}")
    with pytest.raises(InputError, match="one file per site"):
        read_sites("heart-disease")
    (tmp_path / "empty.csv").write_text("age,sex\n")
    with pytest.raises(InputError, match="has no rows"):
        read_sites(f"csv:{tmp_path}/empty.csv")


def test_the_cells_of_a_parquet_file_are_read_as_they_are_written_there(tmp_path):
    """Ids are carried to predictions as text: no number may become another one."""
    ids = [9007199254740993, None, 3]
    pl.DataFrame({"pid": ids, "x": [0.5, None, 2.0]}).write_parquet(tmp_path / "a.parquet")
    assert read_as_text(tmp_path / "a.parquet", "pid") == ["9007199254740993", "", "3"]
    assert np.isnan(np.asarray(read(tmp_path / "a.parquet").columns["x"], float)[1])
