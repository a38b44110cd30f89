"""How the hand-scheduled product kernel is cut, and its launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flce_tune.kernels.hopper.launch import descriptor
from flce_tune.kernels.hopper.product import product_kernel
from flce_tune.kernels.triton.arguments import cdiv

M_BLOCK, N_BLOCK = 128, 256


@dataclass(frozen=True)
class ProductSchedule:
    """How the kernel cuts and orders its work."""

    k_block: int
    stages: int
    lead: int  # steps; 0: no order
    group: int = 16

    @property
    def shared_memory(self) -> int:
        """Bytes; the barriers and what the compiler adds are less than 1 KiB."""
        return 2 * self.stages * (M_BLOCK + N_BLOCK) * self.k_block + 1024

    def __str__(self) -> str:
        size = f"{M_BLOCK}×{N_BLOCK}×{self.k_block}"
        return f"product {size} s{self.stages} lead {self.lead} g{self.group}"


def arguments(
    schedule: ProductSchedule,
    a: Tensor,  # [m, k] bfloat16, or the transposed view of a [k, m]
    b: Tensor,  # [k, n] bfloat16
    out: Tensor,  # [m, n] bfloat16
    extra: Tensor | None,  # [m, n] uint8; None: written once
    prior: bool,
    last: bool,
) -> tuple[object, ...]:
    """All arguments of the kernel."""
    (m, n), rows, k_block = out.shape, M_BLOCK // 2, schedule.k_block
    transposed = a.stride(0) == 1 and a.stride(1) != 1
    strip = [rows, 2 * k_block]
    joined = (None, None, None, None, 0)  # no factors and no entries
    return (
        descriptor(a.t(), [k_block, rows]) if transposed else descriptor(a, [rows, k_block]),
        descriptor(b, [k_block, N_BLOCK]),
        descriptor(out, strip),
        None if extra is None else descriptor(extra, strip),
        *joined, m, n, len(b), 0, 1, len(b), schedule.group, schedule.stages, schedule.lead,
        transposed, 0, prior, last,
    )  # fmt: skip


def launch(given: tuple[object, ...], m: int, n: int, programs: int) -> None:
    """Run on as many multiprocessors, with what ``arguments`` made."""
    tiles = cdiv(m, M_BLOCK) * cdiv(n, N_BLOCK)
    product_kernel[(min(tiles, programs),)](*given, num_warps=4)
