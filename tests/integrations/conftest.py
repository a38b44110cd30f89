"""Hugging Face models: no network, and no notes about optional packages."""

import pytest

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet_and_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
