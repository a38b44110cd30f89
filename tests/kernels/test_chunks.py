"""How the work is cut does not change what comes out."""

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import compare, make, run

from flce_tune.kernels import reference, strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Problem, describe_device

pytestmark = pytest.mark.usefixtures("poison")
CPU = torch.device("cpu")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64, 127, 128, 129, 300, 4096])
def test_any_chunk(chunk, dtype, reduction):
    case = make(300, 16, 101, dtype, ("bias", "ignored"))
    compare(case, dtype, config=Config("chunked", chunk=chunk), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slab", [1, 7, 256, 257, 513, 600, 4096])
def test_any_slab(slab, dtype, reduction):
    case = make(61, 16, 600, dtype, ("bias", "ignored"))
    compare(case, dtype, config=Config("recompute", slab=slab), reduction=reduction)


def test_bug_006_the_weight_gradients_error_does_not_grow_with_the_chunks():
    case = make(8192, 16, 128, torch.bfloat16, seed=2)
    needs = ("weight",)
    truth = run(reference.linear_cross_entropy, case.to(torch.float64), needs)["weight"]
    plain = run(reference.linear_cross_entropy, case, needs)["weight"]
    for chunks in (1, 16, 256, 1024):
        config = Config("chunked", chunk=8192 // chunks)
        ours = run(linear_cross_entropy, case, needs, config=config)["weight"]
        assert_as_exact(f"{chunks} chunks", ours, plain, truth, torch.bfloat16)


def test_bug_006_a_low_precision_accumulator_is_asked_for_and_can_be_seen():
    case = make(4096, 16, 128, torch.bfloat16, seed=2)
    truth = run(reference.linear_cross_entropy, case.to(torch.float64), ("weight",))["weight"]
    rounded = Config("chunked", chunk=16, accumulator="weight_dtype")
    with pytest.raises(ValueError, match='accumulate="weight_dtype"'):
        run(linear_cross_entropy, case, config=rounded)
    errors = [
        float((run(linear_cross_entropy, case, ("weight",), **how)["weight"] - truth).norm())
        for how in (
            {"config": Config("chunked", chunk=16)},
            {"config": rounded, "accumulate": "weight_dtype"},
        )
    ]
    assert errors[1] > 4 * errors[0]


def test_bug_050_few_classes_and_many_tokens():
    case = make(8191, 128, 32, torch.bfloat16)
    compare(case, torch.bfloat16, config=Config("chunked", chunk=1024))


def test_bug_050_every_probability_is_tiny():
    case = make(64, 8, 20_000, torch.bfloat16)
    case.weight.mul_(2.0**-6)
    compare(case, torch.bfloat16, config=Config("recompute", slab=4096))


@pytest.mark.parametrize("mode", ["train", "train_frozen_weight", "eval"])
@pytest.mark.parametrize("features", [(), ("per_token",)], ids=str)
@pytest.mark.parametrize("limit", [None, 0, 1 << 20, 1 << 40])
def test_the_default_is_valid_and_within_the_limit_if_anything_is(mode, features, limit):
    problem = Problem(5000, 64, 3000, "float32", mode, features=features)
    device = describe_device(CPU)
    config = strategies.default(problem, device, limit)
    assert strategies.reject(config, problem, device) is None
    if limit == 1 << 40:
        assert config == strategies.default(problem, device)
    if limit == 1 << 20:
        smallest = strategies.workspace(strategies.default(problem, device, 0), problem)
        assert strategies.workspace(config, problem) <= max(limit, smallest)


def test_a_workspace_limit_changes_nothing_but_the_memory():
    case = make(300, 16, 700, torch.float32, ("bias",))
    compare(case, torch.float32, more={"workspace_limit": 1})


def test_every_config_of_the_space_gives_the_same_answer():
    case = make(300, 16, 400, torch.float32, ("bias", "label_smoothing"))
    problem = Problem(300, 16, 400, "float32", features=("bias", "label_smoothing"))
    configs = strategies.space(problem, describe_device(CPU))
    assert {config.strategy for config in configs} == {"chunked", "full", "recompute"}
    for config in configs:
        compare(case, torch.float32, config=config)


@pytest.mark.parametrize(
    "config",
    [Config("full"), Config("chunked", chunk=128), Config("factored", chunk=256, slab=128),
     Config("overlay", slab=128), Config("recompute", slab=128)],
    ids=str,
)  # fmt: skip
def test_what_lies_between_the_rows_of_a_buffer_stays_out(config):
    """With AMX the bfloat16 product reads past a row's end, where the poison is."""
    x = torch.randn(256, 16).bfloat16().requires_grad_()
    weight = torch.randn(200, 16).bfloat16().requires_grad_()
    loss = linear_cross_entropy(x, weight, torch.randint(0, 200, (256,)), config=config)
    for gradient in torch.autograd.grad(loss, (x, weight)):
        assert gradient.isfinite().all()
