"""What launchers pass to the kernels: descriptors, flags, scalars, grids, empty outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.limits import ALIGNMENT, programs_per_sm
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.values import Coefficients, Labels, LossSpec, Statistics, Wanted


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes microseconds, as kernels may call it too."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a 2-D tensor to the copy engine; reads past its shape give 0, writes are dropped."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def units_before(raw: Tensor) -> int:
    """Most elements a row of raw [n, v] may have before it in its first 16-byte unit."""
    unit = ALIGNMENT // raw.element_size()
    aligned = raw.stride(0) % unit == 0 and raw.data_ptr() % ALIGNMENT == 0
    return 0 if aligned else unit - 1


def begin_alike(raw: Tensor, out: Tensor) -> bool:
    """Whether every row of both [n, v] begins in the same place of a 16-byte unit."""
    size = raw.element_size()
    if size != out.element_size():
        return False
    apart = raw.data_ptr() - out.data_ptr()
    further = (raw.stride(0) - out.stride(0)) * size
    return apart % ALIGNMENT == 0 and further % ALIGNMENT == 0


def empty_statistics(n: int, device: torch.device, loss: LossSpec, wanted: Wanted) -> Statistics:
    """Allocate the statistics that are wanted."""

    def per_row(needed: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(n, dtype=dtype, device=device) if needed else None

    return Statistics(
        lse=torch.empty(n, dtype=torch.float32, device=device),
        lse_low=torch.empty(n, dtype=torch.float32, device=device),
        target_logit=torch.empty(n, dtype=torch.float32, device=device),
        logit_sum=per_row(loss.label_smoothing > 0),
        mean_logit=per_row(wanted.entropy),
        prediction=per_row(wanted.prediction, torch.int64),
    )


def loss_scalars(loss: LossSpec) -> tuple[float, float]:
    """Scale and softcap, 1 where there is none."""
    scale = 1.0 if loss.logit_scale is None else float(loss.logit_scale)
    return scale, 1.0 if loss.softcap is None else float(loss.softcap)


def statistics_flags(labels: Labels, loss: LossSpec, wanted: Wanted) -> dict[str, bool]:
    """Which parts of the statistics a kernel computes."""
    return {
        "HAS_SOFTCAP": loss.softcap is not None,
        "HAS_CLASS_WEIGHT": labels.class_weight is not None,
        "WANT_SUM": loss.label_smoothing > 0,
        "WANT_MEAN": wanted.entropy,
        "WANT_PREDICTION": wanted.prediction,
    }


def gradient_flags(labels: Labels, given: Coefficients, loss: LossSpec) -> dict[str, bool]:
    """Which terms the gradient has."""
    return {
        "HAS_SOFTCAP": loss.softcap is not None,
        "HAS_C": given.c is not None,
        "HAS_E": given.e is not None,
        "HAS_CLASS_WEIGHT": labels.class_weight is not None,
    }


def tile_arguments(tile: Tile) -> dict[str, Any]:
    """A tile as keywords of a logits kernel."""
    return {
        "N_BLOCK": tile.n_block,
        "V_BLOCK": tile.v_block,
        "D_BLOCK": tile.d_block,
        "GROUP": tile.group,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def merge_blocks(n: int) -> dict[str, int]:
    """Rows and tiles that a program merges at a time: fewer rows where there are few in all.

    So there are programs for every multiprocessor from 512 rows on.
    """
    rows = 16 if n >= 4096 else 8 if n >= 2048 else 4
    return {"ROWS": rows, "TILES": 1024 // rows}


def logits_grid(tile: Tile, n: int, width: int, x: Tensor) -> tuple[int]:
    """As many persistent programs as fit the GPU, or tiles if there are fewer."""
    tiles = cdiv(n, tile.n_block) * cdiv(width, tile.v_block)
    device = describe_device(x.device)
    return (min(tiles, device.sm_count * programs_per_sm(tile, x.element_size(), device)),)
