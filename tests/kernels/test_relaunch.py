"""Launching a compiled kernel again: what is told apart, and what reaches the binary."""

import itertools
from types import SimpleNamespace

import pytest
import torch

relaunch = pytest.importorskip("flce_tune.kernels.triton.relaunch")

PARAMETERS = ("x", "scale", "n", "WIDTH", "BLOCK")
STORAGE = torch.zeros(64)
VALUES = (
    STORAGE, STORAGE[1:], STORAGE[4:], STORAGE.half(), STORAGE.bfloat16()[1:], None, True, 1.0, 0,
    1, 2, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**33, 2**63, 2**63 + 16,
)  # fmt: skip


class Kernel:
    """Stands for Triton's: each call compiles a binary, which records its launches."""

    def __init__(self):
        self.params = [SimpleNamespace(name=name) for name in PARAMETERS]
        self.compiled, self.launches = [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return Binary(self)

        return run


class Binary:
    def __init__(self, kernel):
        self._kernel = kernel

    def _init_handles(self):
        raise AssertionError("left to Triton")

    def __getitem__(self, grid):
        return lambda *arguments: self._kernel.launches.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch):
    device = SimpleNamespace(index=0, get_current_device=lambda: device.index)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=device))
    made = relaunch.Relaunched(Kernel())
    made.device = device
    return made


def test_compiles_once_and_passes_everything_in_order(kernel):
    constants = {"BLOCK": 32, "WIDTH": 8, "num_warps": 2}
    for _ in range(3):
        kernel[(5, 2)](STORAGE, 0.5, 48, **constants)
    assert kernel.compiled == [((5, 2), (STORAGE, 0.5, 48), constants)]
    assert kernel.launches == 2 * [((5, 2, 1), (STORAGE, 0.5, 48, 8, 32))]


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((STORAGE[1:], 0.5, 48), {}),
        ((STORAGE.half(), 0.5, 48), {}),
        ((None, 0.5, 48), {}),
        ((STORAGE, 0.5, 49), {}),
        ((STORAGE, 0.5, 48), {"WIDTH": 16}),
        ((STORAGE, 0.5, 48), {"num_warps": 4}),
    ],
)
def test_compiles_for_another_kind_of_argument(kernel, arguments, constants):
    usual = {"WIDTH": 8, "BLOCK": 32, "num_warps": 2}
    kernel[(1,)](STORAGE, 0.5, 48, **usual)
    kernel[(1,)](*arguments, **{**usual, **constants})
    assert len(kernel.compiled) == 2
    kernel[(1,)](STORAGE, 2.5, 16, **usual)
    assert len(kernel.compiled) == 2


def test_each_device_has_its_own(kernel):
    for kernel.device.index in (0, 1, 0, 1):
        kernel[(1,)](STORAGE, 0.5, 48, WIDTH=8, BLOCK=32)
    assert len(kernel.compiled) == 2


def test_what_nobody_compiled_is_not_kept(kernel, monkeypatch):
    monkeypatch.delattr(Binary, "_init_handles")
    for _ in range(2):
        kernel[(1,)](STORAGE, 0.5, 48, WIDTH=8, BLOCK=32)
    assert len(kernel.compiled) == 2


def test_an_unknown_argument_is_named(kernel):
    with pytest.raises(TypeError, match="str: 'x'"):
        kernel[(1,)]("x", 0.5, 48, WIDTH=8, BLOCK=32)


def test_tells_apart_what_triton_tells_apart():
    specialize = pytest.importorskip("triton._C.libtriton").native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    differ = 0
    for one, other in itertools.combinations(VALUES, 2):
        theirs = [specialize(backend, value, False, True, True) for value in (one, other)]
        if theirs[0] != theirs[1]:
            differ += 1
            assert relaunch.kinds_of([one]) != relaunch.kinds_of([other]), (one, other)
    assert differ > len(VALUES)
