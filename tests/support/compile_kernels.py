"""Compiles the tiled kernels for a GPU that is not there; a program, without the interpreter.

    python compile_kernels.py 9 0 232448

Prints one JSON line per kernel: its name, the tile, the shared memory the compiler took and what
``limits.shared_memory`` estimated. The last tile of each kernel goes all the way to a binary, the
others to LLVM's code, unoptimised: their shared memory is known then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.limits import SUM_STRIP, reject_tile, shared_memory
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.common import GEMMS, TILES
from flce_tune.kernels.triton.launch import ENTRY_BLOCK
from flce_tune.kernels.triton.logits import logits_kernel, slab_gradient_kernel
from flce_tune.kernels.triton.product import product_kernel
from flce_tune.kernels.triton.skipping import kept_product_kernel

ENTRY_PARTS = ("offset", "row", "source", "value")
PROBLEM = Problem(4096, 4096, 128256)


begun: set[tuple[Any, ...]] = set()
"""Variants of kernels of which a tile is compiled to a binary."""


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Tile, target: GPUTarget
) -> Any:
    """Compile one specialisation; pointers are float32 and scalars int32 unless ``types`` says."""
    signature = {}
    constants = dict(constants)
    for name in kernel.arg_names:
        guess = "*fp32" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, guess)
        if signature[name] == "absent":
            signature[name], constants[name] = "constexpr", None
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    source = ASTSource(kernel.kernel, signature, constants)
    flags = {name: value for name, value in constants.items() if "BLOCK" not in name}
    variant = (kernel.__name__, *sorted((flags | {"GROUP": 0}).items(), key=str))
    if variant in begun:
        with no_assembler():
            return triton.compile(source, target=target, options=options)
    begun.add(variant)
    return triton.compile(source, target=target, options=options)


@contextmanager
def no_assembler() -> Iterator[None]:
    """Stop at LLVM's code: to optimise and assemble it takes most of the time."""

    def without(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        stages["ptx"] = lambda _, metadata: metadata.setdefault("name", "none") and ""
        stages["cubin"] = lambda *_: b""

    add_stages, optimize = CUDABackend.add_stages, llvm.optimize_module
    CUDABackend.add_stages, llvm.optimize_module = without, lambda *_: None
    try:
        yield
    finally:
        CUDABackend.add_stages, llvm.optimize_module = add_stages, optimize


def logits(tile: Tile, target: GPUTarget, *, store: bool) -> Any:
    """The logits kernel with every option that has code of its own."""
    flags = {"EVEN": False, "HAS_BIAS": True, "HAS_SOFTCAP": True, "HAS_CLASS_WEIGHT": False}
    wanted = {"WANT_SUM": True, "WANT_MEAN": True, "WANT_PREDICTION": True}
    types = {
        "x_desc": f"tensordesc<bf16[{tile.n_block}, {tile.d_block}]>",
        "w_desc": f"tensordesc<bf16[{tile.v_block}, {tile.d_block}]>",
        "out_desc": f"tensordesc<bf16[{tile.n_block}, {tile.v_block}]>" if store else "absent",
        "bias_ptr": "*bf16",
        "class_weight_ptr": "absent",
        "best_ptr": "*i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    constants = {**blocks(tile), "STORE": store, **flags, **wanted}
    return compiled(logits_kernel, types, constants, tile, target)


def slab(tile: Tile, target: GPUTarget) -> Any:
    """The recomputed gradient, plain."""
    absent = dict.fromkeys(("bias_ptr", "c_ptr", "e_ptr", "class_weight_ptr"), "absent")
    types = {
        "x_desc": f"tensordesc<bf16[{tile.n_block}, {tile.d_block}]>",
        "w_desc": f"tensordesc<bf16[{tile.v_block}, {tile.d_block}]>",
        "out_desc": f"tensordesc<bf16[{tile.n_block}, {tile.v_block}]>",
        "target_ptr": "*i64",
        "scale": "fp32",
        "softcap": "fp32",
        **absent,
    }
    names = ("BIAS", "SCALE", "SOFTCAP", "C", "E", "CLASS_WEIGHT")
    constants = {**blocks(tile), "SLAB": 0, **{f"HAS_{name}": False for name in names}}
    return compiled(slab_gradient_kernel, types, constants, tile, target)


def blocks(tile: Tile) -> dict[str, Any]:
    """A tile as constants of a logits kernel."""
    return {
        "N_BLOCK": tile.n_block,
        "V_BLOCK": tile.v_block,
        "D_BLOCK": tile.d_block,
        "GROUP": tile.group,
    }


def product(tile: Tile, name: str, accumulator: str, target: GPUTarget) -> Any:
    """dX or dW, written once ("") or added to a sum."""
    m, k = (tile.n_block, tile.v_block) if name == "dx" else (tile.v_block, tile.n_block)
    transposed = name == "dw"
    extra = {"fp32": "*fp32", "split24": "*u8"}.get(accumulator, "absent")
    types = {
        "a_desc": f"tensordesc<bf16[{k}, {m}]>" if transposed else f"tensordesc<bf16[{m}, {k}]>",
        "b_desc": f"tensordesc<bf16[{k}, {tile.d_block}]>",
        "out_desc": f"tensordesc<bf16[{m}, {tile.d_block}]>",
        "out_ptr": "*bf16",
        "extra_ptr": extra,
        **dict.fromkeys(("factor_ptr", "b_ptr"), "absent"),
        **dict.fromkeys((f"entry_{name}_ptr" for name in ENTRY_PARTS), "absent"),
    }
    constants = {
        "M_BLOCK": m,
        "N_BLOCK": tile.d_block,
        "K_BLOCK": k,
        "GROUP": tile.group,
        "TRANSPOSED": transposed,
        "SLAB": 0,
        "HAS_FACTOR": False,
        "ENTRY_BLOCK": 0,
        "ACCUMULATOR": accumulator or "weight_dtype",
        "PRIOR": bool(accumulator),
        "LAST": not accumulator,
        "STORE_WIDTH": SUM_STRIP,
        "WHOLE": True,
    }
    return compiled(product_kernel, types, constants, tile, target)


def sent(tile: Tile, target: GPUTarget) -> Any:
    """A rank's share of dX from numerators, in float32, as the other ranks are to add to it."""
    types = {
        "a_desc": f"tensordesc<bf16[{tile.n_block}, {tile.v_block}]>",
        "b_desc": f"tensordesc<bf16[{tile.v_block}, {tile.d_block}]>",
        "out_desc": "absent",
        "extra_ptr": "absent",
        "b_ptr": "*bf16",
        "entry_offset_ptr": "*i32",
        "entry_row_ptr": "*i64",
        "entry_source_ptr": "*i64",
    }
    constants = {
        "M_BLOCK": tile.n_block,
        "N_BLOCK": tile.d_block,
        "K_BLOCK": tile.v_block,
        "GROUP": tile.group,
        "TRANSPOSED": False,
        "SLAB": 4096,
        "HAS_FACTOR": True,
        "ENTRY_BLOCK": ENTRY_BLOCK,
        "ACCUMULATOR": "weight_dtype",
        "PRIOR": True,
        "LAST": True,
        "STORE_WIDTH": SUM_STRIP,
        "WHOLE": False,
    }
    return compiled(product_kernel, types, constants, tile, target)


def kept(config: Config, name: str, target: GPUTarget) -> Any:
    """dX or dW over lists of tiles."""
    tile, k_tile = {"dx": (config.dx, config.logits), "dw": (config.dw, config.dx)}[name]
    assert tile is not None
    assert k_tile is not None
    m, k = (tile.n_block, tile.v_block) if name == "dx" else (tile.v_block, tile.n_block)
    transposed = name == "dw"
    types = {
        "a_desc": f"tensordesc<bf16[{k}, {m}]>" if transposed else f"tensordesc<bf16[{m}, {k}]>",
        "b_desc": f"tensordesc<bf16[{k}, {tile.d_block}]>",
        "out_desc": f"tensordesc<bf16[{m}, {tile.d_block}]>",
        **dict.fromkeys(("list_ptr", "count_ptr", "entry_offset_ptr"), "*i32"),
        **dict.fromkeys(("entry_row_ptr", "entry_source_ptr"), "*i64"),
        "factor_ptr": "absent" if transposed else "*fp32",
        "b_ptr": "*bf16",
    }
    constants = {
        "M_BLOCK": m,
        "N_BLOCK": tile.d_block,
        "K_BLOCK": k,
        "K_TILE": k_tile.n_block if transposed else k_tile.v_block,
        "GROUP": tile.group,
        "TRANSPOSED": transposed,
        "HAS_FACTOR": not transposed,
        "ENTRY_BLOCK": ENTRY_BLOCK,
    }
    return compiled(kept_product_kernel, types, constants, tile, target)


def report(label: str, tile: Tile, estimate: int, kernel: Any) -> None:
    """Print a line."""
    row = {
        "kernel": label,
        "tile": str(tile),
        "shared": kernel.metadata.shared,
        "estimate": estimate,
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    major, minor, smem = map(int, sys.argv[1:])
    device = Device("cuda", "a GPU", (major, minor), 100, smem, 1 << 34)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    for name, contraction in GEMMS.items():
        tiles = [tile for tile in TILES[name] if tile.schedule == "compiler"]
        for tile in (tiles[::3] + tiles[-1:])[::-1]:
            for accumulator in ("",) if name == "logits" else ("", "split24"):
                if reject_tile(tile, contraction, PROBLEM, device, accumulator):
                    continue
                kernels = {}
                if name == "logits":
                    kernels["logits"] = logits(tile, target, store=True)
                    kernels["statistics"] = logits(tile, target, store=False)
                    kernels["slab"] = slab(tile, target)
                else:
                    kernels[name] = product(tile, name, accumulator, target)
                if name == "dx" and not accumulator:
                    kernels["sent"] = sent(tile, target)
                estimate = shared_memory(tile, contraction, 2, accumulator)
                for label, kernel in kernels.items():
                    report(f"{label} {accumulator}".strip(), tile, estimate, kernel)
    skipping = strategies.get("tile_skip").default(PROBLEM, device)
    for name, contraction in (("dx", "v"), ("dw", "n")):
        tile = getattr(skipping, name)
        estimate = shared_memory(tile, contraction, 2)
        report(f"kept {name}", tile, estimate, kept(skipping, name, target))


if __name__ == "__main__":
    main()
