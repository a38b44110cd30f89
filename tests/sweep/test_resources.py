import types

import pytest

from flce_tune.sweep.resources import watched_kernels

compiler = pytest.importorskip("triton.compiler")


def kernel(registers, spills, shared):
    """What Triton hands over at a launch, as far as it matters here."""
    return types.SimpleNamespace(
        run=None, n_regs=registers, n_spills=spills, metadata=types.SimpleNamespace(shared=shared)
    )


def test_the_largest_kernel_counts(monkeypatch):
    monkeypatch.setattr(compiler.CompiledKernel, "launch_metadata", lambda kernel, *args: args)
    before = compiler.CompiledKernel.launch_metadata
    with watched_kernels() as resources:
        launch = compiler.CompiledKernel.launch_metadata
        assert launch(kernel(128, 0, 99), "grid", 0) == ("grid", 0)
        launch(kernel(64, 8, 1000), "grid", 0)
    assert (resources.registers, resources.spills, resources.shared_memory) == (128, 8, 1000)
    assert compiler.CompiledKernel.launch_metadata is before


def test_without_kernels_nothing_is_claimed():
    with watched_kernels() as resources:
        pass
    assert resources.registers is resources.spills is resources.shared_memory is None
