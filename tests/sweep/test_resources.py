import types

import pytest

from flce_tune.sweep.resources import watched_kernels

compiler = pytest.importorskip("triton.compiler")


def kernel(registers, spills, shared, binary=b""):
    """What Triton hands over at a launch, as far as it matters here."""
    return types.SimpleNamespace(
        kernel=binary,
        run=None,
        n_regs=registers,
        n_spills=spills,
        metadata=types.SimpleNamespace(shared=shared),
    )


def test_the_largest_kernel_counts(monkeypatch):
    monkeypatch.setattr(compiler.CompiledKernel, "launch_metadata", lambda kernel, *args: args)
    before = compiler.CompiledKernel.launch_metadata
    with watched_kernels() as resources:
        launch = compiler.CompiledKernel.launch_metadata
        assert launch(kernel(128, 0, 99), (7,), 0) == ((7,), 0)
        launch(kernel(64, 8, 1000), (7,), 0)
    assert (resources.registers, resources.spills, resources.shared_memory) == (128, 8, 1000)
    assert compiler.CompiledKernel.launch_metadata is before


def test_launches_are_known_by_binary_and_grid(monkeypatch):
    monkeypatch.setattr(compiler.CompiledKernel, "launch_metadata", lambda kernel, *args: args)
    kernels = [kernel(1, 0, 0, binary) for binary in (b"one", b"one", b"two")]
    with watched_kernels() as resources:
        for one, grid in zip(kernels, [(4,), (5, 1), (4,)], strict=True):
            compiler.CompiledKernel.launch_metadata(one, grid, 0)
    binaries, grids = zip(*resources.launches, strict=True)
    assert binaries[0] == binaries[1] != binaries[2]
    assert grids == ((4,), (5, 1), (4,))


def test_without_kernels_nothing_is_claimed():
    with watched_kernels() as resources:
        pass
    assert resources.registers is resources.spills is resources.shared_memory is None
