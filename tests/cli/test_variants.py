"""Several modes and accumulations of one model in one sweep."""

import json

import pytest


def test_every_mode_with_every_accumulation_and_evaluation_once(run):
    answer = run(
        "sweep", "--preset", "demo", "--device", "cpu", "--dry-run", "--json",
        "--mode", "train,train_frozen_weight", "--mode", "eval",
        "--accumulate", "fp32,weight_dtype",
    )  # fmt: skip
    assert answer.exit_code == 0, answer.stderr
    problems = [one["problem"] for one in json.loads(answer.stdout)]
    assert [(p["mode"], p["accumulate"]) for p in problems] == [
        ("train", "fp32"),
        ("train", "weight_dtype"),
        ("train_frozen_weight", "fp32"),
        ("train_frozen_weight", "weight_dtype"),
        ("eval", "fp32"),
    ]


@pytest.mark.parametrize("option", ["--mode", "--accumulate"])
def test_an_unknown_name_is_told(run, option):
    answer = run("sweep", "--preset", "demo", "--device", "cpu", "--dry-run", option, "train,magic")
    assert answer.exit_code == 2
    assert "is none of" in answer.stderr


def test_missed_takes_no_modes(run):
    answer = run("sweep", "--missed", "--mode", "train,eval", "--device", "cpu")
    assert answer.exit_code == 2
    assert "--missed" in answer.stderr


def test_a_sum_in_the_weights_dtype_is_swept(run, database):
    swept = (
        "sweep", "--hidden", "16", "--vocab", "64", "--tokens", "64", "--dtype", "bfloat16",
        "--accumulate", "weight_dtype", "--quick", "--device", "cpu", "--json",
    )  # fmt: skip
    answer = run(*swept)
    assert answer.exit_code == 0, answer.stderr
    (problem,) = json.loads(answer.stdout)["problems"]
    assert problem["problem"]["accumulate"] == "weight_dtype"
    assert problem["winners"]
    assert database.exists()
