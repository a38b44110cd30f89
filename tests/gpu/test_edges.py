"""Infinities, labels out of range, strides and sizes beyond 32-bit offsets."""

import math

import pytest
import torch
from gpu import ATOMIC, BY_HAND, LARGE, cuts, needs_gpu, skip_unless_it_runs
from loss_cases import Case, make, run

from flce_tune.errors import TargetOutOfRangeError
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = [*needs_gpu, pytest.mark.usefixtures("poison")]

INF = float("inf")
BF16 = torch.bfloat16
CONFIGS = {f"{name}, library": config for name, config in cuts({}, 128, 256).items()}
CONFIGS |= {f"{name}, tiles": config for name, config in cuts(LARGE, 128, 256).items()}
CONFIGS |= {f"{name}, by hand": config for name, config in cuts(BY_HAND, 128, 256).items()}
CONFIGS["atomic"] = ATOMIC
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@with_configs
@pytest.mark.parametrize("vocab", [129, 257, 1000])
def test_bug_002_no_column_beyond_the_vocabulary_joins_the_softmax(config, vocab):
    skip_unless_it_runs(config, 200, 64, vocab, BF16)
    case = Case(
        torch.zeros(200, 64, device="cuda", dtype=BF16),
        torch.zeros(vocab, 64, device="cuda", dtype=BF16),
        torch.arange(200, device="cuda") % vocab,
        torch.full((vocab,), -20.0, device="cuda", dtype=BF16),
    )
    got = run(linear_cross_entropy, case, config=config)
    assert float(got["loss"]) == pytest.approx(math.log(vocab), rel=1e-5)
    assert abs(float(got["bias"].float().sum())) < 2.0**-6


@with_configs
@pytest.mark.parametrize("place", [0, 300, 999])
def test_bug_015_minus_infinities(config, place):
    skip_unless_it_runs(config, 3, 64, 1000, BF16)
    bias = torch.full((1000,), -INF, device="cuda", dtype=BF16)
    bias[place] = 0.5
    other = (place + 1) % 1000
    target = torch.tensor([place, place, other], device="cuda")
    case = Case(
        torch.zeros(3, 64, device="cuda", dtype=BF16),
        torch.zeros(1000, 64, device="cuda", dtype=BF16), target, bias,
    )  # fmt: skip
    got = run(linear_cross_entropy, case, reduction="sum", config=config)
    assert float(got["loss"]) == INF
    expected = torch.zeros(1000, device="cuda", dtype=BF16)
    expected[place], expected[other] = 1.0, -1.0
    assert torch.equal(got["bias"], expected)
    rows = linear_cross_entropy(
        case.x, case.weight, target, bias=bias, reduction="none", config=config
    )
    assert rows.tolist() == [0.0, 0.0, INF]


@with_configs
@pytest.mark.parametrize("label", [1000, -1, -101, 2**31, -(2**40)])
def test_bug_003_a_label_out_of_range_poisons_its_row_alone(config, label):
    skip_unless_it_runs(config, 200, 64, 1000, BF16)
    case = make(200, 64, 1000, BF16, ("ignored",), device="cuda")
    clean = run(linear_cross_entropy, case, ("x",), reduction="none", config=config)
    case.target[77] = label
    others = torch.arange(200, device="cuda") != 77
    got = run(linear_cross_entropy, case, ("x",), reduction="none", config=config)
    assert got["loss"][77].isnan()
    assert got["x"][77].isnan().all()
    for name in ("loss", "x"):
        assert torch.equal(got[name][others], clean[name][others])
    mean = run(linear_cross_entropy, case, ("x", "weight"), config=config)
    assert mean["loss"].isnan()
    assert mean["x"][77].isnan().all()
    assert mean["x"][others].isfinite().all()
    torch.cuda.synchronize()
    assert float(torch.ones(1, device="cuda")) == 1.0
    with pytest.raises(TargetOutOfRangeError, match=str(label)):
        run(linear_cross_entropy, case, check_targets=True, config=config)


@with_configs
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bug_004_every_label_ignored(config, reduction, dtype):
    skip_unless_it_runs(config, 200, 64, 1000, dtype)
    case = make(200, 64, 1000, dtype, ("bias",), device="cuda")
    case.target.fill_(-100)
    got = run(linear_cross_entropy, case, reduction=reduction, config=config)
    assert got["loss"].isnan() if reduction == "mean" else not got["loss"].any()
    for name in ("x", "weight", "bias"):
        assert torch.equal(got[name], torch.zeros_like(got[name])), name


@with_configs
def test_a_token_of_weight_zero_still_has_a_loss(config):
    skip_unless_it_runs(config, 200, 64, 1000, BF16)
    case = make(200, 64, 1000, BF16, device="cuda")
    case.x.requires_grad_()
    got = linear_cross_entropy(
        case.x, case.weight, case.target, token_weight=torch.zeros(200, device="cuda"),
        reduction="sum", outputs=("token_loss",), config=config,
    )  # fmt: skip
    rows = linear_cross_entropy(case.x, case.weight, case.target, reduction="none")
    torch.testing.assert_close(got.token_loss, rows.detach(), rtol=2.0**-7, atol=2.0**-5)


@pytest.mark.parametrize("kind", ["library", "tiles"])
@pytest.mark.parametrize(
    "layout",
    ["narrow", "every other", "column-major", "transposed", "shifted by one", "expanded"],
)
def test_bug_028_inputs_of_any_strides(kind, layout):
    configs = cuts({} if kind == "library" else LARGE, 128, 256)
    skip_unless_it_runs(configs["full"], 192, 64, 1000, BF16)
    case = make((16, 12), 64, 1000, BF16, ("bias",), device="cuda")
    x, weight = case.x, case.weight
    if layout == "narrow":
        wide = torch.full((1000, 67), float("nan"), device="cuda", dtype=BF16)
        wide[:, :64] = weight
        weight = wide[:, :64]
    elif layout == "every other":
        wide = torch.full((1000, 128), float("nan"), device="cuda", dtype=BF16)
        wide[:, ::2] = weight
        weight = wide[:, ::2]
    elif layout == "column-major":
        weight = weight.t().contiguous().t()
    elif layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "shifted by one":
        flat = torch.full((64001,), float("nan"), device="cuda", dtype=BF16)
        flat[1:] = weight.reshape(-1)
        weight = flat[1:].view(1000, 64)
    else:
        x = x[:1].expand(16, 12, 64)
    for config in configs.values():
        results = []
        for given in ((x, weight), (x.contiguous(), weight.contiguous())):
            leaves = [t.detach().requires_grad_() for t in given]
            loss = linear_cross_entropy(*leaves, case.target, bias=case.bias, config=config)
            results.append([loss, *torch.autograd.grad(loss, leaves)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def needs_memory(gibibytes):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory, {free:.0f} are free")


@pytest.mark.usefixtures("empty_gpu")
@pytest.mark.parametrize("kind", ["library", "tiles"])
def test_bug_025_more_logits_than_32_bits_count(kind, monkeypatch):
    monkeypatch.undo()  # filling 9 GB with NaN is not what is tested
    needs_memory(40)
    n, hidden, vocab = 43 * 2047, 16, 50000
    assert n * vocab > 2**32
    config = Config("full", **({} if kind == "library" else LARGE))
    skip_unless_it_runs(config, n, hidden, vocab, BF16)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(n, hidden, device="cuda", generator=generator).to(BF16)
    weight = (torch.randn(vocab, hidden, device="cuda", generator=generator) / 4).to(BF16)
    target = torch.randint(0, vocab, (n,), device="cuda", generator=generator)
    x.requires_grad_()
    got = linear_cross_entropy(
        x, weight, target, reduction="sum", outputs=("token_loss",), config=config
    )
    (dx,) = torch.autograd.grad(got.loss, x)
    boundary = 2**31 // vocab
    for start in (0, boundary - 50, boundary + 1, 2 * boundary - 50, n - 100):
        rows = slice(start, start + 100)
        part = x.detach()[rows].requires_grad_()
        small = linear_cross_entropy(
            part, weight, target[rows], reduction="sum", outputs=("token_loss",), config=config
        )
        (small_dx,) = torch.autograd.grad(small.loss, part)
        torch.testing.assert_close(got.token_loss[rows], small.token_loss, rtol=1e-3, atol=2e-2)
        torch.testing.assert_close(dx[rows], small_dx, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("empty_gpu")
@pytest.mark.parametrize(
    "config", [Config("full"), Config("full", **LARGE), Config("chunked", chunk=128),
               Config("recompute", slab=65536, **LARGE)], ids=str,
)  # fmt: skip
def test_a_weight_larger_than_32_bits_count(config, monkeypatch):
    monkeypatch.undo()
    needs_memory(60)
    n, hidden, vocab = 256, 2560, 900_000
    assert hidden * vocab > 2**31
    skip_unless_it_runs(config, n, hidden, vocab, BF16)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(vocab, hidden, device="cuda", generator=generator, dtype=BF16)
    weight.mul_(2.0**-6).requires_grad_()
    x = torch.randn(n, hidden, device="cuda", generator=generator).to(BF16).requires_grad_()
    boundary = 2**31 // hidden
    target = torch.randint(0, vocab, (n,), device="cuda", generator=generator)
    target[:3] = torch.tensor([boundary + 1, boundary - 1, vocab - 1], device="cuda")
    loss = linear_cross_entropy(x, weight, target, reduction="sum", config=config)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    with torch.no_grad():
        z = (x @ weight.t()).float()
        expected = torch.nn.functional.cross_entropy(z, target, reduction="sum")
        g = torch.softmax(z, 1)
        g[torch.arange(n), target] -= 1
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-3, atol=0.0)
        torch.testing.assert_close(dx, g.to(BF16) @ weight, rtol=2.0**-6, atol=2.0**-12)
        for first in (0, boundary - 50, boundary + 1, vocab - 100):
            rows = slice(first, first + 100)
            right = g[:, rows].t() @ x.float()
            torch.testing.assert_close(dw[rows].float(), right, rtol=2.0**-6, atol=2.0**-7)
