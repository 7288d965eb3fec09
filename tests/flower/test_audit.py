"""What left a client, as its own log says."""

import json

import pytest

pytest.importorskip("flwr")

from flower_grid import Federation

from fednmap.flower import audit_log, masking
from fednmap.flower.audit_log import AuditRow, logs, of_run, rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")


def sent_by(federation, name="anna"):
    run = json.loads((federation.folder / "run" / "federation.json").read_text())["run"]
    return {row.kind: row for row in rows(name, of_run(logs(federation.folder / "states")[name], run))}


def test_everything_that_left_is_listed(tmp_path):
    """Against the messages themselves, as the grid saw them."""
    replies = []

    def watch(name, message, answer):
        reply = answer()
        if name == "anna":
            replies.append(sorted(f"{part}.{key}" for part, record in reply.content.items() for key in record))
        return [reply]

    federation = Federation(tmp_path, rounds=3, fault=watch)
    federation.start()
    lines = logs(tmp_path / "states")["anna"]
    assert [sorted(item["name"] for item in line["items"]) for line in lines] == replies
    found = sent_by(federation)
    assert found["uplink"].items[0] == "up.y float64 (6)"
    assert (found["uplink"].messages, found["uplink"].rounds) == (3, (0, 2))
    assert found["uplink"].counted == 2  # of the last one the server would tell in the next round
    assert found["uplink"].treated == found["measurement"].treated == "as it is"
    assert "gradient.x float64 (6)" in found["measurement"].items
    assert "site.samples int" in found["what it has"].items


def test_with_secure_aggregation_vectors_are_masked(tmp_path):
    federation = Federation(tmp_path, rounds=2, secagg=True)
    federation.start()
    found = sent_by(federation)
    assert found["uplink"].items[0] == "masked.levels int64 (7)"
    assert found["uplink"].treated == "masked, rounded to 9.09e-13"
    assert found["measurement"].items == ("masked.levels int64 (10)",)
    assert found["secagg: public keys"].items == tuple(f"secagg.{name} bytes" for name in masking.PublicKeys._fields)
    assert {"secagg: public keys", "secagg: encrypted shares", "secagg: shares to unmask"} <= found.keys()


def test_uplinks_and_measurements_are_rounded_to_grids_of_their_own(tmp_path):
    federation = Federation(tmp_path, rounds=2, secagg=True, secagg_bits=32, secagg_bound=1000.0)
    federation.start()
    found = sent_by(federation)
    assert found["uplink"].treated == "masked, rounded to 1.91e-06"
    assert found["measurement"].treated == "masked, rounded to 9.09e-13"


def test_errors_are_messages_too_and_lost_rounds_are_not_counted(tmp_path):
    def fault(name, message, answer):
        reply = answer()
        return [] if name == "anna" and "round" in message.content and message.content["round"]["t"] == 1 else [reply]

    federation = Federation(tmp_path, rounds=3, norm_bound=1e9, deadline=0.3, fault=fault)
    federation.start()
    assert (sent_by(federation)["uplink"].messages, sent_by(federation)["uplink"].counted) == (3, 1)

    class Without(Federation):
        def load(self, context):
            raise FileNotFoundError("secret-name.csv")

    (tmp_path / "b").mkdir()
    without = Without(tmp_path / "b")
    with pytest.raises(ValueError, match="cannot be loaded"):
        without.start()
    (row,) = [row for row in rows("anna", logs(tmp_path / "b" / "states")["anna"]) if row.kind == "what it has"]
    assert row.items == ("site.failed str",)


def test_the_command(tmp_path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    Federation(tmp_path, rounds=2).start()
    code, out, _ = command("audit", tmp_path / "states")
    assert code == 0
    assert "up.y float64 (6)" in out
    assert "uplinks: 8, of them in the clear 8, masked 0, clipped 0, noised 0" in out
    code, out, _ = command("audit", tmp_path / "states", "--client", "bert", "--json")
    assert {row["client"] for row in json.loads(out)} == {"bert"}
    for words, why in (
        (["audit", tmp_path / "run"], "holds no logs"),
        (["audit", tmp_path / "states", "--client", "x"], "there are anna"),
    ):
        code, _, err = command(*words)
        assert code == 2
        assert why in err


def test_at_80_columns_no_name_is_cut(tmp_path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "metric.a_metric_with_a_name_that_is_longer_than_its_column"
    row = AuditRow("anna [1]", "measurement", (0, 1999), 2000, (f"{name} float64 (1)",), 16_000_000_000, 0, "as it is")
    monkeypatch.setattr(audit_log, "logs", lambda root: {row.client: []})
    monkeypatch.setattr(audit_log, "rows", lambda client, lines: [row])
    code, out, _ = command("audit", tmp_path)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert name in "".join(out.split())


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, "in the clear 8, masked 0, clipped 8, noised 0"), ({"secagg": True}, "in the clear 0, masked 8, clipped 8")],
    ids=["alone", "masked"],
)
def test_clipping_hides_nothing(tmp_path, command, monkeypatch, settings, words):
    monkeypatch.setenv("COLUMNS", "160")
    Federation(tmp_path, rounds=2, dp_clip=1.0, **settings).start()
    assert f"uplinks: 8, of them {words}" in command("audit", tmp_path / "states")[1]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    Federation(tmp_path, rounds=1).start()
    path = tmp_path / "states" / "sent" / "anna.jsonl"
    whole = len(logs(tmp_path / "states")["anna"])
    path.write_text(path.read_text() + '{"kind": "tra')
    assert len(logs(tmp_path / "states")["anna"]) == whole
