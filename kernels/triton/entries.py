"""Sparse entries added to a kept sum: S[row] += Σ value·B[source], for products without them.

Algorithm: entries are sorted by row. A program for each entry and block of columns; the first
entry's of a row adds up all of them, ENTRIES at a time, in float32, and updates the row, the others
have nothing to do. So each row is written once, without atomics, and the order of its sum is fixed.

FLOPs 2 an entry and column. Bytes an entry and column: 2 for B, and once a row 6 with a split24
sum or 4 with one in the output's dtype. Numerics: the sum rounds once more, as for one more part.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.triton.arguments import cdiv, next_power_of_2
from flce_tune.kernels.triton.product import narrow, widen

COLUMNS = 512
ENTRIES = 8


@triton.jit(do_not_specialize=["first", "end", "count"])
def entries_kernel(
    row_ptr,  # [count] ascending
    source_ptr,  # [count] row of B
    value_ptr,  # [count] float32
    b_ptr,  # [., n]
    out_ptr,  # [end - first, n]
    extra_ptr,  # uint8 beside it, or unused
    first,  # the rows of entries that are the output's
    end,
    count,
    n,
    b_stride,
    out_stride,
    extra_stride,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(row_ptr + entry)
    before = tl.load(row_ptr + entry - 1, mask=entry > 0, other=-1)
    if (row < first) | (row >= end) | (row == before):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = columns < n
    total = tl.zeros([COLUMNS], tl.float32)
    while tl.load(row_ptr + entry, mask=entry < count, other=-1) == row:
        some = entry + tl.arange(0, ENTRIES)
        here = tl.load(row_ptr + some, mask=some < count, other=-1) == row
        value = tl.load(value_ptr + some, mask=here, other=0.0)
        source = tl.load(source_ptr + some, mask=here, other=0).to(tl.int64)
        b = tl.load(
            b_ptr + source[:, None] * b_stride + columns[None, :],
            mask=(here & (value != 0.0))[:, None] & ok[None, :],
            other=0.0,
        )
        total += tl.sum(value[:, None] * b.to(tl.float32), axis=0)
        entry += ENTRIES
    place = (row - first).to(tl.int64)
    out = out_ptr + place * out_stride + columns
    if SPLIT:
        extra = extra_ptr + place * extra_stride + columns
        total += widen(tl.load(out, mask=ok, other=0.0), tl.load(extra, mask=ok, other=0))
        high, low = narrow(total)
        tl.store(out, high, mask=ok)
        tl.store(extra, low, mask=ok)
    else:
        total += tl.load(out, mask=ok, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=ok)


def launch_entries(
    entries: Entries,
    out: Tensor,  # [m, n]
    extra: Tensor | None,  # [m, n] uint8 beside it, or None
    first: int,  # the entries' row that is the output's first
) -> None:
    """Add entries to a sum that a product keeps as split24, or in the output's own dtype."""
    (m, n), count = out.shape, len(entries.row)
    columns = min(COLUMNS, next_power_of_2(n))
    entries_kernel[(count, cdiv(n, columns))](
        entries.row,
        entries.source,
        entries.value,
        entries.rows,
        out,
        extra,
        first,
        first + m,
        count,
        n,
        entries.rows.stride(0),
        out.stride(0),
        0 if extra is None else extra.stride(0),
        SPLIT=extra is not None,
        COLUMNS=columns,
        ENTRIES=ENTRIES,
        num_warps=4,
    )
