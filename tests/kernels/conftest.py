import pytest
from poison import poison_uninitialised

from flce_tune.kernels import selection


@pytest.fixture(autouse=True)
def _analytic_configs(monkeypatch):
    """Choose by analysis alone, whatever other tests made the op ask."""
    monkeypatch.setattr(selection, "_chooser", selection.AnalyticChooser())


@pytest.fixture
def poison(monkeypatch):
    """Uninitialised memory of the package is NaN."""
    poison_uninitialised(monkeypatch)
