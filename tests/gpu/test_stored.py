"""``overlay`` and ``factored`` at sizes that fill real tiles."""

import itertools
from dataclasses import replace

import pytest
import torch
from exactness import assert_as_exact
from gpu import (
    BY_HAND,
    BY_HAND_NARROW,
    LARGE,
    PING_PONG,
    SHARED,
    SMALL,
    needs_gpu,
    skip_unless_it_runs,
)
from loss_cases import expect, hold, make, run

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.kernels.strategies import overlay

pytestmark = [*needs_gpu, pytest.mark.usefixtures("poison")]

KNOWN = ("ignored", "bias", "logit_scale", "z_loss", "class_weight", "token_weight", "divisor")
SHAPES = {
    "dW holds some": (3000, 256, 5000),
    "dW holds nearly all": (500, 1024, 5001),
    "dW holds nothing": (1000, 64, 3000),
    "its residuals end anywhere": (1500, 264, 5001),
}


def configs(tiles, slab):
    """Each strategy, with every exact accumulator that the tiles can keep."""
    found = {"overlay": Config("overlay", slab=slab, **tiles)}
    for chunk in (512, 1024, 4096):
        found[f"factored {chunk}"] = Config("factored", chunk=chunk, slab=slab, **tiles)
    for name, config in list(found.items()):
        found[f"{name}, split24"] = replace(config, accumulator="split24")
    if tiles["dw"].schedule != "compiler":
        found = {name: config for name, config in found.items() if config.accumulator != "fp32"}
    return found


def by_hand():
    """The same, scheduled by hand where the GPU can."""
    kinds = (PING_PONG, SHARED, BY_HAND)
    all_of_them = [config for tiles in kinds for config in configs(tiles, 768).values()]
    problem, device = Problem(3000, 256, 5000), describe_device(torch.device("cuda", 0))
    return [config for config in all_of_them if not strategies.reject(config, problem, device)]


@pytest.mark.parametrize("features", [(), KNOWN], ids=["plain", "all options"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("tiles", "slab"),
    [
        (LARGE, 768),
        (SMALL, 256),
        (PING_PONG, 768),
        (SHARED, 768),
        (BY_HAND, 768),
        (BY_HAND_NARROW, 768),
    ],
    ids=["large", "small", "ping_pong", "shared", "products", "narrow products"],
)
def test_as_exact_as_plain_torch(tiles, slab, shape, features):
    case = make(*shape, torch.bfloat16, features, device="cuda")
    plain, truth = expect(case, torch.bfloat16)
    for name, config in configs(tiles, slab).items():
        skip_unless_it_runs(config, *shape, torch.bfloat16)
        try:
            hold(run(linear_cross_entropy, case, config=config), plain, truth, torch.bfloat16)
        except AssertionError as error:
            raise AssertionError(f"{name}: {config}: {error}") from error


@pytest.mark.parametrize("rows", [256, 1024])
@pytest.mark.parametrize(
    "tiles", [LARGE, SMALL, BY_HAND, BY_HAND_NARROW], ids=["large", "small", "products", "narrow"]
)
def test_numerators_in_dx(tiles, rows, monkeypatch):
    """dX piece by piece, each over the numerators of the one before."""
    monkeypatch.setattr(overlay, "ELEMENTS_AHEAD", rows * 256)
    case = make(3000, 256, 5000, torch.bfloat16, ("ignored", "bias"), device="cuda")
    plain, truth = expect(case, torch.bfloat16)
    found = {n: c for n, c in configs(tiles, 768).items() if c.strategy == "overlay"}
    for config in found.values():
        assert overlay._rounds(Problem(3000, 256, 5000), config)[0].start == 256
        skip_unless_it_runs(config, 3000, 256, 5000, torch.bfloat16)
        one, two = (run(linear_cross_entropy, case, config=config) for _ in range(2))
        hold(one, plain, truth, torch.bfloat16)
        assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("tokens", [1000, 1024])
def test_small_logits(tokens):
    """An untrained model: the labels' share is nearly all, and plain torch rounds 1/N alike."""
    case = make(tokens, 256, 5000, torch.bfloat16, device="cuda")
    case.weight.mul_(0.125)
    plain, truth = expect(case, torch.bfloat16)
    for config in configs(LARGE, 768).values():
        hold(run(linear_cross_entropy, case, config=config), plain, truth, torch.bfloat16)


def test_labels_far_below_the_largest_logit():
    case = make(3000, 256, 5000, torch.bfloat16, ("ignored",), device="cuda")
    case.x[::2] *= 50
    plain, truth = expect(case, torch.bfloat16)
    for config in (*configs(LARGE, 768).values(), *by_hand()):
        hold(run(linear_cross_entropy, case, config=config), plain, truth, torch.bfloat16)


def test_confident_rows():
    """p of the label near 1: p - 1 must not be lost in the rounding of p."""
    case = make(3000, 256, 5000, torch.bfloat16, device="cuda")
    case.x[:] = (case.x + 4 * case.weight[case.target]).bfloat16()
    plain, truth = expect(case, torch.bfloat16)
    for config in (*configs(LARGE, 768).values(), *by_hand()):
        hold(run(linear_cross_entropy, case, config=config), plain, truth, torch.bfloat16)


@pytest.mark.parametrize(
    ("tiles", "name"),
    [
        *itertools.product((LARGE, PING_PONG, SHARED), ("overlay", "factored 1024")),
        *itertools.product(
            (LARGE, PING_PONG, SHARED, BY_HAND), ("overlay, split24", "factored 1024, split24")
        ),
    ],
)
def test_twice_gives_the_same_bits(tiles, name):
    config = configs(tiles, 768)[name]
    skip_unless_it_runs(config, 3000, 256, 5000, torch.bfloat16)
    case = make(3000, 256, 5000, torch.bfloat16, ("ignored",), device="cuda")
    one, two = (run(linear_cross_entropy, case, config=config) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_unknown_labels_poison_only_the_loss_and_what_depends_on_them():
    case = make(1000, 256, 5000, torch.bfloat16, device="cuda")
    case.target[7] = 5000
    for config in (*configs(LARGE, 768).values(), *by_hand()):
        ours = run(linear_cross_entropy, case, config=config)
        assert ours["loss"].isnan()
        assert ours["x"][7].isnan().all()
        assert ours["x"][:7].isfinite().all()
        assert ours["x"][8:].isfinite().all()


@pytest.mark.parametrize("tiles", [BY_HAND, BY_HAND_NARROW], ids=["64", "32"])
@pytest.mark.parametrize("tokens", [3000, 8500], ids=["whole", "in pieces"])
def test_all_tokens_at_once_add_labels_sums(tiles, tokens):
    shape = (tokens, 64, 10001)
    case = make(*shape, torch.bfloat16, ("ignored", "bias"), device="cuda")
    case.target[: tokens // 4] = 8447  # the last of a piece
    plain, truth = expect(case, torch.bfloat16)
    config = Config("factored", chunk=8704, slab=768, **tiles)
    skip_unless_it_runs(config, *shape, torch.bfloat16)
    one, two = (run(linear_cross_entropy, case, config=config) for _ in range(2))
    hold(one, plain, truth, torch.bfloat16)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("tiles", [LARGE, BY_HAND], ids=["large", "products"])
def test_the_workspace_estimate_is_an_upper_bound(tiles):
    for config in configs(tiles, 2048).values():
        assert_within_the_estimate(config, 6144, 1024, 32000)


@pytest.mark.parametrize("tokens", [6144, 9000], ids=["whole", "in pieces"])
def test_the_workspace_estimate_of_labels_sums_is_an_upper_bound(tokens):
    config = Config("factored", chunk=9216, slab=2048, **BY_HAND)
    assert_within_the_estimate(config, tokens, 1024, 32000)


def assert_within_the_estimate(config, *shape):
    skip_unless_it_runs(config, *shape, torch.bfloat16)
    x = torch.randn(shape[0], shape[1], device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(shape[2], shape[1], device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, shape[2], (shape[0],), device="cuda")

    def step():
        loss = linear_cross_entropy(x, weight, target, config=config)
        return torch.autograd.grad(loss, (x, weight))

    step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = step()
    peak = torch.cuda.max_memory_allocated() - held
    returned = sum(g.numel() * g.element_size() for g in gradients)
    allowed = returned + strategies.workspace(config, Problem(*shape)) + (4 << 20)
    assert peak <= allowed, f"{config}: {peak / 2**20:.1f} MiB, estimated {allowed / 2**20:.1f}"


def test_the_loss_is_that_of_other_strategies():
    case = make(1000, 256, 5000, torch.bfloat16, ("ignored",), device="cuda")
    full = run(linear_cross_entropy, case, config=Config("recompute", slab=1024, **LARGE))
    for config in configs(LARGE, 768).values():
        ours = run(linear_cross_entropy, case, config=config)
        assert_as_exact("loss", ours["loss"], full["loss"], full["loss"].double(), torch.float32)
