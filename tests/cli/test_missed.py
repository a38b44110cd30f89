"""``flce-tune sweep --missed`` over recorded misses."""

import dataclasses
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.tuning_db.records import Miss
from flce_tune.tuning_db.store import Store

HERE = device_record(describe_device(torch.device("cpu")))
ELSEWHERE = dataclasses.replace(HERE, name="another CPU")
TINY = Problem(tokens=30, hidden=16, vocab=64, dtype="float32")
MISSED = ("sweep", "--missed", "--device", "cpu", "--quick")


@pytest.fixture
def misses(database: Path) -> Path:
    now = datetime.now(timezone.utc)
    record = problem_record(TINY)
    odd = dataclasses.replace(record, dtype="float3")
    with Store.open(f"sqlite:///{database}") as store:
        store.note_misses([Miss(d, record, TINY.tokens, 1, now) for d in (HERE, ELSEWHERE)])
        store.note_misses([Miss(HERE, odd, 30, 1, now)])
    return database


def test_what_was_missed_here_is_tuned_and_cleared(run, misses: Path):
    result = run(*MISSED, "--json")
    assert result.exit_code == 0, result.stderr
    (tuned,) = json.loads(result.stdout)["problems"]
    assert (tuned["problem"]["tokens"], tuned["problem"]["vocab"]) == (30, 64)
    assert tuned["winners"]
    assert "float3" in result.stderr
    with Store.open(f"sqlite:///{misses}") as store:
        left = {(miss.device, miss.problem.dtype) for miss in store.misses()}
    assert left == {(ELSEWHERE, "float32"), (HERE, "float3")}
    assert run(*MISSED).exit_code == 4


def test_any_sweep_of_a_missed_problem_clears_it(run, misses: Path):
    swept = ("--hidden", "16", "--vocab", "64", "--tokens", "30", "--dtype", "float32", "--quick")
    assert run("sweep", *swept, "--device", "cpu").exit_code == 0
    assert run(*MISSED).exit_code == 4


@pytest.mark.usefixtures("misses")
def test_a_problem_besides_is_a_usage_error(run):
    result = run(*MISSED, "--preset", "demo")
    assert result.exit_code == 2
    assert "--missed" in result.stderr


def test_without_a_database_none_is_made(run, database: Path):
    assert run(*MISSED).exit_code == 4
    assert not database.exists()
