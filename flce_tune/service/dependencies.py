"""What routes ask for by type; coroutines, since a plain function would cost a thread each."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from flce_tune.service.feeds import Feeds
from flce_tune.service.lookup import Lookup
from flce_tune.service.metrics import Metrics
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.store import Store


async def _store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


async def _feeds(request: Request) -> Feeds:
    feeds: Feeds = request.app.state.feeds
    return feeds


async def _lookup(request: Request) -> Lookup:
    lookup: Lookup = request.app.state.lookup
    return lookup


async def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


async def _settings(request: Request) -> ServiceSettings:
    settings: ServiceSettings = request.app.state.settings
    return settings


StoreDep = Annotated[Store, Depends(_store)]
FeedsDep = Annotated[Feeds, Depends(_feeds)]
LookupDep = Annotated[Lookup, Depends(_lookup)]
MetricsDep = Annotated[Metrics, Depends(_metrics)]
SettingsDep = Annotated[ServiceSettings, Depends(_settings)]
