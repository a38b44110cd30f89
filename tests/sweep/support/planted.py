"""Faults to plant. On sys.path of the tests and, with it, of their workers."""

import os
import signal
import time
import types

import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.sweep.measure import OpBench

try:
    import triton
    import triton.language as tl
except ImportError:
    pass
else:

    @triton.jit
    def poke(pointer):
        tl.store(pointer + 1099511627776, 1.0)  # terabytes away


FULL = Config("full")


def fail(error):
    raise error


def hang():
    while True:
        time.sleep(1)


class Planted:
    """A strategy whose chunk names a fault; without one it is ``full``."""

    name = "planted"
    deterministic = True
    faults = (
        "runtime_error",
        "assertion",
        "compiler",
        "out_of_memory",
        "wrong",
        "unwritten",
        "writes_inputs",
        "exits",
        "segfault",
        "hangs",
    )

    def config(self, fault):
        return Config(self.name, chunk=1 + self.faults.index(fault))

    def reject(self, config, problem, device):
        return None

    def products(self, config, problem):
        return 3.0

    def space(self, problem, device):
        for fault in self.faults:
            yield self.config(fault)
        yield Config(self.name)

    def default(self, problem, device):
        return Config(self.name)

    def workspace(self, config, problem):
        return strategies.workspace(FULL, problem)

    def train(self, inputs, row_weight, loss, wanted, config):
        fault = self.faults[config.chunk - 1] if config.chunk else None
        match fault:
            case "runtime_error":
                fail(RuntimeError("planted"))
            case "assertion":
                fail(AssertionError("planted"))
            case "compiler":
                fail(RuntimeError("PassManager::run failed"))
            case "out_of_memory":
                fail(torch.OutOfMemoryError("planted"))
            case "exits":
                os._exit(7)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "hangs":
                hang()
        statistics, gradients = strategies.get("full").train(inputs, row_weight, loss, wanted, FULL)
        if fault == "wrong":
            gradients.dw.mul_(1.01)
        if fault == "unwritten":
            # Right by luck: the memory holds what an earlier run left there, unless poisoned.
            stale = torch.empty_like(gradients.dx)
            gradients.dx[3:] = torch.where(stale.isnan(), stale, gradients.dx)[3:]
        if fault == "writes_inputs":
            inputs.weight.detach()[0, 0] += 1
        return statistics, gradients


class PlantedBench(OpBench):
    """Measures the op, in a process that knows the planted strategy."""

    def __init__(self, problem, device, seed):
        if Planted.name not in strategies.names():
            strategies.register(Planted())
        super().__init__(problem, device, seed)
        self.compile(FULL, False)  # what the first run imports takes none of a candidate's time


class PlantedOnGpu(Planted):
    """Faults after which a CUDA context is of no use any more."""

    name = "planted_on_gpu"
    faults = ("assertion_on_device", "illegal_access")

    def train(self, inputs, row_weight, loss, wanted, config):
        if config.chunk == 1:
            torch.zeros(4, device="cuda")[torch.full((1,), 99, device="cuda")].sum().item()
        if config.chunk == 2:
            poke[(1,)](torch.zeros(1, device="cuda"))
        return strategies.get("full").train(inputs, row_weight, loss, wanted, FULL)


class GpuBench(OpBench):
    """Measures the op, in a process that knows what is planted on GPUs."""

    def __init__(self, problem, device, seed):
        if PlantedOnGpu.name not in strategies.names():
            strategies.register(PlantedOnGpu())
        super().__init__(problem, device, seed)


class Round(Planted):
    """``full``, but with a chunk right only for token counts that are a multiple of 4."""

    name = "round"
    bad = Config("round", chunk=4)

    def space(self, problem, device):
        yield self.bad
        yield Config(self.name)

    def train(self, inputs, row_weight, loss, wanted, config):
        statistics, gradients = strategies.get("full").train(inputs, row_weight, loss, wanted, FULL)
        if config.chunk:
            gradients.dx[len(inputs.x) // 4 * 4 :] = 0  # the last tile, which nobody wrote
        return statistics, gradients


class Compiled:
    """What Triton's compiler makes, as far as the tuner looks at it."""

    run = None
    n_regs, n_spills = 32, 0
    metadata = types.SimpleNamespace(shared=1024)

    def __init__(self, tile):
        # The last stages do nothing for a loop this short: the binaries are the same.
        self.kernel = f"{tile.n_block} {tile.v_block} {tile.d_block}".encode()


class Tiled(Planted):
    """``full`` with a kernel from a compiler that makes equal binaries of different tiles."""

    name = "tiled"
    tiles = (
        Tile(64, 64, 64, num_stages=3),
        Tile(64, 64, 64, num_stages=4),
        Tile(128, 64, 64, num_stages=3),
    )

    def space(self, problem, device):
        for tile in self.tiles:
            yield Config(self.name, logits=tile)

    def default(self, problem, device):
        return Config(self.name, logits=self.tiles[0])

    def train(self, inputs, row_weight, loss, wanted, config):
        from triton.compiler import CompiledKernel

        CompiledKernel.launch_metadata(Compiled(config.logits), (len(inputs.x),), 0)
        return strategies.get("full").train(inputs, row_weight, loss, wanted, FULL)


class Puppet:
    """A bench that does what it is told, to try the worker itself."""

    def __init__(self, problem, device, seed):
        self.calls = 0

    def time(self, order, *args):
        self.calls += 1
        return getattr(self, order)(*args)

    def check_ragged(self, config):
        pass

    def compile(self, config, ragged):
        pass

    def count(self):
        return self.calls, os.getpid()

    def say(self, word):
        return word

    def environment(self, name):
        return os.environ.get(name)

    def gpus(self):
        return [
            str(torch.cuda.get_device_properties(index).uuid)
            for index in range(torch.cuda.device_count())
        ]

    def refuse(self):
        raise ValueError("no")

    def quit(self, code):
        raise SystemExit(code)

    def hang(self):
        hang()

    def segfault(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def grandchild(self):
        """Start a process that outlives a plain kill of this one."""
        if (pid := os.fork()) == 0:
            hang()
        return pid


class Unable(Puppet):
    """A bench that cannot be made."""

    def __init__(self, problem, device, seed):
        raise MemoryError("the inputs do not fit")


class Failing(Puppet):
    """A bench on which every config fails."""

    def trial(self, config):
        raise RuntimeError(f"cannot run {config}")

    def compile(self, config, ragged):
        raise AttributeError("nothing of that name in this Triton")


class Impatient(Puppet):
    """A bench without torch's work: each config has a time of its own, in ms."""

    def trial(self, config):
        from flce_tune.sweep.measure import Trial

        return Trial(self.ms(config), 100_000 - (config.chunk or 0), {"dx": 1e-7})

    def time(self, config):
        return self.ms(config)

    def time_plain(self):
        return 50.0

    def ms(self, config):
        return 10.0 + (config.chunk or config.slab or 0) / 1000
