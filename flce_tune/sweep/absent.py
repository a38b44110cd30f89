"""A GPU to compile for that is neither needed nor touched.

``stand_in_for`` turns a process into one whose meta tensors take the path of a GPU's: the op runs
as it does in training, on tensors that have sizes, strides and alignment but no storage, products
of libraries do nothing, and Triton compiles, keeps its binaries on disk under the keys that the
same call looks for on the GPU, and launches nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.resources import usage

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from flce_tune.sweep.measure import Bench, BenchFactory

META = torch.device("meta")
STOOD_IN_FOR = torch.device("cuda", 0)
NO_GPU = "-1"  # as CUDA_VISIBLE_DEVICES
NICENESS = 10  # the measuring goes before the compilers

_ANSWERS: dict[Any, object] = {
    Tensor.device.__get__: STOOD_IN_FOR,
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}


@dataclass(frozen=True, slots=True)
class CompilingFactory:
    """Makes benches that can compile, and nothing else, in a process without a GPU."""

    make_bench: BenchFactory
    gpu: Device

    def __call__(self, problem: Problem, device: torch.device, seed: int) -> Bench:
        """Stand in for the GPU."""
        os.nice(NICENESS)
        stand_in_for(self.gpu)
        return self.make_bench(problem, device, seed)


def stand_in_for(gpu: Device) -> None:
    """Have this process compile for a GPU, for good."""
    from triton.runtime import driver

    driver.set_active(AbsentDriver(gpu))
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.sm_count,
        shared_memory_per_block_optin=gpu.shared_memory_per_block,
        total_memory=gpu.memory_bytes,
    )
    for owner, name, value in (
        (torch.cuda, "current_device", 0),
        (torch.cuda, "get_device_properties", properties),
        (torch.autograd, "has_torch_function", False),  # else backward runs outside of the mode
    ):
        setattr(owner, name, lambda *_, value=value: value)
    _MetaOfGpu().__enter__()  # type: ignore[no-untyped-call]


class AbsentDriver:
    """Triton's view of a GPU that can be compiled for, and whose launches do nothing."""

    def __init__(self, gpu: Device) -> None:
        self._target = 10 * gpu.capability[0] + gpu.capability[1]
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": gpu.shared_memory_per_block},
            load_binary=_loaded,
        )

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        """Make what launches a kernel."""
        return lambda *_: None

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """As the driver of the real one says."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._target, 32)


def _loaded(
    name: str, binary: bytes, shared: int, device: int
) -> tuple[object, int, int, int, int]:
    """Module, function, registers, spills and most threads of a binary that is not loaded."""
    return object(), 1, *usage(binary), 1024


class _MetaOfGpu(TorchFunctionMode):
    """Meta tensors say that they are on the GPU; what is made on the GPU is a meta tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == STOOD_IN_FOR:
            kwargs["device"] = META
        if func in (torch.mm, torch.addmm):
            return _product(func, *args, **kwargs)
        return func(*args, **kwargs)


def _product(
    func: Callable[..., Tensor],
    *args: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,  # which products of meta tensors may not know
) -> Tensor:
    if out is not None:
        return out
    result = func(*args)
    return result if out_dtype is None else result.to(out_dtype)
