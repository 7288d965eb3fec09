"""The recorder: whoever runs the rounds, the folder that it leaves is the one that `fednmap train` leaves."""

import numpy as np
from small import FEDNMAP, begin, outcome, small

from fednmap.runs.checkpoints import Checkpoint
from fednmap.runs.execution import DONE, Recorder
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import RunFolder


def recorded(path, original, stop=None):
    """The same measurements, recorded by hand; up to a checkpoint after `stop` rounds, and a record beyond it."""
    config = small()
    recorder = Recorder(config, RunFolder.create(path, config, "train"))
    for record in original.records(*FEDNMAP):
        if stop is not None and record["round"] > stop:
            recorder.record(int(record["round"]), record)
            break
        recorder.record(int(record["round"]), record)
        if record["round"] == stop:
            algorithm = prepare(config).algorithm("fednmap")
            server, _ = algorithm.init(prepare(config).problem.start)
            recorder.save(Checkpoint(stop - 1, server, {"bytes_up": 1.0}))
    return recorder


def test_a_run_recorded_by_hand_is_an_ordinary_run(tmp_path):
    original = begin(tmp_path / "original")
    (closing,) = original.results()
    recorder = recorded(tmp_path / "copy", original)
    found = recorder.finish(original.model(FEDNMAP), measure_gamma=closing["measure_gamma"], ended=DONE)
    assert found == closing
    assert outcome(recorder.folder) == outcome(original)


def test_a_recorder_continues_from_its_checkpoint_and_drops_what_came_later(tmp_path):
    original = begin(tmp_path / "original")
    recorded(tmp_path / "copy", original, stop=12)
    recorder = Recorder(small(), RunFolder.open(tmp_path / "copy"))
    assert recorder.folder.records(*FEDNMAP)[-1]["round"] == 15
    experiment = prepare(small())
    algorithm = experiment.algorithm("fednmap")
    kept, refused = recorder.latest(algorithm, experiment.problem.start)
    assert (kept.t, kept.totals, refused) == (11, {"bytes_up": 1.0}, [])
    records = recorder.restart(kept)
    assert [record["round"] for record in records] == [0, 3, 6, 9, 12]
    for record in original.records(*FEDNMAP)[5:]:
        recorder.record(int(record["round"]), record)
    recorder.finish(original.model(FEDNMAP))
    assert outcome(recorder.folder)[0] == outcome(original)[0]


def test_other_settings_do_not_continue(tmp_path):
    original = begin(tmp_path / "original")
    recorded(tmp_path / "copy", original, stop=12)
    other = small(eta_a=0.3)
    experiment = prepare(other)
    recorder = Recorder(other, RunFolder.open(tmp_path / "copy"))
    kept, (line,) = recorder.latest(experiment.algorithm("fednmap"), experiment.problem.start)
    assert kept is None
    assert "made with other settings" in line


def test_a_measurement_that_lacks_a_metric_is_not_taken_for_half_written(tmp_path):
    """Between machines the only client that has test data may be away."""
    recorder = Recorder(small(), RunFolder.create(tmp_path / "run", small(), "train"))
    costs = dict.fromkeys(("train_seconds", "eval_seconds", "bytes_up", "bytes_down"), 1.0)
    recorder.record(0, {"objective": 2.0, "test_accuracy": 0.5, **costs})
    recorder.record(3, {"objective": 1.0, **costs})
    found = recorder.folder.records(*FEDNMAP)
    assert [(record["round"], record["objective"]) for record in found] == [(0, 2.0), (3, 1.0)]
    assert np.isnan(found[1]["test_accuracy"])
    assert recorder.finish()["objective"] == 1.0
