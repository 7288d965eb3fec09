"""Wrong inputs: one line each, in a moment, in little memory. The generator is `fuzz.py`; its seeds are fixed."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fednmap.data import cache, pictures
from fednmap.names import InputError

SECONDS, MEGABYTES = 20.0, 1000  # with the imports of the first command
TRAIN = ("--model", "logistic", "--clients", 2, "--rounds", 1, "--quiet")


@pytest.mark.parametrize(("count", "seed"), [(25, 0), pytest.param(3000, 1000, marks=pytest.mark.slow)])
def test_no_input_ends_in_a_traceback_a_hang_or_without_memory(count, seed):
    # in a Python of its own: it forks, which a process whose threads have worked must not
    script = Path(__file__).with_name("fuzz.py")
    done = subprocess.run([sys.executable, script, str(count), str(seed)], capture_output=True, text=True, check=True)
    *wrong, last = done.stdout.strip().splitlines()
    print(last)
    assert json.loads(last)["wrong"] == 0, "\n".join(wrong)
    assert json.loads(last)["MB"] < MEGABYTES


def huge_cell():
    Path("t.csv").write_text("a,y\n" + "1,0\n2,1\n" * 9 + "3,18446744073709551617\n")
    return ("train", "--data", "csv:t.csv", *TRAIN)


def huge_client():
    Path("t.csv").write_text("a,client,y\n" + "1,18446744073709551617,0\n2,7,1\n" * 9)
    return ("train", "--data", "csv:t.csv", *TRAIN)


def many_columns():
    names = ",".join(f"c{k}" for k in range(100_000))
    Path("t.csv").write_text(f"{names}\n" + ",".join("1" * 100_000) + "\n")
    return ("fit", "--data", "csv:t.csv,t.csv", "--target", "y")


def long_header():
    Path("t.csv").write_text("x" * 5_000_000 + ",y\n1,2\n")
    return ("train", "--data", "csv:t.csv", *TRAIN)


def many_names():
    Path("t.csv").write_text(",".join(f"c{k:0100d}" for k in range(40_000)) + "\n" + ",".join("1" * 40_000) + "\n")
    return ("fit", "--data", "csv:t.csv", "--target", "y")


def parquet(values):
    def make():
        import polars

        polars.DataFrame({"x": values, "y": [0, 1] * (len(values) // 2)}).write_parquet("t.parquet")
        return ("fit", "--data", "csv:t.parquet", "--target", "y")

    return make


def many_labels():
    Path("t.svm").write_text("".join(f"{k} 1:1\n" for k in range(100_000)))
    return ("train", "--data", "svm:t.svm", *TRAIN)


def option(name, value):
    return lambda: ("train", "--data", "sparse-regression", "--rounds", 2, "--quiet", f"--{name}", value)


NAMED = {
    "a label beyond 64 bits": huge_cell,
    "a client beyond 64 bits": huge_client,
    "100,000 columns": many_columns,
    "a header of 5 MB": long_header,
    "40,000 long names": many_names,
    "lists": parquet([[1, 2]] * 50_000),
    "bytes": parquet([b"\xff\0"] * 50_000),
    "structs": parquet([{"a": 1}] * 50_000),
    "100,000 labels": many_labels,
    "a huge penalty": option("reg", "l1:1e308"),
    "a huge clip": option("dp-clip", "1e308"),
}


@pytest.mark.parametrize("name", NAMED)
def test_one_line_in_a_moment(command, name):
    words = NAMED[name]()
    began = time.process_time()
    code, _, err = command(*words)
    assert time.process_time() - began < SECONDS
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert code in (0, 1, 2)
    assert len(lines) == (code != 0)
    assert all(len(line) < 1100 for line in lines)


def test_export_without_settings(command):
    assert command("train", "--data", "sparse-regression", "--rounds", 1, "--quiet", "--out", "run")[0] == 0
    Path("run/run.toml").write_text("")
    code, _, err = command("export", "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "run.toml names no method; put it back from a copy" in err


def test_what_a_fit_has_written_is_missing_or_empty(command):
    Path("t.csv").write_text("a,y\n" + "1,0\n2,1\n2,0\n" * 9)
    assert command("fit", "--data", "csv:t.csv", "--target", "y", "--quiet", "--out", "run")[0] == 0
    Path("run/coefficients.csv").write_text("")
    Path("run/report.html").unlink()
    code, out, err = command("show", "run")
    assert (code, err) == (0, "")
    assert "coefficients.csv is not the file that was written" in out
    code, _, err = command("report", "run")
    assert (code, err.count("\n")) == (2, 1)


def test_a_header_of_many_names_is_a_header(command):
    names = [f"gene_{k:08d}" for k in range(20_000)]
    Path("t.csv").write_text("\n".join([",".join([*names, "y"]), *(["0," * 20_000 + v for v in "010101"])]) + "\n")
    code, _, err = command("fit", "--data", "csv:t.csv", "--target", "z", "--quiet")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no column 'z'" in err


def test_a_packed_file_that_is_too_large_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LARGEST", 2**20)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(InputError, match="holds more than 1 MB, and the published file does not"):
        cache.read(path, "0")
    with pytest.raises(InputError, match="not a whole idx file"):
        pictures.parse_idx("x", b"\0\0\x08\x03" + b"\xff" * 12 + bytes(9))
