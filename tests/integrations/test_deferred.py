"""Recording is exact: what was noted down equals what the operations compute."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from flce_tune.integrations.deferred import DeferredLogits, UnknownOperationError
from flce_tune.integrations.on_demand import LogitsOnDemand

N, T, D, V = 3, 5, 8, 21


def parts(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(N, T, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return x, weight, bias


def adapter(x):
    torch.manual_seed(1)
    a, b = torch.randn(2, D, dtype=x.dtype), torch.randn(V, 2, dtype=x.dtype)
    return (x @ a.T).detach().requires_grad_(), b.requires_grad_()


def both(change, dtype=torch.float64):
    """What ``change`` makes of real logits and of deferred ones, and the inputs."""
    x, weight, bias = inputs = parts(dtype)
    real = F.linear(x, weight, bias)
    return change(real), change(DeferredLogits.of_linear(x, weight, bias, {})), inputs


RECORDED = {
    "nothing": lambda z: z,
    "cast": lambda z: z.to(torch.float32).float().to(z.device),
    "scale": lambda z: z * 0.25,
    "scale from the left": lambda z: 3 * z,
    "divided": lambda z: z / 6.0,
    "torch.mul": lambda z: torch.mul(torch.div(z, 2.0), 3.0),
    "cap": lambda z: torch.tanh(z / 5.0) * 5.0,
    "capped scale": lambda z: (z * 0.7 / 5.0).tanh() * 5.0 * 2.0,
    "last cut off": lambda z: z[..., :-1, :],
    "second sequence": lambda z: z[1],
    "first two": lambda z: z[:2, 1:],
    "view": lambda z: z.contiguous().view(-1, V),
    "reshape": lambda z: z.reshape([T, N, V]),
    "flatten": lambda z: z.flatten(0, 1),
}


@pytest.mark.parametrize("change", RECORDED.values(), ids=RECORDED)
def test_what_is_recorded(change, recwarn):
    real, deferred, inputs = both(change)
    assert isinstance(deferred, DeferredLogits)
    assert (deferred.shape, deferred.dtype, deferred.dim()) == (real.shape, real.dtype, real.dim())
    assert deferred.size(-1) == V
    torch.testing.assert_close(deferred.compute(), real)
    target = torch.arange(real.shape[:-1].numel()).reshape(real.shape[:-1]) % V
    expected = F.cross_entropy(real.reshape(-1, V).double(), target.reshape(-1))
    loss = deferred.cross_entropy(target)
    torch.testing.assert_close(loss, expected, check_dtype=False)
    for ours, theirs in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not recwarn.list


COMPUTED = {
    "negative scale": lambda z: z * -1.0,
    "zero": lambda z: z * 0,
    "tensor scale": lambda z: z * torch.arange(1.0, V + 1.0),
    "two caps": lambda z: z.tanh().tanh(),
    "added number": lambda z: z + 1.0,
    "added to a tensor": lambda z: torch.ones(V) + z,
    "vocabulary cut": lambda z: z[..., :7],
    "mask of rows": lambda z: z[torch.arange(N * T).reshape(N, T) % 2 == 0],
    "view through the vocabulary": lambda z: z.view(-1),
    "flattened": lambda z: z.flatten(1),
    "method": lambda z: z.softmax(-1),
    "function": lambda z: torch.cat([z, z], dim=0),
    "property": lambda z: z.mT,
    "exp": lambda z: torch.exp(z),
    "difference": lambda z: 1.0 - (z - 2.0),
    "minus": lambda z: -z,
    "power": lambda z: z**2,
    "quotient": lambda z: 1.0 / z,
    "iteration": lambda z: torch.stack(list(z)),
}


@pytest.mark.parametrize("change", COMPUTED.values(), ids=COMPUTED)
def test_what_cannot_be_recorded_is_computed_with_a_warning(change):
    with pytest.warns(UserWarning, match="flce_tune computes the full logits"):
        real, computed, inputs = both(change)
    torch.testing.assert_close(computed, real)
    gradients = torch.autograd.grad(computed.square().sum(), inputs)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(real.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    x, weight, bias = inputs
    with pytest.raises(UnknownOperationError):
        change(DeferredLogits.of_linear(x, weight, bias, {}, strict=True))


@pytest.mark.parametrize(
    "write",
    [lambda z: z.div_(2.0), lambda z: z.__setitem__((0, 0), 1.0), lambda z: torch.relu_(z)],
    ids=["method", "item", "function"],
)
def test_writing_into_logits_is_refused(write):
    x, weight, bias = parts()
    with pytest.raises(ValueError, match="this model writes into its logits"):
        write(DeferredLogits.of_linear(x, weight, bias, {}))


def test_comparisons_compare_values():
    x, weight, bias = parts()
    logits = DeferredLogits.of_linear(x, weight, bias, {})
    with pytest.warns(UserWarning, match="flce_tune computes the full logits"):
        assert torch.equal(logits > 0, F.linear(x, weight, bias) > 0)
    with pytest.warns(UserWarning, match="flce_tune computes the full logits"):
        assert not (logits == 0.0).any()


def test_a_sum_of_products_is_one_product():
    x, weight, bias = parts()
    ax, b = adapter(x)
    deferred = DeferredLogits.of_linear(x, weight, bias, {}) * 0.5
    deferred = deferred + DeferredLogits.of_linear(ax, b, None, {}) * 2.0
    real = F.linear(x, weight, bias) * 0.5 + F.linear(ax, b) * 2.0
    torch.testing.assert_close(deferred.compute(), real)
    target = torch.zeros(N, T, dtype=torch.long)
    expected = F.cross_entropy((real / 3.0).flatten(0, 1), target.flatten())
    loss = (deferred / 3.0).cross_entropy(target)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (x, weight, bias, ax, b)),
        torch.autograd.grad(expected, (x, weight, bias, ax, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_called_by_the_model_itself(reduction, recwarn):
    target = torch.arange(N * T) % V
    target[3] = 7
    weight = torch.linspace(0.5, 2.0, V, dtype=torch.float64)
    criterion = torch.nn.CrossEntropyLoss(
        weight=weight, ignore_index=7, reduction=reduction, label_smoothing=0.1
    )
    real, deferred, _ = both(lambda z: criterion(z.view(-1, V), target))
    torch.testing.assert_close(deferred, real)
    assert not recwarn.list


@pytest.mark.parametrize(
    "call",
    [
        lambda z: F.cross_entropy(z.view(-1, V), torch.full((N * T, V), 1.0 / V, dtype=z.dtype)),
        lambda z: F.cross_entropy(z.transpose(1, 2), torch.zeros(N, T, dtype=torch.long)),
        lambda z: F.cross_entropy(
            z.view(-1, V), torch.zeros(N * T, dtype=torch.long), reduce=False
        ),
    ],
    ids=["probabilities", "classes in the middle", "old arguments"],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_other_forms_of_cross_entropy_compute_the_logits(call):
    with pytest.warns(UserWarning, match="flce_tune computes the full logits"):
        real, deferred, _ = both(call)
    torch.testing.assert_close(deferred, real)


def test_autocast_is_that_of_the_head():
    x, weight, _ = parts(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = F.linear(x, weight)
        deferred = DeferredLogits.of_linear(x, weight, None, {})
    assert deferred.dtype == real.dtype == torch.bfloat16
    torch.testing.assert_close(deferred.compute(), real, rtol=0, atol=0)


# Logits on demand


def on_demand(dtype=torch.float32):
    x, weight, bias = parts(dtype)
    return LogitsOnDemand.of(DeferredLogits.of_linear(x, weight, bias, {})), F.linear(
        x, weight, bias
    )


def test_looking_at_the_description_computes_nothing():
    logits, real = on_demand()
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.device) == (real.shape, real.dtype, real.device)
    assert (logits.ndim, logits.dim(), logits.size(1), len(logits)) == (3, 3, T, N)
    assert torch.is_floating_point(logits)
    assert not logits.requires_grad
    half = logits.to(torch.bfloat16).float()
    assert isinstance(half, LogitsOnDemand)
    assert not logits._computed
    assert not half._computed


USES = {
    "arithmetic": lambda z: z + 1,
    "argmax": lambda z: z.argmax(-1),
    "index": lambda z: z[..., :-1, :],
    "function": lambda z: torch.softmax(z, -1),
    "list": lambda z: torch.cat([z, z]),
    "detach": lambda z: z.detach(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "copy": lambda z: copy.deepcopy(z.detach()),
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "double": lambda z: z.double(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use_computes_a_plain_tensor(use):
    logits, real = on_demand()
    logits.argmax()  # from here on casts have values to cast
    result = use(logits)
    assert type(result) is torch.Tensor
    torch.testing.assert_close(result, use(real))


def test_gradients_flow_whatever_was_looked_at_before():
    logits, real = on_demand()
    with torch.no_grad():
        assert not (logits * 1).requires_grad
    (gradient,) = torch.autograd.grad((logits * 2).sum(), logits._deferred.products[0].weight)
    torch.testing.assert_close(
        gradient, 2 * logits._deferred.products[0].x.sum((0, 1)).expand(V, D)
    )
    assert "tensor" in repr(logits)
    assert real.shape == logits.shape


def test_an_operator_of_the_dispatcher_sees_values():
    logits, real = on_demand()
    torch.testing.assert_close(torch.ops.aten.sum.default(logits), real.sum())
