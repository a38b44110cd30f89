"""What is refused, and how: the argument, what came, what is accepted."""

import re

import pytest
import torch
import torch.distributed as dist
from loss_cases import make, run

from flce_tune.errors import InvalidConfigError, TargetOutOfRangeError
from flce_tune.kernels import strategies
from flce_tune.kernels.arguments import prepare
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.module import LinearCrossEntropy
from flce_tune.kernels.op import linear_cross_entropy, linear_logprobs

N, D, V = 6, 4, 7
X, W, Y = torch.zeros(N, D), torch.zeros(V, D), torch.zeros(N, dtype=torch.int64)
GOOD = {"x": X, "weight": W, "target": Y}


def refuse(error, *words, **changes):
    """Expect an error whose message holds every word."""
    with pytest.raises(error) as caught:
        linear_cross_entropy(**(GOOD | changes))
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("error", "words", "changes"),
    [
        (TypeError, ["x must be", "list"], {"x": [1.0]}),
        (TypeError, ["weight must be", "ndarray"], {"weight": W.numpy()}),
        (TypeError, ["target", "int64", "float32"], {"target": Y.float()}),
        (TypeError, ["target", "int64", "uint8"], {"target": Y.byte()}),
        (TypeError, ["x must be", "bfloat16", "int64"], {"x": X.long()}),
        (TypeError, ["weight must be", "bfloat16", "complex64"], {"weight": W.to(torch.complex64)}),
        (TypeError, ["bias must be", "int32"], {"bias": torch.zeros(V, dtype=torch.int32)}),
        (ValueError, ["weight", "[V, D]", "(7, 4, 1)"], {"weight": W[..., None]}),
        (ValueError, ["x must be", "D = 4", "(6, 5)"], {"x": torch.zeros(N, 5)}),
        (ValueError, ["target", "(6,)", "(5,)"], {"target": Y[:5]}),
        (ValueError, ["target", "(6,)", "(6, 1)"], {"target": Y[:, None]}),
        (ValueError, ["bias", "(7,)", "(6,)"], {"bias": torch.zeros(N)}),
        (ValueError, ["class_weight", "(7,)", "(1,)"], {"class_weight": torch.zeros(1)}),
        (ValueError, ["token_weight", "(6,)", "()"], {"token_weight": torch.tensor(1.0)}),
        (ValueError, ["reduction", "mean", "'avg'"], {"reduction": "avg"}),
        (ValueError, ["label_smoothing", "[0, 1]", "1.5"], {"label_smoothing": 1.5}),
        (ValueError, ["label_smoothing", "nan"], {"label_smoothing": float("nan")}),
        (ValueError, ["softcap", "positive", "-1"], {"softcap": -1.0}),
        (ValueError, ["softcap", "positive", "0"], {"softcap": 0.0}),
        (ValueError, ["logit_scale", "positive", "0.0"], {"logit_scale": 0.0}),
        (ValueError, ["z_loss", "-0.5"], {"z_loss": -0.5}),
        (ValueError, ["accumulate", "fp32", "'bf16'"], {"accumulate": "bf16"}),
        (ValueError, ["outputs", "entropy", "'logits'"], {"outputs": ("logits",)}),
        (ValueError, ["return_lse", "outputs"], {"return_lse": True, "outputs": ("lse",)}),
        (ValueError, ["divisor", "mean", "sum"], {"divisor": 3.0, "reduction": "sum"}),
        (ValueError, ["divisor", "one number", "(2,)"], {"divisor": torch.ones(2)}),
        (ValueError, ["class_weight", "grad"], {"class_weight": torch.ones(V, requires_grad=True)}),
        (ValueError, ["shift", "[..., T, D]", "(4,)"],
         {"x": X[0], "target": Y[0], "shift": True}),
        (TypeError, ["unexpected keyword", "label_smothing"], {"label_smothing": 0.1}),
        (InvalidConfigError, ["cce", "chunked"], {"config": Config("cce")}),
        (InvalidConfigError, ["chunk"], {"config": Config("chunked")}),
        (InvalidConfigError, ["slab"], {"config": Config("recompute")}),
        (InvalidConfigError, ["full", "chunk", "3"], {"config": Config("full", chunk=3)}),
        (InvalidConfigError, ["CUDA"], {"config": Config("full", logits=Tile(64, 64, 64))}),
        (InvalidConfigError, ["split24", "bfloat16", "float32"],
         {"config": Config("full", accumulator="split24")}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(error, words, changes):
    refuse(error, *words, **changes)


@pytest.mark.parametrize("name", ["weight", "target", "bias", "class_weight", "token_weight"])
def test_another_device_is_named(name):
    shape = {"weight": (V, D), "target": (N,), "token_weight": (N,)}.get(name, (V,))
    dtype = torch.int64 if name == "target" else torch.float32
    elsewhere = torch.zeros(shape, dtype=dtype, device="meta")
    refuse(ValueError, name, "meta", "cpu", "load the values", **{name: elsewhere})


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.zeros(0, D), torch.zeros(V * D)])
def test_bug_034_and_040_a_weight_that_is_not_all_there(weight):
    refuse(ValueError, "weight", "gathered", weight=weight)


def test_bug_029_a_distributed_tensor_is_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(W, mesh, [Shard(1)])
        refuse(TypeError, "x", "DTensor", "full_tensor", x=distribute_tensor(X, mesh, [Shard(0)]))
        refuse(ValueError, "weight", "Shard(0)", "full_tensor", weight=sharded)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label", [7, -1, -101, 2**31, -(2**31), 2**40])
def test_bug_003_a_label_out_of_range_is_named(label, reduction):
    target = Y.clone()
    target[4] = label
    refuse(TargetOutOfRangeError, str(label), "position 4", "[0, 7)", "-100",
           target=target, reduction=reduction)  # fmt: skip
    refuse(IndexError, str(label), target=target, x=X.clone().requires_grad_())
    with pytest.raises(TargetOutOfRangeError, match=re.escape(str(label))):
        linear_logprobs(X, W, target)


def test_bug_003_minus_one_can_be_the_ignore_index():
    target = torch.tensor([0, -1, 3, -1, 6, 2])
    case = make(N, D, V)
    got = run(linear_cross_entropy, type(case)(case.x, case.weight, target), ignore_index=-1)
    kept = target != -1
    want = run(linear_cross_entropy, type(case)(case.x[kept], case.weight, target[kept]))
    torch.testing.assert_close(got["loss"], want["loss"])
    torch.testing.assert_close(got["weight"], want["weight"])


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_is_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_logprobs(X, W, Y, temperature=temperature)


def test_the_module_refuses_wrong_options_when_it_is_made():
    for options, words in (
        ({"reduction": "avg"}, "reduction"),
        ({"softcap": 0.0}, "softcap"),
        ({"label_smoothing": 2.0}, "label_smoothing"),
        ({"outputs": ("logits",)}, "outputs"),
        ({"accumulate": "bf16"}, "accumulate"),
    ):
        with pytest.raises(ValueError, match=words):
            LinearCrossEntropy(**options)
    with pytest.raises(TypeError, match="label_smothing"):
        LinearCrossEntropy(label_smothing=0.1)


def test_int32_labels_are_accepted():
    case = make(N, D, V, features=("ignored",))
    small = type(case)(case.x, case.weight, case.target.int())
    for name, value in run(linear_cross_entropy, small).items():
        assert torch.equal(value, run(linear_cross_entropy, case)[name])


def test_bug_020_every_option_reaches_the_loss_of_function_and_module():
    case = make((3, 8), D, V, torch.float32)
    case.target[0, 1] = -100
    case.target[1, 2] = 3
    plain = linear_cross_entropy(case.x, case.weight, case.target)
    class_weight = torch.rand(V) + 0.5
    options = {
        "ignore_index": 3, "reduction": "sum", "label_smoothing": 0.3, "softcap": 1.0,
        "logit_scale": 2.0, "z_loss": 0.1, "class_weight": class_weight, "shift": True,
    }  # fmt: skip
    case.target[case.target == -100] = 3
    plain = linear_cross_entropy(case.x, case.weight, case.target)
    for name, value in options.items():
        function = linear_cross_entropy(case.x, case.weight, case.target, **{name: value})
        module = LinearCrossEntropy(**{name: value})(case.x, case.weight, case.target)
        assert not torch.allclose(function, plain), name
        assert torch.equal(function, module), name
    per_call = {"bias": torch.rand(V), "token_weight": torch.rand(3, 8), "divisor": 3.0}
    for name, value in per_call.items():
        function = linear_cross_entropy(case.x, case.weight, case.target, **{name: value})
        module = LinearCrossEntropy()(case.x, case.weight, case.target, **{name: value})
        assert not torch.allclose(function, plain), name
        assert torch.equal(function, module), name
    held = LinearCrossEntropy(outputs=("lse",))(case.x, case.weight, case.target)
    assert held.lse is not None
    _, lse = LinearCrossEntropy(return_lse=True)(case.x, case.weight, case.target)
    assert torch.equal(lse, held.lse)
    config = Config("recompute", slab=3)
    with_config = LinearCrossEntropy(config=config)(case.x, case.weight, case.target)
    torch.testing.assert_close(with_config, plain)
    with pytest.raises(InvalidConfigError):
        LinearCrossEntropy(config=Config("chunked"))(case.x, case.weight, case.target)


def test_every_strategy_explains_a_config_it_cannot_run():
    from flce_tune.kernels.problem import Problem, describe_device

    problem = Problem(N, D, V, "float32")
    device = describe_device(torch.device("cpu"))
    for name in strategies.names():
        config = Config(name) if name == "factored" else Config(name, chunk=1, slab=1)
        reason = strategies.reject(config, problem, device)
        assert reason
        assert name in reason


@pytest.mark.parametrize("width", [64, 63])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bug_028_kernels_get_rows_they_can_copy(width, dtype):
    """Unit last stride, rows that do not overlap, and aligned ones where their width allows."""
    flat = torch.randn(64 * 200, dtype=dtype)
    layouts = {
        "whole": flat[: 40 * width].view(40, width),
        "narrow": flat.view(-1, 80)[:40, :width],
        "ragged": flat[: 40 * 77].view(40, 77)[:, :width],
        "every other": flat.view(-1, 160)[:40, : 2 * width : 2],
        "column-major": flat[: 40 * width].view(width, 40).t(),
        "shifted by one": flat[1 : 40 * width + 1].view(40, width),
        "expanded": flat[:width].expand(40, width),
        "overlapping": flat.as_strided((40, width), (8, 1)),
        "one row": flat.as_strided((1, width), (1, 1)),
    }
    for name, tensor in layouts.items():
        target = torch.zeros(len(tensor), dtype=torch.int64)
        got = prepare(tensor, tensor, target, None, None).x
        assert torch.equal(got, tensor), name
        assert got.stride(1) == 1, name
        assert len(got) == 1 or got.stride(0) >= width, name
        if width == 64:
            assert got.data_ptr() % 16 == 0, name
            assert len(got) == 1 or got.stride(0) * got.element_size() % 16 == 0, name
        if name in ("whole", "narrow"):
            assert got.data_ptr() == tensor.data_ptr(), f"{name} was copied"
