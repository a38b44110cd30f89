"""What routes ask for by type."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from flce_tune.service.lookup import Lookup
from flce_tune.service.metrics import Metrics
from flce_tune.service.settings import ServiceSettings
from flce_tune.tuning_db.store import Store


def _store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


def _settings(request: Request) -> ServiceSettings:
    settings: ServiceSettings = request.app.state.settings
    return settings


def _lookup(request: Request) -> Lookup:
    lookup: Lookup = request.app.state.lookup
    return lookup


def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


StoreDep = Annotated[Store, Depends(_store)]
SettingsDep = Annotated[ServiceSettings, Depends(_settings)]
LookupDep = Annotated[Lookup, Depends(_lookup)]
MetricsDep = Annotated[Metrics, Depends(_metrics)]
