"""``tile_skip`` at sizes that fill real tiles."""

from dataclasses import replace

import pytest
import torch
from exactness import assert_as_exact
from gpu import needs_gpu
from kept_tiles import share, watch
from loss_cases import expect, hold, make, run, trained

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.kernels.triton import skipping

pytestmark = [*needs_gpu, pytest.mark.usefixtures("poison")]

KNOWN = ("ignored", "bias", "logit_scale", "z_loss", "class_weight", "token_weight", "divisor")
SHAPES = {"ragged": (3001, 264, 5001), "round": (2048, 512, 8192), "few tokens": (77, 1024, 32000)}
WIDE = Config(
    "tile_skip", slab=4096, logits=Tile(128, 256, 64), dx=Tile(128, 64, 256), dw=Tile(64, 256, 128)
)


def default():
    problem = Problem(4096, 1024, 32000)
    return strategies.get("tile_skip").default(problem, describe_device(torch.device("cuda")))


@pytest.fixture
def kept(monkeypatch):
    """The tiles each call keeps."""
    return watch(monkeypatch, skipping)


@pytest.mark.parametrize("features", [(), KNOWN], ids=["plain", "all options"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide tiles"])
def test_as_exact_as_plain_torch_where_nothing_is_left_out(wide, shape, features):
    case = make(*shape, torch.bfloat16, features, device="cuda")
    if "token_weight" in case.options:
        case.options["token_weight"].abs_()
    config = replace(WIDE if wide else default(), tolerance=1e-30)
    plain, truth = expect(case, torch.bfloat16)
    hold(run(linear_cross_entropy, case, config=config), plain, truth, torch.bfloat16)


@pytest.mark.parametrize("wide", [False, True], ids=["", "wide tiles"])
@pytest.mark.parametrize("tokens", [2048, 1999])
def test_what_is_left_out_is_most_of_it_and_changes_little(kept, tokens, wide):
    case = trained(tokens, 256, 32000, torch.bfloat16, device="cuda")
    config = WIDE if wide else default()
    truth = expect(case, torch.bfloat16)[1]
    exact, ours = (
        run(linear_cross_entropy, case, config=replace(config, tolerance=tolerance))
        for tolerance in (1e-30, 1e-4)
    )
    assert share(kept[1]) < 0.5 < share(kept[0])
    assert torch.equal(ours["loss"], exact["loss"])
    for name in ("x", "weight"):
        true = truth[name].double()
        rounding = (true.to(torch.bfloat16).double() - true).norm() / true.norm()
        added = (ours[name].double() - exact[name].double()).norm() / true.norm()
        assert 0 < added < rounding, name


def test_the_lists_of_tiles_give_what_plain_torch_gives(monkeypatch):
    """The same numerators, multiplied by both."""
    from flce_tune.kernels import torch_skipping

    case = trained(1000, 256, 9000, torch.bfloat16, device="cuda")
    config = replace(default(), tolerance=1e-3)
    ours = run(linear_cross_entropy, case, config=config)
    for name in ("kept_product", "column_sums", "tile_sums"):
        monkeypatch.setattr(skipping, name, getattr(torch_skipping, name))
    plain = run(linear_cross_entropy, case, config=config)
    truth = expect(case, torch.bfloat16)[1]
    for name in ("x", "weight", "bias"):
        assert_as_exact(name, ours[name], plain[name], truth[name], torch.bfloat16, statistics=1e-4)


def test_more_logits_than_32_bits_can_count():
    case = trained(17000, 64, 128257, torch.bfloat16, device="cuda")
    ours = run(linear_cross_entropy, case, tile_skip=1e-4)
    exact = run(linear_cross_entropy, case, config=Config("chunked", chunk=2048))
    for name in ("x", "weight"):
        apart = (ours[name].double() - exact[name].double()).norm() / exact[name].double().norm()
        assert apart < 4e-3, name


def test_twice_the_same_and_the_host_never_waits():
    case = trained(2048, 256, 32000, torch.bfloat16, device="cuda")
    first = run(linear_cross_entropy, case, tile_skip=1e-4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(linear_cross_entropy, case, tile_skip=1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first[name], second[name]) for name in first)
