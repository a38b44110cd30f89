#!/usr/bin/env python
"""Time the op's Python on a machine without a GPU: the path of a GPU, with nothing launched.

    python benchmarks/host_path.py
    python benchmarks/host_path.py --profile
    python benchmarks/host_path.py --shape 16384,1024,151936 --accumulate weight_dtype \
        --config '{"strategy": "chunked", "chunk": 512}'

The tensors are a CPU's; Triton compiles for a GPU that is not there and launches nothing, and the
products do nothing. What is left is the host's part of a step, but for the driver's calls. Its
other operators run on the CPU, where they take about as long as they take to be queued on a GPU.
What a step launches, allocates and calls is counted, too.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases import Shape, make_inputs
from comparison import forward_backward
from implementations import plain_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from flce_tune import linear_cross_entropy
from flce_tune.kernels import fused
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device
from flce_tune.kernels.triton import backend as triton_backend
from flce_tune.kernels.triton.relaunch import Relaunched
from flce_tune.sweep.absent import AbsentDriver

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132, 232448, 150109880320)


def pretend() -> None:
    """Take the GPU's path for CPU tensors, in this process, for good."""
    driver.set_active(AbsentDriver(H200))
    for module in [m for name, m in sys.modules.items() if name.startswith("flce_tune.kernels")]:
        for name, value in (
            ("has_kernels", lambda tensor: True),
            ("backend_of", lambda tensor: triton_backend),
            ("describe_device", lambda device: H200),
            ("check_target_range", lambda *_: None),
            ("raw_logits", lambda *_: None),
            ("_library_product", lambda *_, **__: None),
        ):
            if hasattr(module, name):
                setattr(module, name, value)


class Counted(TorchDispatchMode):
    """Counts what runs inside: allocations, views, and operators that a GPU has a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.flce_tune.fused_loss.default:
            with self:  # what it is made of
                return fused.compute(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view:
            name = "views"
        elif name.startswith(("empty", "new_empty")):
            name = "allocations"
        self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def counts(step: Callable[[], object]) -> Counter[str]:
    """Launches and operators of one step, by name."""
    launches: Counter[str] = Counter()
    launch = Relaunched.launch

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        launches[self.__name__] += 1
        launch(self, *args, **kwargs)

    step()
    Relaunched.launch = counted  # type: ignore[method-assign]
    with Counted() as operators:
        step()
    Relaunched.launch = launch  # type: ignore[method-assign]
    return launches + operators.calls


def best_us(step: Callable[[], object], batches: int = 300, steps: int = 20) -> float:
    """Least µs of this thread's time a step took, on average over a batch."""
    step()
    taken = []
    for _ in range(batches):
        begin = time.thread_time()
        for _ in range(steps):
            step()
        taken.append((time.thread_time() - begin) / steps)
    return 1e6 * min(taken)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", type=Shape.parse, default=Shape(256, 64, 512))
    parser.add_argument("--config", help="as JSON; the dispatcher's where there is none")
    parser.add_argument("--accumulate", default="fp32", help="fp32 or weight_dtype")
    parser.add_argument("--batches", type=int, default=300, help="of which the fastest counts")
    parser.add_argument("--steps", type=int, default=20, help="of a batch")
    parser.add_argument("--profile", action="store_true", help="print Python's profile, too")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    inputs = make_inputs(arguments.shape, "flat", torch.bfloat16, cpu)
    tiny = make_inputs(Shape(2, 4, 8), "flat", torch.float32, cpu)  # hardly anything to compute
    config = None
    if arguments.config:
        config = Config.from_dict(json.loads(arguments.config))
    plain = best_us(lambda: forward_backward(plain_loss, tiny))
    pretend()

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        value = linear_cross_entropy(
            x, weight, target, config=config, accumulate=arguments.accumulate
        )
        assert isinstance(value, Tensor), "only the loss was asked for"
        return value

    def step() -> None:
        forward_backward(loss, inputs)

    often = (arguments.batches, arguments.steps)
    forward = best_us(lambda: loss(inputs.x, inputs.weight, inputs.target), *often)
    print(f"forward {forward:.0f} µs, forward and backward {best_us(step, *often):.0f} µs of host"
          f" time (plain PyTorch, a tiny one: {plain:.0f})")  # fmt: skip
    for name, count in counts(step).most_common():
        print(f"{count:6} {name}")
    if arguments.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(arguments.batches * arguments.steps // 6):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    return 0


if __name__ == "__main__":
    sys.exit(main())
