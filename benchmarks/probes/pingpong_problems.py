"""The hand-scheduled kernels and the Triton kernels they stand for, on the same inputs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from pingpong_schedule import Schedule, arguments, launch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper.gradient import gradient_kernel
from flce_tune.kernels.hopper.logits import logits_kernel
from flce_tune.kernels.hopper.numerators import numerators_kernel
from flce_tune.kernels.numerators import HEADROOM, padded
from flce_tune.kernels.triton import backend
from flce_tune.kernels.triton import logits as logits_gemm
from flce_tune.kernels.triton import numerators as triton_numerators
from flce_tune.kernels.triton.arguments import cdiv, descriptor, logits_grid, tile_arguments
from flce_tune.kernels.values import Coefficients, Inputs, LossSpec, Statistics

sys.path.insert(0, str(Path(__file__).parents[1]))
from cases import Shape

SLAB = 4096
SCALE = 0.75
BITS = SCALE * math.log2(math.e)  # per unit of a raw logit
LOSS = LossSpec(logit_scale=SCALE)
TILE = Tile(128, 256, 64, 8, 3, 16)
ROUNDING = 6e-3  # of bfloat16, and of what the sums' order changes
SHARED = Schedule(64, 256, 64, 4, shared=True, lead=3)
FINE = Schedule(64, 256, 32, 8, shared=True, lead=6)
PING_PONG = Schedule(128, 128, 64, 5, shared=False)

Run = Callable[[], None]


class Data:
    """Inputs of one shape, and space for one output."""

    def __init__(self, shape: Shape, hard: bool) -> None:
        self.n, self.width = shape.tokens, shape.vocab
        self.device = torch.device("cuda")
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=self.device, dtype=torch.bfloat16)

        x, w = normal(self.n, shape.hidden), normal(self.width, shape.hidden)
        w *= 4 / shape.hidden**0.5
        target = torch.zeros(self.n, device=self.device, dtype=torch.int64)
        if hard:
            target[::7], target[1::7] = -100, self.width
        bias = normal(self.width) if self.width % 16 else None  # of one check, and nothing timed
        self.inputs = Inputs(x, w, target, bias)
        self.hard = hard
        self.stride = cdiv(self.width, 8) * 8  # which the copy engine can step over
        self.block_rows = padded(self.n)
        self.programs = torch.cuda.get_device_properties(self.device).multi_processor_count
        size = max(cdiv(self.width, SLAB) * self.block_rows * SLAB, self.n * self.stride)
        self.space = torch.full([size], torch.nan, device=self.device, dtype=torch.bfloat16)

    @property
    def matrix(self) -> Tensor:  # [n, v]
        """The output as one block."""
        return self.space[: self.n * self.stride].view(self.n, -1)[:, : self.width]

    @property
    def blocks(self) -> Tensor:
        """The output as blocks of SLAB columns."""
        size = cdiv(self.width, SLAB) * self.block_rows * SLAB
        return self.space[:size].view(-1, SLAB)

    def of_blocks(self) -> Tensor:  # [n, v]
        """A copy of what the blocks hold."""
        blocks = self.blocks.view(-1, self.block_rows, SLAB)[:, : self.n]
        return blocks.transpose(0, 1).reshape(self.n, -1)[:, : self.width].clone()

    def raw(self) -> Tensor:  # [n, v] float32
        """Raw logits by torch."""
        z = self.inputs.x.float() @ self.inputs.weight.float().t()
        return z if self.inputs.bias is None else z + self.inputs.bias.float()

    def of_tiles(self, values: Tensor, v_block: int) -> Tensor:  # [n, tiles, v_block]
        """Values by tile, -inf past the last column."""
        missing = -self.width % v_block
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        return values.view(self.n, -1, v_block)

    def tables(self, v_block: int) -> tuple[Tensor, Tensor]:
        """Two numbers per tile and row, poisoned."""
        size = (2, cdiv(self.width, v_block), self.n)
        return torch.full(size, torch.nan, device=self.device).unbind()

    def work(
        self, kernel: object, schedule: Schedule, out: Tensor | None, tables: tuple[Tensor, ...],
        slab: int, *scalars: float,
    ) -> Run:  # fmt: skip
        """One launch of a hand-scheduled kernel."""
        x, w, bias = self.inputs.x, self.inputs.weight, self.inputs.bias
        given = arguments(schedule, x, w, bias, out, tables, self.block_rows, slab, *scalars)
        return lambda: launch(kernel, schedule, given, self.n, self.width, self.programs)

    def after(self, run: Run) -> None:
        """Run over a poisoned output."""
        self.space.fill_(torch.nan)
        run()
        torch.cuda.synchronize()


class Numerators:
    """Softmax numerators, in blocks."""

    schedules = (
        SHARED,
        Schedule(64, 256, 64, 4, shared=True, lead=0),
        Schedule(64, 256, 64, 4, shared=True, lead=1),
        Schedule(64, 256, 64, 4, shared=True, lead=2),
        Schedule(64, 256, 32, 8, shared=True, lead=4),
        FINE,
        Schedule(64, 256, 64, 4, shared=True, lead=3, group=8),
        Schedule(64, 256, 64, 4, shared=True, lead=3, group=32),
        PING_PONG,
        Schedule(64, 256, 64, 4, shared=False),
    )
    stores = (True, False)

    def __init__(self, data: Data) -> None:
        self.data = data
        self.reference = torch.zeros(data.n, device=data.device)
        if data.hard:  # rows without a label, and rows whose tiles take their own reference
            self.reference[::3] = torch.nan
            self.reference[1::5] = -100.0

    def scheduled(self, schedule: Schedule, store: bool = True) -> Run:
        """The hand-scheduled kernel."""
        self.ours = self.data.tables(schedule.v_block)
        out, tables = self.data.blocks if store else None, (self.reference, *self.ours)
        return self.data.work(numerators_kernel, schedule, out, tables, SLAB, BITS)

    def compiled(self, store: bool = True) -> Run:
        """The Triton kernel."""
        data, self.theirs = self.data, self.data.tables(TILE.v_block)
        tables, out = self.theirs, data.blocks if store else None
        return lambda: triton_numerators.numerators(
            data.inputs, slice(0, data.width), self.reference, self.reference, LOSS, out,
            data.block_rows, SLAB, *tables, TILE,
        )  # fmt: skip

    def wrong(self, schedule: Schedule) -> str:
        """What is wrong, or nothing."""
        data = self.data
        data.after(self.compiled())
        their_e = data.of_blocks()
        data.after(self.scheduled(schedule))
        reference, total = self.ours
        parts = data.of_tiles(data.raw() * BITS, schedule.v_block)
        largest, given = parts.amax(2), self.reference[:, None]
        expected = torch.where(largest <= given + HEADROOM, given, largest.ceil())
        if (share := (expected == reference.t()).float().mean().item()) < 0.999:
            return f"{1 - share:.2%} of the references differ"
        e = torch.exp2(parts - reference.t()[:, :, None])
        if not torch.allclose(total.t(), e.sum(2), rtol=1e-3):
            return "sums differ"
        stored, e = data.of_blocks().float(), e.view(data.n, -1)[:, : data.width]
        if not torch.allclose(stored, e, rtol=ROUNDING, atol=1e-30):
            return "numerators differ"
        if schedule.v_block == TILE.v_block:
            same = (reference == self.theirs[0]).t().repeat_interleave(TILE.v_block, 1)
            close = torch.isclose(stored, their_e.float(), rtol=2**-7, atol=1e-30)
            if not (close | ~same[:, : data.width]).all():
                return "numerators are not the Triton kernel's"
        merged, their = (triton_numerators.merge(*t) for t in (self.ours, self.theirs))
        if not torch.allclose(merged.lse, their.lse, rtol=1e-5):
            return "lse differs"
        data.after(self.scheduled(schedule, store=False))
        same = torch.equal(self.ours[0], reference) and torch.equal(self.ours[1], total)
        return "" if same else "references or sums differ if nothing is stored"


class Gradient:
    """Recomputed gradients, in blocks; checked as one block, too."""

    schedules = (SHARED, FINE, PING_PONG)
    stores = (True,)

    def __init__(self, data: Data) -> None:
        self.data = data
        self.lse = torch.full([data.n], 10.0, device=data.device)
        self.a = torch.linspace(0.5, 2, data.n, device=data.device)
        self.b = self.a.clone()
        self.b[::2] = 0

    def scheduled(self, schedule: Schedule, store: bool = True, blocks: bool = True) -> Run:
        """The hand-scheduled kernel."""
        data = self.data
        tables = (data.inputs.target, self.lse, self.a, self.b)
        out, slab = (data.blocks, SLAB) if blocks else (data.matrix, 0)
        return data.work(gradient_kernel, schedule, out, tables, slab, data.width, SCALE)

    def compiled(self, store: bool = True) -> Run:
        """The Triton kernel."""
        data, given = self.data, Coefficients(self.a, self.b)
        statistics = Statistics(self.lse, self.lse, self.lse)
        return lambda: backend.tiled_slab_gradient(
            data.inputs, data.inputs, statistics, given, LOSS, data.blocks, TILE, data.block_rows
        )

    def wrong(self, schedule: Schedule) -> str:
        """What is wrong, or nothing."""
        data, target = self.data, self.data.inputs.target
        data.after(self.compiled())
        theirs = data.of_blocks().float()
        expected = torch.exp(data.raw() * SCALE - self.lse[:, None]) * (self.a * SCALE)[:, None]
        expected[((target < 0) | (target >= data.width)) & (self.b != 0)] = torch.nan
        for blocks in (True, False):
            data.after(self.scheduled(schedule, blocks=blocks))
            got = (data.of_blocks() if blocks else data.matrix).float()
            where = "blocks" if blocks else "one block"
            if not torch.allclose(got, expected, rtol=ROUNDING, atol=1e-30, equal_nan=True):
                return f"gradients differ, in {where}"
            if not torch.allclose(got, theirs, rtol=2**-7, atol=1e-30, equal_nan=True):
                return f"gradients are not the Triton kernel's, in {where}"
        return ""


class Logits:
    """Logits and their statistics."""

    schedules = (SHARED, FINE, PING_PONG)
    stores = (True, False)

    def __init__(self, data: Data) -> None:
        self.data = data

    def scheduled(self, schedule: Schedule, store: bool = True) -> Run:
        """The hand-scheduled kernel."""
        self.ours = self.data.tables(schedule.v_block)
        out = self.data.matrix if store else None
        return self.data.work(logits_kernel, schedule, out, self.ours, 0, SCALE)

    def compiled(self, store: bool = True) -> Run:
        """The Triton kernel."""
        data, inputs, tables = self.data, self.data.inputs, self.data.tables(TILE.v_block)
        out = descriptor(data.matrix, [TILE.n_block, TILE.v_block]) if store else None
        x = descriptor(inputs.x, [TILE.n_block, TILE.d_block])
        w = descriptor(inputs.weight, [TILE.v_block, TILE.d_block])
        grid = logits_grid(TILE, data.n, data.width, inputs.x)
        return lambda: logits_gemm.logits_kernel[grid](
            x, w, out, inputs.bias, None, *tables, None, None, None,
            data.n, inputs.x.shape[1], data.width, SCALE, 1.0, **tile_arguments(TILE),
            STORE=store, EVEN=data.width % TILE.v_block == 0, HAS_BIAS=inputs.bias is not None,
            HAS_SOFTCAP=False, HAS_CLASS_WEIGHT=False,
            WANT_SUM=False, WANT_MEAN=False, WANT_PREDICTION=False,
        )  # fmt: skip

    def wrong(self, schedule: Schedule) -> str:
        """What is wrong, or nothing."""
        data = self.data
        data.after(self.compiled())
        theirs, raw = data.matrix.clone().float(), data.raw()
        for store in (True, False):
            data.after(self.scheduled(schedule, store))
            z = data.matrix.float() if store else raw
            how = "stored" if store else "not stored"
            if not torch.allclose(z, raw, rtol=ROUNDING, atol=1e-3):
                return f"logits differ, {how}"
            if store and not torch.allclose(z, theirs, rtol=2**-7, atol=1e-3):
                return "logits are not the Triton kernel's"
            parts = data.of_tiles(z * SCALE, schedule.v_block)
            largest, total = (table.t() for table in self.ours)
            if not torch.allclose(largest, parts.amax(2), rtol=1e-4, atol=1e-4):
                return f"maxima differ, {how}"
            if not torch.allclose(total, torch.exp(parts - largest[:, :, None]).sum(2), rtol=1e-3):
                return f"sums differ, {how}"
        return ""


Kernel = Numerators | Gradient | Logits
KERNELS: dict[str, type[Kernel]] = {
    "numerators": Numerators,
    "gradient": Gradient,
    "logits": Logits,
}
