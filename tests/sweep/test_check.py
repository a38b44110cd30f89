import dataclasses

import pytest
import torch

from flce_tune.kernels.problem import Problem
from flce_tune.sweep.check import Checker, WrongResultError, poisoned, reference
from flce_tune.sweep.inputs import make_inputs, plain_loss

CPU = torch.device("cpu")
ALL = ("bias", "class_weight", "label_smoothing", "softcap")
PROBLEM = Problem(tokens=300, hidden=48, vocab=517, dtype="float32")


def prepared(problem):
    inputs = make_inputs(problem, CPU, seed=0)
    return Checker(problem, inputs, seed=0), inputs.outputs(plain_loss(inputs))


@pytest.mark.parametrize("features", [(), ALL, ("per_token",), ("class_weight", "per_token")])
def test_the_reference_is_plain_pytorch_in_double_precision(features):
    problem = dataclasses.replace(PROBLEM, dtype="float64", features=features)
    inputs = make_inputs(problem, CPU, seed=0)
    directions = torch.randn(problem.hidden, 3, dtype=torch.float64)
    ours = reference(inputs, directions)
    plain = inputs.outputs(plain_loss(inputs))
    torch.testing.assert_close(ours["loss"], plain["loss"].reshape(-1), rtol=1e-5, atol=0)
    for name in ("dx", "dw"):
        torch.testing.assert_close(ours[name], plain[name] @ directions, rtol=1e-5, atol=1e-7)
    if "bias" in features:
        torch.testing.assert_close(ours["db"], plain["db"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("features", [(), ALL, ("per_token",)])
def test_plain_pytorch_passes_its_own_check(dtype, features):
    checker, outputs = prepared(dataclasses.replace(PROBLEM, dtype=dtype, features=features))
    errors = checker.errors(outputs)
    assert errors["dx"] == pytest.approx(checker.plain["dx"])
    assert {"loss", "dx", "dw", "dx_block", "dw_block"} <= errors.keys()


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("train_frozen_weight", {"loss", "dx"}), ("eval", {"loss"})],
)
def test_only_what_the_mode_returns_is_checked(mode, wanted):
    checker, outputs = prepared(dataclasses.replace(PROBLEM, mode=mode))
    assert {name for name in checker.errors(outputs) if "block" not in name} == wanted


def one_row_off(tensor):
    """The row whose gradient is the smallest hardly moves the norm of the whole."""
    quiet = tensor.norm(dim=1).argmin()
    tensor[quiet] *= 3


def nan_at_the_end(tensor):
    tensor[-1, -1] = float("nan")


def all_scaled(tensor):
    tensor *= 1.02


def swapped_rows(tensor):
    tensor[[0, 1]] = tensor[[1, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dx", "dw"])
@pytest.mark.parametrize("damage", [nan_at_the_end, all_scaled, swapped_rows])
def test_damage_is_found(dtype, name, damage):
    checker, outputs = prepared(dataclasses.replace(PROBLEM, dtype=dtype))
    damage(outputs[name])
    with pytest.raises(WrongResultError, match=name):
        checker.errors(outputs)


def test_one_wrong_block_of_rare_words_is_found_though_the_norm_hardly_moves():
    checker, outputs = prepared(dataclasses.replace(PROBLEM, vocab=2000, dtype="bfloat16"))
    dw = outputs["dw"]
    blocks = dw[:1920].float().reshape(15, -1).norm(dim=1)
    start = 128 * int(blocks.argmin())
    dw[start : start + 128] = 0
    with pytest.raises(WrongResultError, match="dw"):
        checker.errors(outputs)


def test_a_wrong_loss_is_found():
    checker, outputs = prepared(PROBLEM)
    outputs["loss"] += 1e-3
    with pytest.raises(WrongResultError, match="loss: relative error"):
        checker.errors(outputs)


def test_missing_and_misshapen_outputs_are_found():
    checker, outputs = prepared(PROBLEM)
    with pytest.raises(WrongResultError, match="there is no dw"):
        checker.errors({name: outputs[name] for name in ("loss", "dx")})
    with pytest.raises(WrongResultError, match=r"dx has shape \[299, 48\]"):
        checker.errors(outputs | {"dx": outputs["dx"][:-1]})


def test_the_errors_come_with_the_refusal():
    checker, outputs = prepared(PROBLEM)
    outputs["dw"] *= 2
    with pytest.raises(WrongResultError) as raised:
        checker.errors(outputs)
    assert raised.value.errors["dw"] == pytest.approx(1.0, rel=0.01)


def test_a_low_precision_accumulator_has_its_own_yardstick():
    problem = dataclasses.replace(PROBLEM, tokens=4096, dtype="bfloat16", accumulate="weight_dtype")
    inputs = make_inputs(problem, CPU, seed=0)
    outputs = inputs.outputs(plain_loss(inputs))
    rounded = torch.zeros_like(outputs["dw"])
    for start in range(0, 4096, 512):
        part = dataclasses.replace(inputs, upstream=torch.tensor(512 / 4096)).slice(start + 512)
        part = dataclasses.replace(
            part,
            x=part.x.detach()[start:],
            target=part.target[start:],
            leaves={"dw": part.weight},
        )
        rounded += part.outputs(plain_loss(part))["dw"]
    outputs["dw"] = rounded
    Checker(problem, inputs, seed=0).errors(outputs)
    with pytest.raises(WrongResultError, match="dw"):
        Checker(dataclasses.replace(problem, accumulate="fp32"), inputs, seed=0).errors(outputs)


def test_poison_reaches_python_allocations_and_goes_away():
    with poisoned():
        x = torch.zeros(3)
        made = [
            torch.empty(3),
            torch.empty_like(x),
            torch.empty_strided((3,), (1,)),
            x.new_empty(3),
            torch.empty(2, dtype=torch.int64),
        ]
    assert all(t.isnan().all() for t in made[:4])
    assert "new_empty" not in vars(torch.Tensor)
    assert torch.empty.__name__ == "empty"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_inputs_are_the_same_for_the_same_seed(mode):
    a, b = (make_inputs(dataclasses.replace(PROBLEM, mode=mode), CPU, seed=7) for _ in range(2))
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.target, b.target)
    assert not torch.equal(a.x, make_inputs(PROBLEM, CPU, seed=8).x)


def test_inputs_look_like_a_trained_models():
    inputs = make_inputs(Problem(tokens=2000, hidden=256, vocab=4000), CPU, seed=0)
    assert 1.0 < plain_loss(inputs).item() < 4.0
