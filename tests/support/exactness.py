"""The tolerance rule: as exact as plain torch, measured against a float64 truth.

An error is compared with the error plain torch makes in the same dtype on the same inputs, so no
tolerance depends on shapes or options. Two right computations round in different places, so their
errors are two samples of one distribution: over n elements their rms differs by a factor of about
1 ± 1/√n, which FACTOR (and half an ulp, divided by √n) covers. A computation that rounds once too
often (a bfloat16 accumulator, say) is off by 1.4 and more. The largest error is held to MAX_FACTOR
(and half an ulp of the largest value, the last rounding), so that one wrong element cannot hide in
the rms of many. For float64 the truth is no more exact than ours, and only ulps count.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 1.25
MAX_FACTOR = 2.0
STATISTICS = {torch.float32: 4 * 2.0**-23, torch.float64: 64 * 2.0**-52}
"""What statistics in these dtypes may lose, relative to the value, or to what it is a sum of."""


def assert_as_exact(
    name: str,
    ours: Tensor,
    plain: Tensor,  # of plain torch, same shape
    truth: Tensor,  # float64, same shape
    dtype: torch.dtype,  # what both were computed in
    *,
    statistics: float | None = None,  # allowed beside; None: STATISTICS of the dtype
    summands: Tensor | None = None,  # same shape: of a sum, the total of its absolute terms
) -> None:
    """Fail if ours is further from the truth than plain torch is; show the worst element."""
    assert ours.shape == truth.shape, f"{name}: shape {tuple(ours.shape)}, not {truth.shape}"
    if truth.numel() == 0:
        return
    truth = truth.detach().double()
    ours, plain = ours.detach().to(truth), plain.detach().to(truth)
    finite = truth.isfinite()
    same = (ours == truth) | (ours.isnan() & truth.isnan())
    assert bool((finite | same).all()), _worst(name, (~(finite | same)).double(), ours, truth)
    assert bool(ours[finite].isfinite().all()), _worst(
        name, (~ours.isfinite() & finite).double(), ours, truth
    )
    if not bool(finite.any()):
        return
    error = torch.where(finite, ours - truth, 0.0).abs()
    base = torch.where(finite & plain.isfinite(), plain - truth, 0.0).abs()
    magnitude = torch.where(finite, truth, 0.0).abs()
    lost = magnitude if summands is None else torch.where(finite, summands, 0.0)
    if statistics is None:
        statistics = STATISTICS[torch.float64 if dtype == torch.float64 else torch.float32]
    half_ulp = 0.5 * torch.finfo(dtype).eps
    count = int(finite.sum())
    for norm, factor, ulps in (
        (_rms, FACTOR, half_ulp / count**0.5),
        (torch.max, MAX_FACTOR, half_ulp),
    ):
        allowed = factor * norm(base) + statistics * norm(lost) + ulps * norm(magnitude)
        assert bool(norm(error) <= allowed), (
            f"{norm.__name__.strip('_')} error {float(norm(error)):.3g}, plain torch's is "
            f"{float(norm(base)):.3g}, allowed {float(allowed):.3g}; "
            + _worst(name, error, ours, truth)
        )


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _worst(name: str, error: Tensor, ours: Tensor, truth: Tensor) -> str:
    place = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), error.shape))
    return (
        f"{name}: worst at {index}: ours {float(ours.reshape(-1)[place]):.9g}, "
        f"truth {float(truth.reshape(-1)[place]):.9g}"
    )
