"""GEMMs x·Wᵀ scheduled by hand (Gluon, Hopper): tensor cores do not wait for the epilogue.

``schedule`` is all of a kernel but its epilogue; see ``numerators``, ``gradient`` and ``logits``.

Algorithm: persistent programs of one producer warp, which copies tiles of x and W into a ring of
STAGES buffers (TMA), and two consumers of four warps, which multiply them. Barriers per stage say
that it is full or empty. A consumer's epilogue runs while the other one multiplies:

- not SHARED (ping-pong): consumers take the program's tiles in turn, N_BLOCK × V_BLOCK each, and
  one begins when the other has begun the last step of its tile.
- SHARED: both work on each tile, N_BLOCK / 2 rows each. The second begins its last LEAD steps when
  the first has begun its own last (0: in no order). So it multiplies what is left in the ring while
  the first is in its epilogue, and the first begins the next tile while the second is in its own.

The epilogue goes through a tile 64 columns at a time, so that two small buffers suffice for its
stores: one is written while the other is copied out. A kernel passes ``schedule`` two functions:
one loads what its epilogue needs to know of the rows, before they are multiplied, and the other is
its epilogue. A bias takes no registers: the accumulators begin with it.

What bounds the tiles: the accumulators of two consumers, 128 registers a thread each (of 240; the
producer has 24), and shared memory. Ping-pong tiles of 128 × 128 read a fifth more of it per FLOP
than SHARED ones of 128 × 256, but hide the whole epilogue, where SHARED ones hide LEAD · D_BLOCK
· 8 clocks of it. On an H200 ping-pong is the faster for what is stored, SHARED where nothing is;
see docs/performance.md.

FLOPs and bytes: those of the Triton kernels. Numerics: the same but for the order of sums.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flce_tune.kernels.hopper.strips import STORE_WIDTH, STRIP, jit
from flce_tune.kernels.triton import logits

CONSUMER_REGISTERS = gl.constexpr(240)  # a thread; the other consumer gets what is left, 240 too
PRODUCER_REGISTERS = gl.constexpr(24)

tile_position = jit(logits.tile_position.fn)


@jit
def produce(x_desc, w_desc, rings, barriers, sizes, GROUP: gl.constexpr):
    """Fill stage after stage, tile after tile."""
    x_ring, w_ring = rings  # [STAGES, N_BLOCK, D_BLOCK], [STAGES, V_BLOCK, D_BLOCK]
    full, empty, _ = barriers
    n, hidden, width, _ = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    N_BLOCK: gl.constexpr = x_ring.shape[1]
    V_BLOCK: gl.constexpr = w_ring.shape[1]
    D_BLOCK: gl.constexpr = x_ring.shape[2]
    tiles_n = gl.cdiv(n, N_BLOCK)
    tiles_v = gl.cdiv(width, V_BLOCK)
    step = 0
    for tile in range(gl.program_id(0), tiles_n * tiles_v, gl.num_programs(0)):
        tile_n, tile_v = tile_position(tile, tiles_n, tiles_v, GROUP)
        for k in range(0, hidden, D_BLOCK):
            stage = step % STAGES
            # Before its first completion a barrier counts as past a phase of parity 1.
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            x, w = x_ring.index(stage), w_ring.index(stage)
            tma.async_copy_global_to_shared(x_desc, [tile_n * N_BLOCK, k], ready, x)
            tma.async_copy_global_to_shared(w_desc, [tile_v * V_BLOCK, k], ready, w)
            step += 1


@jit
def multiply(acc, rings, barriers, first_step, begin, end, FIRST_ROW: gl.constexpr):
    """Add steps ``begin`` to ``end`` of a tile; the last one's product is still under way."""
    x_ring, w_ring = rings
    full, empty, _ = barriers
    STAGES: gl.constexpr = x_ring.shape[0]
    for k in range(begin, end):
        step = first_step + k
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x = x_ring.index(stage).slice(FIRST_ROW, acc.shape[0])
        w = w_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the step before is done with its stage
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
    return acc


@jit
def consume(WHICH: gl.constexpr, PREPARE: gl.constexpr, FINISH: gl.constexpr,
            out_desc, bias_ptr, rings, staging, barriers, tables, sizes,
            GROUP: gl.constexpr, SLAB: gl.constexpr, LEAD: gl.constexpr, SHARED: gl.constexpr,
            STORE: gl.constexpr, EVEN: gl.constexpr):  # fmt: skip
    """Multiply and finish this consumer's tiles, or its rows of all."""
    x_ring, w_ring = rings
    _, empty, turns = barriers
    n, hidden, width, _ = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    N_BLOCK: gl.constexpr = x_ring.shape[1]
    V_BLOCK: gl.constexpr = w_ring.shape[1]
    ROWS: gl.constexpr = N_BLOCK // 2 if SHARED else N_BLOCK
    FIRST_ROW: gl.constexpr = WHICH * ROWS if SHARED else 0
    FIRST: gl.constexpr = 0 if SHARED else WHICH  # of the program's tiles
    STRIDE: gl.constexpr = 1 if SHARED else 2
    # A parity tells two phases apart, not three: consumers of different tiles may not wait for
    # stages out of turn.
    IN_ORDER: gl.constexpr = not SHARED or LEAD > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_BLOCK, 16])
    tiles_n = gl.cdiv(n, N_BLOCK)
    tiles_v = gl.cdiv(width, V_BLOCK)
    steps = gl.cdiv(hidden, x_ring.shape[2])
    programs = gl.num_programs(0)
    first_step = FIRST * steps
    turn = 0
    for tile in range(gl.program_id(0) + FIRST * programs, tiles_n * tiles_v, STRIDE * programs):
        tile_n, tile_v = tile_position(tile, tiles_n, tiles_v, GROUP)
        row = tile_n * N_BLOCK + FIRST_ROW
        given = PREPARE(row + gl.arange(0, ROWS, gl.SliceLayout(1, STRIP)), tables, n)
        acc = gl.zeros([ROWS, V_BLOCK], gl.float32, layout)
        if bias_ptr is not None:
            columns = tile_v * V_BLOCK + gl.arange(0, V_BLOCK, gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + columns, mask=columns < width, other=0.0)
            acc += bias.to(gl.float32)[None, :]
        held = 0
        if IN_ORDER:
            if SHARED:
                held = steps - gl.minimum(LEAD, steps)
                acc = multiply(acc, rings, barriers, first_step, 0, held, FIRST_ROW)
            mbarrier.wait(turns.index(WHICH), turn ^ (1 - WHICH))  # consumer 0 has the first turn
        acc = multiply(acc, rings, barriers, first_step, held, steps, FIRST_ROW)
        if IN_ORDER:
            mbarrier.arrive(turns.index(1 - WHICH))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((first_step + steps - 1) % STAGES))
        FINISH(WHICH, acc, given, row, tile_v, out_desc, staging, tables, sizes, SLAB, STORE, EVEN)
        first_step += STRIDE * steps
        turn ^= 1
    tma.store_wait(0)


@jit
def schedule(
    PREPARE: gl.constexpr, FINISH: gl.constexpr,
    x_desc, w_desc, out_desc, bias_ptr, tables, sizes,
    ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, LEAD: gl.constexpr,
    SLAB: gl.constexpr, SHARED: gl.constexpr, STORE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """All of a kernel; what is computed of the raw logits is up to FINISH."""
    # Before its turn, a consumer keeps the stage of the step before, too.
    gl.static_assert(not SHARED or LEAD < STAGES)
    dtype: gl.constexpr = x_desc.dtype
    rings = (
        gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout),  # noqa: RUF005
        gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout),  # noqa: RUF005
    )
    staging = gl.allocate_shared_memory(
        dtype, [4, ROWS, STORE_WIDTH], gl.NVMMASharedLayout(128, 16, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if SHARED else 1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
    barriers = (full, empty, turns)
    gl.warp_specialize(
        [
            (consume, (0, PREPARE, FINISH, out_desc, bias_ptr, rings, staging, barriers, tables,
                       sizes, GROUP, SLAB, LEAD, SHARED, STORE, EVEN)),
            (consume, (1, PREPARE, FINISH, out_desc, bias_ptr, rings, staging, barriers, tables,
                       sizes, GROUP, SLAB, LEAD, SHARED, STORE, EVEN)),
            (produce, (x_desc, w_desc, rings, barriers, sizes, GROUP)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
