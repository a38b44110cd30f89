"""Row statistics of all shards from each shard's own: one all-gather of a few numbers a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flce_tune.errors import RankMismatchError
from flce_tune.kernels.backends import even_parts
from flce_tune.kernels.loss import scaled_logits, statistics_dtype
from flce_tune.kernels.parallel.collectives import gathered, start_gathered
from flce_tune.kernels.parallel.shard import GlobalLabels, Shard
from flce_tune.kernels.torch_backend import joined_lse
from flce_tune.kernels.values import Inputs, LossSpec, Statistics, Wanted

PICKED_ELEMENTS = 1 << 24
"""Elements of x and of weight's rows multiplied at a time for the logits of predictions."""


def merge(
    shard: Shard, labels: GlobalLabels, local: Statistics, largest: Tensor | None
) -> Statistics:
    """``start_merge``, and wait for it."""
    return start_merge(shard, labels, local, largest, aside=False)()


def start_merge(
    shard: Shard,
    labels: GlobalLabels,
    local: Statistics,  # of this rank's logits
    largest: Tensor | None,  # [n] each row's largest logit; with predictions only
    *,
    aside: bool,  # other work comes before the merged ones are needed
) -> Callable[[], Statistics]:
    """Begin to merge the statistics into those of the whole vocabulary, the same on every rank.

    lse = M + log Σ_r exp(lse_r - M), sums add up, the mean logit is weighted by each shard's
    share of the probability, and the prediction is the first of the largest. Rows whose labels
    differ from rank to rank get NaN; on a CPU they raise.

    Raises:
        RankMismatchError: labels that differ, on a CPU.
    """
    dtype = local.lse.dtype
    label = torch.where(shard.owns(labels.target), local.target_logit, 0.0)
    columns = [local.lse, local.lse_low, label, _as_float(labels.target, dtype)]
    columns += [c for c in (local.logit_sum, local.mean_logit) if c is not None]
    if local.prediction is not None:
        assert largest is not None
        columns += [largest, _as_float(local.prediction + shard.start, dtype)]
    mine = torch.stack(columns)
    if not aside:
        parts = gathered(shard.group, mine)
        return lambda: _merged(shard, labels, local, parts)
    parts, wait = start_gathered(shard.group, mine)

    def finish() -> Statistics:
        wait()
        return _merged(shard, labels, local, parts)

    return finish


def _merged(
    shard: Shard,
    labels: GlobalLabels,
    local: Statistics,
    parts: Tensor,  # [ranks, columns, n]
) -> Statistics:
    lse, low, label, target, *rest = parts.unbind(1)  # each [ranks, n]

    merged, merged_low, share = joined_lse(lse, low)
    unknown = (labels.target < 0) | (labels.target >= shard.vocab)
    logit_sum = rest.pop(0).sum(0) if local.logit_sum is not None else None
    mean_logit = None
    if local.mean_logit is not None:
        mean_logit = torch.where(share == 0, 0.0, share * rest.pop(0)).sum(0)
    prediction = None
    if local.prediction is not None:
        best = rest[0].argmax(0, keepdim=True)  # the first of equals, and ranks are in order
        prediction = _as_integer(rest[1]).gather(0, best)[0]
    return Statistics(
        lse=_same_labels_or_nan(target, merged),
        target_logit=label.sum(0).masked_fill(unknown, float("nan")),
        lse_low=merged_low,
        logit_sum=logit_sum,
        mean_logit=mean_logit,
        prediction=prediction,
    )


def _same_labels_or_nan(target: Tensor, merged: Tensor) -> Tensor:
    bits = _as_integer(target)
    differ = (bits != bits[0]).any(0)
    if differ.device.type == "cpu" and bool(differ.any()):
        raise RankMismatchError(
            f"labels differ between the ranks of process_group, first at token "
            f"{int(differ.nonzero()[0])}: {DIFFERENT_TOKENS}"
        )
    return merged.masked_fill(differ, float("nan"))


DIFFERENT_TOKENS = (
    "a vocabulary split over ranks needs the same tokens on each of them. If the weight is "
    "sharded for data parallelism (FSDP), use it inside its module's forward, or pass "
    "flce_tune.gathered_weight(weight)"
)


def nothing(tokens: int, like: Tensor, loss: LossSpec, wanted: Wanted) -> Statistics:
    """Statistics of no classes at all: they change no merged one."""
    zeros = torch.zeros(tokens, dtype=statistics_dtype(like.dtype), device=like.device)
    return Statistics(
        lse=zeros - float("inf"),
        target_logit=zeros,
        lse_low=zeros,
        logit_sum=zeros if loss.label_smoothing else None,
        mean_logit=zeros if wanted.entropy else None,
        prediction=zeros.long() if wanted.prediction else None,
    )


def stored_logits(
    raw: Tensor | None,  # [n, V_local]; None for a rank without columns
    local: Statistics,
    loss: LossSpec,
) -> Tensor | None:  # [n]
    """The logits of the predicted columns, if these are wanted."""
    if local.prediction is None:
        return None
    if raw is None or raw.shape[1] == 0:
        return torch.full_like(local.lse, -float("inf"))
    return scaled_logits(raw.gather(1, local.prediction[:, None])[:, 0], loss)


def recomputed_logits(inputs: Inputs, local: Statistics, loss: LossSpec) -> Tensor | None:
    """The same where no logits were stored: the product of those columns alone."""
    if local.prediction is None or inputs.vocab == 0:
        return stored_logits(None, local, loss)
    step = max(1, PICKED_ELEMENTS // inputs.x.shape[1])
    dtype = local.lse.dtype
    parts = []
    for rows in even_parts(len(inputs.x), step):
        picked = local.prediction[rows]
        logit = torch.linalg.vecdot(inputs.x[rows].to(dtype), inputs.weight[picked].to(dtype))
        parts.append(logit if inputs.bias is None else logit + inputs.bias[picked])
    return scaled_logits(torch.cat(parts), loss)


def _as_float(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as a float of ``dtype``, to travel with the others."""
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    return integers.to(kind).view(dtype)


def _as_integer(floats: Tensor) -> Tensor:
    kind = torch.int64 if floats.dtype == torch.float64 else torch.int32
    return floats.contiguous().view(kind).to(torch.int64)
