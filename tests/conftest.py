"""Shared by all tests."""

import gc
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import pytest
import quick_interpreter
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which reads it once
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        quick_interpreter.install()

ROOT = Path(__file__).parents[1]
# ``python -m pytest`` puts it there, and then ``kernels`` is a package that others may look for
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
pytest_plugins = ["databases"]
HOMES = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    """Let parallel workers share the cores: one torch thread each, theirs and their children's."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # what importing and collecting tests makes is there to stay


def pytest_collection_finish() -> None:
    """Collect garbage from here on, and never look at what there is by now."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Keep the user's settings and database out of the tests."""
    for name in list(os.environ):
        if name.startswith("FLCE_TUNE_") and not name.startswith("FLCE_TUNE_TEST_"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.getbasetemp() / "homes" / str(next(HOMES))  # mktemp lists what is there
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


@pytest.fixture(scope="module")
def _quick_collections():
    """For scripts that collect garbage again and again: what older tests left is not looked at."""
    gc.collect()
    gc.freeze()
