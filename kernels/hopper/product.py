"""Gradient GEMMs scheduled by hand (Gluon, Hopper): the sum of earlier parts comes with the tiles.

Computes what ``kernels.triton.product.product_kernel`` does with a split24 sum, one in the output's
own dtype, or written once; but of entries, only one for every row: dX's, the labels' rows of W, and
those of a dW written once, each label's sum of all (see ``label_sums``).

Algorithm: the SHARED schedule of ``schedule``. One producer warp copies tiles of A and B into a
ring of stages (TMA); two consumers of four warps compute M_BLOCK / 2 rows of each tile, the second
one LEAD steps behind the first, so that each multiplies while the other is in its epilogue.

The ring also serves the epilogue. After a tile's steps the producer goes on with a stage for each
strip of it, 2·K_BLOCK columns of what earlier parts left: the upper 16 bits go where B's tile
would be, the next 8 where A's would be, which is just as many bytes if N_BLOCK = 2·M_BLOCK. So
they are under way while the tile is multiplied, as far ahead as the ring reaches. A consumer adds
its part, writes the new sum over the old one and has it copied out from there. It hands the stage
on when the next strip's copy, or the next tile's first product, is under way, and so hardly waits
for the copy. Without an earlier sum, it gets the stages unfilled.

What joins the product at its end, a factor for each row and an entry, value·B'[source], comes from
global memory into registers, the entries' rows of B' a strip at a time. It needs no place in the
ring: dX's tiles have thousands of steps, and few of dW's rows are labels' (value 0 reads nothing,
and a consumer's rows without any take no instructions).

Shared memory, of 227 KiB less 1 KiB for barriers, and what LEAD steps hide of an epilogue:

    M_BLOCK × N_BLOCK × K_BLOCK   stage     stages        strips a tile   LEAD   clocks hidden
    128 × 256 × 32                24 KiB    9 = 216 KiB   4               5      1280
    128 × 256 × 64                48 KiB    4 = 192 KiB   2               3      1536

LEAD steps and a tile's strips should nearly fit the ring together: else the first consumer's
epilogue waits for the second one's steps. On an H200, LEAD 2 and 3 of 4 stages, and 5 to 7 of 9,
take about the same time. Buffers of their own for the strips would do worse: two of 64
columns for each consumer take 48 KiB, and as a tile has four, the last two would come only when
the first two have been copied out: an epilogue would wait for memory.

Split-K: where there are fewer tiles than multiprocessors, or a last wave has few, each tile's K is
cut into parts (see ``splits``). They are tiles of their own, which differ in where their steps
begin and end, and their partial sums, kept as split24, one below the other. What joins the product
joins their total, in ``triton.partial_sums``. With several parts m is a multiple of M_BLOCK, so
that no tile enters the next part's, and no part is empty.

An epilogue with an earlier sum is 1580 instructions a warp, one warp of it on each scheduler, so
some 2000 clocks with its waits; a tile's products are 16 a unit of K. Of 33000 for K = 2048, some
700 are not hidden.

FLOPs 2·M·N·K. Bytes beyond the operands, per element: 6 with an earlier split24 sum, 3 for the
first one, 5 for the last; 4 with a bfloat16 one, 2 written once; 2 more with entries, 4 in rows
with a label's sum. Numerics: product_kernel's, bit for bit where its products' are, but that an
entry's value stays float32, and that labels' entries are summed before they join dW.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flce_tune.kernels.hopper.schedule import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    tile_position,
)
from flce_tune.kernels.hopper.strips import jit, strips
from flce_tune.kernels.triton import product
from flce_tune.kernels.triton.relaunch import relaunched

widen = jit(product.widen.fn)
narrow = jit(product.narrow.fn)


@jit
def upper(b_ring, stage, desc, WHICH: gl.constexpr):
    """A consumer's rows of a strip in bfloat16, where the stage would keep B."""
    shape: gl.constexpr = [2] + desc.block_type.shape  # noqa: RUF005
    return b_ring.index(stage)._reinterpret(desc.dtype, shape, desc.layout).index(WHICH)


@jit
def lower(a_ring, stage, desc, WHICH: gl.constexpr):
    """A consumer's rows of a strip in bytes, where the stage would keep its rows of A."""
    shape: gl.constexpr = desc.block_type.shape
    return a_ring.index(2 * stage + WHICH)._reinterpret(desc.dtype, shape, desc.layout)


@jit
def place_of(tile, sizes, M_BLOCK: gl.constexpr, N_BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """A tile's place in the output, counted in tiles, its row of A, and which of K it adds up."""
    m, n, depth, _, splits, part = sizes
    tiles_m = gl.cdiv(m, M_BLOCK)
    tile_m, tile_n = tile_position(tile, splits * tiles_m, gl.cdiv(n, N_BLOCK), GROUP)
    begin = tile_m // tiles_m * part
    return tile_m, tile_n, tile_m % tiles_m * M_BLOCK, begin, gl.minimum(begin + part, depth)


@jit
def produce(descs, rings, barriers, sizes, GROUP: gl.constexpr, TRANSPOSED: gl.constexpr,
            SLAB: gl.constexpr, PRIOR: gl.constexpr):  # fmt: skip
    """Fill stage after stage, tile after tile: A and B of its steps, then strips of its sum."""
    a_desc, b_desc, high_desc, low_desc = descs
    a_ring, b_ring = rings
    full, empty, _ = barriers
    m, n, _, block_rows, splits, _ = sizes
    STAGES: gl.constexpr = b_ring.shape[0]
    K_BLOCK: gl.constexpr = b_ring.shape[1]
    N_BLOCK: gl.constexpr = b_ring.shape[2]
    ROWS: gl.constexpr = high_desc.block_type.shape[0]
    STRIP: gl.constexpr = high_desc.block_type.shape[1]
    tiles = splits * gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, N_BLOCK)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n, row, begin, end = place_of(tile, sizes, 2 * ROWS, N_BLOCK, GROUP)
        column = tile_n * N_BLOCK
        for k in range(begin, end, K_BLOCK):
            stage = step % STAGES
            # Before its first completion a barrier counts as past a phase of parity 1.
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            down, across = row, k
            if TRANSPOSED:
                down, across = k, row
            if SLAB:
                down += across // SLAB * block_rows
                across %= SLAB
            for half in gl.static_range(2):
                a = a_ring.index(2 * stage + half)
                if TRANSPOSED:
                    place = [down, across + half * ROWS]
                else:
                    place = [down + half * ROWS, across]
                tma.async_copy_global_to_shared(a_desc, place, ready, a)
            tma.async_copy_global_to_shared(b_desc, [k, column], ready, b_ring.index(stage))
            step += 1
        for i in range(0, N_BLOCK, STRIP):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            if PRIOR:
                SPLIT: gl.constexpr = low_desc is not None
                low_bytes: gl.constexpr = 2 * low_desc.block_type.nbytes if SPLIT else 0
                mbarrier.expect(ready, 2 * high_desc.block_type.nbytes + low_bytes)
                for half in gl.static_range(2):
                    place = [(2 * tile_m + half) * ROWS, column + i]
                    high = upper(b_ring, stage, high_desc, half)
                    tma.async_copy_global_to_shared(high_desc, place, ready, high)
                    if SPLIT:
                        low = lower(a_ring, stage, low_desc, half)
                        tma.async_copy_global_to_shared(low_desc, place, ready, low)
            else:
                mbarrier.arrive(ready)
            step += 1


@jit
def multiply(acc, rings, barriers, first_step, begin, end, WHICH: gl.constexpr,
             TRANSPOSED: gl.constexpr):  # fmt: skip
    """Add steps ``begin`` to ``end`` of a tile; the last one's product is still under way."""
    a_ring, b_ring = rings
    full, empty, _ = barriers
    STAGES: gl.constexpr = b_ring.shape[0]
    for k in range(begin, end):
        step = first_step + k
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_ring.index(2 * stage + WHICH)
        if TRANSPOSED:
            a = a.permute((1, 0))
        acc = warpgroup_mma(a, b_ring.index(stage), acc, is_async=True)
        # The step before is done with its stage: a product, or the last strip of another tile.
        acc = warpgroup_mma_wait(1, deps=[acc])
        tma.store_wait(0)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    return acc


@jit
def of_rows(ptr, rows, m):
    """A value for each row."""
    return gl.load(ptr + rows, mask=rows < m, other=0)


@jit
def entry_strip(value, source, b_ptr, b_stride, column, n, layout: gl.constexpr,
                STRIP: gl.constexpr):  # fmt: skip
    """value·B[source] of each row, in some columns."""
    columns = column + gl.arange(0, STRIP, gl.SliceLayout(0, layout))
    ok = (value != 0.0)[:, None] & (columns < n)[None, :]
    b = gl.load(b_ptr + source[:, None] * b_stride + columns[None, :], mask=ok, other=0.0)
    return value[:, None] * b.to(gl.float32)


@jit
def epilogue(acc, row, column, descs, rings, barriers, joined, sizes, first_step,
             WHICH: gl.constexpr, PRIOR: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Finish a consumer's rows of a tile: add what joins the product, and store the sum."""
    _, _, high_desc, low_desc = descs
    a_ring, b_ring = rings
    full, empty, _ = barriers
    factor_ptr, source_ptr, value_ptr, entry_b_ptr, b_stride = joined
    m, n, _, _, _, _ = sizes
    STAGES: gl.constexpr = b_ring.shape[0]
    STRIP: gl.constexpr = high_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STRIP, 16])
    rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    if factor_ptr is not None:
        factor = of_rows(factor_ptr, rows, m)
    if value_ptr is not None:
        value = of_rows(value_ptr, rows, m)
        source = of_rows(source_ptr, rows, m)
        joining = gl.sum(gl.where(value != 0.0, 1, 0), axis=0)
    parts = strips(acc, STRIP)
    for i in gl.static_range(acc.shape[1] // STRIP):
        step = first_step + i
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        part = gl.convert_layout(parts[i], layout)
        if factor_ptr is not None:
            part *= factor[:, None]
        if value_ptr is not None:  # noqa: SIM102 Triton drops it, and branches on the inner one
            if joining > 0:
                part += entry_strip(
                    value, source, entry_b_ptr, b_stride, column + i * STRIP, n, layout, STRIP
                )
        high_strip = upper(b_ring, stage, high_desc, WHICH)
        if low_desc is not None:
            low_strip = lower(a_ring, stage, low_desc, WHICH)
        if PRIOR:
            if low_desc is not None:
                part += widen(high_strip.load(layout), low_strip.load(layout))
            else:
                part += high_strip.load(layout).to(gl.float32)
        place = [row, column + i * STRIP]
        if LAST:
            high_strip.store(part.to(high_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(high_desc, place, high_strip)
        else:
            high, low = narrow(part)
            high_strip.store(high)
            low_strip.store(low)
            fence_async_shared()
            tma.async_copy_shared_to_global(high_desc, place, high_strip)
            tma.async_copy_shared_to_global(low_desc, place, low_strip)
        if i > 0:
            tma.store_wait(1 if LAST else 2)  # copies of this strip go on
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))


@jit
def consume(WHICH: gl.constexpr, descs, rings, barriers, joined, sizes, GROUP: gl.constexpr,
            LEAD: gl.constexpr, TRANSPOSED: gl.constexpr, PRIOR: gl.constexpr,
            LAST: gl.constexpr):  # fmt: skip
    """Multiply and finish this consumer's rows of all tiles."""
    _, b_ring = rings
    _, empty, turns = barriers
    m, n, _, _, splits, _ = sizes
    STAGES: gl.constexpr = b_ring.shape[0]
    K_BLOCK: gl.constexpr = b_ring.shape[1]
    N_BLOCK: gl.constexpr = b_ring.shape[2]
    ROWS: gl.constexpr = descs[2].block_type.shape[0]
    STRIPS: gl.constexpr = N_BLOCK // descs[2].block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N_BLOCK, 16])
    tiles = splits * gl.cdiv(m, 2 * ROWS) * gl.cdiv(n, N_BLOCK)
    first_step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = place_of(tile, sizes, 2 * ROWS, N_BLOCK, GROUP)
        steps = gl.cdiv(end - begin, K_BLOCK)
        acc = gl.zeros([ROWS, N_BLOCK], gl.float32, layout)
        held = 0
        if LEAD > 0:
            held = steps - gl.minimum(LEAD, steps)
            acc = multiply(acc, rings, barriers, first_step, 0, held, WHICH, TRANSPOSED)
            mbarrier.wait(turns.index(WHICH), turn ^ (1 - WHICH))  # consumer 0 has the first turn
        acc = multiply(acc, rings, barriers, first_step, held, steps, WHICH, TRANSPOSED)
        if LEAD > 0:
            mbarrier.arrive(turns.index(1 - WHICH))
        acc = warpgroup_mma_wait(0, deps=[acc])
        first_step += steps
        mbarrier.arrive(empty.index((first_step - 1) % STAGES))
        row = (2 * tile_m + WHICH) * ROWS
        epilogue(acc, row, tile_n * N_BLOCK, descs, rings, barriers, joined, sizes, first_step,
                 WHICH, PRIOR, LAST)  # fmt: skip
        first_step += STRIPS
        turn ^= 1
    tma.store_wait(0)


@relaunched
@gluon.jit(do_not_specialize=["m", "n", "depth", "splits", "part"])
def product_kernel(
    a_desc,  # [m, depth], or [depth, m] if TRANSPOSED; M_BLOCK / 2 × K_BLOCK at a time
    b_desc,  # [depth, n] in blocks of K_BLOCK × N_BLOCK
    high_desc,  # [splits · m, n], the output, in blocks of M_BLOCK / 2 × 2·K_BLOCK
    low_desc,  # uint8 beside it, in the same blocks; None: no split24 sum
    factor_ptr,  # [m] float32, or None
    source_ptr,  # [m] the row of ``entry_b`` that is added to each of the product's; or None
    value_ptr,  # [m] float32, what it is multiplied by; or None
    entry_b_ptr,  # [., n], float32 if these are sums; or None
    b_stride,
    m,
    n,
    depth,
    block_rows,  # rows of A from one of its blocks to the next
    splits,  # parts of K, each with an output of its own, one below the other
    part,  # columns of A in each but the last; a multiple of K_BLOCK
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SLAB: gl.constexpr,  # columns of a block of A; 0: A is one block
    PRIOR: gl.constexpr,
    LAST: gl.constexpr,  # round into the output: true without split24
):
    # Before its turn, a consumer keeps the stage of the step before, too.
    gl.static_assert(LEAD < STAGES)
    dtype: gl.constexpr = a_desc.dtype
    rings = (
        gl.allocate_shared_memory(dtype, [2 * STAGES] + a_desc.block_type.shape, a_desc.layout),  # noqa: RUF005
        gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout),  # noqa: RUF005
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    descs = (a_desc, b_desc, high_desc, low_desc)
    barriers = (full, empty, turns)
    joined = (factor_ptr, source_ptr, value_ptr, entry_b_ptr, b_stride)
    sizes = (m, n, depth, block_rows, splits, part)
    gl.warp_specialize(
        [
            (consume, (0, descs, rings, barriers, joined, sizes, GROUP, LEAD, TRANSPOSED, PRIOR,
                       LAST)),
            (consume, (1, descs, rings, barriers, joined, sizes, GROUP, LEAD, TRANSPOSED, PRIOR,
                       LAST)),
            (produce, (descs, rings, barriers, sizes, GROUP, TRANSPOSED, SLAB, PRIOR)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
