"""Compares two sets of winners, problem by problem."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flce_tune.sweep.interval import median_interval, overlap
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, ToolchainRecord, Winner
from flce_tune.tuning_db.store import Store


@dataclass(frozen=True, slots=True)
class Difference:
    """The fastest winner of a problem on either side; None: that side has none."""

    problem: ProblemRecord
    device: DeviceRecord | None  # None: each side is one device
    a: Winner | None
    b: Winner | None

    @property
    def ratio(self) -> float | None:
        """A's time over B's: above 1 where B is faster. None unless both have one."""
        if self.a is None or self.b is None:
            return None
        a, b = self.a.measurement.median_ms, self.b.measurement.median_ms
        return a / b if a and b else None

    @property
    def within_noise(self) -> bool | None:
        """Whether the confidence intervals overlap. None unless both sides have one."""
        if self.a is None or self.b is None:
            return None
        a, b = (median_interval(side.measurement.samples_ms) for side in (self.a, self.b))
        return overlap(a, b)

    @property
    def same_config(self) -> bool:
        """Whether both sides have the same fastest config."""
        return (
            self.a is not None
            and self.b is not None
            and self.a.measurement.config == self.b.measurement.config
        )


def compare(
    a: Iterable[Winner], b: Iterable[Winner], *, by_device: bool | None = None
) -> list[Difference]:
    """Compare the fastest winners, by V, D and N.

    Args:
        a: one side.
        b: the other.
        by_device: whether a problem is matched on the same device only; None: unless each side is
            of one device, as when two devices are compared.
    """
    sides = [list(a), list(b)]
    if by_device is None:
        by_device = any(len({w.measurement.device for w in side}) > 1 for side in sides)
    left, right = (_fastest(side, by_device=by_device) for side in sides)
    return [
        Difference(problem, device, left.get((device, problem)), right.get((device, problem)))
        for device, problem in sorted({*left, *right}, key=_order)
    ]


def of_toolchain(
    store: Store, toolchain: ToolchainRecord, device: DeviceRecord | None = None
) -> list[Winner]:
    """What a toolchain ran fastest: its winners, and where another's won since, its measurements.

    Raises:
        StoreError: it cannot be read.
    """
    winners = [w for w in store.winners(device=device) if w.measurement.toolchain == toolchain]
    won = {(w.measurement.device, w.measurement.problem) for w in winners}
    measured = store.fastest(toolchain, device)
    return winners + [
        Winner(m, verified=False) for m in measured if (m.device, m.problem) not in won
    ]


def geometric_mean(differences: Iterable[Difference]) -> float | None:
    """The mean of all ratios; above 1 where B is faster on the whole. None without a ratio."""
    ratios = [one.ratio for one in differences if one.ratio is not None]
    return statistics.geometric_mean(ratios) if ratios else None


_Key = tuple[DeviceRecord | None, ProblemRecord]


def _fastest(winners: Sequence[Winner], *, by_device: bool) -> Mapping[_Key, Winner]:
    ranked = sorted(winners, key=lambda w: w.measurement.median_ms or 0.0, reverse=True)
    return {(w.measurement.device if by_device else None, w.measurement.problem): w for w in ranked}


def _order(key: _Key) -> tuple[object, ...]:
    device, p = key
    name = (device.name, device.sm_count) if device else ("", 0)
    return (*name, p.vocab, p.hidden, p.token_bucket, p.mode, p.dtype, p.accumulate, p.features)
