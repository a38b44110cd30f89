"""``grad_weight_out`` with compiled kernels: sums, memory, no waiting."""

import pytest
import torch
from gpu import LARGE, cuts, needs_gpu, skip_unless_it_runs
from loss_cases import make, run

from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy

pytestmark = [*needs_gpu, pytest.mark.usefixtures("poison")]

BF16 = torch.bfloat16
N, D, V = 700, 128, 5001
CONFIGS = {f"{name}, library": config for name, config in cuts({}, 256, 2048).items()}
CONFIGS |= {f"{name}, tiles": config for name, config in cuts(LARGE, 256, 2048).items()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, BF16], ids=str)
def test_every_backward_adds_without_waiting(config, reduction, buffer_dtype):
    skip_unless_it_runs(config, N, D, V, BF16)
    case = make(N, D, V, BF16, ("ignored",), device="cuda")
    own = run(linear_cross_entropy, case, reduction=reduction, config=config)["weight"].float()
    x, weight = case.x.requires_grad_(), case.weight.requires_grad_()
    buffer = torch.randn(V, D, device="cuda").to(buffer_dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    loss = linear_cross_entropy(
        x, weight, case.target, reduction=reduction, config=config, grad_weight_out=buffer
    ).sum()
    expected = buffer.clone()
    for factor in (4.0, -0.5):
        expected = (expected.float() + own * factor).to(buffer_dtype)
        (loss * factor).backward(retain_graph=factor > 0)
    torch.cuda.set_sync_debug_mode("default")
    assert weight.grad is None
    eps = torch.finfo(buffer_dtype).eps
    torch.testing.assert_close(buffer, expected, rtol=eps, atol=eps / 8)


@pytest.mark.usefixtures("empty_gpu")
def test_the_buffer_costs_no_second_gradient(monkeypatch):
    monkeypatch.undo()
    n, hidden, vocab = 1024, 4096, 128256
    config = Config("recompute", slab=4096)
    x = torch.zeros(n, hidden, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.zeros(vocab, hidden, device="cuda", dtype=BF16, requires_grad=True)
    target = torch.zeros(n, device="cuda", dtype=torch.int64)
    buffer = torch.zeros(vocab, hidden, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        loss = linear_cross_entropy(x, weight, target, config=config, grad_weight_out=buffer)
        (loss * 3).backward()
    one_gradient = vocab * hidden * 2
    assert torch.cuda.max_memory_allocated() - before <= one_gradient + (256 << 20)


def test_a_cuda_graph_adds_at_each_replay():
    case = make(N, D, V, BF16, device="cuda")
    own = run(linear_cross_entropy, case)["weight"].float()
    x, weight = case.x.requires_grad_(), case.weight.requires_grad_()
    buffer = torch.zeros(V, D, device="cuda")

    def step():
        linear_cross_entropy(x, weight, case.target, grad_weight_out=buffer).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    buffer.zero_()
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(buffer, 3 * own, rtol=1e-6, atol=0.0)
