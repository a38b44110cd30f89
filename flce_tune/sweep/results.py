"""What is stored of each problem, gathered for a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    Winner,
    canonical_config,
)

ATOMIC = "atomic"  # one kernel, whose tile covers what the other strategies' GEMMs do
GEMMS = ("logits", "dx", "dw")


@dataclass(frozen=True, slots=True)
class ProblemResults:
    """One problem on one device: each config's last outcome, and the winners."""

    device: DeviceRecord
    problem: ProblemRecord
    measurements: tuple[Measurement, ...]  # the last of each config, of one toolchain
    winners: tuple[Winner, ...]  # fastest first

    @property
    def timed(self) -> list[Measurement]:
        """The measurements that have a time, fastest first."""
        ok = [m for m in self.measurements if m.median_ms is not None]
        return sorted(ok, key=lambda m: m.median_ms or 0.0)

    @property
    def failures(self) -> Mapping[tuple[str, str], int]:
        """How many configs failed, by strategy and status."""
        failed = (m for m in self.measurements if m.status is not Status.OK)
        return Counter((str(m.config.get("strategy")), m.status.value) for m in failed)


@dataclass(frozen=True, slots=True)
class TileTime:
    """The fastest config with a tile of this size."""

    gemm: str  # "logits", "dx", "dw", or "atomic" for its only kernel
    v_block: int
    d_block: int
    ms: float


def gather(measurements: Iterable[Measurement], winners: Sequence[Winner]) -> list[ProblemResults]:
    """Group what is stored by device and problem, ordered by V, D and N.

    Times of different toolchains are not mixed: those of the winners' toolchain count, or of the
    last one where there are no winners.
    """
    groups: dict[tuple[DeviceRecord, ProblemRecord], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.device, one.problem), []).append(one)
    gathered = []
    for (device, problem), group in groups.items():
        front = [
            w for w in winners if (w.measurement.device, w.measurement.problem) == (device, problem)
        ]
        toolchain = (front[0].measurement if front else group[-1]).toolchain
        last = {canonical_config(m.config): m for m in group if m.toolchain == toolchain}
        gathered.append(ProblemResults(device, problem, tuple(last.values()), tuple(front)))
    return sorted(gathered, key=_order)


def tile_times(timed: Iterable[Measurement]) -> list[TileTime]:
    """Find the best time of each V_BLOCK × D_BLOCK, GEMM by GEMM."""
    best: dict[tuple[str, int, int], float] = {}
    for one in timed:
        for gemm in GEMMS:
            tile = one.config.get(gemm)
            if not isinstance(tile, Mapping) or one.median_ms is None:
                continue
            name = ATOMIC if one.config.get("strategy") == ATOMIC else gemm
            key = (name, int(tile["v_block"]), int(tile["d_block"]))
            best[key] = min(best.get(key, one.median_ms), one.median_ms)
    return [TileTime(*key, ms) for key, ms in sorted(best.items())]


def _order(one: ProblemResults) -> tuple[object, ...]:
    p = one.problem
    return (
        one.device.name, p.vocab, p.hidden, p.token_bucket, p.mode, p.dtype, p.accumulate,
        p.features,
    )  # fmt: skip
