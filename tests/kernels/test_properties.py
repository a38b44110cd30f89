"""Random shapes, options, strategies and cuts, against one reference."""

import math

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from loss_cases import FEATURES, compare, make

from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

bounded = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
sizes = {
    "tokens": st.integers(1, 70), "hidden": st.integers(1, 20), "vocab": st.integers(1, 90),
    "seed": st.integers(0, 2**16),
}  # fmt: skip
configs = st.one_of(
    st.builds(Config, st.just("chunked"), chunk=st.integers(1, 80)),
    st.just(Config("full")),
    st.builds(Config, st.just("recompute"), slab=st.integers(1, 100)),
    st.none(),
)


@bounded
@given(
    features=st.sets(st.sampled_from(FEATURES)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    needs=st.sets(st.sampled_from(["x", "weight", "bias"])),
    config=configs,
    **sizes,
)
def test_the_op_is_as_exact_as_plain_torch(
    poison, features, dtype, reduction, needs, config, tokens, hidden, vocab, seed
):
    if reduction != "mean":
        features -= {"divisor"}
    if "bias" not in features:
        needs -= {"bias"}
    case = make(tokens, hidden, vocab, dtype, tuple(features), seed)
    weight = case.options.get("token_weight")
    if weight is not None and "divisor" not in features:
        weight.abs_().add_(0.5)  # weights that nearly cancel would make any mean inexact
    compare(case, dtype, sorted(needs), config=config, reduction=reduction)


@bounded
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    features=st.sets(st.sampled_from(["bias", "ignored", "softcap", "label_smoothing"])),
    config=configs,
    **sizes,
)
def test_what_holds_for_every_input(poison, dtype, features, config, tokens, hidden, vocab, seed):
    case = make(tokens, hidden, vocab, dtype, tuple(features), seed)
    bias = torch.zeros(vocab) if case.bias is None else case.bias.float()
    bias.requires_grad_()
    x, weight = case.x.float(), case.weight.float()
    rows = linear_cross_entropy(
        x, weight, case.target, bias=bias, reduction="none", config=config, **case.options
    )
    counted = case.target != -100
    assert bool((rows[counted] >= -1e-5).all())
    assert not rows[~counted].any()
    (db,) = torch.autograd.grad(rows.sum(), bias)
    if "softcap" not in features:
        assert abs(float(db.detach().sum())) <= 1e-5 * max(1, tokens)  # each row of G sums to zero
    logprob, entropy = linear_logprobs(x, weight, case.target, bias=bias, config=config)
    assert bool((logprob <= 1e-5).all())
    assert bool((entropy >= -1e-5).all())
    assert float(entropy.detach().max()) <= math.log(vocab) + 1e-5


@bounded
@given(shift=st.floats(-8, 8, allow_nan=False), config=configs, **sizes)
def test_a_constant_added_to_all_logits_changes_nothing(
    poison, shift, config, tokens, hidden, vocab, seed
):
    assume(vocab > 1)
    case = make(tokens, hidden, vocab, torch.float64, ("bias",), seed)
    plain = linear_cross_entropy(case.x, case.weight, case.target, bias=case.bias, config=config)
    moved = linear_cross_entropy(
        case.x, case.weight, case.target, bias=case.bias + shift, config=config
    )
    torch.testing.assert_close(plain, moved, rtol=1e-12, atol=1e-12)
