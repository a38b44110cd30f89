import types

import pytest

from flce_tune.kernels.config import Config
from flce_tune.sweep.failures import classify
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.resources import HopelessKernelError, KernelResources, watched_kernels
from flce_tune.tuning_db.records import Status

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


@pytest.mark.parametrize(("spills", "hopeless"), [(None, False), (14, False), (257, True)])
def test_what_spills_an_accumulator_is_not_tried(spills, hopeless):
    resources = KernelResources(spills=spills)
    if not hopeless:
        resources.require_hope()
        return
    with pytest.raises(HopelessKernelError, match="257 registers a thread") as caught:
        resources.require_hope()
    assert classify(caught.value).status is Status.OUT_OF_RESOURCES


@pytest.mark.parametrize("ragged", [False, True])
def test_a_hopeless_kernel_is_refused_when_it_is_compiled_and_before_it_is_timed(
    problem, cpu, monkeypatch, ragged
):
    monkeypatch.setattr(compiler.CompiledKernel, "launch_metadata", lambda kernel, *args: args)
    run = OpBench._run

    def spilling(bench, config):
        compiler.CompiledKernel.launch_metadata(kernel(255, 1000, 0), (1,), 0)
        return run(bench, config)

    monkeypatch.setattr(OpBench, "_run", spilling)
    monkeypatch.setattr(OpBench, "time", lambda bench, config: pytest.fail("it was timed"))
    bench = OpBench(problem, cpu, seed=0)
    with pytest.raises(HopelessKernelError):
        bench.compile(Config("full"), ragged)
    with pytest.raises(HopelessKernelError):
        bench.trial(Config("full"))
