"""The host's part of a small step: how long Python keeps the GPU waiting, and where."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from bar_rows import Bench, Row
from cases import Inputs
from comparison import forward_backward
from implementations import Loss, plain_loss
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flce_tune import linear_cross_entropy
from flce_tune.dispatch import default_dispatcher
from flce_tune.kernels.problem import Problem, describe_device

STEPS = 20
"""Steps between two synchronisations: few enough that the queue of launches never fills."""
BATCHES = 30


def _loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    value = linear_cross_entropy(x, weight, target)
    assert isinstance(value, Tensor), "only the loss was asked for"
    return value


def host(bench: Bench) -> Iterator[Row]:
    """Host time of forward and backward at a small shape, and of one memoised dispatch."""
    inputs = _inputs(bench)
    case = f"{len(inputs.x)}×{inputs.x.shape[1]}×{len(inputs.weight)}"
    losses = {"flce-tune": _loss, "plain PyTorch": plain_loss}
    if bench.device.type == "cuda":
        losses |= {f"{name}, graphed": _graphed(loss, inputs) for name, loss in losses.items()}
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(BATCHES + 1):
        for name, loss in losses.items():
            taken[name].append(_host_seconds(lambda loss=loss: forward_backward(loss, inputs),
                                             bench.device))  # fmt: skip
    for name in losses:
        bar = 300.0 if name.startswith("flce-tune") else None
        samples = [1e6 * seconds for seconds in taken[name][1:]]
        details = {"samples_us": samples, "steps_per_sample": STEPS}
        yield Row("host", f"{case}, {name}", statistics.median(samples), "µs a step", bar,
                  details=details)  # fmt: skip
    problem = Problem(len(inputs.x), inputs.x.shape[1], len(inputs.weight))
    device = describe_device(bench.device)
    choose = default_dispatcher().choose
    choose(problem, device)
    calls = 20_000
    begin = time.perf_counter()
    for _ in range(calls):
        choose(problem, device)
    each = (time.perf_counter() - begin) / calls
    yield Row("host", "memoised dispatch", 1e6 * each, "µs a call", 2.0)


def _graphed(loss: Loss, inputs: Inputs) -> Loss:
    """The loss with both of its passes in CUDA graphs, which the host launches whole."""
    given = (inputs.x, inputs.weight, inputs.target)
    captured: Loss = torch.cuda.make_graphed_callables(loss, given)
    return captured


def _inputs(bench: Bench) -> Inputs:
    return bench.inputs(bench.shape(256, 1024, 32000))


def _host_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Wall time per step of a thread that only queues work."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    taken = time.perf_counter() - begin
    _wait(device)
    return taken / STEPS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def breakdown(bench: Bench, lines: int = 40) -> str:
    """Where the host's time goes: Python's profile of the steps, then torch's operators."""
    inputs = _inputs(bench)

    def steps() -> None:
        for _ in range(STEPS):
            forward_backward(_loss, inputs)
        _wait(bench.device)

    steps()
    python = cProfile.Profile()
    python.enable()
    for _ in range(5):
        steps()
    python.disable()
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(lines)
    activities = [ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as torch_profile:
        steps()
    operators = torch_profile.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=lines, max_name_column_width=50
    )
    return (
        f"Python, {5 * STEPS} steps (a GPU's backward runs in a thread of its own, which is "
        f"seen from Python 3.12 on)\n{text.getvalue()}\nOperators and launches, {STEPS} steps\n"
        f"{operators}"
    )
