"""Runs a Gluon kernel's own source on the CPU, barriers, copies and products in random order.

Each partition of ``warp_specialize`` is a thread, and one runs at a time: at every call that
touches a barrier or starts something asynchronous, chance chooses who goes on and which pending
copies and products complete, in some runs soon and in others as late as they may. A tile being
copied in is NaN until it has arrived. Partitions that all wait, with nothing pending, are a
deadlock.
"""

from __future__ import annotations

import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

HASTE = (0.02, 0.3, 0.9)
"""How likely something pending completes before the next partition goes on."""


class DeadlockError(Exception):
    """Everybody waits, for nothing."""


class Tensor(torch.Tensor):
    """A torch tensor with the names that Gluon's have and torch's have for something else."""

    def split(self):
        return tuple(self.unbind(-1))

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def tensor(values: torch.Tensor) -> Tensor:
    return values.as_subclass(Tensor)


class Pointer:
    def __init__(self, base: torch.Tensor, offsets: Any = 0) -> None:
        self.base, self.offsets = base.view(-1), offsets

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.base, self.offsets + offsets)

    def load(self, mask, other):
        at = torch.where(mask, self.offsets, 0)
        return tensor(torch.where(mask, self.base[at], other))

    def store(self, values, mask) -> None:
        self.base[self.offsets[mask]] = values[mask]


class Descriptor:
    """What the copy engine knows: a matrix and the shape of its tiles."""

    layout = None

    def __init__(self, matrix: torch.Tensor, block: list[int]) -> None:
        self.matrix, self.dtype = matrix, matrix.dtype
        size = matrix.element_size() * block[0] * block[1]
        self.block_type = SimpleNamespace(shape=block, nbytes=size)

    def window(self, coordinates) -> tuple[torch.Tensor, tuple[slice, slice]]:
        """The part of the tile inside the matrix, and where it lies in the tile."""
        places = [slice(c, c + b) for c, b in zip(coordinates, self.block_type.shape, strict=True)]
        inside = self.matrix[places[0], places[1]]
        return inside, (slice(0, inside.shape[0]), slice(0, inside.shape[1]))


class Shared:
    """Shared memory; ``unfenced`` are the buffers written since the writer's last fence."""

    def __init__(self, values: torch.Tensor, machine: Machine) -> None:
        self.values, self.machine, self.shape = values, machine, tuple(values.shape)

    def index(self, i: int) -> Shared:
        return Shared(self.values[i], self.machine)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.values[start : start + length], self.machine)

    def permute(self, order) -> Shared:
        return Shared(self.values.permute(order), self.machine)

    def _reinterpret(self, dtype, shape, _) -> Shared:
        return Shared(self.values.view(-1).view(dtype).view(shape), self.machine)

    def poison(self) -> None:
        self.values.fill_(torch.nan if self.values.is_floating_point() else 0xA5)

    def load(self, _) -> Tensor:
        self.machine.pause()
        return tensor(self.values.clone())

    def store(self, values) -> None:
        assert values.shape == self.values.shape
        self.machine.pause()
        self.values.copy_(values)
        self.machine.me.unfenced.add(self.values.data_ptr())


class Barrier:
    """An mbarrier: a phase is over once all have arrived and all expected bytes too."""

    def __init__(self) -> None:
        self.phase = self.missing = self.bytes = 0
        self.count = 0

    def update(self, arrivals: int = 0, bytes: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += bytes
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.barriers[i]


class Partition:
    """A thread, what it waits for, and what it has under way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.go = work, threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.done, self.error = False, None
        self.products: deque[Callable[[], None]] = deque()
        self.stores: deque[Callable[[], None]] = deque()
        self.unfenced: set[int] = set()


class Stopped(BaseException):
    """Ends a partition's thread after another one's error."""


class Machine:
    """One program at a time on one multiprocessor."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.loads: list[Callable[[], None]] = []
        self.haste = [self.random.choice(HASTE) for _ in range(3)]  # loads, products, stores
        self.turn, self.stop = threading.Semaphore(0), False

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let chance choose who goes on; come back when ``ready``."""
        me = self.me
        me.ready = ready
        self.turn.release()
        me.go.acquire()
        if self.stop:
            raise Stopped
        self.me = me

    def specialize(self, functions: Iterable[tuple[Callable, tuple]], *_: Any) -> None:
        partitions = [Partition(lambda f=f, a=a: f(*a)) for f, a in functions]
        threads = [threading.Thread(target=self._run, args=(p,), daemon=True) for p in partitions]
        for thread in threads:
            thread.start()
        try:
            while running := [p for p in partitions if not p.done]:
                if able := [p for p in running if p.ready()]:
                    self.me = self.random.choice(able)
                    self.me.go.release()
                    self.turn.acquire()
                    if self.me.error:
                        raise self.me.error
                elif not self.loads and not any(p.products or p.stores for p in running):
                    raise DeadlockError
                self._complete_something(partitions, certainly=not able)
        finally:
            self.stop = True
            for partition in partitions:
                partition.go.release()
            for thread in threads:
                thread.join()
        assert not any(p.stores for p in partitions), "a program ended while it was read"

    def _run(self, partition: Partition) -> None:
        partition.go.acquire()
        try:
            if not self.stop:
                partition.work()
        except Stopped:
            return
        except BaseException as error:  # noqa: BLE001 raised again by the scheduler
            partition.error = error
        partition.done = True
        self.turn.release()

    def _complete_something(self, partitions: list[Partition], certainly: bool) -> None:
        """Loads in any order, a partition's products and stores in theirs."""
        for_loads, for_products, for_stores = (1, 1, 1) if certainly else self.haste
        if self.loads and self.random.random() < for_loads:
            self.loads.pop(self.random.randrange(len(self.loads)))()
        for p in partitions:
            for queue, haste in ((p.products, for_products), (p.stores, for_stores)):
                if queue and self.random.random() < haste:
                    queue.popleft()()

    # What kernels call

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.pause(lambda: barrier.passed(parity))

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        self.pause()
        if pred:
            barrier.update(arrivals=count)

    def expect(self, barrier: Barrier, bytes: int) -> None:
        barrier.bytes += bytes
        barrier.update(arrivals=1)

    def load(self, source: Descriptor, coordinates, barrier: Barrier, into: Shared) -> None:
        self.pause()
        into.poison()

        def arrive() -> None:
            inside, places = source.window(coordinates)
            into.values.zero_()
            into.values[places] = inside
            barrier.update(bytes=-source.block_type.nbytes)

        self.loads.append(arrive)

    def store(self, into: Descriptor, coordinates, source: Shared) -> None:
        assert source.values.data_ptr() not in self.me.unfenced, "a copy of what was not fenced"

        def copy() -> None:
            inside, places = into.window(coordinates)
            inside.copy_(source.values[places])

        self.me.stores.append(copy)
        self.pause()

    def fence(self) -> None:
        self.me.unfenced.clear()

    def store_wait(self, pendings: int) -> None:
        while len(self.me.stores) > pendings:
            self.me.stores.popleft()()
        self.pause()

    def mma(self, a: Shared, b: Shared, acc: Tensor, is_async: bool) -> Tensor:
        assert is_async
        self.me.products.append(lambda: acc.add_(a.values.float() @ b.values.float()))
        self.pause()
        return acc

    def mma_wait(self, pendings: int, deps: list[Tensor]) -> Tensor:
        while len(self.me.products) > pendings:
            self.me.products.popleft()()
        self.pause()
        return deps[0]

    def allocate(self, dtype: torch.dtype, shape: list[int], _: Any) -> Shared | Barriers:
        if dtype is torch.int64:
            return Barriers(shape[0])
        return Shared(torch.full(shape, torch.nan, dtype=dtype), self)


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def static_assert(condition: bool) -> None:
    if not condition:
        raise AssertionError("static_assert")


def language(machine: Machine, program: int, programs: int) -> dict[str, Any]:
    """The names of Gluon that a kernel's source uses."""
    dtypes = {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8,
        "uint16": torch.int16, "uint32": torch.int32,  # as bits
    }  # fmt: skip
    gl = SimpleNamespace(
        **dtypes, constexpr=int, int64=torch.int64,
        program_id=lambda _: program, num_programs=lambda _: programs,
        cdiv=lambda a, b: -(-a // b), minimum=min, static_range=range, static_assert=static_assert,
        cast=lambda value, _: value, convert_layout=lambda value, _: value,
        SliceLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None,
        NVMMASharedLayout=lambda *_: None,
        arange=lambda start, end, _: tensor(torch.arange(start, end)),
        zeros=lambda shape, dtype, _: tensor(torch.zeros(shape, dtype=dtype)),
        maximum=lambda a, b, **_: torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)),
        where=lambda c, a, b: tensor(torch.where(c, a, b)), ceil=torch.ceil, exp2=torch.exp2,
        max=lambda value, axis: value.amax(axis), sum=lambda value, axis: value.sum(axis),
        load=lambda pointer, mask, other: pointer.load(mask, other),
        store=lambda pointer, value, mask: pointer.store(value, mask),
        allocate_shared_memory=machine.allocate, warp_specialize=machine.specialize,
    )  # fmt: skip
    return {
        "gl": gl,
        "tl": SimpleNamespace(
            **dtypes, minimum=min, where=torch.where, PropagateNan=SimpleNamespace(ALL=None)
        ),
        "mbarrier": SimpleNamespace(
            init=init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect,
            MBarrierLayout=lambda: None,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.load, async_copy_shared_to_global=machine.store,
            store_wait=machine.store_wait,
        ),
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.mma,
        "warpgroup_mma_wait": machine.mma_wait,
    }  # fmt: skip


def run(module: Any, kernel: str, arguments: tuple[Any, ...], programs: int, seed: int) -> None:
    """Run a module's kernel, program after program."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of each thread here: more would wait for each other, tile by tile
    try:
        for program in range(programs):
            gluon = language(Machine(seed + program), program, programs)
            namespace(vars(module), gluon, {})[kernel](*arguments)
    finally:
        torch.set_num_threads(threads)


def namespace(
    scope: dict[str, Any], gluon: dict[str, Any], known: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """What jitted functions of a module see: Gluon's names, their like, and constants."""
    if id(scope) in known:
        return known[id(scope)]
    names = known[id(scope)] = dict(gluon)
    for name, value in scope.items():
        if hasattr(value, "fn"):  # a jitted function
            seen = namespace(value.fn.__globals__, gluon, known)
            names[name] = types.FunctionType(value.fn.__code__, seen, name)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
    return names
