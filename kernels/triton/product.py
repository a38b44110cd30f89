"""Gradient GEMMs: dX = G·W and dW = Gᵀ·x, written once or accumulated over chunks.

Algorithm: persistent tiles through tensor descriptors as in ``logits``. The accumulator between
chunks is one of

- float32: 4 bytes an element, read and written per chunk;
- split24: the upper 16 bits of the float32 value in the output tensor itself and the next 8 in
  one byte beside it. 17 bits of significand lose nothing that rounding to bfloat16 keeps
  (relative error 2⁻¹⁷ per chunk against 2⁻⁹ at the end), at 3 bytes an element, only one of
  them extra;
- the output's own dtype: 2 bytes, rounded per chunk; asked for explicitly.

The last chunk's epilogue rounds to nearest even into the output, so no cast pass follows. Sums are
exchanged through shared memory a strip at a time, so that registers and pipeline suffice.

A may be numerators, stored in blocks of SLAB columns, with a factor for each row of the product;
the labels' share of it, one entry a token, is then added as a sparse matrix.

FLOPs 2·M·N·K. Bytes beyond the operands, per chunk and element: 8, 6 or 4.
"""

import triton
import triton.language as tl

from flce_tune.kernels.triton.logits import tile_position
from flce_tune.kernels.triton.relaunch import relaunched


@triton.jit
def halves(acc, N_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr):
    """Split a tile into its left and right half."""
    acc = tl.reshape(acc, (N_BLOCK, 2, V_BLOCK // 2))
    return tl.split(tl.permute(acc, (0, 2, 1)))


@triton.jit
def widen(high, low):
    """The float32 whose upper 16 bits are ``high`` (bfloat16) and whose next 8 are ``low``."""
    bits = high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return (bits | (low.to(tl.uint32) << 8)).to(tl.float32, bitcast=True)


@triton.jit
def narrow(value):
    """Upper 16 bits as bfloat16 and next 8 as a byte, rounded to nearest at the 24th bit.

    Infinities and NaNs keep their class: an infinity's carry stays within the bits that are cut
    off, and a NaN gets a bit that survives the cut.
    """
    bits = value.to(tl.uint32, bitcast=True)
    bits = tl.where(value != value, bits | 0x400000, bits + 0x80)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return high, ((bits >> 8) & 0xFF).to(tl.uint8)


@triton.jit
def store_part(
    part, out_ptr, extra_ptr, row, column, m, n, out_stride, extra_stride,
    M_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ACCUMULATOR: tl.constexpr, PRIOR: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add what earlier chunks left, if any, and store in the accumulator's form.

    The tile's corner is a 64-bit scalar, offsets inside it are 32-bit: a 64-bit address for each
    element would not fit the registers.
    """
    rows = tl.arange(0, M_BLOCK)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    ok = (rows < m - row) & (columns < n - column)
    out = out_ptr + row.to(tl.int64) * out_stride + column + (rows * out_stride + columns)
    if ACCUMULATOR != "weight_dtype":
        extra = extra_ptr + row.to(tl.int64) * extra_stride + column
        extra += rows * extra_stride + columns
    if PRIOR:
        if ACCUMULATOR == "fp32":
            part += tl.load(extra, mask=ok, other=0.0)
        elif ACCUMULATOR == "split24":
            high = tl.load(out, mask=ok, other=0.0)
            part += widen(high, tl.load(extra, mask=ok, other=0))
        else:
            part += tl.load(out, mask=ok, other=0.0).to(tl.float32)
    if LAST or ACCUMULATOR == "weight_dtype":
        tl.store(out, part.to(out_ptr.dtype.element_ty), mask=ok)
    elif ACCUMULATOR == "fp32":
        tl.store(extra, part, mask=ok)
    else:
        high, low = narrow(part)
        tl.store(out, high, mask=ok)
        tl.store(extra, low, mask=ok)


@triton.jit
def store_parts(
    acc, out_ptr, extra_ptr, row, column, m, n, out_stride, extra_stride,
    M_BLOCK: tl.constexpr, WIDTH: tl.constexpr, STORE_WIDTH: tl.constexpr,
    ACCUMULATOR: tl.constexpr, PRIOR: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Halve the tile until its parts are STORE_WIDTH columns wide, and store them in turn."""
    if WIDTH <= STORE_WIDTH:
        store_part(
            acc, out_ptr, extra_ptr, row, column, m, n, out_stride, extra_stride,
            M_BLOCK, WIDTH, ACCUMULATOR, PRIOR, LAST,
        )  # fmt: skip
    else:
        left, right = halves(acc, M_BLOCK, WIDTH)
        store_parts(
            left, out_ptr, extra_ptr, row, column, m, n, out_stride, extra_stride,
            M_BLOCK, WIDTH // 2, STORE_WIDTH, ACCUMULATOR, PRIOR, LAST,
        )  # fmt: skip
        store_parts(
            right, out_ptr, extra_ptr, row, column + WIDTH // 2, m, n, out_stride, extra_stride,
            M_BLOCK, WIDTH // 2, STORE_WIDTH, ACCUMULATOR, PRIOR, LAST,
        )  # fmt: skip


@triton.jit
def add_entries(
    acc, first, end, row_ptr, source_ptr, value_ptr, b_ptr, row, column, n, b_stride,
    M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, ENTRY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add value·B[source] to the rows of some entries, as a product of their one-hot matrix."""
    entries = first + tl.arange(0, ENTRY_BLOCK)
    here = entries < end
    place = tl.load(row_ptr + entries, mask=here, other=-1)
    value = tl.load(value_ptr + entries, mask=here, other=0.0)
    source = tl.load(source_ptr + entries, mask=here, other=0).to(tl.int64)
    hit = (row + tl.arange(0, M_BLOCK))[:, None] == place[None, :]
    columns = column + tl.arange(0, N_BLOCK)
    ok = here[:, None] & (columns < n)[None, :]
    b = tl.load(b_ptr + source[:, None] * b_stride + columns[None, :], mask=ok, other=0.0)
    return tl.dot(tl.where(hit, value[None, :], 0.0).to(b.dtype), b, acc)


@relaunched
@triton.jit
def product_kernel(
    a_desc,  # [m, k], or [k, m] if TRANSPOSED; with SLAB, blocks of that many columns, one by one
    b_desc,  # [k, n]
    out_desc,  # [m, n], blocks of M_BLOCK × N_BLOCK; for a sum of one part
    out_ptr,
    extra_ptr,  # float32 or uint8 accumulator beside the output, or unused
    factor_ptr,  # [m] float32, or unused
    entry_offset_ptr,  # [tiles of m + 1]: which entries each tile adds; with all of these or none
    entry_row_ptr,  # [entries] row of the product each is added to, counted from entry_first
    entry_source_ptr,  # [entries] row of B
    entry_value_ptr,  # [entries] float32
    b_ptr,  # B of the entries
    entry_first,
    b_stride,
    m,
    n,
    k,
    out_stride,
    extra_stride,
    block_rows,  # rows of A from one of its blocks to the next
    M_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SLAB: tl.constexpr,  # columns of a block of A; 0: A is one block
    HAS_FACTOR: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,  # entries added at once; 0: there are none
    ACCUMULATOR: tl.constexpr,
    PRIOR: tl.constexpr,
    LAST: tl.constexpr,
    STORE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,  # a tile of the output fits in shared memory beside the pipeline
):
    tiles_m = tl.cdiv(m, M_BLOCK)
    tiles_n = tl.cdiv(n, N_BLOCK)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=ENTRY_BLOCK == 0
    ):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * M_BLOCK
        column = tile_n * N_BLOCK
        acc = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
        for i in range(0, k, K_BLOCK):
            if TRANSPOSED:
                if SLAB:
                    a = a_desc.load([row // SLAB * block_rows + i, row % SLAB]).T
                else:
                    a = a_desc.load([i, row]).T
            elif SLAB:
                a = a_desc.load([i // SLAB * block_rows + row, i % SLAB])
            else:
                a = a_desc.load([row, i])
            acc = tl.dot(a, b_desc.load([i, column]), acc)
        if HAS_FACTOR:
            rows = row + tl.arange(0, M_BLOCK)
            acc *= tl.load(factor_ptr + rows, mask=rows < m, other=0.0)[:, None]
        if ENTRY_BLOCK:
            end = tl.load(entry_offset_ptr + tile_m + 1)
            for first in tl.range(
                tl.load(entry_offset_ptr + tile_m), end, ENTRY_BLOCK, num_stages=1
            ):
                acc = add_entries(
                    acc, first, end, entry_row_ptr, entry_source_ptr, entry_value_ptr, b_ptr,
                    row + entry_first, column, n, b_stride, M_BLOCK, N_BLOCK, ENTRY_BLOCK,
                )  # fmt: skip
        if LAST and not PRIOR and WHOLE:
            out_desc.store([row, column], acc.to(out_desc.dtype))
        else:
            store_parts(
                acc, out_ptr, extra_ptr, row, column, m, n, out_stride, extra_stride,
                M_BLOCK, N_BLOCK, STORE_WIDTH, ACCUMULATOR, PRIOR, LAST,
            )  # fmt: skip
