"""Check and time the hand-scheduled product kernel on a Hopper GPU.

    python benchmarks/probes/pingpong_product_times.py --time-budget 145 --out products.json

Each schedule is checked by a process of its own, which is killed if it hangs. Those that pass are
timed in turn with the Triton kernel and cuBLAS, every round in another order, with a cold L2; a
GEMM by a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pingpong_product_schedule import ProductSchedule, arguments, launch
from pingpong_race import Timing, check_all, on_hopper, race, time_all
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.launch import launch_product

sys.path.insert(0, str(Path(__file__).parents[1]))
from environment import describe, write_json
from measure import Deadline

SCHEMA = "flce-tune-pingpong-product/1"
SCHEDULES = (
    ProductSchedule(32, 9, lead=5),
    ProductSchedule(32, 9, lead=3),
    ProductSchedule(32, 9, lead=7),
    ProductSchedule(32, 9, lead=0),
    ProductSchedule(64, 4, lead=2),
    ProductSchedule(64, 4, lead=3),
    ProductSchedule(32, 9, lead=5, group=8),
    ProductSchedule(32, 9, lead=5, group=32),
)


@dataclass(frozen=True)
class Gemm:
    """One of a chunk's two GEMMs."""

    name: str  # dX or dW
    chunk: int  # tokens
    hidden: int
    vocab: int

    @property
    def tile(self) -> Tile:
        """The Triton kernel's."""
        return Tile(64, 128, 256, 8, 3, 16) if self.name == "dW" else Tile(128, 64, 256, 8, 3, 16)

    def __str__(self) -> str:
        return f"{self.name} of {self.chunk} tokens, D = {self.hidden}, V = {self.vocab}"


GEMMS = tuple(
    Gemm(name, *sizes)
    for sizes in ((4096, 4096, 128256), (2048, 1024, 151936))
    for name in ("dW", "dX")
)
CHECKS = ((8192, 4096, 64), (4096, 2048, 320), (1000, 1040, 333), (333, 200, 1000), (100, 40, 24))


def padded(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A poisoned matrix with rows as the copy engine wants them, and poison beyond their ends."""
    poison = 0xA5 if dtype is torch.uint8 else torch.nan
    return torch.full((rows, cdiv(columns, 16) * 16), poison, dtype=dtype, device="cuda")[
        :, :columns
    ]


def integers(rows: int, columns: int) -> Tensor:
    """Small ones, whose products are summed exactly in any order."""
    values = padded(rows, columns)
    return values.copy_(torch.randint(-8, 9, (rows, columns), device="cuda"))


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """What split24 keeps of finite float32 values, as 16 bits and 8."""
    bits = value.view(torch.int32) + 0x80
    return (bits >> 16).to(torch.int16), (bits >> 8 & 0xFF).to(torch.uint8)


def joined(out: Tensor, extra: Tensor) -> Tensor:
    """The float32 values that split24 kept."""
    return (out.view(torch.int16).int() << 16 | extra.int() << 8).view(torch.float32)


class Check:
    """One schedule on one shape: the kernel against torch, bit for bit."""

    def __init__(self, schedule: ProductSchedule, m: int, n: int, k: int, transposed: bool) -> None:
        self.schedule, self.m, self.n, self.k, self.transposed = schedule, m, n, k, transposed
        self.out, self.extra = padded(m, n), padded(m, n, torch.uint8)
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count

    def run(self, extra: Tensor | None, prior: bool, last: bool) -> Tensor:
        """Launch with other operands; their product."""
        a = integers(self.k, self.m).t() if self.transposed else integers(self.m, self.k)
        b = integers(self.k, self.n)
        given = arguments(self.schedule, a, b, self.out, extra, prior, last)
        launch(given, self.m, self.n, self.programs)
        return (a.double() @ b.double()).float()

    def wrong(self) -> str:
        """What is wrong, or nothing."""
        value = self.run(None, prior=False, last=True)
        if not torch.equal(self.out, value.bfloat16()):
            return "written once: " + self.difference(value)
        self.out.fill_(torch.nan)
        value = self.run(self.extra, prior=False, last=False)
        if not self.holds(value):
            return "first chunk: " + self.difference(value)
        high, low = split(torch.randn_like(value) * 1000)
        self.out.copy_(high.view(torch.bfloat16))
        self.extra.copy_(low)
        for _ in range(2):
            kept = joined(self.out, self.extra)
            value = self.run(self.extra, prior=True, last=False) + kept
            if not self.holds(value):
                return "another chunk: " + self.difference(value)
        kept = joined(self.out, self.extra)
        value = self.run(self.extra, prior=True, last=True) + kept
        if not torch.equal(self.out, value.bfloat16()):
            return "last chunk: " + self.difference(value)
        beyond = self.out.as_strided((self.m, self.out.stride(0)), self.out.stride())[:, self.n :]
        return "" if beyond.isnan().all() else "written beyond the rows' ends"

    def holds(self, value: Tensor) -> bool:
        high, low = split(value)
        return torch.equal(self.out.view(torch.int16), high) and torch.equal(self.extra, low)

    def difference(self, value: Tensor) -> str:
        """Where the upper bits are wrong, to see a pattern in it."""
        away = ~torch.isclose(self.out.float(), value, rtol=2**-7, atol=0.5)
        places = away.nonzero()
        if not len(places):
            return "the last bits differ"
        rows, columns = places.unbind(1)
        return (
            f"{len(places)} of {away.numel()} differ, first {places[0].tolist()},"
            f" rows {rows.min()} to {rows.max()}, columns {columns.min()} to {columns.max()}"
        )


def time_gemm(gemm: Gemm, schedules: Sequence[ProductSchedule], deadline: Deadline) -> None:
    """Print a JSON line per sample of every schedule, of the Triton kernel and of cuBLAS."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)

    g = normal(gemm.chunk, gemm.vocab)
    a = g.t() if gemm.name == "dW" else g
    b = normal(a.shape[1], gemm.hidden)
    m, n = len(a), gemm.hidden
    out = torch.zeros(m, n, dtype=torch.bfloat16, device="cuda")
    low = torch.zeros(m, n, dtype=torch.uint8, device="cuda")
    total = torch.zeros(m, n, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    contraction = "n" if gemm.name == "dW" else "v"

    def compiled(extra: Tensor | None, accumulator: Any, prior: bool) -> Callable[[], Any]:
        return lambda: launch_product(
            a, b, out, extra, gemm.tile, contraction, accumulator, prior, not prior
        )

    def scheduled(schedule: ProductSchedule, extra: Tensor | None) -> Callable[[], Any]:
        given = arguments(schedule, a, b, out, extra, extra is not None, extra is None)
        return lambda: launch(given, m, n, programs)

    works: dict[str, Callable[[], Any]] = {
        "written once, cuBLAS": lambda: torch.mm(a, b, out=out),
        "float32 sum, cuBLAS": lambda: torch.addmm(total, a, b, out_dtype=torch.float32, out=total),
        f"written once, Triton {gemm.tile}": compiled(None, "weight_dtype", prior=False),
        f"split24 sum, Triton {gemm.tile}": compiled(low, "split24", prior=True),
        f"float32 sum, Triton {gemm.tile}": compiled(total, "fp32", prior=True),
    }
    for schedule in schedules:
        works[f"split24 sum, {schedule}"] = scheduled(schedule, low)
        works[f"written once, {schedule}"] = scheduled(schedule, None)
    race(works, 12, deadline)


def timings(right: Sequence[int]) -> list[Timing]:
    """Each GEMM, for a process of its own."""
    return [
        Timing(
            str(gemm),
            2.0 * gemm.chunk * gemm.hidden * gemm.vocab,
            ("--time", str(index), "--schedules", *map(str, right)),
        )
        for index, gemm in enumerate(GEMMS)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--time-budget", type=float, default=145.0, help="seconds")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a check may take")
    parser.add_argument("--out", type=Path, default=Path("pingpong_product.json"))
    parser.add_argument("--check", type=int, help="check one schedule, in this process")
    parser.add_argument("--time", type=int, help="time one GEMM, in this process")
    parser.add_argument("--schedules", type=int, nargs="*", default=[*range(len(SCHEDULES))])
    given = parser.parse_args(argv)
    deadline = Deadline(given.time_budget)
    if not on_hopper():
        parser.error("the kernel is for Hopper GPUs, and there is none")
    if given.check is not None:
        for sizes in CHECKS:
            for transposed in (True, False):
                print(f"{sizes} {transposed=}", flush=True)
                if wrong := Check(SCHEDULES[given.check], *sizes, transposed).wrong():
                    sys.exit(f"{sizes} {transposed=}: {wrong}")
        return 0
    if given.time is not None:
        time_gemm(GEMMS[given.time], [SCHEDULES[i] for i in given.schedules], deadline)
        return 0
    wrong = check_all(
        __file__, given.schedules, lambda index: str(SCHEDULES[index]), deadline, given.patience
    )
    right = [index for index, reason in wrong.items() if not reason]
    document = {
        "schema": SCHEMA,
        "environment": describe(torch.device("cuda", 0)),
        "checks": {str(SCHEDULES[i]): reason for i, reason in wrong.items()},
        "gemms": time_all(__file__, timings(right), deadline),
    }
    write_json(given.out, document)
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
