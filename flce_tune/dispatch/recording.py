"""Records a process's misses when the process ends: with the service, and in the tuning database.

In a database only if it is a SQLite file that is there and can be written: nothing is created.
While training goes on it never waits. Whatever goes wrong costs the record alone.
"""

from __future__ import annotations

import atexit
import logging
import os

from flce_tune.dispatch.misses import Misses
from flce_tune.settings import Settings

WAIT_SECONDS = 2.0
"""How long the end of a process may be held up by another writer."""


def record_at_exit(misses: Misses, config: Settings) -> None:
    """Have ``misses`` recorded when this process ends, unless the settings say otherwise.

    A forked child does not record again what its parent knows.
    """
    if config.record_misses and (config.database_path is not None or config.url is not None):
        atexit.register(_record_in, os.getpid(), misses, config)


def forget() -> None:
    """Record nothing of what was registered so far."""
    atexit.unregister(_record_in)


def _record_in(process: int, misses: Misses, config: Settings) -> None:
    if process == os.getpid():
        report(misses, config)
        record(misses, config)


def report(misses: Misses, config: Settings) -> int:
    """Tell the service of the pending misses now; returns how many. Raises nothing."""
    pending = misses.pending()
    if config.url is None or not pending:
        return 0
    from flce_tune.dispatch.remote import report_misses

    try:
        report_misses(config.url, pending, token=config.token)
    except Exception as error:  # noqa: BLE001 - a process that ends well must go on ending well
        logging.getLogger("flce_tune").debug("misses were not reported: %s", error)
        return 0
    return len(pending)


def record(misses: Misses, config: Settings) -> int:
    """Write the pending misses now; returns how many. Raises nothing."""
    path = config.database_path
    try:
        if path is None or not misses.pending() or not path.is_file():
            return 0
        if not os.access(path, os.W_OK) or path.stat().st_size == 0:
            return 0
        from flce_tune.tuning_db.store import Store  # SQLAlchemy, only where there is a database

        with Store.open(config.database_url, create=False, wait_seconds=WAIT_SECONDS) as store:
            return misses.flush(store)
    except Exception as error:  # noqa: BLE001 - a process that ends well must go on ending well
        logging.getLogger("flce_tune").debug("misses were not recorded: %s", error)
        return 0
