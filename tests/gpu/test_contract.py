"""The contract at sizes that fill real tiles: library GEMMs, tiles, split24, atomic."""

import pytest
import torch
from exactness import assert_as_exact
from gpu import (
    ATOMIC,
    BY_HAND,
    BY_HAND_NARROW,
    LARGE,
    PING_PONG,
    SHARED,
    SMALL,
    cuts,
    needs_gpu,
    skip_unless_it_runs,
)
from loss_cases import expect, hold, make, run

from flce_tune.kernels import reference
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

pytestmark = [*needs_gpu, pytest.mark.usefixtures("poison")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HALVES = (torch.bfloat16, torch.float16)
OPTIONS = {
    "plain": (),
    "softcap": ("ignored", "softcap", "logit_scale", "bias"),
    "smoothing": ("ignored", "label_smoothing", "class_weight", "z_loss"),
    "weights": ("ignored", "token_weight", "divisor"),
}
with_reductions = pytest.mark.parametrize("reduction", ["mean", "none"])


def hold_all(case, dtype, configs, reduction):
    """Hold every config to one truth."""
    upstream = None
    if reduction == "none":
        case.options.pop("divisor", None)
        upstream = torch.randn(case.target.shape, device="cuda").bfloat16()
    plain, truth = expect(case, dtype, upstream=upstream, reduction=reduction)
    for name, config in configs.items():
        ours = run(
            linear_cross_entropy, case, upstream=upstream, reduction=reduction, config=config
        )
        try:
            hold(ours, plain, truth, dtype)
        except AssertionError as error:
            raise AssertionError(f"{name}: {config}: {error}") from error


@with_reductions
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
def test_library_products(features, dtype, reduction):
    case = make(300, 64, 1000, dtype, features, device="cuda")
    hold_all(case, dtype, cuts({}, chunk=128, slab=256), reduction)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("n", "hidden", "vocab"),
    [(512, 128, 129), (1000, 256, 32777), (4096, 64, 50257), (300, 1024, 128256)],
)
def test_library_products_of_real_vocabularies(n, hidden, vocab, dtype):
    case = make(n, hidden, vocab, dtype, ("ignored",), device="cuda")
    hold_all(case, dtype, cuts({}, chunk=512, slab=16384), "mean")


@with_reductions
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
def test_small_tiles(features, reduction):
    skip_unless_it_runs(Config("full", **SMALL), 300, 64, 1000, torch.bfloat16)
    case = make(300, 64, 1000, torch.bfloat16, features, device="cuda")
    hold_all(case, torch.bfloat16, cuts(SMALL, chunk=128, slab=256), reduction)


@pytest.mark.parametrize(
    ("n", "hidden", "vocab", "dtype"),
    [
        (512, 128, 129, torch.bfloat16),
        (1000, 256, 32777, torch.bfloat16),
        (1000, 256, 32777, torch.float16),
        (4096, 64, 50257, torch.bfloat16),
        (300, 1024, 128256, torch.bfloat16),
    ],
)
@with_reductions
@pytest.mark.parametrize(
    "tiles",
    [LARGE, PING_PONG, SHARED, BY_HAND, BY_HAND_NARROW],
    ids=["compiler", "ping_pong", "shared", "products", "narrow products"],
)
def test_large_tiles(tiles, n, hidden, vocab, dtype, reduction):
    skip_unless_it_runs(Config("full", **tiles), n, hidden, vocab, dtype)
    case = make(n, hidden, vocab, dtype, ("ignored",), device="cuda")
    hold_all(case, dtype, cuts(tiles, chunk=256, slab=16384), reduction)


@with_reductions
@pytest.mark.parametrize(
    "tiles", [PING_PONG, SHARED, BY_HAND], ids=["ping_pong", "shared", "products"]
)
@pytest.mark.parametrize("hidden", [8, 72, 1000])
def test_tiles_scheduled_by_hand_with_options(hidden, tiles, reduction):
    skip_unless_it_runs(Config("full", **tiles), 1000, hidden, 5001, torch.bfloat16)
    features = ("ignored", "bias", "logit_scale", "z_loss", "class_weight", "token_weight")
    case = make(1000, hidden, 5001, torch.bfloat16, features, device="cuda")
    hold_all(case, torch.bfloat16, cuts(tiles, chunk=300, slab=2048), reduction)


@with_reductions
@pytest.mark.parametrize("features", [OPTIONS["softcap"], OPTIONS["smoothing"]], ids=str)
def test_large_tiles_with_options(features, reduction):
    skip_unless_it_runs(Config("full", **LARGE), 1000, 256, 5000, torch.bfloat16)
    case = make(1000, 256, 5000, torch.bfloat16, features, device="cuda")
    hold_all(case, torch.bfloat16, cuts(LARGE, chunk=256, slab=2048), reduction)


@pytest.mark.parametrize(
    "tiles", [LARGE, SMALL, BY_HAND, BY_HAND_NARROW],
    ids=["large", "small", "by hand", "by hand, narrow"],
)  # fmt: skip
@with_reductions
def test_split24(tiles, reduction):
    configs = {
        "chunked": Config("chunked", chunk=128, dw=tiles["dw"], accumulator="split24"),
        "recompute": Config("recompute", slab=512, dx=tiles["dx"], accumulator="split24"),
    }
    for config in configs.values():
        skip_unless_it_runs(config, 1000, 256, 5000, torch.bfloat16)
    case = make(1000, 256, 5000, torch.bfloat16, ("ignored", "bias"), device="cuda")
    hold_all(case, torch.bfloat16, configs, reduction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", OPTIONS.values(), ids=OPTIONS)
def test_atomic(features, dtype):
    case = make(300, 72, 1000, dtype, features, device="cuda")
    hold_all(case, dtype, {"atomic": ATOMIC}, "mean")


@pytest.mark.parametrize("hidden", [3, 12, 72])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_hidden_sizes_that_no_tile_takes(hidden, dtype):
    case = make(300, hidden, 129, dtype, ("bias",), device="cuda")
    hold_all(case, dtype, cuts({}, chunk=128, slab=64) | {"default": None}, "mean")


@pytest.mark.parametrize("dtype", [torch.float64], ids=str)
def test_float64(dtype):
    case = make(300, 24, 129, dtype, ("bias", "label_smoothing"), device="cuda")
    hold_all(case, dtype, cuts({}, chunk=128, slab=64), "mean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["library", "tiles"])
def test_outputs_and_logprobs(kind, dtype):
    configs = cuts(LARGE if kind == "tiles" else {}, chunk=256, slab=2048)
    skip_unless_it_runs(configs["full"], 700, 128, 5001, dtype)
    case = make(700, 128, 5001, dtype, ("bias", "softcap"), device="cuda")
    upstreams = torch.randn(2, 700, device="cuda").bfloat16()

    def of_logits(dtype):
        given = case.to(dtype)
        leaves = [t.detach().requires_grad_() for t in (given.x, given.weight, given.bias)]
        z = reference.logits(*leaves, given.options["softcap"])
        rows = reference.row_statistics(z, case.target)
        total = (rows["logprob"] * upstreams[0]).sum() + (rows["entropy"] * upstreams[1]).sum()
        grads = torch.autograd.grad(total, leaves)
        return rows | dict(zip(("x", "weight", "bias"), grads, strict=True))

    plain, truth = of_logits(dtype), of_logits(torch.float64)
    for config in configs.values():
        leaves = [t.detach().requires_grad_() for t in (case.x, case.weight, case.bias)]
        logprob, entropy = linear_logprobs(
            *leaves[:2], case.target, bias=leaves[2], softcap=4.0, config=config
        )
        total = (logprob * upstreams[0]).sum() + (entropy * upstreams[1]).sum()
        grads = torch.autograd.grad(total, leaves)
        ours = {"logprob": logprob, "entropy": entropy}
        ours |= dict(zip(("x", "weight", "bias"), grads, strict=True))
        got = linear_cross_entropy(
            *leaves[:2], case.target, bias=leaves[2], softcap=4.0, config=config,
            outputs=("lse", "entropy", "prediction", "accuracy"),
        )  # fmt: skip
        ours["lse"] = got.lse
        for name, value in (*ours.items(), ("entropy", got.entropy)):
            assert_as_exact(f"{config}: {name}", value, plain[name], truth[name], dtype)
        z = reference.logits(*(t.double() for t in (case.x, case.weight, case.bias)), 4.0)
        chosen = z.gather(1, got.prediction[:, None])[:, 0]
        assert bool((chosen >= z.max(1).values - 2 * torch.finfo(dtype).eps * 4).all())


@pytest.mark.parametrize("kind", ["library", "tiles", "split24", "by hand"])
@with_reductions
def test_twice_gives_the_same_bits(kind, reduction):
    tiles = {"library": {}, "by hand": BY_HAND}.get(kind, LARGE)
    configs = cuts(tiles, chunk=256, slab=2048)
    if kind == "split24":
        configs = {
            "chunked": Config("chunked", chunk=256, dw=LARGE["dw"], accumulator="split24"),
            "recompute": Config("recompute", slab=2048, dx=LARGE["dx"], accumulator="split24"),
        }
    case = make(1000, 256, 5000, torch.bfloat16, ("ignored", "bias"), device="cuda")
    for config in configs.values():
        skip_unless_it_runs(config, 1000, 256, 5000, torch.bfloat16)
        first, second = (
            run(linear_cross_entropy, case, reduction=reduction, config=config) for _ in range(2)
        )
        for name, value in first.items():
            assert torch.equal(value, second[name]), f"{config}: {name}"


@pytest.mark.parametrize("chunk", [16384, 1024, 64])
@pytest.mark.parametrize("accumulator", ["fp32", "fp32 tile", "split24"])
def test_bug_006_the_weight_gradients_error_does_not_grow_with_the_chunks(chunk, accumulator):
    kind, _, tile = accumulator.partition(" ")
    dw = LARGE["dw"] if tile or kind == "split24" else None
    config = Config("chunked", chunk=chunk, dw=dw, accumulator=kind)
    skip_unless_it_runs(config, 16384, 256, 8192, torch.bfloat16)
    case = make(16384, 256, 8192, torch.bfloat16, device="cuda")
    plain, truth = expect(case, torch.bfloat16, ("weight",))
    hold(run(linear_cross_entropy, case, ("weight",), config=config), plain, truth, torch.bfloat16)


@pytest.mark.parametrize("kind", ["library", "tiles"])
def test_bug_050_few_classes_and_many_tokens(kind):
    configs = cuts(LARGE if kind == "tiles" else {}, chunk=2048, slab=16)
    skip_unless_it_runs(configs["full"], 8191, 128, 32, torch.bfloat16)
    case = make(8191, 128, 32, torch.bfloat16, device="cuda")
    hold_all(case, torch.bfloat16, configs, "mean")


@pytest.mark.parametrize("kind", ["library", "tiles"])
def test_bug_050_every_probability_is_tiny(kind):
    configs = cuts(LARGE if kind == "tiles" else {}, chunk=256, slab=8192)
    skip_unless_it_runs(configs["full"], 512, 64, 50000, torch.bfloat16)
    case = make(512, 64, 50000, torch.bfloat16, device="cuda")
    case.weight.mul_(2.0**-6)
    hold_all(case, torch.bfloat16, configs, "mean")
