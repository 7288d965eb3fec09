"""Names of the last version still work, with a warning that names the new one."""

from importlib import import_module

import pytest

OLD = {
    "fednmap.core": ("Adding", "fednmap.core.AccumulatingOracle"),
    "fednmap.estimators": ("Path", "fednmap.estimators.RegularizationPath"),
    "fednmap.theory.at_once": ("AtOnce", "fednmap.theory.steps_from_smoothness.StepsFromSmoothness"),
    "fednmap.simulation": ("run", "fednmap.run"),
    "fednmap.simulation.participation": ("Poisson", "fednmap.simulation.participation.PoissonSampler"),
    "fednmap.algorithms.kernels": ("Steps", "fednmap.algorithms.kernels.LocalSteps"),
    "fednmap.algorithms.compressors": ("TopK", "fednmap.algorithms.compressors.TopKCompressor"),
}


@pytest.mark.parametrize("module", OLD)
def test_an_old_name_warns_and_is_the_new_one(module):
    old, new = OLD[module]
    place, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"is now {new}; use that name"):
        found = getattr(import_module(module), old)
    assert found is getattr(import_module(place), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = import_module(module).nothing
