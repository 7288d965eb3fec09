"""200 damages to run folders: none is silent.

A damaged file is named by `fednmap train --resume` or refused in one line; what a run can make again it makes again, to
the same bits. A damage that changes nothing of what a file says, such as a space in run.toml, needs no word.
"""

import json
import random
import shutil
import tomllib
from collections import Counter
from contextlib import suppress

import pytest
from small import Heard, begin, outcome

from fednmap import Callback
from fednmap.names import InputError
from fednmap.runs.execution import execute
from fednmap.runs.folder import SUMS, RunFolder

KINDS = ("flip", "cut", "empty", "swap", "remove")
GIVEN = {"algorithms": ("fednmap", "fedavg", "fedmid"), "rounds": 12, "clients": 4, "checkpoint_every": 4}


class Fall(Callback):
    def on_round(self, round, totals):
        if round.t == 10:
            raise SystemExit


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A finished run, one that was killed, and a finished one with another seed to swap files with."""
    place = tmp_path_factory.mktemp("originals")
    begin(place / "finished", **GIVEN)
    begin(place / "other", seed=1, **GIVEN)
    with suppress(SystemExit):
        begin(place / "killed", Fall(), **GIVEN)
    return place


def files(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.name[0] != ".")


def do(kind, path, other, rng):
    """Damage the file; whether that was possible."""
    data = path.read_bytes()
    if kind == "flip":
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "remove":
        path.unlink()
    elif other.exists() and other.read_bytes() != data:
        path.write_bytes(other.read_bytes())
    else:
        return False
    return True


def means_the_same(path, data):
    """Whether a TOML or JSON file says what it said before."""
    read = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix)
    with suppress(ValueError, OSError):
        return read is not None and read(path.read_text()) == read(data.decode())
    return False


def look(folder):
    """What `--resume` says, and whether it refuses."""
    heard = Heard()
    try:
        execute(RunFolder.open(folder).config(), RunFolder(folder), heard)
    except InputError as error:
        return [str(error)], True
    return heard.lines, False


def damages(originals, tmp_path, count, seed):
    rng, silent, seen = random.Random(seed), [], Counter()
    whole = outcome(RunFolder(originals / "finished"))
    while sum(seen.values()) < count:
        state = rng.choice(("finished", "finished", "killed"))
        folder = shutil.copytree(originals / state, tmp_path / "run")
        name, kind = rng.choice(files(folder)), rng.choice(KINDS)
        path = folder / name
        data = path.read_bytes()
        # a file of the same name of another run, or of another method of this one
        twin = [folder / other for other in files(folder) if other.suffix == name.suffix and other != name]
        other = rng.choice([originals / "other" / name, *twin])
        if do(kind, path, other, rng):
            lines, refused = look(folder)
            assert not any("\n" in line for line in lines)
            what = f"{state} {kind} {name}"
            if not lines and not means_the_same(path, data):
                restored = path.exists() and path.read_bytes() == data
                if not restored and not (state == "killed" and outcome(RunFolder(folder)) == whole):
                    silent.append(what)
            elif not refused and name.name not in ("run.toml", SUMS) and name.parts[0] != "checkpoints":
                assert outcome(RunFolder(folder)) == whole, (what, lines)
            seen[state, kind] += 1
        shutil.rmtree(folder)
    return silent, seen


@pytest.mark.parametrize(
    ("count", "seed"), [(12, 0), pytest.param(200, 1, marks=[pytest.mark.slow, pytest.mark.ci(turn=9)])]
)
def test_no_damage_is_silent(originals, tmp_path, count, seed):
    silent, seen = damages(originals, tmp_path, count, seed)
    print(f"{count} damages, {len(silent)} silent; {dict(seen)}")
    assert silent == []


@pytest.mark.parametrize("kind", [k if k == "swap" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_damaged_model_of_a_finished_run_is_made_again_and_said(originals, tmp_path, command, kind):
    folder = shutil.copytree(originals / "finished", tmp_path / "run")
    path = folder / "models" / "fedavg-0.safetensors"
    whole = path.read_bytes()
    do(kind, path, folder / "models" / "fedmid-0.safetensors", random.Random(0))
    code, out, err = command("show", "run")
    assert code == 0
    assert "models/fedavg-0.safetensors is" in out + err
    code, _, err = command("compare", "--resume", "run", "--quiet", "--jobs", 1)
    assert code == 0
    assert "fedavg-0 is run again from its last intact checkpoint" in err
    assert path.read_bytes() == whole
    assert command("compare", "--resume", "run", "--quiet")[2] == ""


@pytest.mark.parametrize("kind", ["cut", "flip", pytest.param("remove", marks=pytest.mark.slow)])
def test_measurements_of_an_unfinished_run_are_made_again_and_said(originals, tmp_path, kind):
    whole = outcome(RunFolder(originals / "finished"))
    folder = shutil.copytree(originals / "killed", tmp_path / "run")
    path = folder / "metrics.csv"
    text = path.read_text()
    at = text.index(",objective,") + len(",objective,") + 3
    {"cut": lambda: path.write_text(text[:200]), "remove": path.unlink}.get(
        kind, lambda: path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    )()
    lines, refused = look(folder)
    assert not refused
    assert "metrics.csv does not hold the measurements before it" in lines[0]
    assert outcome(RunFolder(folder)) == whole


def test_the_list_is_one_that_sha256sum_reads(originals):
    import hashlib

    folder = originals / "finished"
    listed = dict(reversed(line.split("  ")) for line in (folder / SUMS).read_text().splitlines())
    assert {str(name) for name in files(folder)} - {SUMS} == listed.keys()
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in listed.items())


def test_an_edit_that_is_allowed_is_said(originals, tmp_path):
    folder = shutil.copytree(originals / "finished", tmp_path / "run")
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("rounds = 12", "rounds = 16"))
    lines, refused = look(folder)
    assert not refused
    assert "rounds is 16 and was 12 when the run began" in lines
    assert not [line for line in lines if line.startswith("run.toml")]
    assert {r["rounds"] for r in RunFolder(folder).results()} == {16}
