"""Options and settings under their former names: they work for one version more, and name the new one."""

import json
import subprocess
import sys
import tomllib

import pytest
from hospital_files import write_hospitals

from fednmap.data import load
from fednmap.estimators.fit_config import FitConfig, with_weight
from fednmap.flower.settings import read
from fednmap.names import InputError
from fednmap.runs.atomic_files import add_checksum, to_json
from fednmap.runs.configuration import Config, code_in
from fednmap.runs.execution import settings
from fednmap.runs.folder import RunFolder

SMALL = ("--model", "logistic", "--clients", 3, "--rounds", 2, "--quiet", "--json", "--out", "run")


@pytest.mark.filterwarnings("default::FutureWarning")
def test_train_takes_the_former_option_and_names_the_new_one(command, tmp_path):
    code, _, err = command("train", *SMALL, "--reg", "l1:0.02")
    assert (code, err) == (0, "fednmap: warning: --reg is now --penalty; use that name\n")
    assert tomllib.loads((tmp_path / "run" / "run.toml").read_text())["penalty"] == "l1:0.02"
    code, _, err = command("train", *SMALL, "--reg", "l1:0.02", "--penalty", "l1:0.1")
    assert code == 2
    assert "expected penalty once, got reg too, which is its former name; leave reg out" in err


@pytest.mark.filterwarnings("default::FutureWarning")
def test_fit_takes_the_former_options(command, tmp_path):
    data = ("fit", "--data", f"csv:{write_hospitals(tmp_path / 'hospitals')}", "--target", "outcome")
    former = ("--drop-columns", "time,event", "--max-rounds", 30, "--tol", 1e-5, "--lam", 0.02)
    today = ("--exclude", "time,event", "--rounds", 30, "--tol-absolute", 1e-5, "--penalty", "l1:0.02")
    (code, old, err), (_, new, _) = (
        command(*data, *words, "--quiet", "--json", "--out", out) for words, out in ((former, "old"), (today, "new"))
    )
    assert code == 0
    for name in ("--drop-columns is now --exclude", "--max-rounds is now --rounds", "--tol is now --tol-absolute"):
        assert f"fednmap: warning: {name}; use that name\n" in err
    old, new = json.loads(old), json.loads(new)
    assert (old["coefficients"], old["lam"]) == (new["coefficients"], new["lam"])


def test_no_help_shows_a_former_name():
    for name in ("train", "fit"):
        said = subprocess.run([sys.executable, "-m", "fednmap", name, "--help"], capture_output=True, text=True).stdout
        assert "--penalty" in said
        assert not {"--reg", "--drop-columns", "--max-rounds"} & set(said.split())


def test_settings_in_files_and_in_python():
    with pytest.warns(FutureWarning, match="reg is now penalty"):
        assert Config.make(reg="l1:0.5").penalty == "l1:0.5"
    with pytest.warns(FutureWarning, match="reg_only is now penalty_only"):
        assert read({"names": "a", "run-folder": "x", "reg-only": "weights"})[0].penalty_only == "weights"
    with pytest.warns(FutureWarning, match="max_rounds is now rounds"):
        assert FitConfig.make(target="y", max_rounds=7).rounds == 7
    assert code_in({"reg": "evil:Code:1"}) == ["evil:Code:1"]  # a file cannot have it loaded under its former name


def test_options_of_a_table(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,0\n2,1\n3,0\n4,1\n5,0\n6,1\n")
    with pytest.warns(FutureWarning, match="label is now target"):
        assert load(f"csv:{tmp_path / 't.csv'},label=a").features == ("b",)


def test_a_folder_with_former_names_is_shown_and_compared(tmp_path):
    config = Config.make(penalty="l1:0.5")
    folder = RunFolder.create(tmp_path / "run", config, "train")
    toml, place = folder.path / "run.toml", folder.path / "environment.json"
    toml.write_text(toml.read_text().replace("\npenalty =", "\nreg ="))
    facts = {name: v for name, v in folder.environment().items() if name not in ("check", "settings")}
    old = {"reg" if name == "penalty" else name: v for name, v in config.model_dump(mode="json").items()}
    place.write_bytes(to_json(add_checksum(facts | {"settings": old})))
    assert folder.about().penalty == "l1:0.5"
    with pytest.warns(FutureWarning, match="reg is now penalty"):
        assert folder.config() == config
    assert folder.check_settings(config.model_dump(mode="json")) == []
    with pytest.raises(InputError, match=r"penalty is 'l1:0\.4' and was 'l1:0\.5'"):
        folder.check_settings(Config.make(penalty="l1:0.4").model_dump(mode="json"))
    assert settings(config) == {"reg": "l1:0.5"}  # as the digests of older checkpoints have it


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"penalty": "l1"}, {"penalty": "l1"}),
        ({"penalty": "ridge:0.2"}, {"penalty": "ridge", "lam": 0.2}),
        ({"penalty": "scad:0.2,4"}, {"penalty": "scad:4", "lam": 0.2}),
        ({"penalty": "mcp:auto,2.5"}, {"penalty": "mcp:2.5"}),
        ({"penalty": "mcp:auto", "lam": 1.0}, {"penalty": "mcp", "lam": 1.0}),
        ({"penalty": "box:-1,1"}, {"penalty": "box:-1,1"}),
        ({"penalty": "sparse-group-lasso:0.1,0.3"}, {"penalty": "sparse-group-lasso", "lam": 0.4, "l1_ratio": 0.25}),
        ({"penalty": "l1:x"}, {"penalty": "l1:x"}),
    ],
)
def test_the_weight_of_a_penalty_is_written_as_in_train(given, found):
    assert with_weight(given) == pytest.approx(found)


def test_a_weight_is_given_once_and_a_shape_alone_warns():
    with pytest.raises(InputError, match=r"expected one weight of the penalty, got l1:0\.1 and lam; leave one out"):
        with_weight({"penalty": "l1:0.1", "lam": 0.1})
    with pytest.warns(FutureWarning, match="penalty mcp:3 is now mcp:auto,3"):
        assert with_weight({"penalty": "mcp:3"}) == {"penalty": "mcp:3"}
