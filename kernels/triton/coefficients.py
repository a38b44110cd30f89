"""Coefficients of the logits' gradient, a few for each token, in one launch.

``loss.coefficients`` as operators of torch is three to ten launches, which a chunk of few tokens,
or a pass over given logits, waits for longer than they take. Numerics: float32, the same
operations in the same order. Bytes: some 20 a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.loss import weight_total
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.reduce import weight_of
from flce_tune.kernels.triton.relaunch import relaunched
from flce_tune.kernels.values import Coefficients, Labels, LossSpec, Statistics

BLOCK = 512
WARPS = 4


@relaunched
@triton.jit
def coefficients_kernel(
    target_ptr,  # [n] int64
    weight_ptr,  # [n] float32, like all that follow
    upstream_ptr,  # scalar, or None for 1
    lse_ptr,  # [n]
    lse_low_ptr,
    mean_logit_ptr,  # or None: no gradient on the entropy
    grad_lse_ptr,  # or None
    grad_entropy_ptr,  # or None
    class_weight_ptr,  # [V], or None
    class_total_ptr,  # scalar, their sum; or None for V
    a_ptr,  # [n] out
    b_ptr,  # out, or None: the weights themselves
    c_ptr,  # out, or None
    e_ptr,  # out, or None: no label smoothing
    n,
    vocab,
    smoothing,
    z_loss,
    HAS_Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < n
    weight = tl.load(weight_ptr + rows, mask=ok, other=0.0)
    if upstream_ptr is not None:
        weight = tl.where(weight == 0.0, 0.0, weight * tl.load(upstream_ptr))
    lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
    a = weight
    if class_weight_ptr is not None:
        target = tl.load(target_ptr + rows, mask=ok, other=0)
        a = weight * weight_of(target, class_weight_ptr, vocab, ok)
    b = a
    if e_ptr is not None:
        classes = vocab * 1.0  # an integer of 1 is a constant here
        b = a * (1.0 - smoothing)
        e = weight * (smoothing / classes)
        if class_total_ptr is not None:
            classes = tl.load(class_total_ptr)
        a = b + e * classes
        tl.store(e_ptr + rows, e, mask=ok)
    if HAS_Z_LOSS:
        a += weight * (2.0 * z_loss) * lse
    if grad_lse_ptr is not None:
        a += tl.load(grad_lse_ptr + rows, mask=ok, other=0.0)
    rest = tl.exp(-tl.load(lse_low_ptr + rows, mask=ok, other=0.0))
    if grad_entropy_ptr is not None:
        of_entropy = tl.load(grad_entropy_ptr + rows, mask=ok, other=0.0)
        a += of_entropy * tl.load(mean_logit_ptr + rows, mask=ok, other=0.0)
        tl.store(c_ptr + rows, -of_entropy * rest, mask=ok)
    tl.store(a_ptr + rows, a * rest, mask=ok)
    if b_ptr is not None:
        tl.store(b_ptr + rows, b, mask=ok)


def coefficients(
    labels: Labels,
    statistics: Statistics,
    row_weight: Tensor,  # [N]
    loss: LossSpec,
    grad_lse: Tensor | None = None,  # [N]
    grad_entropy: Tensor | None = None,  # [N]
    upstream: Tensor | None = None,  # scalar
) -> Coefficients:
    """``loss.coefficients`` in one launch."""
    n, smoothing = len(row_weight), float(loss.label_smoothing)
    if grad_entropy is not None and statistics.mean_logit is None:
        raise ValueError("a gradient on the entropy needs the statistic mean_logit")

    def per_row(needed: bool) -> Tensor | None:
        return torch.empty_like(row_weight) if needed else None

    changed = upstream is not None or labels.class_weight is not None or smoothing > 0
    a, b = torch.empty_like(row_weight), per_row(changed)
    c, e = per_row(grad_entropy is not None), per_row(smoothing > 0)
    class_total = None
    if smoothing and labels.class_weight is not None:
        class_total = weight_total(labels)
    if n:
        coefficients_kernel[(cdiv(n, BLOCK),)](
            labels.target, row_weight, upstream, statistics.lse, statistics.lse_low,
            statistics.mean_logit, _plain(grad_lse), _plain(grad_entropy), labels.class_weight,
            class_total, a, b, c, e, n, labels.vocab, smoothing, float(loss.z_loss),
            HAS_Z_LOSS=bool(loss.z_loss), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return Coefficients(a=a, b=row_weight if b is None else b, c=c, e=e)


def _plain(upstream: Tensor | None) -> Tensor | None:
    """An upstream gradient may be one number, expanded."""
    return None if upstream is None else upstream.contiguous()
