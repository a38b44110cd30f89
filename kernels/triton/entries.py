"""Sums of sparse entries, Σ value·B[source] for each row, for products that cannot add them up.

They join a kept sum, or are kept by themselves in float32, for a product written once to add as one
entry a row (see ``kernels.label_sums``).

Algorithm: entries are sorted by row. Programs for entries and blocks of columns; the one of a row's
first entry adds up all of them in float32, ENTRIES and then MANY at a time, and writes the row; the
others have nothing to do. So each row is written once, without atomics, and the order of its sum is
fixed. A row of many entries is cut into stretches, whose sums are worked out first (``carried``).
By themselves, sums are kept for a group of rows at a time: its programs go through its entries
alone, which the offsets delimit, so that many groups do not look at all of them each.

FLOPs 2 an entry and column. Bytes an entry and column: 2 for B, and once a row 6 with a split24
sum, 4 with one in the output's dtype or by itself. Numerics: a kept sum rounds once more, as for
one more part; by itself it does not round but to float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.label_sums import STRETCH
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.triton.arguments import cdiv, next_power_of_2
from flce_tune.kernels.triton.carried import COLUMNS, MANY, WARPS, total_of_some
from flce_tune.kernels.triton.product import narrow, widen
from flce_tune.kernels.triton.relaunch import relaunched

ENTRIES = 4
PROGRAMS = 2048
"""That go through a group's entries, for each block of columns."""


class RowEntries(NamedTuple):
    """One entry for each row of a product: value·rows[source]; of value 0, it is not looked at."""

    source: Tensor  # [m]
    value: Tensor  # [m]
    rows: Tensor  # [., n]


@triton.jit
def total_of_row(
    entry, row, row_ptr, source_ptr, value_ptr, b_ptr, carried_ptr, columns, count, n, b_stride,
    STRETCH: tl.constexpr, ENTRIES: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Add up the entries of a row, of which this is the first, in some columns."""
    end = count
    if STRETCH > 0:
        end = tl.minimum(entry // STRETCH * STRETCH + STRETCH, count)
    total = total_of_some(
        entry, end, row, row_ptr, source_ptr, value_ptr, b_ptr, columns, n, b_stride, ENTRIES
    )
    entry += ENTRIES
    while tl.load(row_ptr + entry, mask=entry < end, other=-1) == row:
        total += total_of_some(
            entry, end, row, row_ptr, source_ptr, value_ptr, b_ptr, columns, n, b_stride, MANY
        )
        entry += MANY
    if STRETCH > 0:
        while tl.load(row_ptr + end, mask=end < count, other=-1) == row:
            carried = carried_ptr + (end // STRETCH).to(tl.int64) * n + columns
            total += tl.load(carried, mask=columns < n, other=0.0)
            end += STRETCH
    return total


@relaunched
@triton.jit(do_not_specialize=["first", "end", "count"])
def entries_kernel(
    row_ptr,  # [count] ascending
    source_ptr,  # [count] row of B
    value_ptr,  # [count] float32
    b_ptr,  # [., n]
    carried_ptr,  # [stretches, n] float32, or None
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
    STRETCH: tl.constexpr,  # entries; 0: all are one stretch
    ENTRIES: tl.constexpr,
    MANY: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(row_ptr + entry)
    before = tl.load(row_ptr + entry - 1, mask=entry > 0, other=-1)
    if (row < first) | (row >= end) | (row == before):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = columns < n
    total = total_of_row(
        entry, row, row_ptr, source_ptr, value_ptr, b_ptr, carried_ptr, columns, count, n, b_stride,
        STRETCH, ENTRIES, MANY,
    )  # fmt: skip
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


@relaunched
@triton.jit(do_not_specialize=["first", "first_tile", "tiles", "count"])
def label_sums_kernel(
    offset_ptr,  # [all tiles + 1] the first entry of each tile of rows
    row_ptr,  # [count] ascending
    source_ptr,  # [count] row of B
    value_ptr,  # [count] float32
    b_ptr,  # [., n]
    carried_ptr,  # [stretches, n] float32, or None
    place_ptr,  # [m] int64, of the output's rows with entries: their row of sums
    has_ptr,  # [m] float32, 1 for these rows
    sum_ptr,  # [., n] float32
    first,  # the row of entries that is the output's first
    first_tile,  # which begins there
    tiles,  # of the output
    count,
    n,
    b_stride,
    BY_ENTRY: tl.constexpr,  # a row of sums for each entry, not for each row of the output
    COLUMNS: tl.constexpr,
    STRETCH: tl.constexpr,
    ENTRIES: tl.constexpr,
    MANY: tl.constexpr,
):
    begin = tl.load(offset_ptr + first_tile)
    end = tl.load(offset_ptr + first_tile + tiles)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for entry in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        row = tl.load(row_ptr + entry)
        before = tl.load(row_ptr + entry - 1, mask=entry > 0, other=-1)
        if row != before:
            total = total_of_row(
                entry, row, row_ptr, source_ptr, value_ptr, b_ptr, carried_ptr, columns, count, n,
                b_stride, STRETCH, ENTRIES, MANY,
            )  # fmt: skip
            place = row - first
            if BY_ENTRY:
                place = (entry - begin).to(place.dtype)
            tl.store(place_ptr + row - first, place)
            tl.store(has_ptr + row - first, 1.0)
            tl.store(sum_ptr + place.to(tl.int64) * n + columns, total, mask=columns < n)


def launch_label_sums(
    entries: Entries,
    m: int,
    first: int,  # the entries' row that is the first of m
) -> RowEntries:
    """Add up each row's entries, in float32; a row without any gets value 0."""
    if first % entries.block:
        raise ValueError(f"entries of tiles of {entries.block} rows, got row {first}")
    count, n = len(entries.row), entries.rows.shape[1]
    columns = min(COLUMNS, next_power_of_2(n))
    place = entries.row.new_empty(m, dtype=torch.int64)
    has = entries.value.new_zeros(m, dtype=torch.float32)
    sums = entries.rows.new_empty(min(count, m), n, dtype=torch.float32)
    label_sums_kernel[(min(count, PROGRAMS), cdiv(n, columns))](
        entries.offsets,
        entries.row,
        entries.source,
        entries.value,
        entries.rows,
        entries.carried,
        place,
        has,
        sums,
        first,
        first // entries.block,
        cdiv(m, entries.block),
        count,
        n,
        entries.rows.stride(0),
        BY_ENTRY=count <= m,
        COLUMNS=columns,
        STRETCH=0 if entries.carried is None else STRETCH,
        ENTRIES=ENTRIES,
        MANY=MANY,
        num_warps=WARPS,
    )
    return RowEntries(place, has, sums)


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
        entries.carried,
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
        STRETCH=0 if entries.carried is None else STRETCH,
        ENTRIES=ENTRIES,
        MANY=MANY,
        num_warps=WARPS,
    )
