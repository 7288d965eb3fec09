"""Wrong inputs by the thousand: each must end with one line, within 5 seconds, in less than 1 GB.

    python tests/attacks/fuzz.py [COUNT] [SEED]

An input is a folder of files and the words of a command, drawn from its seed; input SEED can be made again by its
number. The command runs in this process, 20 inputs in a fork, so that time and memory are those of the command. The 5
seconds are processor time, because other programs share the machine; the longest time on the clock is printed too.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

SECONDS, BATCH = 5.0, 20
NASTY = [
    *("", " ", "nan", "NaN", "inf", "-inf", "1e308", "-1e308", "1e-308", "1e999", "0", "-0", "-1", "0.5", "1_000"),
    *("18446744073709551617", "9223372036854775808", "99999999999999999999999999", "1e5000", "0x10", "True", "?"),
    *("word", '"', "'", ",", ";", "\t", "\0", "\ufeff", "ü", "日本", "a b", "[x]", "=1+1", "../x", "2020-01-01", "1,5"),
    *("x" * 200_000, "9" * 5_000, "\r", "#", "--help", "{", "%s", "auto", "1:2:3", "l1:", ":"),
]
REGS = ["l1", "l2", "elastic-net", "mcp", "scad", "group-l1", "box", "nuclear", "none", "l0", "simplex", "tv"]
OPTIONS = [
    *("rounds", "clients", "local-steps", "batch-size", "eta-a", "gamma", "eta-s", "participation", "drop", "seed"),
    *("dp-clip", "dp-epsilon", "dp-noise", "dp-delta", "tol", "patience", "time-limit", "eval-every", "partition"),
    *("checkpoint-every", "chunk", "measure-gamma", "schedule", "secagg-bits", "memory", "set", "model", "data"),
    *("async", "delays", "slowdown", "staleness", "dp-budget", "dp-forget", "aggregate", "attack", "sampler"),
    *("topology", "dtype"),
]
FORMULAS = [
    *("y ~ {}", "y ~ age * {}", "sex ~ age + {}", "{} ~ age", "y ~ bs(age, {})", "y ~ C({})", "y ~ I(age ** {})"),
    *("y ~ scale(age, ddof={})", "y ~ (age + x + sex) ** {}", "Surv(age, y) ~ x + {}", "y ~ `{}`", "y ~ log({}) : sex"),
    *("y ~ {}.__class__", "y ~ I(__import__('os').system({}))", "y ~ I(age @ {})", "y ~ x | {}", "y ~ bs(x, knots={})"),
]
SHORT = ["--clients", "3", "--rounds", "2", "--quiet"]
SMALL = ["--data", "sparse-regression", "--model", "least-squares", "--rounds", "2", "--quiet"]


def text_table(rng, rows=12):
    """A CSV of numbers and words with some of its cells, names or bytes damaged."""
    names = ["age", "sex", "x", "y"]
    cells = [[str(rng.randrange(20, 80)), rng.choice("mf"), f"{rng.random():.3f}", str(k % 2)] for k in range(rows)]
    for _ in range(rng.randrange(0, 4)):
        what = rng.randrange(7)
        row, column = rng.randrange(rows), rng.randrange(4)
        if what < 3:
            cells[row % len(cells)][column % len(cells[row % len(cells)])] = rng.choice(NASTY)
        elif what == 3:
            names[column] = rng.choice([*NASTY, "age"])
        elif what == 4:
            for each in cells:
                each[column % len(each)] = rng.choice(["1", "", rng.choice(NASTY)])
        elif what == 5:
            cells[row % len(cells)] = cells[row % len(cells)][: rng.randrange(5)] or [""]
        else:
            cells = cells[: rng.randrange(1, 4)]
    mark = rng.choice([",", ",", ",", ";", "\t", "|"])
    return damaged("\n".join(mark.join(line) for line in [names, *cells]).encode() + b"\n", rng)


def damaged(data, rng, often=0.15):
    if rng.random() > often:
        return data
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        [data[:at], data[:at] + rng.randbytes(8) + data[at:], data[:at] + bytes(9), b"", data * 3, data[at:]]
    )


def svm_table(rng):
    lines = []
    for k in range(rng.randrange(1, 30)):
        label = rng.choice([str(k % 2), str(k % 2), "-1", rng.choice(NASTY)[:40]])
        pairs = [f"{j}:{rng.choice(['1', '0.5', rng.choice(NASTY)[:40]])}" for j in sorted(rng.sample(range(1, 9), 3))]
        if rng.random() < 0.1:
            pairs = [f"{rng.choice(['0', '-1', '2000000000', '99999999999', 'x', ''])}:1"]
        lines.append(" ".join([label, *pairs]))
    if rng.random() < 0.03:  # as many labels as rows
        lines = [f"{k} 1:1" for k in range(100_000)]
    return damaged("\n".join(lines).encode() + b"\n", rng)


def parquet(path, rng):
    import datetime
    import decimal

    import polars

    rows = 10
    kinds = {
        "lists": [[1, 2]] * rows,
        "bytes": [b"\xff\0"] * rows,
        "structs": [{"a": 1, "b": "x"}] * rows,
        "dates": [datetime.date(2020, 1, 1)] * rows,
        "times": [datetime.datetime(2020, 1, 1, 5)] * rows,
        "decimals": [decimal.Decimal("1.5")] * rows,
        "booleans": [True, False] * (rows // 2),
        "gaps": [None] * rows,
        "large": [2**63 - 1] * rows,
        "words": ["a", "b"] * (rows // 2),
        "numbers": [rng.random() for _ in range(rows)],
        "infinite": [float("inf"), 1.0] * (rows // 2),
    }
    names = rng.sample(sorted(kinds), rng.randrange(1, 4))
    polars.DataFrame({name: kinds[name] for name in names} | {"y": [0, 1] * (rows // 2)}).write_parquet(path)
    path.write_bytes(damaged(path.read_bytes(), rng))


def a_table(place, rng):
    (place / "t.csv").write_bytes(text_table(rng))
    model = rng.choice(["logistic", "least-squares", "auto"])
    return ["train", "--data", "csv:t.csv", "--model", model, *SHORT]


def some_sites(place, rng):
    (place / "s").mkdir()
    for name in ("a", "b"):
        if rng.random() < 0.25:
            parquet(place / "s" / f"{name}.parquet", rng)
        else:
            (place / "s" / f"{name}.csv").write_bytes(text_table(rng))
    words = ["fit", "--data", "csv:s", "--target", rng.choice(["y", "y", "y", "sex", "age", rng.choice(NASTY)])]
    words += ["--family", rng.choice(["logistic", "gaussian", "poisson", "cox"])] if rng.random() < 0.4 else []
    lam = rng.choice(["0.1", rng.choice(NASTY)])
    penalty = rng.choice(["none", "l1", "mcp", "ridge", "elasticnet", "group"])
    words += ["--penalty", penalty] if rng.random() < 0.5 else []
    if rng.random() < 0.3:
        words[3:5] = ["--formula", rng.choice(FORMULAS).format(rng.choice([*NASTY[:-9], "x", "sex", "5", "bs(x, 4)"]))]
    if rng.random() < 0.3:
        words += ["--site-effects", rng.choice(["intercepts", "sparse", "all", "random", rng.choice(NASTY)])]
        words += ["--mu", rng.choice(["0.1", rng.choice(NASTY)])] if rng.random() < 0.3 else []
    words += rng.choice([[], [], ["--heterogeneity"], ["--path"], ["--cv", rng.choice(["2", "sites", *NASTY])]])
    return [*words, "--lam", lam, "--max-rounds", "30", "--quiet", "--out", "run"]


def a_sparse_file(place, rng):
    (place / "t.svm").write_bytes(svm_table(rng))
    model = rng.choice(["logistic", "least-squares", "auto"])
    return ["train", "--data", "svm:t.svm", "--model", model, *SHORT]


def options(place, rng):
    words = ["train", *SMALL]
    for _ in range(rng.randrange(1, 3)):
        name = rng.choice(["reg", *OPTIONS])
        value = rng.choice([*NASTY, "1", "2", "1e300", "1e-300"]).replace("\0", "0")[:3000]
        if name == "reg":
            value = f"{rng.choice(REGS)}:{value}{rng.choice(['', '', ',1', ',' + rng.choice(NASTY)[:20]])}"
        words += [f"--{name}", value]
    return [*words, "--reg", "l1:0.01"] if "--reg" not in words and rng.random() < 0.5 else words


def a_config(place, rng):
    text = 'data = "sparse-regression"\nmodel = "least-squares"\nclients = 10\nrounds = 2\nreg = "l1:0.1"\n'
    name = rng.choice(["rounds", "eta_a", "set", "reg", "algorithms", "data", "nonsense", "dtype", "topology"])
    value = rng.choice(["1", "[]", "{}", '""', "nan", "-1", "true", "[[1]]", '"x"', "1979-05-27", "1e999"])
    text = "".join(f"{line}\n" for line in text.splitlines() if not line.startswith(name)) + f"{name} = {value}\n"
    (place / "c.toml").write_bytes(damaged(text.encode(), rng, 0.4))
    return ["train", "--config", "c.toml", "--rounds", "2", "--quiet"]  # else a cut file may ask for the default ones


def a_run_folder(place, rng):
    kind = rng.choice(["run", "run", "fitted"])
    shutil.copytree(original() / kind, place / "run")
    (place / "new.csv").write_text("age,sex,x\n50,f,0.5\n")
    files = sorted(p for p in (place / "run").rglob("*") if p.is_file() and p.name[0] != ".")
    for path in rng.sample(files, rng.randrange(1, 3)):
        data = path.read_bytes()
        if rng.random() < 0.2:
            path.unlink()
        elif path.suffix == ".toml" and rng.random() < 0.5:
            path.write_bytes(rng.choice([b"", b"rounds = 3\n", b'algorithms = "x"\n', b"a = [[[[" * 400]))
        else:
            path.write_bytes(damaged(data, rng, 1.0))
    words = rng.choice([["show"], ["report"], ["export"], ["train", "--quiet", "--resume"], ["predict"]])
    words = ["predict"] if kind == "fitted" and rng.random() < 0.5 else words
    return [*words, "run", *(["new.csv"] if words == ["predict"] else [])]


KINDS = [a_table, some_sites, some_sites, a_sparse_file, options, options, a_config, a_run_folder]
_original = []
SLOWEST = [0.0, 0.0]  # of the inputs so far: seconds on the clock, of the processor


def original():
    """The folder of a finished run and of a fit, made once."""
    if not _original:
        place = Path(tempfile.mkdtemp(prefix="fuzz-"))
        with contextlib.chdir(place):
            assert command(["train", *SMALL, "--checkpoint-every", "1", "--out", "run"])[0] == 0
            lines = [f"{20 + 7 * k % 50},{'fm'[k % 2]},{k % 5 / 5},{k % 3 % 2}" for k in range(30)]
            Path("t.csv").write_text("\n".join(["age,sex,x,y", *lines]) + "\n")
            words = ["--formula", "y ~ age + bs(x, 4) + sex", "--quiet", "--out", "fitted"]
            assert command(["fit", "--data", "csv:t.csv", *words])[0] == 0
        _original.append(place)
    return _original[0]


class Hang(BaseException):
    pass


def hang(*_):
    raise Hang


def command(words):
    """The exit code and what was written on stderr."""
    from fednmap import cli

    out, err = io.StringIO(), io.StringIO()
    old, sys.argv = sys.argv, ["fednmap", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        return end.code, err.getvalue()
    except Exception:
        return 70, traceback.format_exc()
    finally:
        sys.argv = old
    return 70, "no exit"


def attempt(number):
    """Run input `number`: what is wrong with how it ended, or nothing."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        words = rng.choice(KINDS)(Path(folder), rng)
        signal.signal(signal.SIGPROF, hang)  # seconds of this process, however busy the machine is
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        began = time.perf_counter(), time.process_time()
        try:
            code, err = command([word.replace("\0", "0") for word in words])
        except Hang:
            return f"{number}: more than {SECONDS:g} s: {' '.join(words)[:300]}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            SLOWEST[:] = map(max, SLOWEST, (time.perf_counter() - began[0], time.process_time() - began[1]))
    lines = [line for line in err.splitlines() if line.startswith("fednmap: ") and "warning:" not in line]
    if code == 70 or "Traceback" in err:
        return f"{number}: traceback: {' '.join(words)[:300]}\n{err[-1500:]}"
    few = 1 <= len(lines) <= 4  # one for each mistake
    if code not in (0, 1, 2) or (code and not few) or any(len(line) > 2000 for line in err.splitlines()):
        return f"{number}: exit {code}, {len(lines)} lines: {' '.join(words)[:300]}\n{err[:600]}"
    return ""


def batch(numbers, pipe):
    warnings.resetwarnings()
    warnings.simplefilter("ignore", ResourceWarning)
    os.environ["MPLBACKEND"] = "agg"
    found = [bad for bad in map(attempt, numbers) if bad]
    pipe.send((found, [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, *SLOWEST]))


def fuzz(count, seed=0):
    """Run inputs seed, ..., seed + count - 1; what went wrong, the largest memory in MB, the longest times."""
    import torch  # noqa: F401  # forks have it already

    import fednmap.commands.fit
    import fednmap.commands.train  # noqa: F401

    original()
    context, wrong, most = multiprocessing.get_context("fork"), [], [0, 0.0, 0.0]
    for first in range(seed, seed + count, BATCH):
        mine, theirs = context.Pipe()
        numbers = range(first, min(first + BATCH, seed + count))
        process = context.Process(target=batch, args=(numbers, theirs))
        process.start()
        theirs.close()
        try:
            found, used = mine.recv() if mine.poll(60 + 10 * SECONDS * BATCH) else ([f"{numbers}: hangs"], most)
        except EOFError:
            found, used = [f"{numbers}: the process ended"], most
        process.kill()
        process.join()
        wrong, most = wrong + found, [max(pair) for pair in zip(most, used, strict=True)]
    return wrong, most


if __name__ == "__main__":
    began = time.perf_counter()
    given = [int(word) for word in sys.argv[1:]]
    count, seed = given[0] if given else 60, given[1] if len(given) > 1 else 0
    wrong, (memory, clock, processor) = fuzz(count, seed)
    print("\n\n".join(wrong))
    found = {"inputs": count, "wrong": len(wrong), "MB": memory, "longest": clock, "longest of processor": processor}
    print(json.dumps(found | {"seconds": time.perf_counter() - began}))
