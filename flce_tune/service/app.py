"""The service: ``create_app`` builds it, ``run`` serves it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from flce_tune.service import errors, logs, openapi
from flce_tune.service.auth import Gate, Reader
from flce_tune.service.body_limit import BodyLimit
from flce_tune.service.feeds import Feeds
from flce_tune.service.lookup import Lookup
from flce_tune.service.metrics import Metrics
from flce_tune.service.observe import Observe
from flce_tune.service.pages import site
from flce_tune.service.queue import StoreQueue
from flce_tune.service.routes import (
    api_page,
    compare,
    health,
    jobs,
    misses,
    results,
    snapshots,
    transfer,
    work,
)
from flce_tune.service.runner import JobRunner, new_owner
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.store import Store
from flce_tune.version import __version__


def create_app(settings: ServiceSettings) -> FastAPI:
    """Build the application. The database is opened and jobs are taken once it starts up."""
    app = FastAPI(
        title="flce-tune",
        version=__version__,
        summary="Tuned configs for fused linear cross-entropy, per GPU and problem.",
        lifespan=_lifespan,
        docs_url=None,  # api_page: without a CDN
        redoc_url=None,
    )
    app.state.settings = settings
    app.state.metrics = Metrics()
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        exceptions={"/v1/import": settings.max_import_bytes},
    )
    app.add_middleware(Observe, metrics=app.state.metrics)
    errors.install(app)
    for module in (health, api_page, site):
        app.include_router(module.router)
    private: dict[str, Any] = {}
    if settings.private:
        private = {"dependencies": [Reader], "responses": errors.responses(401, 403, 429)}
    app.include_router(health.figures, **private)
    app.include_router(results.configs, **private)
    for module in (jobs, work, misses, results, compare, snapshots, transfer):
        app.include_router(module.router, **private)
    api_page.mount_assets(app)
    app.mount("/static", StaticFiles(packages=[(__package__, "static")]), name="static")
    openapi.install(app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: ServiceSettings = app.state.settings
    store = await anyio.to_thread.run_sync(Store.open, settings.database_url)
    lookup = Lookup(store)
    metrics: Metrics = app.state.metrics
    metrics.watch(store)
    runner = _runner(store, settings, metrics, lookup) if settings.run_jobs else None
    app.state.store = store
    app.state.gate = Gate(store, settings, metrics)
    app.state.lookup = lookup
    app.state.feeds = Feeds(store, settings.poll_seconds)
    app.state.runner = runner
    if runner is not None:
        runner.start()
    try:
        yield
    finally:
        if runner is not None:
            await anyio.to_thread.run_sync(runner.stop)
        await anyio.to_thread.run_sync(store.close)


def _runner(store: Store, settings: ServiceSettings, metrics: Metrics, lookup: Lookup) -> JobRunner:
    return JobRunner(
        StoreQueue(store, new_owner(), settings.lease_seconds, settings.executor),
        poll_seconds=settings.poll_seconds,
        stop_seconds=settings.stop_seconds,
        on_finished=lookup.forget,
        on_lost=metrics.lease_losses.inc,
    )


def run(settings: ServiceSettings) -> None:
    """Serve until SIGINT or SIGTERM; a running job is given back to the queue.

    Raises:
        StoreError: the database cannot be used; raised before anything listens.
        ServiceError: anybody beyond this machine could write.
    """
    logs.configure()
    with Store.open(settings.database_url) as store:
        settings.refuse_exposure(has_tokens=bool(store.tokens()))
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        server_header=False,
        log_config=None,
        access_log=False,  # Observe writes it
        timeout_graceful_shutdown=5,
    )
