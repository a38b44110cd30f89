"""Whole strategies on the Triton kernels, through the interpreter, against plain torch.

The op never gives float32 to tiles or CPU tensors to Triton; here the strategies are called
directly and told to use the Triton primitives, so that their plumbing is tested without a GPU.
"""

import sys

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.strategies.chunked import Chunked
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")
pytest.importorskip("flce_tune.kernels.triton.launch")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, D, V = 21, 24, 150
TILES = {
    "logits": Tile(16, 64, 16, 4, 2, 2),
    "dx": Tile(16, 32, 16, 4, 2, 2),
    "dw": Tile(16, 32, 16, 4, 2, 2),
}
SPECS = {
    "plain": LossSpec(),
    "everything": LossSpec(-100, 0.125, 4.0, 1.75, 0.03125),
}
CONFIGS = {
    "chunked": Config("chunked", chunk=8),
    "full": Config("full"),
    "recompute": Config("recompute", slab=64),
    "chunked with tiles": Config("chunked", chunk=8, **TILES),
    "full with tiles": Config("full", **TILES),
    "recompute with tiles": Config("recompute", slab=64, **TILES),
    "chunked with a dw tile": Config("chunked", chunk=8, dw=TILES["dw"]),
    "recompute with a dx tile": Config("recompute", slab=64, dx=TILES["dx"]),
    "atomic": Config("atomic", logits=Tile(1, 32, 16, 4, 2, 1)),
}
FEATURES = {"plain": (), "options": ("bias", "class_weight")}
EVERYTHING = Wanted(True, True, True, entropy=True, prediction=True)
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
with_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
with_features = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)


@pytest.fixture
def on_triton(monkeypatch):
    """Every strategy takes the Triton primitives."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flce_tune.kernels.") and hasattr(module, "backend_of"):
            monkeypatch.setattr(module, "backend_of", lambda tensor: triton_backend)


def prepared(dtype, features):
    case = make(N, D, V, torch.float32, ("ignored", *features)).to(dtype)
    return Inputs(case.x, case.weight, case.target, case.bias, case.options.get("class_weight"))


def row_weights(dtype):
    row_weight = torch.randn(N, generator=torch.Generator().manual_seed(5))
    row_weight[::3] = 0  # the ignored rows
    return row_weight.to(dtype) / N


def truths(compute):
    """What plain torch computes, in float32 and in float64."""
    return [compute(dtype) for dtype in (torch.float32, torch.float64)]


def check(name, ours, plain, truth):
    if truth is None:
        assert ours is None, name
    elif truth.dtype == torch.int64:
        assert torch.equal(ours, truth), name
    else:
        assert_as_exact(name, ours, plain, truth, torch.float32)


@with_configs
@with_specs
@with_features
def test_training(config, spec, features, request):
    wanted = EVERYTHING if features else Wanted(True, True, False)

    def train(dtype):
        inputs = prepared(dtype, features)
        return Chunked().train(inputs, row_weights(dtype), spec, wanted, Config("chunked", 8))

    (plain, plain_grads), (truth, true_grads) = truths(train)
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, features)
    strategy = strategies.get(config.strategy)
    got, grads = strategy.train(inputs, row_weights(torch.float32), spec, wanted, config)
    counted = inputs.target != -100
    for name in ("lse", "target_logit", "logit_sum", "mean_logit", "prediction"):
        values = [getattr(s, name) for s in (got, plain, truth)]
        if name == "target_logit" or config.strategy == "atomic":
            values = [None if v is None else v[counted] for v in values]
        check(name, *values)
    for name in ("dx", "dw", "db"):
        check(name, *(getattr(g, name) for g in (grads, plain_grads, true_grads)))


@with_configs
@with_specs
@with_features
def test_backward_for_given_coefficients(config, spec, features, request):
    def backward(dtype, strategy, config):
        inputs = prepared(dtype, features)
        generator = torch.Generator().manual_seed(6)
        upstreams = [u.to(dtype) for u in torch.randn(2, N, generator=generator)]
        statistics = strategy.evaluate(inputs, spec, EVERYTHING, config)
        given = losses.coefficients(inputs, statistics, row_weights(dtype), spec, *upstreams)
        wanted = Wanted(True, True, bool(features))
        return strategy.backward(inputs, statistics, given, spec, wanted, config)

    plain, truth = truths(lambda dtype: backward(dtype, Chunked(), Config("chunked", 8)))
    request.getfixturevalue("on_triton")
    got = backward(torch.float32, strategies.get(config.strategy), config)
    for name in ("dx", "dw", "db"):
        check(name, *(getattr(g, name) for g in (got, plain, truth)))


@with_configs
@pytest.mark.parametrize("wanted", [Wanted(dx=True), Wanted(dw=True), Wanted(db=True)], ids=str)
def test_only_the_wanted_gradient(config, wanted, request):
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, ("bias",))
    strategy = strategies.get(config.strategy)
    _, grads = strategy.train(inputs, row_weights(torch.float32), LossSpec(), wanted, config)
    for name in ("dx", "dw", "db"):
        assert (getattr(grads, name) is not None) == getattr(wanted, name)


@with_configs
def test_a_token_of_weight_zero_still_has_a_loss(config, request):
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, ())
    nothing = torch.zeros(N)
    strategy = strategies.get(config.strategy)
    got, _ = strategy.train(inputs, nothing, LossSpec(), Wanted(True, True), config)
    expected = torch.nn.functional.cross_entropy(
        inputs.x @ inputs.weight.t(), inputs.target, reduction="none"
    )
    torch.testing.assert_close(losses.row_losses(inputs, got, LossSpec()), expected)


@with_configs
def test_bug_003_a_label_out_of_range_poisons_its_row_alone(config, request):
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, ())
    strategy = strategies.get(config.strategy)
    weights, wanted = row_weights(torch.float32), Wanted(dx=True)
    _, expected = strategy.train(inputs, weights, LossSpec(), wanted, config)
    inputs.target[4] = V + 3
    got, grads = strategy.train(inputs, weights, LossSpec(), wanted, config)
    others = torch.arange(N) != 4
    assert losses.row_losses(inputs, got, LossSpec())[4].isnan()
    assert grads.dx[4].isnan().all()
    assert torch.equal(grads.dx[others], expected.dx[others])


@with_configs
def test_hidden_states_of_ignored_tokens_do_not_spread(config, request):
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, ("bias",))
    strategy, wanted = strategies.get(config.strategy), Wanted(True, True, True)
    weights = row_weights(torch.float32)
    _, clean = strategy.train(inputs, weights, LossSpec(), wanted, config)
    inputs.x[::3] = 1e30
    _, dirty = strategy.train(inputs, weights, LossSpec(), wanted, config)
    for name in ("dx", "dw", "db"):
        torch.testing.assert_close(getattr(dirty, name), getattr(clean, name))
