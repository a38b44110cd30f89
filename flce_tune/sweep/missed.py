"""What training looked for and a sweep has tuned since."""

from __future__ import annotations

from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.sweep.events import SweepReport
from flce_tune.tuning_db.store import Store


def clear_misses(report: SweepReport, store: Store) -> None:
    """Forget the misses that ``report`` brought winners for.

    Raises:
        StoreError: the store failed.
    """
    for one in report.problems:
        if one.winners and one.device is not None:
            store.clear_miss(device_record(one.device), problem_record(one.problem))
