"""DTensor, FSDP2, DDP, sequence parallelism, gradient buffers: equal to the unsharded model."""

import pytest
import sharded_models
import torch
from sharded_models import COLUMNS, REPLICATE, ROWS


def check(ranks, size, function, *arguments, **keywords):
    for part in ranks.run(size, function, *arguments, **keywords):
        assert part
        for name, (ours, truth) in part.items():
            torch.testing.assert_close(ours, truth, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("placement", [ROWS, REPLICATE], ids=str)
def test_dtensor_weight_and_bias(ranks, placement):
    for size in (2, 3):
        check(ranks, size, sharded_models.dtensor, placement)


@pytest.mark.parametrize(
    ("placement", "options", "message"),
    [
        (COLUMNS, {}, "weight's placement is S(1), accepted are Shard(0) and Replicate()"),
        (ROWS, {"vocab_range": (0, 12)}, "a DTensor weight knows its vocab_range"),
        (REPLICATE, {"as_split": True}, "which is no split"),
    ],
)
def test_dtensor_weights_that_are_refused(ranks, placement, options, message):
    for error in ranks.run(2, sharded_models.dtensor_refusal, placement, **options):
        assert error.startswith("ValueError")
        assert message in error


@pytest.mark.parametrize("whole_head", [True, False], ids=["in root", "all in root"])
@pytest.mark.parametrize("sync_each", [True, False], ids=["sync", "no sync"])
def test_fsdp_in_forward_with_accumulation(ranks, whole_head, sync_each):
    check(ranks, 2, sharded_models.fsdp, whole_head=whole_head, steps=2, sync_each=sync_each)


def test_fsdp_weight_outside_its_forward(ranks):
    for size in (2, 3):
        check(ranks, size, sharded_models.fsdp_outside)


def test_fsdp_weight_taken_for_a_split_one_is_found(ranks):
    for error in ranks.run(2, sharded_models.fsdp_taken_for_split):
        assert error.startswith("RankMismatchError: labels differ")
        assert "gathered_weight" in error


@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
def test_ddp_with_accumulation(ranks, no_sync):
    check(ranks, 2, sharded_models.ddp, steps=3, no_sync=no_sync)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sequence_parallel(ranks, reduction):
    for size in (2, 3):
        check(ranks, size, sharded_models.sequence_parallel, reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradient_buffer(ranks, reduction):
    check(ranks, 2, sharded_models.main_grad, reduction)


def test_inside_torch_compile(ranks):
    check(ranks, 2, sharded_models.compiled)
