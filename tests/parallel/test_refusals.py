"""Calls that differ from rank to rank, and bad input: an error on every rank, never a hang."""

import pytest
import torch
from misuse import refusals

from flce_tune.kernels.config import Config

REMEDY = "differ between the ranks of process_group"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokens", {"tokens": 5}, "target's shape: (12,) on rank 0, (5,) on rank 1"),
        ("no tokens", {"tokens": 0}, "target's shape: (12,) on rank 0, (0,) on rank 1"),
        ("dtype", {"dtype": torch.float64}, "x's dtype: torch.float32 on rank 0, torch.float64"),
        ("option", {"z_loss": 0.5}, "z_loss=0.5"),
        ("reduction", {"reduction": "sum"}, "reduction: 'mean' on rank 0, 'sum' on rank 1"),
        ("frozen", {"frozen": True}, "requires_grad of weight: True on rank 0, False on rank 1"),
        ("labels", {"seed": 9}, REMEDY),
        ("config", {"config": Config("full")}, "config: None on rank 0"),
        (
            "limit",
            {"workspace_limit": 1 << 20},
            "workspace_limit: None on rank 0, 1048576 on",
        ),
        ("range on one", {"vocab_range": (10, 20)}, "on every rank or on none"),
    ],
)
def test_calls_that_differ(ranks, name, change, message):
    for error in ranks.run(2, refusals, [{}, change]):
        assert message in error, name
        assert error.startswith(("RankMismatchError", "ValueError"))


@pytest.mark.parametrize(
    ("change", "own", "others"),
    [
        ({"hidden": 3}, "ValueError: x must be [..., D] with D = 3", "refused its call"),
        ({"rows": 0}, "ValueError: weight is empty", "rank 1 of process_group refused its call"),
        ({"flat": True}, "ValueError: weight must be [V, D]", "GatheredParameters"),
        ({"reduction": "max"}, "ValueError: reduction must be one of", "refused its call"),
    ],
)
def test_a_rank_that_refuses_does_not_leave_the_others_waiting(ranks, change, own, others):
    first, second = ranks.run(2, refusals, [{}, change])
    assert second.startswith(own)
    assert first.startswith("RankMismatchError")
    assert others in first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"vocab_range": (0, 10)}, {"vocab_range": (11, 21)}], "each rank beginning where"),
        ([{"vocab_range": (10, 20)}, {"vocab_range": (0, 10)}], "each rank beginning where"),
        ([{"vocab_range": (0, 11)}, {"vocab_range": (11, 20)}], "at most as many classes as rows"),
        ([{"class_weight": 10}] * 2, "class_weight must have shape (20,)"),
        ([{"label": 20}] * 2, "TargetOutOfRangeError: target 20 at position 3 is outside [0, 20)"),
        ([{"label": -1}] * 2, "TargetOutOfRangeError"),
        ([{"device": "meta"}] * 2, "the tensors are on meta: move them, materialise them"),
        ([{"no_group": True}] * 2, "vocab_range and sequence_parallel go with process_group"),
    ],
)
def test_what_no_rank_may_do(ranks, changes, message):
    for error in ranks.run(2, refusals, changes):
        assert message in error


def test_no_tokens_on_any_rank(ranks):
    for text in ranks.run(2, refusals, [{"tokens": 0}] * 2):
        assert text == "loss nan, gradients (0, 8) (10, 8) of zeros"
