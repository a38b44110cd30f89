"""Row statistics by sums of numerators, in place of maxima."""

import pytest
import torch

from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.strategies import common
from flce_tune.kernels.values import Inputs, LossSpec, Wanted

TILE = Tile(128, 128, 64, 8, 5, 16, "ping_pong")


def inputs_of(n, hidden, vocab, scale=1.0):
    g = torch.Generator().manual_seed(n + vocab)
    x = torch.randn(n, hidden, generator=g) * scale
    weight = torch.randn(vocab, hidden, generator=g)
    target = torch.randint(0, vocab, (n,), generator=g)
    target[::7] = -100
    return Inputs(x=x, weight=weight, target=target, bias=torch.randn(vocab, generator=g))


@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("rows_per_step", [64, 1024])
def test_a_tile_scheduled_by_hand_sums_numerators(scale, rows_per_step, monkeypatch):
    inputs = inputs_of(300, 32, 1000, scale)
    monkeypatch.setattr(common, "backend_of", lambda _: pytest.fail("maxima were asked for"))
    config = Config("recompute", slab=256, logits=TILE)
    found = common.evaluate(inputs, LossSpec(), Wanted(), config, rows_per_step)
    z = inputs.x.double() @ inputs.weight.double().t() + inputs.bias.double()
    lse = torch.logsumexp(z, 1)
    assert (found.lse + found.lse_low.double() - lse).abs().max() <= 2e-6 * z.abs().max()
    known = inputs.target >= 0
    labels = z.gather(1, inputs.target.clamp(min=0)[:, None])[:, 0]
    assert torch.allclose(found.target_logit[known].double(), labels[known], rtol=1e-5, atol=1e-5)
    assert found.logit_sum is None
