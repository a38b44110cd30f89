import gc

import pytest
import torch
from poison import poison_uninitialised

from flce_tune.kernels import selection


@pytest.fixture(autouse=True)
def _analytic_configs(monkeypatch):
    """Choose by analysis alone, whatever other tests made the op ask."""
    monkeypatch.setattr(selection, "_chooser", selection.AnalyticChooser())


@pytest.fixture(autouse=True)
def _default_sync_mode():
    """A test may forbid synchronisation; none may leave it so."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def poison(monkeypatch):
    """Uninitialised memory of the package is NaN."""
    poison_uninitialised(monkeypatch)


@pytest.fixture
def empty_gpu():
    """A GPU whose memory this process has given back."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()
