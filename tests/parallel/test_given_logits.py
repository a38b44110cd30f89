"""``cross_entropy`` of split logits: equal to that of the whole, and its gradient in place."""

from itertools import pairwise

import pytest
import torch
from loss_cases import FEATURES, hold, make
from split_cases import PADDING, even, run_given

from flce_tune.kernels import reference

V = 103


def given(features=(), dtype=torch.float64):
    case = make(32, 16, V, dtype, features)
    return reference.logits(case.x, case.weight), case.target, case.options


def check(ranks, bounds, padding, logits, target, options, **keywords):
    dtype = logits.dtype

    def plain(kind):
        leaf = logits.to(kind).requires_grad_()
        cast = {k: v.to(kind) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        loss = reference.cross_entropy(leaf, target, **cast, **keywords)
        (gradient,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        return {"loss": loss.detach(), "logits": gradient.movedim(-1, 0)}

    parts = ranks.run(
        len(bounds) - 1, run_given, logits, target, options | keywords, bounds, padding
    )
    widths = [b - a for a, b in pairwise(bounds)]
    for part, width in zip(parts, widths, strict=True):
        assert torch.equal(part["loss"], parts[0]["loss"])
        assert not part["logits"][width:].any()
    whole = torch.cat([p["logits"][:w] for p, w in zip(parts, widths, strict=True)])
    hold({"loss": parts[0]["loss"], "logits": whole}, plain(dtype), plain(torch.float64), dtype)
    return parts


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_option(ranks, reduction):
    features = [f for f in FEATURES if f != "bias" and (f != "divisor" or reduction == "mean")]
    for bounds, padding in (even(V, 2), 0), (even(V, 3), PADDING), ([0, 0, 60, 103], PADDING):
        check(ranks, bounds, padding, *given(features), reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_as_exact_as_plain_torch(ranks, dtype):
    check(ranks, even(V, 2), 0, *given(["label_smoothing", "softcap"], dtype))


def test_gradient_in_place(ranks):
    logits, target, options = given(["ignored"])
    for in_place in (True, False):
        parts = check_in_place(ranks, logits, target, options | {"in_place": in_place})
        assert all(bool(part["overwritten"]) == in_place for part in parts)


def check_in_place(ranks, logits, target, options):
    return ranks.run(2, run_given, logits, target, options, even(V, 2), PADDING)
