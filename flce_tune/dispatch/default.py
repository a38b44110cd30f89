"""The dispatcher of this process, as the settings describe it."""

from __future__ import annotations

import threading

from flce_tune import settings
from flce_tune.dispatch import recording
from flce_tune.dispatch.dispatcher import Dispatcher
from flce_tune.dispatch.notices import Notices
from flce_tune.dispatch.remote import RemoteSnapshots
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.errors import InterchangeError, ServiceError, StoreError
from flce_tune.settings import Settings
from flce_tune.tuning_db.records import DeviceRecord

_lock = threading.Lock()
_dispatcher: Dispatcher | None = None


def default_dispatcher() -> Dispatcher:
    """The one dispatcher of this process, built on first use from the environment's settings.

    It reads the tuning database and the shipped files once; with ``FLCE_TUNE_URL`` set, each
    device's first choice also asks that service, whose winners go before the database's. It
    creates no file but the copies of the service's snapshots, and changes none but, when the
    process ends, the list of misses in the database (see ``recording``). What cannot be read
    gives one warning and is done without.
    """
    global _dispatcher
    if _dispatcher is None:
        with _lock:
            if _dispatcher is None:
                config = settings.load()
                _dispatcher = build_dispatcher(config)
                recording.record_at_exit(_dispatcher.misses, config)
    return _dispatcher


def reset_default_dispatcher() -> None:
    """Forget the dispatcher, so that the next use reads settings and database anew.

    For a process that has just swept or imported, and for tests. Misses not yet recorded are
    forgotten, too.
    """
    global _dispatcher
    with _lock:
        _dispatcher = None
        recording.forget()


def build_dispatcher(config: Settings) -> Dispatcher:
    """A dispatcher as ``config`` describes it. Raises nothing for what cannot be read."""
    notices = Notices()
    fetch = None
    if config.url is not None:
        service = RemoteSnapshots(config.url, config.cache_path, token=config.token)

        def fetch(device: DeviceRecord) -> Snapshot:
            return _fetched(service, device, notices)

    return Dispatcher(
        _stored(config, notices), shipped=_shipped(notices), fetch=fetch, notices=notices
    )


def _stored(config: Settings, notices: Notices) -> Snapshot:
    url, path = config.database_url, config.database_path
    if path is not None and not path.exists():
        return Snapshot.empty(f"no database at {path} yet")
    from flce_tune.tuning_db.store import Store  # SQLAlchemy, only where there is a database

    try:
        with Store.open(url, create=False, read_only=True) as store:
            return Snapshot.from_store(store)
    except StoreError as error:
        notices.once(
            "store",
            f"flce-tune: the tuning database {path or 'of FLCE_TUNE_DB'} is not used, configs are"
            f" chosen without it: {error}",
        )
        return Snapshot.empty("a database that cannot be read")


def _shipped(notices: Notices) -> Snapshot:
    try:
        return Snapshot.from_pretuned()
    except InterchangeError as error:
        notices.once(
            "pretuned",
            f"flce-tune: the shipped pre-tuned files are not used: {error}."
            " Reinstall flce-tune to repair them.",
        )
        return Snapshot.empty("pre-tuned files that cannot be read")


def _fetched(service: RemoteSnapshots, device: DeviceRecord, notices: Notices) -> Snapshot:
    try:
        return service.fetch(device)
    except ServiceError as error:
        notices.once(
            "service",
            f"flce-tune: FLCE_TUNE_URL is done without: {error}."
            " Check the address, or unset it to use the local database alone.",
        )
        return Snapshot.empty("a service that gave no answer")
