"""How many collectives a call makes, and how large they are; run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from loss_cases import Case
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.given_logits import cross_entropy
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.parallel import collectives

Sent = list[tuple[str, int, int]]  # what, elements, bytes a rank sends


@contextmanager
def listening() -> Iterator[Sent]:
    """Note every collective, which still takes place."""
    sent: Sent = []
    real = {name: getattr(collectives, name) for name in ("_gather", "_scatter")}

    def note(kind: str, tensor: Tensor) -> None:
        sent.append((kind, tensor.numel(), tensor.nbytes))

    def gather(into: Tensor, mine: Tensor, **keywords: Any) -> Any:
        note("gather", mine)
        return real["_gather"](into, mine, **keywords)

    def scatter(mine: Tensor, whole: Tensor, **keywords: Any) -> Any:
        note("scatter", whole)
        return real["_scatter"](mine, whole, **keywords)

    reduce = collectives.dist.all_reduce

    def summed(tensor: Tensor, **keywords: Any) -> Any:
        note("sum", tensor)
        return reduce(tensor, **keywords)

    with (
        mock.patch.object(collectives, "_gather", gather),
        mock.patch.object(collectives, "_scatter", scatter),
        mock.patch.object(collectives.dist, "all_reduce", summed),
    ):
        yield sent


def linear(group: ProcessGroup, case: Case, bounds: list[int], **keywords: Any) -> Sent:
    """Of one forward and backward pass, the second of its kind."""
    rows = slice(bounds[group.rank()], bounds[group.rank() + 1])
    keywords = {"vocab_range": (rows.start, rows.stop)} | keywords
    for _ in range(2):
        x, weight = (t.detach().clone().requires_grad_() for t in (case.x, case.weight[rows]))
        with listening() as sent:
            loss = linear_cross_entropy(
                x, weight, case.target, process_group=group, **case.options, **keywords
            )
            assert isinstance(loss, Tensor)
            loss.sum().backward()
    return sent


def given(group: ProcessGroup, logits: Tensor, target: Tensor, bounds: list[int]) -> Sent:
    """The same of given logits."""
    columns = logits[:, bounds[group.rank()] : bounds[group.rank() + 1]].clone().requires_grad_()
    for _ in range(2):
        with listening() as sent:
            loss = cross_entropy(columns, target, process_group=group, label_smoothing=0.1)
            assert isinstance(loss, Tensor)
            torch.autograd.grad(loss, columns)
    return sent
