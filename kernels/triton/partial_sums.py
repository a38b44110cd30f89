"""The end of a product whose sums were split: its epilogue, over the total of the partial sums.

Algorithm: a program for each ROWS × COLUMNS elements adds up their partial sums in float32, in
order, applies the row's factor, adds the row's entry, value·B[source], and what earlier products
left, and stores the new sum, as the epilogue of ``hopper.product`` does for one that is not split.
No atomics: the same bits every time.

FLOPs 1 an element and part. Bytes an element: 3 a part, which may still be in the L2 cache; 3 to
read an earlier split24 sum or 2 one in the output's dtype; 3 or 2 to store; 2 for an entry.
Numerics: those of the epilogue, but that each part was rounded to 24 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.product import narrow, widen
from flce_tune.kernels.triton.relaunch import relaunched

ROWS, COLUMNS = 8, 256


@relaunched
@triton.jit(do_not_specialize=["splits", "part_rows", "m"])
def partial_sums_kernel(
    high_ptr,  # [splits · part_rows, n], upper 16 bits of the partial sums
    low_ptr,  # [splits · part_rows, n], their next 8
    out_ptr,  # [m, n]
    extra_ptr,  # [m, n] uint8 beside it, or None
    factor_ptr,  # [m] float32, or None
    source_ptr,  # [m] row of B; or None
    value_ptr,  # [m] float32; or None
    b_ptr,  # [., n], or None
    splits,
    part_rows,
    m,
    n,
    high_stride,
    low_stride,
    out_stride,
    extra_stride,
    b_stride,
    PRIOR: tl.constexpr,
    LAST: tl.constexpr,  # round into the output
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    here = rows < m
    ok = here[:, None] & (columns < n)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(splits):
        row = (part * part_rows + rows)[:, None]
        high = tl.load(high_ptr + row * high_stride + columns, mask=ok, other=0.0)
        total += widen(high, tl.load(low_ptr + row * low_stride + columns, mask=ok, other=0))
    if factor_ptr is not None:
        total *= tl.load(factor_ptr + rows, mask=here, other=0.0)[:, None]
    if value_ptr is not None:
        value = tl.load(value_ptr + rows, mask=here, other=0.0)[:, None]
        source = tl.load(source_ptr + rows, mask=here, other=0).to(tl.int64)[:, None]
        b = tl.load(b_ptr + source * b_stride + columns, mask=ok & (value != 0.0), other=0.0)
        total += value * b.to(tl.float32)
    row = rows.to(tl.int64)[:, None]
    out = out_ptr + row * out_stride + columns
    if extra_ptr is not None:
        extra = extra_ptr + row * extra_stride + columns
    if PRIOR:
        high = tl.load(out, mask=ok, other=0.0)
        if extra_ptr is not None:
            total += widen(high, tl.load(extra, mask=ok, other=0))
        else:
            total += high.to(tl.float32)
    if LAST:
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        high, low = narrow(total)
        tl.store(out, high, mask=ok)
        tl.store(extra, low, mask=ok)


def launch_partial_sums(
    high: Tensor,  # [splits · part rows, n]
    low: Tensor,  # [splits · part rows, n] uint8
    splits: int,
    out: Tensor,  # [m, n]
    extra: Tensor | None,  # [m, n] uint8 beside it; None: sums are kept as the output is
    row_factor: Tensor | None,  # [m] float32
    source: Tensor | None,  # [m] the row of ``rows`` that joins each row of the product; with
    value: Tensor | None,  # [m] float32, what it is multiplied by
    rows: Tensor | None,  # [., n]
    prior: bool,
    last: bool,
) -> None:
    """Finish the product whose partial sums these are."""
    m, n = out.shape
    partial_sums_kernel[(cdiv(m, ROWS), cdiv(n, COLUMNS))](
        high,
        low,
        out,
        extra,
        row_factor,
        source,
        value,
        rows,
        splits,
        len(high) // splits,
        m,
        n,
        high.stride(0),
        low.stride(0),
        out.stride(0),
        0 if extra is None else extra.stride(0),
        0 if rows is None else rows.stride(0),
        PRIOR=prior,
        LAST=last or extra is None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
