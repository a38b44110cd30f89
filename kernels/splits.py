"""Where dX's last tiles are split along the vocabulary, so that they fill the GPU.

dX = G·W has few tiles, and each takes as long as the vocabulary. Persistent programs take them in
waves of one tile a multiprocessor, and the last wave may have few. So some last rows of tiles are
multiplied in parts, each tile by several programs, whose partial sums are added up afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flce_tune.kernels.limits import HAND_PRODUCT

HOPPERS = (78, 114, 132)
"""Multiprocessors of the GPUs that the kernel is for: H20, H100 with PCIe, other H100s and H200."""
MOST_SPLITS = 8
MOST_SPLITS_OF_SEVERAL_WAVES = 4
MOST_TILES = 396
"""Tiles of partial sums kept at once: three waves of an H200's 132 multiprocessors, 37 MiB."""
PARTIAL_BYTES = 3
"""Of an element of a partial sum, kept as split24."""
LAUNCH = 2048
"""What a split launch and its sum cost beside its waves, in units of the dimension summed over: a
wave takes 16 clocks a unit."""
EPILOGUE = 512
"""What a wave of partial sums costs beside its products, in the same units."""
LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of a product that are multiplied as usual, and in how many parts the others are."""

    whole: int
    splits: int = 1


@functools.lru_cache(256)
def split_plan(m: int, n: int, depth: int, sm_count: int) -> Plan:
    """Choose the cheapest plan of an [m, n] product with sums over ``depth``.

    The launches run one after the other, each in waves of its own.
    """
    tiles_m, tiles_n = (-(-size // block) for size, block in zip((m, n), HAND_PRODUCT, strict=True))
    best, plan = (1 - LEAST_GAIN) * _cost(tiles_m * tiles_n, 0, 1, depth, sm_count), Plan(m)
    for splits in range(2, MOST_SPLITS + 1):
        most = MOST_TILES if splits <= MOST_SPLITS_OF_SEVERAL_WAVES else sm_count
        for tail in range(1, min(tiles_m, most // (splits * tiles_n)) + 1):
            whole = tiles_m - tail
            cost = _cost(whole * tiles_n, tail * tiles_n, splits, depth, sm_count)
            if cost < best:
                best, plan = cost, Plan(whole * HAND_PRODUCT[0], splits)
    return plan


def _cost(whole: int, tail: int, splits: int, depth: int, sm_count: int) -> float:
    """Time for so many tiles as usual and so many in parts, in units of ``depth``."""
    waves, part_waves = -(-whole // sm_count), -(-tail * splits // sm_count)
    time = waves * (depth + EPILOGUE) + part_waves * (depth / splits + EPILOGUE)
    return time + LAUNCH if tail else time


@functools.lru_cache(256)
def split_bytes(m: int, n: int, depth: int) -> int:
    """Most bytes of partial sums of an [m, n] product with sums over ``depth`` or less, on HOPPERS.

    Every halving of the depth is looked at: shorter sums are rarely split into more. The plans that
    launches have asked for stay cached.
    """
    plan_of = split_plan.__wrapped__
    depths = [depth >> halvings for halvings in range(depth.bit_length())]
    plans = (plan_of(m, n, part, sms) for part in depths for sms in HOPPERS)
    rows, columns = HAND_PRODUCT
    across = -(-n // columns)
    tiles = max(plan.splits * -(-(m - plan.whole) // rows) * across for plan in plans)
    return tiles * rows * columns * PARTIAL_BYTES
