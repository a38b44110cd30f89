import os

import pytest
import torch
from poison import poison_uninitialised

from flce_tune.kernels import selection

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _analytic_configs(monkeypatch):
    """Choose by analysis alone, whatever other tests made the op ask."""
    monkeypatch.setattr(selection, "_chooser", selection.AnalyticChooser())


@pytest.fixture
def poison(monkeypatch):
    """Uninitialised memory of the package is NaN."""
    poison_uninitialised(monkeypatch)
