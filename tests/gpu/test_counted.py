"""drop_ignored on a GPU: exactness, synchronisation, graphs."""

import pytest
import torch
from exactness import assert_as_exact
from gpu import LARGE, cuts, needs_gpu, skip_unless_it_runs
from loss_cases import expect, hold, make, run

from flce_tune.kernels import reference
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = needs_gpu

N, D, V = 2000, 128, 5001
CONFIGS = {f"{name}, library": config for name, config in cuts({}, 256, 2048).items()}
CONFIGS |= {f"{name}, tiles": config for name, config in cuts(LARGE, 256, 2048).items()}
with_configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def masked(dtype=torch.bfloat16, share=0.6, seed=0):
    case = make(N, D, V, dtype, ("bias", "token_weight"), seed, device="cuda")
    case.target[: int(share * N)] = -100
    case.target[::7] = -100
    return case


@pytest.mark.usefixtures("poison")
@with_configs
@pytest.mark.parametrize("bound", [None, 900])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_is_as_exact_as_plain_torch(config, bound, reduction):
    skip_unless_it_runs(config, N, D, V, torch.bfloat16)
    case = masked()
    upstream = torch.randn(N, device="cuda").bfloat16() if reduction == "none" else 0.5
    ours = run(
        linear_cross_entropy, case, upstream=upstream, reduction=reduction, config=config,
        drop_ignored=True, max_counted=bound,
    )  # fmt: skip
    plain, truth = expect(case, torch.bfloat16, upstream=upstream, reduction=reduction)
    hold(ours, plain, truth, torch.bfloat16)
    ignored = case.target == -100
    assert not ours["x"][ignored].any()


def step(x, weight, target, bound):
    x.grad = weight.grad = None
    loss = linear_cross_entropy(x, weight, target, drop_ignored=True, max_counted=bound)
    loss.backward()
    return loss.detach()


def test_with_a_bound_the_host_never_waits_and_a_graph_serves_every_count():
    case = masked()
    x, weight = (t.clone().requires_grad_() for t in (case.x, case.weight))
    target = case.target.clone()
    step(x, weight, target, 900)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(x, weight, target, 900)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(x, weight, target, 900)
    for share in (0.9, 0.6, 0.0):
        other = masked(share=share)
        target.copy_(other.target)
        graph.replay()
        if share == 0.0:
            assert loss.isnan()
            assert weight.grad.isnan().all()
            continue
        plain, truth = (
            reference.linear_cross_entropy(case.x.to(d), case.weight.to(d), other.target)
            for d in (case.x.dtype, torch.float64)
        )
        assert_as_exact("loss", loss, plain, truth, case.x.dtype)
        ignored = other.target == -100
        assert not x.grad[ignored].any()
        assert x.grad[~ignored].any()


def test_counting_is_refused_in_a_graph():
    case = masked()
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        linear_cross_entropy(case.x, case.weight, case.target, drop_ignored=True)
    torch.cuda.synchronize()
