"""How products with few tiles are split along the dimension summed over."""

import itertools

import pytest

from flce_tune.kernels.limits import HAND_PRODUCT
from flce_tune.kernels.splits import (
    HOPPERS,
    MOST_SPLITS,
    MOST_SPLITS_OF_SEVERAL_WAVES,
    MOST_TILES,
    PARTIAL_BYTES,
    Plan,
    split_bytes,
    split_plan,
)

ROWS, COLUMNS = HAND_PRODUCT


def tiles(m, n):
    return -(-m // ROWS) * -(-n // COLUMNS)


@pytest.mark.parametrize("sm_count", [1, 2, 78, 114, 132])
@pytest.mark.parametrize("depth", [1, 64, 1000, 2049, 4096, 32000, 256000])
def test_plans_cover_all_rows_and_take_no_more_waves(sm_count, depth):
    for m, n in itertools.product(
        (1, 127, 128, 129, 700, 2048, 2816, 3072, 8192, 16385), (8, 256, 264, 1024, 2304, 4096)
    ):
        plan = split_plan(m, n, depth, sm_count)
        if plan.splits == 1:
            assert plan == Plan(m)
            continue
        assert 2 <= plan.splits <= MOST_SPLITS
        assert 0 <= plan.whole < m
        assert plan.whole % ROWS == 0
        parts = tiles(m - plan.whole, n) * plan.splits
        assert parts <= (MOST_TILES if plan.splits <= MOST_SPLITS_OF_SEVERAL_WAVES else sm_count)
        if sm_count in HOPPERS:
            needed = parts * ROWS * COLUMNS * PARTIAL_BYTES
            assert needed <= split_bytes(m, n, depth)
            assert needed <= split_bytes(m, n, 2 * depth)
        whole_waves = -(-tiles(plan.whole, n) // sm_count)
        waves = whole_waves + -(-parts // sm_count) / plan.splits
        assert waves < -(-tiles(m, n) // sm_count)
        for k_block in (32, 64):  # no part is empty
            steps = -(-depth // k_block)
            assert -(-steps // plan.splits) * (plan.splits - 1) < steps


@pytest.mark.parametrize(
    ("m", "n", "depth", "plan"),
    [
        (8192, 2304, 256000, Plan(58 * 128, 2)),  # 4.5 waves for 5
        (2048, 1024, 151936, Plan(0, 2)),  # half a wave for one
        (2816, 2304, 256000, Plan(0, 2)),  # three half waves for two
        (512, 2304, 256000, Plan(0, 3)),
        (256, 2304, 256000, Plan(0, 7)),
        (512, 1024, 151936, Plan(0, 8)),
        (1024, 4096, 128256, Plan(1024)),  # 128 tiles: nearly a wave
        (2048, 1024, 1024, Plan(2048)),  # too short
    ],
    ids=str,
)
def test_plans_for_an_h200(m, n, depth, plan):
    assert split_plan(m, n, depth, 132) == plan


def test_partial_sums_are_few():
    tile = ROWS * COLUMNS * PARTIAL_BYTES
    assert split_bytes(16384, 4096, 128256) == 0, "whole waves, nearly"
    assert split_bytes(1, 8, 256000) == MOST_SPLITS * tile
    for m, n in ((8192, 2304), (2048, 1024), (65536, 16384)):
        assert split_bytes(m, n, 256000) <= MOST_TILES * tile
