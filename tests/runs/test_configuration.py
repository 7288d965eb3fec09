"""Configurations: what is written is what is read, and every mistake is told, in words, at once."""

import json
import random
import re
import tomllib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import small

from fednmap import data
from fednmap.algorithms import ALGORITHMS, Scaffnew
from fednmap.measure import problem_gamma
from fednmap.names import InputError
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare, settled
from fednmap.runs.folder import RunFolder

ANYBODY = sorted(name for name, kind in ALGORITHMS.items() if not kind.traits.full_participation)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
counts = st.integers(1, 2**40)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | words
configs = st.fixed_dictionaries(
    {},
    optional={
        "data": st.sampled_from(["digits", "mnist"]) | words.map("svm:{}".format),
        "test": st.none() | words,
        "model": st.just("auto") | words.map("mlp:{}".format),
        "clients": counts,
        "partition": words.map("dirichlet:{}".format),
        "algorithms": st.lists(st.sampled_from(ANYBODY), min_size=1, unique=True).map(tuple),
        "penalty": words.map("l1:{}".format),
        "penalty_only": st.none() | words,
        "gamma": st.none() | positive,
        "eta_a": positive,
        "eta_s": positive,
        "local_steps": counts,
        "rounds": st.integers(0, 2**40),
        "batch_size": st.integers(0, 2**40),
        "participation": st.floats(0, 1, exclude_min=True),
        "drop": st.floats(0, 1, exclude_max=True),
        "seed": st.integers(0, 2**32 - 1),
        "trials": counts,
        "dtype": st.sampled_from(["float32", "float64"]),
        "device": words,
        "eval_every": counts,
        "measure_gamma": st.none() | positive,
        "checkpoint_every": counts,
        "chunk": st.none() | counts,
        "set": st.dictionaries(st.sampled_from(["fedda.eta_s", "fednmap.Q", "zhang.eta_a"]), values),
    },
)


@given(configs)
@settings(max_examples=200, deadline=None)
def test_a_configuration_written_and_read_is_the_same(given):
    config = Config.make(**given)
    again = Config.make(**tomllib.loads(config.toml()))
    assert again == config
    assert again.toml() == config.toml()
    assert Config.make(**config.model_dump(mode="json")) == config
    kinds = {k: type(v) for k, v in config.set.items()}
    assert {k: type(v) for k, v in again.set.items()} == kinds


def lines(**values):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Config.make(**values)
    return str(caught.value).splitlines()


def test_all_mistakes_are_told_at_once():
    found = lines(rounds=-1, drop=1.5, gama=1, algorithms=("fedmap", "fedavg", "fedavg"), set={"fedda.eta": 1, "x": 2})
    assert [re.split(r"[ :]", line)[0] for line in found] == ["algorithms"] * 2 + [
        "rounds",
        "drop",
        "set",
        "set",
        "unknown",
    ]
    assert "did you mean 'fedmid'" in found[0] or "did you mean 'fednmap'" in found[0]
    assert "'fedavg' is named 2 times" in found[1]
    assert found[-1].startswith("unknown setting 'gama'; did you mean 'gamma'?")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rounds", -1, "rounds is -1; it must be a whole number, at least 0 (Communication rounds T)"),
        ("rounds", 2.5, "rounds is 2.5; it must be a whole number, at least 0"),
        ("rounds", "many", "rounds is 'many'; it must be a whole number, at least 0"),
        ("rounds", True, "rounds is True; it must be a whole number, at least 0"),
        ("local_steps", 0, "local_steps is 0; it must be a whole number, at least 1 (Local steps Q of a round)"),
        ("participation", 0, "participation is 0; it must be a number, above 0 and at most 1 (Share of the clients"),
        ("participation", 1.1, "participation is 1.1; it must be a number, above 0 and at most 1"),
        (
            "drop",
            1,
            "drop is 1; it must be a number, at least 0 and below 1 (Probability that a reply",
        ),
        ("gamma", float("inf"), "gamma is inf; it must be a number, above 0"),
        ("eta_a", float("nan"), "eta_a is nan; it must be a number, above 0 (Local step size"),
        ("seed", 2**32, "seed is 4294967296; it must be a whole number, at least 0 and below 4294967296"),
        ("dtype", "float16", "dtype is 'float16'; it must be 'float32' or 'float64'"),
        ("batch_size", [4], "batch_size is [4]; it must be a whole number, at least 0 (Samples per local step"),
        ("data", 3, "data is 3; it must be text"),
        ("data", "digit", "data: unknown data set 'digit'; did you mean 'digits'?"),
        ("model", "mlpp:3", "model: unknown model 'mlpp'; did you mean 'mlp'?"),
        ("partition", "sortd", "partition: unknown partition 'sortd'; did you mean 'sorted'?"),
        ("penalty", "elasticnet:1", "penalty: unknown regularizer 'elasticnet'; did you mean 'elastic-net'?"),
        ("algorithms", (), "algorithms is (); it must be a list of one name or more"),
        ("algorithms", "fednmap", "algorithms is 'fednmap'; it must be a list of one name or more"),
        ("set", {"fednmap.q": 3}, "set: unknown parameter of fednmap 'q'"),
        ("set", {"fednmp.Q": 3}, "set: unknown algorithm 'fednmp'; did you mean 'fednmap'?"),
        ("set", {"fednmap.Q": [3]}, "set is [3]; it must be a table of METHOD.PARAMETER = number, text, true or false"),
    ],
)
def test_a_mistake_says_what_was_given_what_is_allowed_and_what_it_means(setting, value, message):
    (line,) = lines(**{setting: value})
    assert line.startswith(message)


def test_long_and_strange_values_stay_on_one_line():
    (line,) = lines(rounds="x" * 500 + "\n\x1b[31m")
    assert len(line) < 200
    (line,) = lines(dtype="a\nb\x1b[2J")
    assert "\x1b" not in line


@pytest.mark.parametrize("content", ["rounds = ", "[[[", "a = 1\na = 2", "rounds = 1e", "= 3", '"""', "a.b.c = {"])
def test_what_is_no_toml_is_said_to_be(tmp_path, content):
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises(ValueError, match=r"run\.toml is not valid TOML"):
        Config.read(tmp_path / "run.toml")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read .*nowhere.toml: No such file or directory"):  # noqa: RUF043
        Config.read(tmp_path / "nowhere.toml")


STRANGE = [
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "true",
    "false",
    '""',
    '"auto"',
    "'x'",
    "[]",
    "{}",
    "[1,2]",
    "1979-05-27",
    "99999999999999999999",
    "0x10",
    "1_000",
    "0.5",
    "3",
    '"fednmap"',
    '["fednmap",3]',
    '"l1:"',
    '"mcp:1,1,1"',
    "'é\\'",
    '"digits:3"',
    '"csv:/nowhere"',
    '"svm:"',
    '"synthetic:1"',
    '"shards:0"',
    '"dirichlet:-1"',
    '"mlp:0"',
    '"mlp:a"',
    '"box:1,0"',
    '"l1:nan"',
    '"elastic-net:1,2,3"',
    '"l0:1"',
    '"cuda:99"',
    '"natural"',
    '"least-squares"',
    '"topk:0"',
    '{"fednmap.Q"=2.5}',
    '{"fednmap.gamma"=-1}',
    '{"fednmap.eta_a"="x"}',
    '{"zhang.Q"=true}',
]


def mutated(text, rng):
    """A configuration as it looks after a slip of the hand, or of the disk."""
    at, to = sorted(rng.randrange(len(text)) for _ in range(2))
    rows = text.splitlines()
    k = rng.choice([i for i, row in enumerate(rows) if "=" in row])
    name, _, value = rows[k].partition("=")
    kind = rng.randrange(9)
    if kind < 4:
        rows[k] = f"{name}= {rng.choice(STRANGE)}"
    elif kind == 4:
        rows.insert(rng.randrange(len(rows)), rows[k])
    elif kind == 5:
        rows[k] = f"{name[:-2]}x ={value}"
    elif kind == 6:
        return text[:at] + text[min(to, at + rng.randrange(30)) :]
    elif kind == 7:
        return text[:at] + "".join(chr(rng.randrange(1, 300)) for _ in range(3)) + text[at:]
    else:
        return text[:at] + chr(ord(text[at]) ^ (1 << rng.randrange(5))) + text[at + 1 :]
    return "\n".join(rows)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_thousand_mutated_files(tmp_path, monkeypatch):
    """Each is refused in words, or is run as it says: no other kind of error, no setting passed over."""
    digits, load = data.load("digits"), data.load
    monkeypatch.setattr(data, "load", lambda name, **options: digits if name == "digits" else load(name, **options))
    text, rng, path = small().toml(), random.Random(0), tmp_path / "run.toml"
    read, prepared = [], {}
    for _ in range(1000):
        mutant = mutated(text, rng)
        path.write_text(mutant, encoding="utf-8")
        config = told(Config.read, path)
        read.append(config)
        if config is None:
            continue
        for name, value in tomllib.loads(mutant).items():
            found = getattr(config, name)
            assert found == type(found)(value)
        if config.toml() not in prepared:
            prepared[config.toml()] = told(prepare, config)
    print(
        f"{read.count(None)} refused when read, {list(prepared.values()).count(None)} of {len(prepared)} when prepared"
    )
    assert read.count(None) > 300


def told(make, source):
    """What it makes, or None where an InputError has said in plain lines why not."""
    try:
        return make(source)
    except InputError as error:
        lines = str(error).splitlines()
    assert lines
    assert all(line.isprintable() for line in lines)
    return None


def test_files_of_earlier_versions_stay_readable(tmp_path):
    """A setting that is gone is ignored where it had no effect, and refused where it had one."""
    file = tmp_path / "run.toml"
    file.write_text("compile = false\nrounds = 3\n")
    assert Config.read(file).rounds == 3
    file.write_text("compile = true\n")
    with pytest.raises(ValueError, match="compile"):
        Config.read(file)


def test_a_setting_that_is_true_or_false():
    with pytest.raises(ValueError, match="secagg is 3; it must be true or false"):
        Config.make(secagg=3)


def written(tmp_path, command, *words):
    """The configuration in the run folder of a command, and the first measurement of every method."""
    path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    code, _, _ = command("compare", *words, "--out", path, "--quiet")
    folder = RunFolder.open(path)
    first = {job.method: curves["stationarity"][0] for job, curves in folder.curves().items()}
    last = {job.method: curves["stationarity"][-1] for job, curves in folder.curves().items()}
    return code, folder.config(), first, last


PROBLEM = ["--model", "logistic", "--clients", "4", "--batch-size", "0"]
SHORT = [
    *PROBLEM,
    *["--rounds", "20", "--eval-every", "10", "--algorithms", "fednmap,fedda"],
    *["--penalty", "elastic-net:0.001,0.01"],
]


@pytest.mark.slow
@pytest.mark.ci(turn=11)
def test_the_yardstick_belongs_to_the_problem(command, tmp_path):
    _, config, first, last = written(tmp_path, command, *SHORT)
    assert config.measure_gamma > 0
    others = (["--eta-a", "1000"], ["--gamma", "0.5"], ["--local-steps", "3"], ["--eta-s", "0.3"])
    for words in others:
        _, other, start, end = written(tmp_path, command, *SHORT, *words)
        assert other.measure_gamma == config.measure_gamma
        assert start == first  # the same first model in the same unit
        if "1000" in words:  # far too long a step, and it shows; 4 eta_a Q as a unit would hide it
            assert all(end[name] > last[name] for name in last)
            _, other, _, hidden = written(tmp_path, command, *SHORT, *words, "--measure-gamma", "40000")
            assert other.measure_gamma == 40000
            assert max(hidden.values()) < 1e-4 * min(end.values())


def test_all_trials_and_a_resumed_run_share_the_yardstick(command, tmp_path):
    words = [*SHORT, "--model", "mlp:3", "--algorithms", "fednmap", "--trials", "2"]
    _, config, _, _ = written(tmp_path, command, *words)
    experiment = settled(prepare(config))
    assert experiment.config == config
    assert settled(prepare(config.model_copy(update={"seed": 1}))).config.measure_gamma == config.measure_gamma
    own = prepare(small(model="mlp:3", seed=1))
    assert own.measure_gamma == problem_gamma(own.problem, own.phi, own.problem.start)
    assert own.measure_gamma is own.measure_gamma  # measured once


def test_tuning_and_the_run_after_it_use_the_same_yardstick(command, tmp_path):
    plain = json.loads(command("tune", *PROBLEM, "--budget", "16", "--rounds", "1", "--json")[1])
    _, config, _, _ = written(tmp_path, command, *SHORT, "--eta-a", "auto", "--rounds", "1")
    assert plain["measure_gamma"] == config.measure_gamma
    unset = config.model_copy(update={"measure_gamma": None})
    assert prepare(unset).measure_gamma == config.measure_gamma


def test_gamma_follows_the_steps_of_its_own_method():
    steps = {"fednmap.eta_a": 0.02, "fednmap.eta_s": 0.5, "fednmap.Q": 3}
    common = prepare(small()).algorithm("fednmap")
    assert common.gamma == pytest.approx(4 * common.eta_a * common.eta_s * common.Q)
    experiment = prepare(small(set=steps))
    own = experiment.algorithm("fednmap")
    assert own.gamma == pytest.approx(4 * 0.02 * 0.5 * 3)
    x = experiment.phi.prox(experiment.problem.start, experiment.gamma)
    torch.testing.assert_close(own.model(own.init(experiment.start(own))[0]), x)
    assert prepare(small(set=steps, gamma=0.7)).algorithm("fednmap").gamma == 0.7
    assert prepare(small(set=steps | {"fednmap.gamma": 0.3}, gamma=0.7)).algorithm("fednmap").gamma == 0.3


def test_a_trials_seed_reaches_methods_with_coins_of_their_own(monkeypatch):
    monkeypatch.setattr(Scaffnew, "seeded", lambda self, seed: replace(self, seed=seed), raising=False)
    config = small(algorithms=("scaffnew",), penalty="none", participation=1, drop=0)
    seeds = [prepare(config.model_copy(update={"seed": s})).algorithm("scaffnew").seed for s in (4, 5)]
    assert seeds == [4, 5]
    given = config.model_copy(update={"seed": 4, "set": {"scaffnew.seed": 9}})
    assert prepare(given).algorithm("scaffnew").seed == 9


def told_of(command, path, rows, *words):
    """Exit code and stderr of a short run on a table with two features."""
    path.write_text("a,b,label\n" + "".join(f"{a},{b},{y}\n" for a, b, y in rows))
    quick = ["--clients", "2", "--rounds", "1", "--model", "logistic", "--quiet", "--json"]
    code, _, err = command("train", "--data", f"csv:{path.name}", *quick, *words)
    err = "".join(line for line in err.splitlines(keepends=True) if "psi ended at" not in line)  # a table out of scale
    assert err.count("\n") == (code != 0 or "warning" in err)
    return code, err


@pytest.mark.filterwarnings("default")
def test_data_that_cannot_be_meant_are_refused_or_doubted(command, tmp_path):
    path, rng = tmp_path / "table.csv", random.Random(0)
    rows = [(rng.gauss(0, 1), rng.gauss(0, 1), k % 2) for k in range(40)]
    assert told_of(command, path, rows) == (0, "")
    code, err = told_of(command, path, [(a, b, 1) for a, b, _ in rows])
    assert (code, "all labels of csv:table.csv are the same" in err) == (2, True)
    code, err = told_of(command, path, rows, "--model", "least-squares")
    assert (code, "the targets of csv:table.csv are labels" in err) == (2, True)
    given = ["--data", "csv:table.csv,regression=true", "--model", "least-squares"]
    assert told_of(command, path, rows, *given) == (0, "")
    for scale in (1e-4, 1e5):
        code, err = told_of(command, path, [(a, scale * b, y) for a, b, y in rows])
        assert (code, "add --standardize, or no step size suits them all" in err) == (0, True)
    assert told_of(command, path, [(a, 1, y) for a, _, y in rows]) == (0, "")  # a column of ones is an intercept


@pytest.mark.filterwarnings("default")
def test_clients_that_the_data_bring_and_others_that_were_asked_for(command, tmp_path):
    lines = [f"{k % 7},{k % 5},{k % 4},{k % 2}" for k in range(80)]
    (tmp_path / "four.csv").write_text("\n".join(["a,b,client,label", *lines]))
    words = ["--data", "csv:four.csv", "--rounds", "1", "--model", "logistic", "--quiet", "--json", "--eta-a", "0.001"]
    assert command("train", *words)[2] == ""
    code, _, err = command("train", *words, "--clients", "20", "--out", "run")
    assert (code, err.count("\n")) == (0, 1)
    assert "clients is 20, and csv:four.csv brings its own 4; these are used" in err
    assert RunFolder.open(tmp_path / "run").config().clients == 4
    assert command("train", "--resume", "run", "--json", "--quiet")[2] == ""
    assert command("train", *words, "--clients", "5", "--partition", "iid")[2] == ""
    sweep = ["--over", "q", "--values", "1,2", "--trials", "2", "--eval-last", "1", "--out", "sweep"]
    assert command("speedup", *words, *sweep)[2] == ""


def test_noise_leaves_the_name_of_an_own_method(monkeypatch, tmp_path):
    (tmp_path / "relabelled.py").write_text("from fednmap.algorithms import FedNMap\n\nclass Mine(FedNMap): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    for clipping in ({}, {"dp_clip": 0.1}):
        experiment = prepare(Config.make(algorithms=("relabelled:Mine",), model="linear", **clipping))
        assert experiment.config.labels == {"relabelled:Mine": "Mine"}


def test_the_support_of_a_regression_is_that_of_its_coefficients():
    experiment = prepare(Config.make(data="sparse-regression", model="least-squares", intercept=True))
    x = torch.cat([experiment.dataset.truth, torch.ones(1)])  # the intercept last
    assert [f(x) for f in experiment.metrics().values()] == [1.0, 1.0]
