"""Rounds on a pretended device: the CPU's numbers to the bit, nothing copied back, no tensors of two devices mixed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BACK = {"penalty Slope", "penalty TotalVariation"}
"""What is computed on the CPU in every prox, by design of its algorithm."""
READS = {"method FedNewton"}
"""What reads more than a few single numbers in a round, and so waits for the device: a solve on the server."""
SORTS = {f"penalty {name}" for name in ("LInf", "L1Ball", "Simplex")}
"""What is computed in another way than on the CPU, and so differs by rounding."""


def check(*words):
    command = [sys.executable, str(TESTS / "far_run.py"), *words]
    paths = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": "", "OMP_NUM_THREADS": "1"}
    found = json.loads(subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout)
    assert found
    for name, case in found.items():
        assert "error" not in case, (name, case)
        rounding = "data set" in name or name in SORTS  # clients of a data set are computed one by one, not stacked
        assert case["difference"] <= (1e-6 if rounding else 0), name
        assert case["loss"] <= 1e-6, name
        assert case.get("back", 0) == 0 or name in BACK, (name, case)
        assert case["read"] <= 3 * 3 or name in READS, (name, case)  # of three rounds: a few each, for divergence
    return found


def test_a_round_stays_on_the_device():
    assert len(check("dense", "dropout, data on the host", "method FedNMap", "penalty Simplex")) == 6


@pytest.mark.slow
@pytest.mark.ci
def test_problems_methods_and_penalties_stay_on_the_device():
    found = check()
    assert {name for name, case in found.items() if case.get("back")} == BACK  # the list is no longer than it must be
    assert {name for name, case in found.items() if case["read"] > 9} == READS
