from pathlib import Path

import pytest
import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.tuning_db.store import Store


@pytest.fixture
def planted(monkeypatch):
    """The module of planted faults, importable here and in workers, its strategy registered."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support"))
    import planted

    strategies.register(planted.Planted())
    yield planted
    strategies.unregister(planted.Planted.name)


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'tuning.sqlite3'}") as store:
        yield store


@pytest.fixture
def cpu():
    return torch.device("cpu")


@pytest.fixture
def problem():
    return Problem(tokens=300, hidden=24, vocab=400, dtype="float32")
