"""A trained model's last hidden states, head and labels, small enough to take elsewhere.

The head is kept in 4 bits with a scale for each GROUP of a row, hidden states in 8 bits with a
scale a token: logits of a model quantised so, which are as peaked as the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from cases import Inputs
from torch import Tensor

GROUP = 64  # weights that share a scale
LARGEST = 7.0  # of 4 bits with a sign
TRIALS = torch.linspace(0.5, 1.0, 21)  # of each group's largest weight: what LARGEST stands for


def pack(inputs: Inputs, folder: Path, parts: int) -> list[Path]:
    """Write the inputs to so many files of about equal size."""
    rows = np.array_split(np.arange(len(inputs.weight)), parts)
    x = inputs.x.detach().float().cpu()
    scale = x.abs().amax(1, keepdim=True) / 127
    common = {
        "x": (x / scale).round().to(torch.int8).numpy(),
        "x_scale": scale.numpy(),
        "target": inputs.target.int().cpu().numpy(),
    }
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for index, some in enumerate(rows):
        codes, scales = to_four_bits(inputs.weight.detach()[some[0] : some[-1] + 1].float().cpu())
        path = folder / f"states-{index}.npz"
        np.savez(path, codes=codes.numpy(), scales=scales.numpy(), **(common if index == 0 else {}))
        paths.append(path)
    return paths


def unpack(paths: Sequence[Path], dtype: torch.dtype, device: torch.device) -> Inputs:
    """Read back what ``pack`` wrote, in order."""
    files = [np.load(path) for path in sorted(paths)]
    weight = torch.cat(
        [
            from_four_bits(*(torch.from_numpy(file[n]).to(device) for n in ("codes", "scales")))
            for file in files
        ]
    )
    x, scale, target = (
        torch.from_numpy(files[0][n]).to(device) for n in ("x", "x_scale", "target")
    )
    return Inputs(
        (x.float() * scale).to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        target.long(),
    )


def to_four_bits(
    weight: Tensor,  # [v, D]
) -> tuple[Tensor, Tensor]:  # [v, D / 2] uint8, [v, D / GROUP] float16
    """Codes, two in a byte, and scales of least squared error among TRIALS."""
    groups = weight.view(len(weight), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True).clamp_min(1e-8)
    best, lowest = largest / LARGEST, torch.full_like(largest, torch.inf)
    for share in TRIALS.tolist():
        scale = (largest * share / LARGEST).half().float()
        error = (_rounded(groups, scale) * scale - groups).square().sum(2, keepdim=True)
        best, lowest = torch.where(error < lowest, scale, best), torch.minimum(error, lowest)
    codes = (_rounded(groups, best) + 8).to(torch.uint8).view(len(weight), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, best[:, :, 0].half()


def from_four_bits(codes: Tensor, scales: Tensor) -> Tensor:  # [v, D] float32
    """What the codes stand for."""
    values = torch.stack([codes & 15, codes >> 4], 2).flatten(1).float() - 8
    return (values.view(len(codes), -1, GROUP) * scales.float()[:, :, None]).flatten(1)


def _rounded(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round().clamp(-LARGEST, LARGEST)
