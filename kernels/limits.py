"""Hardware limits a tile must respect: one estimate, shared by validity, launchers and tuner."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata

from flce_tune.kernels.config import Tile
from flce_tune.kernels.problem import Device, Problem

TENSOR_CORE_DTYPES = ("bfloat16", "float16")
ALIGNMENT = 16
"""Bytes: row strides and addresses the copy engine accepts are multiples of it."""
HAND_STRIP = 64
"""Columns that kernels scheduled by hand store at a time: 128 bytes, a swizzle's reach."""
HAND_STAGES = 9
"""Most stages of kernels scheduled by hand."""
HAND_PRODUCT = (128, 256)
"""Rows and columns of a gradient's tile scheduled by hand."""
HAND_UNKNOWN = frozenset({"softcap", "label_smoothing", "statistics"})
"""Features that kernels scheduled by hand have no epilogues for."""
HAND_TRITON = (3, 6)
"""The first Triton whose Gluon has what kernels scheduled by hand use."""
SUM_STRIP = 64
"""Columns of a sum exchanged at a time. For 128×256 tiles on sm_90, 32 columns spill nothing, 64
spill up to 464 bytes, 128 up to 2024; 64 is fastest, as narrower strips wait for memory more."""


def operand_bytes(tile: Tile, contraction: str, itemsize: int) -> int:
    """Bytes of both operand tiles of one pipeline stage.

    ``contraction`` names the block summed over: "d" for the logits, "v" for dX, "n" for dW.
    """
    n, v, d = tile.n_block, tile.v_block, tile.d_block
    pairs = {"d": n * d + v * d, "v": n * v + v * d, "n": n * v + n * d}
    return pairs[contraction] * itemsize


def output_elements(tile: Tile, contraction: str) -> int:
    """Elements of the float32 accumulator tile."""
    n, v, d = tile.n_block, tile.v_block, tile.d_block
    return {"d": n * v, "v": n * d, "n": v * d}[contraction]


def shared_memory(tile: Tile, contraction: str, itemsize: int, accumulator: str = "") -> int:
    """Bound shared memory per block in bytes: the pipeline, and what the epilogue stores.

    An output tile is stored whole; sums are exchanged a strip of SUM_STRIP columns at a time. The
    rest is barriers and row statistics. Tiles scheduled by hand are stored in strips, through four
    small buffers, or through their pipeline's.
    """
    if tile.schedule != "compiler":
        strips = 4 * consumer_rows(tile) * HAND_STRIP * itemsize if contraction == "d" else 0
        return tile.num_stages * operand_bytes(tile, contraction, itemsize) + strips + 1024
    if accumulator:
        rows = tile.n_block if contraction == "v" else tile.v_block
        store = rows * min(SUM_STRIP, tile.d_block) * 4
    else:
        store = output_elements(tile, contraction) * itemsize
    rest = 1024 + 8 * max(tile.n_block, tile.v_block)
    return tile.num_stages * operand_bytes(tile, contraction, itemsize) + store + rest


def consumer_rows(tile: Tile) -> int:
    """Rows of a tile of logits that one of two groups of warps computes."""
    return tile.n_block // 2 if tile.schedule == "shared" else tile.n_block


def product_blocks(tile: Tile, contraction: str) -> tuple[int, int]:
    """Rows of a gradient's tile, and how many of the dimension summed over it takes at once."""
    return {"v": (tile.n_block, tile.v_block), "n": (tile.v_block, tile.n_block)}[contraction]


def programs_per_sm(tile: Tile, itemsize: int, device: Device, contraction: str = "d") -> int:
    """How many programs of a persistent kernel share a multiprocessor: 1, or 2 if both fit.

    Two 4-warp programs hide each other's epilogue; with 8 warps the registers are full.
    """
    if tile.num_warps > 4 or device.kind != "cuda":
        return 1
    fits = 2 * shared_memory(tile, contraction, itemsize) <= device.shared_memory_per_block
    return 2 if fits else 1


def reject_tile(
    tile: Tile, contraction: str, problem: Problem, device: Device, accumulator: str = ""
) -> str | None:
    """Say why a tile cannot run, or None.

    ``contraction`` as in ``operand_bytes``; ``accumulator`` of the product, "" if written once.
    """
    if device.kind != "cuda":
        return f"tiles need a CUDA device, this is {device.kind}"
    if device.capability < (8, 0):
        return f"tiles need compute capability 8.0 or newer, this is {device.capability}"
    if problem.dtype not in TENSOR_CORE_DTYPES:
        return f"tiles multiply {TENSOR_CORE_DTYPES} only, the problem is {problem.dtype}"
    blocks = {"n_block": tile.n_block, "v_block": tile.v_block, "d_block": tile.d_block}
    for name, size in blocks.items():
        if size & (size - 1) or not 16 <= size <= 256:
            return f"{name} must be a power of two in [16, 256], got {size}"
    if tile.schedule != "compiler" and (
        reason := _reject_schedule(tile, contraction, problem, device, accumulator)
    ):
        return reason
    if tile.num_warps not in (2, 4, 8, 16):
        return f"num_warps must be 2, 4, 8 or 16, got {tile.num_warps}"
    stages = 8 if tile.schedule == "compiler" else HAND_STAGES
    if not 1 <= tile.num_stages <= stages:
        return f"num_stages must be in [1, {stages}], got {tile.num_stages}"
    if problem.hidden * problem.itemsize % ALIGNMENT:
        return (
            f"tiles need rows of x and weight to be a multiple of {ALIGNMENT} bytes, "
            f"hidden {problem.hidden} is {problem.hidden * problem.itemsize} bytes"
        )
    per_thread = output_elements(tile, contraction) // (32 * tile.num_warps)
    if tile.schedule == "ping_pong":
        per_thread *= 2  # each group of warps has a tile of its own
    if per_thread > 128:
        return f"the accumulator needs {per_thread} registers a thread, at most 128 fit"
    needed = shared_memory(tile, contraction, problem.itemsize, accumulator)
    if needed > device.shared_memory_per_block:
        return (
            f"needs {needed} bytes of shared memory, a block has {device.shared_memory_per_block}"
        )
    return None


def _reject_schedule(
    tile: Tile, contraction: str, problem: Problem, device: Device, accumulator: str
) -> str | None:
    """Say why a tile cannot be scheduled by hand, or None."""
    what = f"a {tile.schedule} tile"
    if device.capability != (9, 0):
        return f"{what} needs compute capability 9.0, this is {device.capability}"
    if _triton() < HAND_TRITON:
        needed, found = (".".join(map(str, version)) for version in (HAND_TRITON, _triton()))
        return f"{what} needs Triton {needed} or newer, this is {found}"
    if problem.dtype != "bfloat16":
        return f"{what} multiplies bfloat16 only, the problem is {problem.dtype}"
    if tile.num_warps != 8:
        return f"{what} has 8 warps, got {tile.num_warps}"
    if tile.num_stages < 2:
        return f"{what} has at least 2 stages, got {tile.num_stages}"
    if contraction == "d":
        return _reject_hand_logits(tile, problem)
    return _reject_hand_product(tile, contraction, accumulator)


def _reject_hand_logits(tile: Tile, problem: Problem) -> str | None:
    what = f"a {tile.schedule} tile"
    if unknown := HAND_UNKNOWN.intersection(problem.features):
        return f"{what} knows no {', '.join(sorted(unknown))}"
    rows = consumer_rows(tile)
    if rows not in (64, 128) or tile.v_block < 2 * HAND_STRIP or rows * tile.v_block > 1 << 14:
        return f"{what} has 64 rows × 128 or 256 columns a group of warps, or 128 × 128"
    if tile.d_block not in (32, 64):
        return f"{what} has a d_block of 32 or 64, got {tile.d_block}"
    return None


def _reject_hand_product(tile: Tile, contraction: str, accumulator: str) -> str | None:
    if tile.schedule != "shared":
        return f"a {tile.schedule} tile computes logits only, got contraction {contraction}"
    rows, k_block = product_blocks(tile, contraction)
    if (rows, tile.d_block) != HAND_PRODUCT:
        return f"a shared tile of a gradient is 128 × 256, got {rows} × {tile.d_block}"
    if k_block not in (32, 64):
        return f"a shared tile of a gradient takes 32 or 64 at once, got {k_block}"
    if accumulator == "fp32":
        return (
            "a shared tile keeps no float32 sums: its pipeline's buffers, through which it reads "
            "and writes them, have room for split24 or weight_dtype"
        )
    return None


@functools.cache
def _triton() -> tuple[int, ...]:
    """Major and minor version of the installed Triton, (0,) without one."""
    return tuple(map(int, (triton_version() or "0").split(".")[:2]))


def triton_version() -> str:
    """The installed Triton's version; "" where there is none."""
    for distribution in ("triton", "pytorch-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""
