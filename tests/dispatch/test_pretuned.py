"""The shipped files: each one is read, names GPUs, and holds configs that can run on them."""

import importlib.resources

import pytest

from flce_tune import pretuned
from flce_tune.dispatch import Snapshot
from flce_tune.dispatch.convert import config_of, device_of, problem_of
from flce_tune.errors import InterchangeError
from flce_tune.kernels import strategies


def test_every_shipped_file_is_read_and_valid_where_it_was_measured():
    for winner in pretuned.winners():
        measured = winner.measurement
        reason = strategies.reject(
            config_of(measured), problem_of(measured.problem), device_of(measured.device)
        )
        assert reason is None, (measured.config, reason)
        assert measured.device.kind == "cuda"


def test_no_shipped_winner_is_lost_on_the_way_to_the_snapshot():
    assert len(Snapshot.from_pretuned()) == len(pretuned.winners())


def test_files_are_read_from_the_package(monkeypatch, tmp_path):
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "README.md").write_text("not read")
    monkeypatch.setattr(importlib.resources, "files", lambda _: tmp_path)
    with pytest.raises(InterchangeError, match=r"b\.json"):
        pretuned.winners()
