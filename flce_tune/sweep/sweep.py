"""The driver: sweeps problem after problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flce_tune.errors import SweepError
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import ProblemReport, SweepEvents, SweepOptions, SweepReport
from flce_tune.sweep.measure import BenchFactory, OpBench
from flce_tune.sweep.places import LocalPlace
from flce_tune.sweep.tuning import ProblemSweep
from flce_tune.sweep.worker import StoppedError
from flce_tune.tuning_db.store import Store


def sweep(
    problems: Sequence[Problem],
    store: Store,
    device: torch.device,
    options: SweepOptions | None = None,
    *,
    events: SweepEvents | None = None,
    should_stop: Callable[[], bool] | None = None,
    make_bench: BenchFactory = OpBench,
) -> SweepReport:
    """Tune each problem on ``device`` and store everything as it comes.

    The same call after an interruption goes on where it stopped: configs that this toolchain has
    measured on this device, or that have failed there, are not measured again. ``should_stop`` is
    asked several times a second; when it says yes the report tells what was done so far.
    ``make_bench`` decides how a config is measured.

    Raises:
        SweepError: no problem got a winner; the message tells why, problem by problem.
        UnknownStrategyError: the options name a strategy that nobody registered.
        StoreError: the store failed.
    """
    options = options or SweepOptions()
    for name in options.strategies or ():
        strategies.get(name)
    place = LocalPlace(device, isolate=options.isolate)
    reports: list[ProblemReport] = []
    interrupted = False
    for problem in problems:
        tuning = ProblemSweep(
            problem, store, place, options, events or SweepEvents(), should_stop, make_bench
        )
        try:
            reports.append(tuning.run())
        except StoppedError:
            reports.append(tuning.report())
            interrupted = True
            break
    report = SweepReport(tuple(reports), interrupted)
    if reports and not interrupted and not report.winners:
        reasons = "\n".join(f"{r.problem}: {r.error}" for r in reports)
        raise SweepError(f"no config could be tuned.\n{reasons}")
    return report
