"""What stretches of sorted entries add to a row that begins before them.

The labels' entries of dW are sorted by row, and a tenth of all tokens may have one label: a program
that adds up such a row by itself takes longer than all others. So entries are cut into stretches of
STRETCH, and what a stretch adds to a row that goes on in it is worked out first, by a program for
each stretch and block of columns. Whoever adds up the row (``entries``) adds up its first stretch
and these. Few entries are not worth another launch.

FLOPs 2 an entry and column; bytes 2 an entry and column for B, and 4 a stretch and column.
Numerics: float32, in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.label_sums import FEW, STRETCH
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.triton.arguments import cdiv, next_power_of_2
from flce_tune.kernels.triton.relaunch import relaunched

COLUMNS = 1024
MANY = 8
"""Entries added up at a time."""
WARPS = 4


@triton.jit
def total_of_some(
    entry, end, row, row_ptr, source_ptr, value_ptr, b_ptr, columns, n, b_stride,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Add up the next entries, as far as they are of the row and before the end."""
    some = entry + tl.arange(0, ENTRIES)
    here = tl.load(row_ptr + some, mask=some < end, other=-1) == row
    value = tl.load(value_ptr + some, mask=here, other=0.0)
    source = tl.load(source_ptr + some, mask=here, other=0).to(tl.int64)
    b = tl.load(
        b_ptr + source[:, None] * b_stride + columns[None, :],
        mask=(here & (value != 0.0))[:, None] & (columns < n)[None, :],
        other=0.0,
    )
    return tl.sum(value[:, None] * b.to(tl.float32), axis=0)


@relaunched
@triton.jit(do_not_specialize=["extent", "count"])
def carried_kernel(
    row_ptr,  # [count] ascending
    source_ptr,  # [count] row of B
    value_ptr,  # [count] float32
    b_ptr,  # [., n]
    carried_ptr,  # [stretches, n] float32, left as it is where no row goes on in a stretch
    extent,  # rows of the output; others are no labels
    count,
    n,
    b_stride,
    COLUMNS: tl.constexpr,
    STRETCH: tl.constexpr,
    MANY: tl.constexpr,
):
    stretch = tl.program_id(0) + 1
    entry = stretch * STRETCH
    row = tl.load(row_ptr + entry)
    if (row != tl.load(row_ptr + entry - 1)) | (row < 0) | (row >= extent):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.minimum(entry + STRETCH, count)
    total = tl.zeros([COLUMNS], tl.float32)
    while tl.load(row_ptr + entry, mask=entry < end, other=-1) == row:
        total += total_of_some(
            entry, end, row, row_ptr, source_ptr, value_ptr, b_ptr, columns, n, b_stride, MANY
        )
        entry += MANY
    tl.store(carried_ptr + stretch.to(tl.int64) * n + columns, total, mask=columns < n)


def launch_carried(entries: Entries) -> Tensor | None:  # [stretches, n] float32
    """What each stretch adds to a row that begins before it; None if all entries are one."""
    count, n = len(entries.row), entries.rows.shape[1]
    if count <= FEW:
        return None
    columns = min(COLUMNS, next_power_of_2(n))
    stretches = cdiv(count, STRETCH)
    carried = entries.value.new_empty(stretches, n)
    carried_kernel[(stretches - 1, cdiv(n, columns))](
        entries.row,
        entries.source,
        entries.value,
        entries.rows,
        carried,
        entries.extent,
        count,
        n,
        entries.rows.stride(0),
        COLUMNS=columns,
        STRETCH=STRETCH,
        MANY=MANY,
        num_warps=WARPS,
    )
    return carried
