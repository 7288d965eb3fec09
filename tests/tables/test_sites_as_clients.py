"""Tables of several sites in train and compare: names, intercept, scale and weights; and weights between machines."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hospital_files import SIZES, write_hospitals
from public_data import needs

from fednmap import InputError, simulate
from fednmap.data import load
from fednmap.estimators import FederatedLogisticRegression
from fednmap.problems import LeastSquares
from fednmap.runs.configuration import Config
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import Job, RunFolder

FEATURES = ("age", "sex=m", "ecg=b", "ecg=c", "pressure", "pressure=missing")


@pytest.fixture
def hospitals(tmp_path):
    return write_hospitals(tmp_path / "hospitals")


def data(hospitals):
    return f"csv:{hospitals},target=outcome,exclude=time+event"


def test_a_file_is_a_client_and_columns_have_names(hospitals):
    found = load(data(hospitals))
    assert found.features == FEATURES
    assert found.labels == ("healthy", "sick")
    assert found.sites == tuple(SIZES)
    assert torch.bincount(found.clients).tolist() == [n - n // 5 for n in SIZES.values()]
    files = ",".join(str(hospitals / f"{name}.csv") for name in ("bern", "basel"))
    assert load(f"csv:{files},target=outcome,exclude=time+event").sites == ("bern", "basel")
    tested = load(data(hospitals), test=str(hospitals / "zug.csv"))
    assert len(tested.x_test) == SIZES["zug"]
    with pytest.raises(InputError, match="has one file per client; leave client=sex out"):
        load(f"csv:{hospitals},client=sex")


def test_what_to_predict_is_not_guessed_from_one_file_alone(tmp_path):
    for name, columns in (("a", "outcome,age"), ("b", "age,outcome")):
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n1.5,2.5\n3.5,4.5\n")
    with pytest.raises(InputError, match="a ends with the column 'age' and b with 'outcome'; say what to predict"):
        load(f"csv:{tmp_path}")
    assert load(f"csv:{tmp_path},target=outcome").features == ("age",)
    (tmp_path / "a.csv").write_text("age,outcome\n1.5,2.5\n3.5,4.5\n")
    assert load(f"csv:{tmp_path}").features == ("age",)


@pytest.mark.parametrize("weights", ["clients", "samples"])
def test_the_method_of_train_ends_at_the_estimator(hospitals, weights):
    """Intercept, unpenalised; standardised columns; weights: the same problem."""
    settings = {
        "model": "logistic",
        "penalty": "l1:0.01",
        "batch_size": 0,
        "local_steps": 1,
        "eta_a": 1.0,
        "memory": 10,
    }
    experiment = prepare(Config.make(data=data(hospitals), dtype="float64", weights=weights, **settings))
    assert (experiment.config.intercept, experiment.config.standardize) == (True, True)
    algorithm = experiment.algorithm("fednmap")
    *_, end = simulate(algorithm, experiment.problem, rounds=60, start=experiment.start(algorithm))
    x = algorithm.model(end.server).numpy()
    known = experiment.dataset
    fit = FederatedLogisticRegression(
        "l1", 0.01, standardize=False, tol=1e-10, weights={"clients": "sites"}.get(weights, weights)
    ).fit(known.x_train.numpy(), known.y_train.numpy(), known.clients.numpy())
    assert np.abs(x[:-1] - fit.coef_[0]).max() < 1e-7
    assert x[-1] == pytest.approx(fit.intercept_[0], abs=1e-7)


def test_names_stay_with_the_model(command, hospitals):
    words = ("--model", "logistic", "--penalty", "l1:0.01", "--batch-size", 0, "--rounds", 5, "--out", "run", "--quiet")
    assert (
        command("train", "--data", data(hospitals), *words, "--weights", "samples", "--penalty-only", "weights")[0] == 0
    )
    model = RunFolder.open(hospitals.parent / "run").model(Job("fednmap", 0))
    assert (model.features, model.labels, model.intercept) == (FEATURES, ("healthy", "sick"), True)
    assert len(model.scaling[0]) == 6
    code, out, _ = command("show", "run")
    assert (code, "fednmap, for sick" in out, "sex=m" in out, "(intercept)" in out) == (0, True, True, True)
    code, out, _ = command("export", "run", "--json")
    assert json.loads(out)["features"] == list(FEATURES)
    assert command("report", "run")[0] == 0
    assert "ecg=c" in (hospitals.parent / "report.html").read_text()


def test_an_exported_model_is_for_the_columns_as_they_are(command, hospitals):
    """Scores of the file's model on the given columns are those of x on the standardised ones."""
    from safetensors import safe_open

    words = ("--model", "logistic", "--batch-size", 0, "--rounds", 5, "--dtype", "float64", "--out", "run", "--quiet")
    command("train", "--data", data(hospitals), *words)
    command("export", "run", "--out", "model.safetensors")
    with safe_open(hospitals.parent / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["labels"]) == ["healthy", "sick"]
        weight, bias = file.get_tensor("1.weight"), file.get_tensor("1.bias")
    folder = RunFolder.open(hospitals.parent / "run")
    experiment, given = prepare(folder.config()), load(data(hospitals)).x_train.double()
    x = folder.model(Job("fednmap", 0)).parameters["x"]
    inner = experiment.dataset.x_train @ x[:-1] + x[-1]
    assert torch.allclose(given @ weight[0] + bias[0], inner, atol=1e-9)


def test_columns_that_are_too_large_are_named(hospitals):
    settings = {"data": data(hospitals), "model": "logistic", "standardize": False}
    with pytest.warns(UserWarning, match="column pressure of .* is so large that steps of eta_a = .* overshoot far"):
        prepare(Config.make(**settings))


REFUSED = [
    ({"data": "digits", "model": "mlp:4", "intercept": True}, "mlp:4 has its own biases"),
    ({"data": "digits", "model": "logistic", "standardize": True}, "digits holds pictures"),
    ({"data": "heart-disease", "model": "logistic", "penalty_only": "bias"}, "its intercept is never regularized"),
    ({"data": "digits", "weights": "rows"}, "weights is 'rows'; it must be 'clients' or 'samples'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_in_one_line(settings, message):
    if settings["data"] == "heart-disease":
        needs("heart_disease", "processed.va.data")
    with pytest.raises(InputError) as refused:
        prepare(Config.make(**settings))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_weights_between_machines_are_the_simulators(tmp_path, participation):
    pytest.importorskip("flwr")
    from flower_grid import Federation, make_problem

    weights = (0.1, 0.2, 0.3, 0.4)

    class Weighted(Federation):
        def plan(self):
            return replace(super().plan(), weights=weights)

    problem = LeastSquares(list(make_problem().data), weights=weights)
    federation = Weighted(tmp_path, problem, participation=participation)
    federation.start()
    simulated = federation.simulated()
    found, _ = federation.server()
    assert float((found.z - simulated.z).abs().max()) < 1e-10
    assert float((found.h - simulated.h).abs().max()) < 1e-10
    last = federation.coordinator.folder.records("fednmap", 0)[-1]
    x = federation.coordinator.plan.algorithm.model(found)
    assert last["loss"] == pytest.approx(float(problem.loss(x)))
