"""Numerators on the Triton kernels, through the interpreter, against plain torch."""

import sys
from dataclasses import replace

import pytest
import torch
from exactness import assert_as_exact
from loss_cases import make

from flce_tune.kernels import loss as losses
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.parallel.shard import GlobalLabels, Shard
from flce_tune.kernels.strategies import overlay
from flce_tune.kernels.strategies.chunked import Chunked
from flce_tune.kernels.strategies.factored import Factored
from flce_tune.kernels.strategies.overlay import Overlay
from flce_tune.kernels.strategies.peers import Alone, RowGradient
from flce_tune.kernels.values import Inputs, LossSpec, Statistics, Wanted

triton_backend = pytest.importorskip("flce_tune.kernels.triton.backend")
triton_numerators = pytest.importorskip("flce_tune.kernels.triton.numerators")

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, D, V = 40, 32, 700
TILES = {
    "logits": Tile(16, 64, 16, 4, 2, 2),
    "dx": Tile(16, 32, 16, 4, 2, 2),
    "dw": Tile(16, 32, 16, 4, 2, 2),
}
CONFIGS = {
    "overlay": (Overlay(), Config("overlay", slab=64, **TILES)),
    "factored": (Factored(), Config("factored", chunk=256, slab=64, **TILES)),
    "factored, no dw tile": (
        Factored(),
        Config("factored", chunk=256, slab=128, logits=TILES["logits"]),
    ),
}
SPECS = {"plain": LossSpec(), "options": LossSpec(-100, 0.0, None, 1.75, 0.03125)}
EVERYTHING = Wanted(True, True, True)


@pytest.fixture
def on_triton(monkeypatch):
    """Every strategy takes the Triton primitives."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("flce_tune.kernels."):
            continue
        for chooser, kernels in (
            ("backend_of", triton_backend),
            ("primitives_of", triton_numerators),
        ):
            if hasattr(module, chooser):
                monkeypatch.setattr(module, chooser, lambda tensor, kernels=kernels: kernels)


def prepared(dtype, loud):
    case = make(N, D, V, torch.float32, ("ignored", "bias", "class_weight")).to(dtype)
    if loud:  # labels far below the largest logit: tiles take their own reference
        case.x[::2] *= 60
    return Inputs(case.x, case.weight, case.target, case.bias, case.options["class_weight"])


@pytest.mark.parametrize("loud", [False, True], ids=["", "loud"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("strategy", "config"), CONFIGS.values(), ids=CONFIGS)
def test_training(strategy, config, spec, loud, request):
    row_weight = torch.randn(N, generator=torch.Generator().manual_seed(5)) / N
    row_weight[::3] = 0  # the ignored rows
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = prepared(dtype, loud)
        results.append(
            Chunked().train(inputs, row_weight.to(dtype), spec, EVERYTHING, Config("chunked", 8))
        )
    plain, truth = results
    request.getfixturevalue("on_triton")
    inputs = prepared(torch.float32, loud)
    ours, grads = strategy.train(inputs, row_weight, spec, EVERYTHING, config)
    for name in ("lse", "dx", "dw", "db"):
        got, base, true = (getattr(r[name != "lse"], name) for r in ((ours, grads), plain, truth))
        if loud:  # exponents of several hundred, multiplied in float32: bfloat16 does not notice
            torch.testing.assert_close(got.double(), true, rtol=2e-3, atol=2e-5, msg=name)
        else:
            assert_as_exact(name, got, base, true, torch.float32)


def test_chunk_after_chunk(request):
    """Labels are sorted once, and every chunk takes its own, in the order of all tokens."""
    tile = Tile(64, 64, 16, 4, 2, 2)
    config = Config("factored", 256, 64, tile, tile, replace(tile, v_block=32))
    case = make(700, 16, 90, torch.float32, ("ignored",))
    row_weight = torch.rand(700, generator=torch.Generator().manual_seed(5)) / 700
    row_weight[::3] = 0
    results = []
    for dtype in (torch.float32, torch.float64):
        some = case.to(dtype)
        inputs = Inputs(some.x, some.weight, some.target)
        results.append(
            Chunked().train(inputs, row_weight.to(dtype), LossSpec(), EVERYTHING, Config("chunked"))
        )
    plain, truth = results
    request.getfixturevalue("on_triton")
    inputs = Inputs(case.x, case.weight, case.target)
    ours = Factored().train(inputs, row_weight, LossSpec(), EVERYTHING, config)
    for name in ("lse", "dx", "dw", "db"):
        got, base, true = (getattr(r[name != "lse"], name) for r in (ours, plain, truth))
        assert_as_exact(name, got, base, true, torch.float32)


def test_numerators_in_dx(request, monkeypatch):
    """dX piece by piece, each over the numerators of the one before."""
    monkeypatch.setattr(overlay, "ELEMENTS_AHEAD", 1)
    tile = Tile(64, 64, 64, 4, 2, 2)
    config = Config("overlay", None, 128, tile, tile, tile)
    case = make(600, 64, 500, torch.float32, ("ignored", "bias"))
    row_weight = torch.rand(600, generator=torch.Generator().manual_seed(5)) / 600
    row_weight[::3] = 0
    results = []
    for dtype in (torch.float32, torch.float64):
        some = case.to(dtype)
        inputs = Inputs(some.x, some.weight, some.target, some.bias)
        results.append(
            Chunked().train(inputs, row_weight.to(dtype), LossSpec(), EVERYTHING, Config("chunked"))
        )
    plain, truth = results
    request.getfixturevalue("on_triton")
    inputs = Inputs(case.x, case.weight, case.target, case.bias)
    ours = Overlay().train(inputs, row_weight, LossSpec(), EVERYTHING, config)
    for name in ("lse", "dx", "dw", "db"):
        got, base, true = (getattr(r[name != "lse"], name) for r in (ours, plain, truth))
        assert_as_exact(name, got, base, true, torch.float32)
    assert len(ours[1].dx.untyped_storage()) == (600 + 256 + 168) * 64 * 4


class Told:
    """Stands in for the other ranks: it knows what the merged statistics will be."""

    parts, others = 1, True

    def __init__(self, whole, merged, row_weight, loss, shard):
        self.labels = GlobalLabels(whole.target, whole.vocab, whole.class_weight)
        self.merged, self.row_weight, self.loss, self.shard = merged, row_weight, loss, shard

    def widest(self, vocab):
        return self.shard.widest

    def exchange(self, rows, local, raw=None):
        labels = self.labels.rows(rows)
        merged = Statistics(*(s[rows] for s in self.merged))
        given = losses.coefficients(labels, merged, self.row_weight[rows], self.loss)
        return lambda: RowGradient(
            merged, *self.shard.gradient_inputs(labels, merged, given, self.loss)
        )

    def hidden_sum(self, x, dtype):
        return Alone().hidden_sum(x, torch.float32)


@pytest.mark.parametrize("loud", [False, True], ids=["", "loud"])
@pytest.mark.parametrize(("strategy", "config"), CONFIGS.values(), ids=CONFIGS)
def test_training_on_one_of_two_shards(strategy, config, loud, request):
    row_weight = torch.randn(N, generator=torch.Generator().manual_seed(5)) / N
    row_weight[::3] = 0  # the ignored rows
    spec, whole = LossSpec(), prepared(torch.float64, loud)
    statistics, truth = Chunked().train(
        whole, row_weight.double(), spec, EVERYTHING, Config("chunked", 8)
    )
    merged = [s.float() for s in (statistics.lse, statistics.lse_low, statistics.target_logit)]
    merged[1] = (statistics.lse - merged[0]).float()
    request.getfixturevalue("on_triton")
    inputs, cut = prepared(torch.float32, loud), V // 2 // 8 * 8
    dx, dw, db = 0, [], []
    for rank, part in enumerate((slice(0, cut), slice(cut, V))):
        shard = Shard(None, rank, ((0, cut), (cut, V)))
        local = replace(inputs.columns(part), target=shard.local(inputs.target))
        peers = Told(inputs, merged, row_weight, spec, shard)
        _, grads = strategy.train(local, row_weight, spec, EVERYTHING, config, peers)
        dx = dx + grads.dx
        dw.append(grads.dw)
        db.append(grads.db)
    for name, ours in (("dx", dx), ("dw", torch.cat(dw)), ("db", torch.cat(db))):
        torch.testing.assert_close(
            ours.double(), getattr(truth, name), rtol=2e-3, atol=2e-5, msg=name
        )


@pytest.mark.parametrize(("strategy", "config"), CONFIGS.values(), ids=CONFIGS)
def test_a_label_outside_every_shard_spoils_its_own_row(strategy, config, request):
    spec, row_weight = LossSpec(), torch.full((N,), 1 / N)
    inputs, cut = replace(prepared(torch.float32, False), class_weight=None), V // 2 // 8 * 8
    inputs.target.clamp_(min=0)
    plain, _ = Chunked().train(inputs, row_weight, spec, EVERYTHING, Config("chunked", 8))
    merged = [plain.lse, plain.lse_low, plain.target_logit.clone()]
    inputs.target[3], merged[2][3] = V, torch.nan
    request.getfixturevalue("on_triton")
    for rank, part in enumerate((slice(0, cut), slice(cut, V))):
        shard = Shard(None, rank, ((0, cut), (cut, V)))
        local = replace(inputs.columns(part), target=shard.local(inputs.target))
        peers = Told(inputs, merged, row_weight, spec, shard)
        _, grads = strategy.train(local, row_weight, spec, EVERYTHING, config, peers)
        assert grads.dx.isnan().any(1).nonzero().flatten().tolist() == [3]
