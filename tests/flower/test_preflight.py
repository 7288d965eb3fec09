"""Before the first round: sites that do not fit together are named, and nothing is computed."""

import json
import logging

import pytest
import torch

pytest.importorskip("flwr")

from flower_grid import NAMES, Federation
from flwr.app import ConfigRecord, MessageType

from fednmap.flower import roster
from fednmap.flower.local import LocalProblem
from fednmap.problems import LeastSquares, Logistic

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flwr")

COLUMNS = ("age", "bmi", "sex", "chol", "thal", "ca")


class Described(Federation):
    """Sites with names for their columns; `wrong` maps a site to what it has instead."""

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.wrong = {}

    def load(self, context):
        name = context.node_config["client"]
        local = super().load(context)
        how = self.wrong.get(name)
        return how(local) if how else LocalProblem(local.problem, columns=COLUMNS)


def narrow(local):
    x, y = local.problem.data[0]
    return LocalProblem(LeastSquares([(x[:, :-1], y)]), columns=COLUMNS[:-1])


def unnamed_and_narrow(local):
    x, y = local.problem.data[0]
    return LocalProblem(LeastSquares([(x[:, :-1], y)]))


def without_path(local):
    raise FileNotFoundError("no file heart.csv")


def classifies(local):
    x, _ = local.problem.data[0]
    return LocalProblem(Logistic([(x, torch.arange(len(x)) % 2)]), columns=COLUMNS, labels=("well", "ill"))


WRONG = {
    "narrow": (
        narrow,
        "bert: 5 columns, expected 6: number 5 is None, expected 'ca'; samples have shape (5,), expected (6,); the "
        "model has 5 parameters, expected 6",
    ),
    "unnamed": (unnamed_and_narrow, "bert: 0 columns, expected 6: number 0 is None, expected 'age'"),
    "load": (without_path, "bert: its data cannot be loaded: the site refused (FileNotFoundError); the site's own log"),
    "order": (
        lambda local: LocalProblem(local.problem, columns=(*COLUMNS[:3], "thal", "chol", "ca")),
        "bert: 6 columns, expected 6: number 3 is 'thal', expected 'chol'",
    ),
    "extra": (
        lambda local: LocalProblem(local.problem, columns=(*COLUMNS, "name")),
        "bert: 7 columns, expected 6: number 6 is 'name', expected None",
    ),
    "labels": (classifies, "bert: 2 labels, expected 0: number 0 is 'well', expected None"),
    "dtype": (
        lambda local: LocalProblem(LeastSquares([tuple(v.float() for v in local.problem.data[0])]), columns=COLUMNS),
        "bert: computes in float32, expected float64",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_named_and_stops_the_run(tmp_path, kind):
    how, why = WRONG[kind]
    federation = Described(tmp_path)
    federation.wrong = {"bert": how}
    with pytest.raises(ValueError, match="do not fit together") as caught:
        federation.start()
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [name for name in NAMES if name != "bert" and f"{name}:" in str(caught.value)]
    assert not [m for _, m in federation.grid.asked if m.metadata.message_type == MessageType.TRAIN]
    assert why in json.loads((tmp_path / "run" / "status.json").read_text())["error"]


def test_two_wrong_sites_of_four_are_both_named_also_if_the_first_is_one(tmp_path):
    federation = Described(tmp_path)
    federation.wrong = {"anna": narrow, "dora": without_path}
    with pytest.raises(ValueError, match=r"dora: its data cannot be loaded.*anna: 5 columns"):
        federation.start()


def test_another_version_is_named(tmp_path):
    def old(name, message, answer):
        reply = answer()
        if name == "cleo" and "site" in reply.content:
            reply.content["site"] = ConfigRecord(dict(reply.content["site"]) | {"fednmap": "0.1"})
        return [reply]

    with pytest.raises(ValueError, match=r"cleo: fednmap 0\.1, expected"):
        Described(tmp_path).start(fault=old)


@pytest.mark.parametrize("spoil", [{}, {"dimension": "six"}, {"columns": [1, 2]}, {"samples": -1}])
def test_a_report_that_cannot_be_read_is_named(tmp_path, spoil):
    def strange(name, message, answer):
        reply = answer()
        if name == "cleo" and "site" in reply.content:
            reply.content["site"] = ConfigRecord({**reply.content["site"], **spoil} if spoil else {})
        return [reply]

    with pytest.raises(ValueError, match="cleo: its report cannot be read"):
        Described(tmp_path).start(fault=strange)


def test_by_default_everybody_is_needed_and_who_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(roster, "STUCK", 0.2)
    federation = Federation(tmp_path, deadline=0.2, min_clients="")
    with pytest.raises(TimeoutError, match=r"3 clients connected, at least 4 are needed; missing: dora"):
        federation.start(nodes={101: "anna", 102: "bert", 103: "cleo"})


def test_by_default_a_round_without_somebody_is_repeated(tmp_path):
    lost = ["bert", "cleo"]

    def fault(name, message, answer):
        if message.metadata.message_type == MessageType.TRAIN and name in lost:
            lost.remove(name)
            return []
        return [answer()]

    federation = Federation(tmp_path, deadline=0.3, min_clients="", fault=fault)
    closing = federation.start()
    assert closing["took_part"] == dict.fromkeys(NAMES, 6)


def test_who_joins_later_and_does_not_fit_is_left_out_and_named(tmp_path, caplog):
    federation = Described(tmp_path, min_clients=1, deadline=0.5)
    federation.wrong = {"dora": narrow}

    def fault(name, message, answer):
        if "round" in message.content and message.content["round"]["t"] == 2:
            federation.grid.nodes[104] = "dora"
        return [answer()]

    with caplog.at_level(logging.WARNING, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        closing = federation.start(fault=fault, nodes={101: "anna", 102: "bert", 103: "cleo"})
    assert caplog.text.count("dora: left out: 5 columns, expected 6: number 5 is None, expected 'ca'") == 1
    assert closing["took_part"] == {"anna": 6, "bert": 6, "cleo": 6, "dora": 0}


def test_who_does_not_fit_is_not_measured_either(tmp_path):
    """Columns in another order: the model can be applied there, and its loss means nothing."""
    federation = Described(tmp_path, min_clients=1, deadline=0.5)
    federation.wrong = {"dora": lambda local: LocalProblem(local.problem, columns=COLUMNS[::-1])}

    def fault(name, message, answer):
        if "round" in message.content and message.content["round"]["t"] == 2:
            federation.grid.nodes[104] = "dora"
        return [answer()]

    federation.start(fault=fault, nodes={101: "anna", 102: "bert", 103: "cleo"})
    records = federation.coordinator.folder.records(*federation.coordinator.job)
    assert [record["clients_measured"] for record in records] == [3, 3, 3]


def test_a_wrong_node_that_is_replaced_by_a_right_one_takes_part(tmp_path):
    federation = Described(tmp_path, min_clients=1, deadline=0.5)
    federation.wrong = {"dora": narrow}

    def fault(name, message, answer):
        t = message.content["round"]["t"] if "round" in message.content else -1
        if t == 1:
            federation.grid.nodes[104] = "dora"
        if t == 3 and 104 in federation.grid.nodes:
            del federation.grid.nodes[104]
            federation.wrong = {}
            federation.grid.nodes[105] = "dora"
        return [answer()]

    closing = federation.start(fault=fault, nodes={101: "anna", 102: "bert", 103: "cleo"})
    assert closing["took_part"] == {"anna": 6, "bert": 6, "cleo": 6, "dora": 2}


@pytest.mark.parametrize("slow", ["query.site", "train"])
def test_a_client_that_is_always_too_late_is_named_in_log_results_and_show(tmp_path, command, caplog, slow):
    """Whether its data takes too long to load, so that it never says what it has, or its local steps do."""

    def fault(name, message, answer):
        return [] if name == "dora" and message.metadata.message_type == slow else [answer()]

    federation = Federation(tmp_path, deadline=0.2, rounds=3, fault=fault)
    with caplog.at_level(logging.INFO, logger="flwr"):
        logging.getLogger("flwr").propagate = True
        federation.start()
        said = "dora was not counted in its last 3 rounds; the optimum is then another one than that of all 4 clients"
        assert [r.levelname for r in caplog.records if said in r.message] == ["WARNING"]
        closing = federation.start(resume=True, rounds=5)
    lines = [r.message for r in caplog.records if "clients counted" in r.message]
    assert all(": 3 of 4 clients counted, without dora, " in line for line in lines)
    (warning,) = closing["warnings"]
    assert warning.startswith(said.replace("3 rounds", "5 rounds"))
    assert json.loads((tmp_path / "run" / "results.json").read_text())[0]["warnings"] == [warning]
    assert f"warning: fednmap: {warning}" in " ".join(command("show", tmp_path / "run")[1].split())
    command("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert f"warning: fednmap: {warning}" in (tmp_path / "report.html").read_text()


def test_a_client_that_missed_a_few_rounds_is_not_warned_of_and_one_that_stays_away_is(tmp_path):
    silent = {"bert": (1, 2, 3), "dora": (4, 5), "cleo": (3, 4, 5)}

    def fault(name, message, answer):
        t = message.content["round"]["t"] if "round" in message.content else -1
        return [] if t in silent.get(name, ()) else [answer()]

    closing = Federation(tmp_path, deadline=0.2, rounds=6, fault=fault).start()
    assert [line.split(";")[0] for line in closing["warnings"]] == ["cleo was not counted in its last 3 rounds"]


def test_a_round_that_fails_says_who_did_not_reply(tmp_path):
    def fault(name, message, answer):
        return [] if name == "dora" and message.metadata.message_type == "train" else [answer()]

    words = r"round 0 failed 2 times \(dora: no good reply within 0\.2 s\); its state is saved"
    with pytest.raises(TimeoutError, match=words):
        Federation(tmp_path, deadline=0.2, min_clients="", attempts=2, fault=fault).start()


def test_results_say_who_took_part_also_after_a_resume(tmp_path, command):
    silent = {"bert": (1, 2), "dora": (4,)}

    def fault(name, message, answer):
        t = message.content["round"]["t"] if "round" in message.content else -1
        return [] if t in silent.get(name, ()) else [answer()]

    federation = Federation(tmp_path, deadline=0.2, rounds=3, fault=fault)
    federation.start()
    closing = federation.start(resume=True, rounds=6)
    due = {"anna": 6, "bert": 4, "cleo": 6, "dora": 5}
    assert closing["took_part"] == due
    _, shown, _ = command("show", tmp_path / "run")
    assert "counted in rounds, of 6: anna 6, bert 4, cleo 6, dora 5" in shown
    sites = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert {name: site["samples"] for name, site in sites.items()} == dict.fromkeys(NAMES, 12)


def test_no_port_is_given_twice(tmp_path, monkeypatch):
    """A node may not have opened its port yet when the next one asks for a free one."""
    from fednmap.flower import launch

    found = iter([4000, 4000, 4001, 4000, 4001, 4002])
    monkeypatch.setattr(launch, "free_port", lambda: next(found))
    launcher = launch.Launcher(tmp_path)
    assert [launcher.port, launcher._unused_port(), launcher._unused_port()] == [4000, 4001, 4002]
