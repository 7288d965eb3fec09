"""A client's name is bound to its node's key; a node that claims another's name is refused and logged."""

import logging
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key
from flower_grid import NAMES, Federation

from fednmap.flower.identity import Identities, fingerprint, make, node_key, prove

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")

NODES = {101 + i: name for i, name in enumerate(NAMES)}


@pytest.fixture
def keys(tmp_path):
    """A key for each node, and one that nobody knows; public keys beside them."""
    for name in (*NAMES, "mallory"):
        path = node_key(tmp_path / "keys" / name)
        private = load_ssh_private_key(path.read_bytes(), password=None)
        public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public + b" a comment\n")
    return tmp_path / "keys"


@pytest.fixture
def file(tmp_path, keys):
    identities = Identities(tmp_path / "clients.toml", pin=True)
    for name in NAMES:
        identities.add(name, (keys / f"{name}.pub").read_bytes())
    return identities.path


def with_keys(keys, nodes=NODES):
    return {node: {"key": str(keys / name)} for node, name in nodes.items()}


@contextmanager
def warnings(caplog):
    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        yield


def test_nodes_with_their_own_keys_take_part(tmp_path, keys, file):
    federation = Federation(tmp_path, rounds=2, clients_file=str(file), min_clients=4)
    assert federation.start(about=with_keys(keys))["took_part"] == dict.fromkeys(NAMES, 2)


@pytest.mark.parametrize("first", [True, False])
def test_an_impostor_is_refused_and_logged(tmp_path, keys, file, caplog, first):
    """A registered node, dora's, calls itself anna: before anna is there, or after."""
    about = with_keys(keys)
    nodes = {101: "anna", 102: "bert", 103: "cleo", (100 if first else 105): "anna"}
    about[100 if first else 105] = {"key": str(keys / "dora")}
    federation = Federation(tmp_path, rounds=2, clients_file=str(file), deadline=0.5)
    with warnings(caplog):
        closing = federation.start(nodes=nodes, about=about)
    assert closing["took_part"] == {"anna": 2, "bert": 2, "cleo": 2, "dora": 0}
    due, has = (fingerprint((keys / f"{name}.pub").read_bytes()) for name in ("anna", "dora"))
    node = 100 if first else 105
    assert f"node {node} refused: it calls itself anna, whose key is {due}, and has {has}" in caplog.text
    assert federation.coordinator.roster.nodes["anna"] == 101


def test_a_node_without_a_key_is_refused(tmp_path, keys, file, caplog):
    about = with_keys(keys)
    del about[103]
    with warnings(caplog):
        closing = Federation(tmp_path, rounds=1, clients_file=str(file), deadline=0.5).start(about=about)
    assert closing["took_part"]["cleo"] == 0
    assert "node 103 refused: it calls itself cleo and proves no key" in caplog.text


def test_the_first_key_is_pinned_and_another_one_refused_later(tmp_path, keys, caplog):
    file = tmp_path / "new" / "clients.toml"
    given = {"clients_file": str(file), "pin_on_first_use": True}
    federation = Federation(tmp_path, rounds=1, **given)
    assert federation.start(about=with_keys(keys))["took_part"] == dict.fromkeys(NAMES, 1)
    assert Identities(file).read().clients == {n: fingerprint((keys / f"{n}.pub").read_bytes()) for n in NAMES}
    about = with_keys(keys) | {102: {"key": str(keys / "mallory")}}
    with warnings(caplog):
        closing = federation.start(about=about, resume=True, rounds=2, deadline=0.5)
    assert closing["took_part"] == dict.fromkeys(NAMES, 2) | {"bert": 1}
    assert "node 102 refused: it calls itself bert, whose key is" in caplog.text


def test_a_name_that_was_revoked_is_not_pinned_for_whoever_comes_next(tmp_path, keys):
    identities = Identities(tmp_path / "clients.toml", pin=True)
    for name in ("anna", "bert"):
        identities.check(name, 1, "n", prove(keys / name, "n", name, 1))
    identities.revoke("bert")
    identities.check("cleo", 1, "n", prove(keys / "cleo", "n", "cleo", 1))  # what is written later keeps it
    with pytest.raises(ValueError, match="calls itself bert, whose key was revoked; use `clients add`"):
        identities.check("bert", 1, "n", prove(keys / "mallory", "n", "bert", 1))
    identities.add("bert", (keys / "mallory.pub").read_bytes())
    identities.check("bert", 1, "n", prove(keys / "mallory", "n", "bert", 1))


def test_a_node_that_was_refused_is_asked_again_when_its_key_is_entered(tmp_path, keys, file):
    """It stays connected; nobody restarts it."""
    identities = Identities(file)
    identities.revoke("cleo")
    about = with_keys(keys) | {103: {"key": str(keys / "mallory")}}
    hellos = []

    def fault(name, message, answer):
        hellos.append(message.metadata.dst_node_id if "ask" in message.content else None)
        if message.content.get("round", {}).get("t") == 2 and "cleo" not in identities.read().clients:
            identities.add("cleo", (keys / "mallory.pub").read_bytes())
        return [answer()]

    federation = Federation(tmp_path, rounds=5, eval_every=5, clients_file=str(file), deadline=0.5)
    closing = federation.start(about=about, fault=fault)
    assert closing["took_part"] == dict.fromkeys(NAMES, 5) | {"cleo": 2}
    assert hellos.count(103) == 2
    assert hellos.count(101) == 1


def test_a_key_is_revoked_while_the_run_goes_on_and_another_one_takes_its_place(tmp_path, keys, file, caplog):
    identities = Identities(file)

    def fault(name, message, answer):
        t = message.content["round"]["t"] if "round" in message.content else -1
        if t == 1 and "bert" in identities.read().clients:
            identities.revoke("bert")
        if t == 3 and "bert" not in identities.read().clients:
            identities.add("bert", (keys / "mallory.pub").read_bytes())
            federation.grid.nodes[105] = "bert"
        return [answer()]

    federation = Federation(tmp_path, rounds=6, eval_every=6, clients_file=str(file), deadline=0.5)
    with warnings(caplog):
        closing = federation.start(about=with_keys(keys) | {105: {"key": str(keys / "mallory")}}, fault=fault)
    assert closing["took_part"] == dict.fromkeys(NAMES, 6) | {"bert": 4}
    assert "bert: left out: its key counts no more" in caplog.text
    h = torch.stack([state.h for state in federation.client_states()])
    assert float((h.mean(0) - federation.server()[0].h).abs().max()) < 1e-12


def test_a_proof_is_of_one_node_one_name_and_one_time(tmp_path, keys, file):
    identities, nonce = Identities(file), "0" * 64
    proof = prove(keys / "anna", nonce, "anna", 101)
    assert identities.check("anna", 101, nonce, proof) == fingerprint((keys / "anna.pub").read_bytes())
    for name, node, other in (("anna", 102, nonce), ("anna", 101, "1" * 64), ("bert", 101, nonce)):
        with pytest.raises(ValueError, match="signature is wrong"):
            identities.check(name, node, other, proof)
    bert = prove(keys / "bert", nonce, "anna", 101)
    with pytest.raises(ValueError, match="signature is wrong"):
        identities.check("anna", 101, nonce, proof | {"signature": bert["signature"]})
    for nonsense in ({"public": b"x"}, {"public": b"x y", "signature": b""}, {"public": 3, "signature": 4}):
        with pytest.raises(ValueError, match=r"cannot be read|no public key|wrong"):
            identities.check("anna", 101, nonce, nonsense)


def test_keys_writes_the_list_and_commands_change_it(tmp_path, command, keys):
    folder = tmp_path / "made"
    make(folder, ["a", "b"], "127.0.0.1")
    file = folder / "clients.toml"
    read = Identities(file).read()
    known = read.clients
    assert known == {name: fingerprint((folder / f"{name}.pub").read_bytes()) for name in ("a", "b")}
    assert not read.revoked
    anna = keys / "anna.pub"
    code, out, _ = command("flower", "clients", "rotate", file, "a", anna)
    assert (code, out) == (0, f"a  {fingerprint(anna.read_bytes())}\n")
    code, out, _ = command("flower", "clients", "revoke", file, "b")
    assert code == 0
    _, out, _ = command("flower", "clients", "list", file)
    assert out.splitlines() == [
        f"a  {fingerprint(anna.read_bytes())}",
        f"revoked  {known['a']}",
        f"revoked  {known['b']}",
    ]
    assert command("flower", "clients", "add", tmp_path / "other.toml", "c", keys / "cleo.pub")[0] == 0
    for words, why in (
        (["add", file, "a", keys / "bert.pub"], "use `rotate`"),
        (["add", file, "c", anna], "a has the key"),
        (["add", file, "b", folder / "b.pub"], "is revoked"),
        (["add", file, "../c", keys / "cleo.pub"], "client's name"),
        (["rotate", file, "c", anna], "use `add`"),
        (["revoke", file, "b"], "b is not in"),
        (["add", file, "c", file], "no public key"),
        (["add", file, "c", tmp_path / "nowhere"], "nowhere"),
        (["list", tmp_path / "nowhere"], "there is no"),
    ):
        code, _, err = command("flower", "clients", *words)
        assert code == 2, words
        assert why in err
        assert len(err.strip().splitlines()) == 1


def test_the_fingerprint_is_that_of_ssh_keygen(keys):
    import shutil
    import subprocess

    if shutil.which("ssh-keygen") is None:
        pytest.skip("no ssh-keygen here")
    said = subprocess.run(["ssh-keygen", "-lf", keys / "anna.pub"], capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == fingerprint((keys / "anna.pub").read_bytes())


def test_pinning_needs_a_file(tmp_path):
    with pytest.raises(ValueError, match="say which file that is"):
        Federation(tmp_path, pin_on_first_use=True)
