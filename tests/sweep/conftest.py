from pathlib import Path

import pytest
import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.places import LocalPlace


@pytest.fixture
def planted(monkeypatch):
    """The module of planted faults, importable here and in workers, its strategy registered."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support"))
    import planted

    strategies.register(planted.Planted())
    yield planted
    strategies.unregister(planted.Planted.name)


@pytest.fixture
def store(tmp_path, open_new):
    with open_new(tmp_path / "tuning.sqlite3") as store:
        yield store


@pytest.fixture
def cpu():
    return torch.device("cpu")


@pytest.fixture
def problem():
    return Problem(tokens=300, hidden=24, vocab=400, dtype="float32")


@pytest.fixture
def absent_gpu(cpu, tmp_path, monkeypatch):
    """A place whose GPU is not in this machine; Triton compiles for it, and its cache is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    place = LocalPlace(cpu)
    place.device = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150109880320)
    yield place
    place.close()
