"""What epilogues of the hand-scheduled GEMMs share: a tile in strips, and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from flce_tune.kernels.limits import HAND_STRIP


def jit(function: Callable[..., Any]) -> Any:
    """``gluon.jit``, hashed here and now.

    A caller's key on disk holds what a function reads from its module only if that was hashed
    before; see ``triton.rows.LOG2E``.
    """
    made = gluon.jit(function)
    _ = made.cache_key
    return made


STORE_WIDTH = gl.constexpr(HAND_STRIP)  # columns
STRIP = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@jit
def halves(values):
    """The left and the right half of the columns; moves no register."""
    ROWS: gl.constexpr = values.shape[0]
    HALF: gl.constexpr = values.shape[1] // 2
    return values.reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()


@jit
def strips(values, WIDTH: gl.constexpr):
    """All columns, WIDTH at a time."""
    left, right = halves(values)
    if values.shape[1] == 2 * WIDTH:
        return left, right
    else:  # noqa: RET505 Triton would trace what follows
        return strips(left, WIDTH) + strips(right, WIDTH)


@jit
def inside(raw, tile_v, width, EVEN: gl.constexpr):
    """Raw logits of a tile, -inf past the last column."""
    V_BLOCK: gl.constexpr = raw.shape[1]
    if not EVEN:  # noqa: SIM102 Triton drops the outer one, and branches on the inner
        if tile_v * V_BLOCK + V_BLOCK > width:
            columns = tile_v * V_BLOCK + gl.arange(0, V_BLOCK, gl.SliceLayout(0, raw.type.layout))
            raw = gl.where((columns < width)[None, :], raw, float("-inf"))
    return raw


@jit
def largest_of(parts):
    """Each row's maximum over all strips."""
    top = parts[0]
    for i in gl.static_range(1, len(parts)):
        top = gl.maximum(top, parts[i])
    return gl.convert_layout(gl.max(top, axis=1), gl.SliceLayout(1, STRIP))


@jit
def copy_out(values, buffer, out_desc, row, column):
    """Begin to store a strip, once the copy before the last has read its buffer."""
    tma.store_wait(1)
    buffer.store(values.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], buffer)


@jit
def store_rows(ptr, values, row, tile_v, n):
    """Store a value per row of a tile."""
    rows = row + gl.arange(0, values.shape[0], values.type.layout)
    gl.store(ptr + gl.cast(tile_v, gl.int64) * n + rows, values, mask=rows < n)
