"""What ``overlay`` and ``factored`` know of labels before there are logits, and what ``factored``
adds of them apart.

All of it is worked out for all tokens at once, as a step of many chunks is bound by its launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import (
    Blocks,
    Entries,
    Factors,
    first_reference,
    label_numerators,
    primitives_of,
)
from flce_tune.kernels.values import Inputs, LossSpec


@dataclass(frozen=True, slots=True)
class Labels:
    """Of some tokens; the last three where products add the labels' entries."""

    logit: Tensor  # [n] z_iy, NaN where no column is the label
    reference: Tensor  # [n] a first R
    column: Tensor | None = None  # [n] the label's row of W; any where there is none
    ascending: Tensor | None = None  # [n] labels in order; out of range, all below or above others
    order: Tensor | None = None  # [n] their tokens, counted from the first of all

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        loss: LossSpec,
        config: Config,
        sizes: Sequence[int] = (),  # of the chunks: their labels are sorted by themselves
        *,
        others: bool,  # ranks that may have the labels
    ) -> Labels:
        """Of all tokens."""
        known = first_references(inputs, loss, others=others)
        if config.dx is None or config.dw is None:
            return cls(*known)
        target, vocab = inputs.target, inputs.vocab
        return cls(*known, target.clamp(0, vocab - 1), *_sorted_by_chunk(target, vocab, sizes))

    def split(self, sizes: Sequence[int]) -> Iterator[Labels]:
        """Of each chunk."""
        if len(sizes) == 1:
            return iter([self])
        known = self.logit, self.reference, self.column, self.ascending, self.order
        return map(
            Labels, *(tensor.split_with_sizes(sizes) for tensor in known if tensor is not None)
        )


def _sorted_by_chunk(
    target: Tensor,  # [N]
    vocab: int,
    sizes: Sequence[int],  # any, then equal ones, of which the last may be less
) -> tuple[Tensor, Tensor]:  # [N] int32 labels, [N] tokens
    """Sort each chunk's labels, all chunks at once; by 32 bits, which takes half as long."""
    width = vocab + 2
    dtype = torch.int32 if max(1, len(sizes)) * width < 1 << 31 else torch.int64
    key = target.clamp(-1, vocab).to(dtype)
    if len(sizes) < 2:
        return torch.sort(key, stable=True)
    begin = sizes[1] - sizes[0]
    chunk = torch.arange(begin, begin + len(target), dtype=dtype, device=target.device)
    base = chunk.clamp_(min=0).div_(sizes[1], rounding_mode="floor").mul_(width)
    ascending, order = torch.sort(key.add_(base), stable=True)
    return ascending.sub_(base), order


def first_references(inputs: Inputs, loss: LossSpec, *, others: bool) -> tuple[Tensor, Tensor]:
    """Each row's label logit [n], NaN where no column is its label, and a first R.

    A row whose label is another rank's goes by some column of this one: any will do that lies
    within HEADROOM of the row's largest, and different rows take different ones.
    """
    primitives, target, vocab = primitives_of(inputs.x), inputs.target, inputs.vocab
    if not others:
        label_logit = primitives.label_logits(inputs, loss)
        return label_logit, first_reference(label_logit)
    known = (target >= 0) & (target < vocab)
    some = torch.arange(len(target), device=target.device) % vocab
    logit = primitives.label_logits(replace(inputs, target=torch.where(known, target, some)), loss)
    return torch.where(known, logit, torch.nan), first_reference(logit)


@dataclass(frozen=True, slots=True)
class LabelShare:
    """How the labels' entries of G join the products: apart, or, in plain torch, within E."""

    dx: Entries | None
    dw: Entries | None

    @classmethod
    def place(
        cls,
        inputs: Inputs,
        labels: Labels,  # of the same tokens
        x: Tensor,  # [N, D], of all tokens
        found: Factors,
        blocks: Sequence[Blocks],  # of the whole vocabulary
        config: Config,
    ) -> LabelShare:
        """Write E at the labels, and prepare what is added apart."""
        primitives, target = primitives_of(inputs.x), inputs.target
        apart = config.dx is not None and config.dw is not None
        within = None if apart else label_numerators(found)
        for part in blocks:
            primitives.set_labels(part, target, within)
        if config.dx is None or config.dw is None:
            return cls(None, None)
        column, ascending, order = labels.column, labels.ascending, labels.order
        assert column is not None
        assert order is not None
        return cls(
            Entries(None, column, found.label, inputs.weight, len(target), config.dx.n_block),
            Entries(ascending, order, found.ordered, x, inputs.vocab, config.dw.v_block),
        )
