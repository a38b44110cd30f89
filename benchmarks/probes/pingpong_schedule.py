"""How the hand-scheduled kernels are cut, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flce_tune.kernels.hopper.launch import descriptor
from flce_tune.kernels.limits import HAND_STRIP
from flce_tune.kernels.triton.arguments import cdiv


@dataclass(frozen=True)
class Schedule:
    """How the kernel cuts and orders its work."""

    rows: int  # ROWS: of a tile, one consumer's
    v_block: int
    d_block: int
    stages: int
    shared: bool
    lead: int = 0  # steps, if shared; 0: no order
    group: int = 16

    @property
    def n_block(self) -> int:
        """Rows of a tile."""
        return self.rows * (2 if self.shared else 1)

    @property
    def shared_memory(self) -> int:
        """Bytes; the barriers and what the compiler adds are less than 1 KiB."""
        ring = self.stages * (self.n_block + self.v_block) * self.d_block
        return 2 * (ring + 4 * self.rows * HAND_STRIP) + 1024

    def __str__(self) -> str:
        kind = "shared" if self.shared else "ping-pong"
        size = f"{self.n_block}×{self.v_block}×{self.d_block}"
        lead = f" lead {self.lead}" if self.shared else ""
        return f"{kind} {size} s{self.stages}{lead} g{self.group}"


def arguments(
    schedule: Schedule,
    x: Tensor,  # [n, D] bfloat16
    weight: Tensor,  # [v, D] bfloat16
    bias: Tensor | None,  # [v]
    out: Tensor | None,  # [n, v], or [blocks · block_rows, slab]; bfloat16
    tables: tuple[Tensor, ...],  # of rows, and of tiles and rows
    block_rows: int,
    slab: int,  # 0: one block
    *scalars: float,
) -> tuple[object, ...]:
    """All arguments of a kernel."""
    (n, hidden), width = x.shape, len(weight)
    strip = [schedule.rows, HAND_STRIP]
    return (
        descriptor(x, [schedule.n_block, schedule.d_block]),
        descriptor(weight, [schedule.v_block, schedule.d_block]),
        None if out is None else descriptor(out, strip),
        bias, *tables, n, hidden, width, block_rows, *scalars,
        schedule.rows, schedule.group, schedule.stages, schedule.lead, slab, schedule.shared,
        out is not None, width % schedule.v_block == 0,
    )  # fmt: skip


def launch(
    kernel: Any,
    schedule: Schedule,
    given: tuple[object, ...],
    n: int,
    width: int,
    programs: int,
) -> None:
    """Run on as many multiprocessors, with what ``arguments`` made."""
    tiles = cdiv(n, schedule.n_block) * cdiv(width, schedule.v_block)
    kernel[(min(tiles, programs),)](*given, num_warps=4)
