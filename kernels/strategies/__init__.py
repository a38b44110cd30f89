"""Strategies: one file each, registered here.

``reject`` is the one validity predicate: the tuner prunes by it, the dispatcher believes it. Both
know only strategies that give the same answer. One that does not, within a tolerance, is registered
as on request: it runs where a call's own config names it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flce_tune.errors import InvalidConfigError, UnknownStrategyError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies.base import Strategy

_REGISTERED: dict[str, Strategy] = {}
_ON_REQUEST: dict[str, Strategy] = {}


def register(strategy: Strategy, *, on_request: bool = False) -> None:
    """Make a strategy known by its name; the name must be new."""
    if strategy.name in _REGISTERED or strategy.name in _ON_REQUEST:
        raise ValueError(f"a strategy named {strategy.name!r} is registered already")
    (_ON_REQUEST if on_request else _REGISTERED)[strategy.name] = strategy


def unregister(name: str) -> None:
    """Forget a strategy that was registered."""
    del (_REGISTERED if name in _REGISTERED else _ON_REQUEST)[name]


def names() -> tuple[str, ...]:
    """The strategies that are tuned and chosen: they give the same answer."""
    return tuple(_REGISTERED)


def get(name: str) -> Strategy:
    """Look a strategy up, also one on request.

    Raises:
        UnknownStrategyError: nobody registered it.
    """
    try:
        return _REGISTERED[name] if name in _REGISTERED else _ON_REQUEST[name]
    except KeyError:
        raise UnknownStrategyError(_unknown(name)) from None


def require_tunable(name: str) -> None:
    """Raise UnknownStrategyError, saying why, unless the strategy can be tuned."""
    if name not in _REGISTERED:
        raise UnknownStrategyError(_unknown(name))


def _unknown(name: str) -> str:
    known = ", ".join(names())
    if name in _ON_REQUEST:
        return f"strategy {name!r} is not tuned or chosen: its answer differs from that of {known}"
    return f"unknown strategy {name!r}; registered are {known}"


def reject(config: Config, problem: Problem, device: Device) -> str | None:
    """Say why a config cannot be tuned or chosen here, or None if it can."""
    if config.strategy not in _REGISTERED:
        return _unknown(config.strategy)
    return get(config.strategy).reject(config, problem, device)


def require(config: Config, problem: Problem, device: Device) -> None:
    """Raise InvalidConfigError with the reason unless a call's own config can run."""
    if config.strategy in _ON_REQUEST:
        reason = get(config.strategy).reject(config, problem, device)
    else:
        reason = reject(config, problem, device)
    if reason:
        raise InvalidConfigError(f"config {config} cannot run here: {reason}")


def workspace(config: Config, problem: Problem) -> int:
    """Bytes held at the peak beyond inputs and returned gradients, estimated."""
    return get(config.strategy).workspace(config, problem)


def products(config: Config, problem: Problem) -> float:
    """Products of 2NDV FLOPs in a training step."""
    return get(config.strategy).products(config, problem)


def completed(config: Config, problem: Problem, device: Device) -> Config:
    """Fill a config that gives a strategy and a tolerance only in with the strategy's default."""
    if config.tolerance is None or config != Config(config.strategy, tolerance=config.tolerance):
        return config
    return replace(_default_of(config.strategy, problem, device), tolerance=config.tolerance)


@functools.lru_cache(maxsize=256)
def _default_of(strategy: str, problem: Problem, device: Device) -> Config:
    """Looking for tiles that go together takes long, and every call asks."""
    return get(strategy).default(problem, device)


def space_with_reasons(
    problem: Problem, device: Device, *, strategy: str | None = None
) -> list[tuple[Config, str | None]]:
    """Every config the strategies propose, each with the reason it cannot run, or None."""
    chosen = [get(strategy)] if strategy else list(_REGISTERED.values())
    proposed = dict.fromkeys(c for s in chosen for c in s.space(problem, device))
    return [(config, reject(config, problem, device)) for config in proposed]


def space(problem: Problem, device: Device, *, strategy: str | None = None) -> list[Config]:
    """Every config worth measuring here that can run."""
    return [c for c, reason in space_with_reasons(problem, device, strategy=strategy) if not reason]


def default(problem: Problem, device: Device, workspace_limit: int | None = None) -> Config:
    """Choose by analysis alone: the first that fits of chunked, smaller chunks, recompute.

    When nothing fits the limit, the config with the smallest workspace is returned.
    """
    from flce_tune.kernels.strategies.defaults import analytic_default

    return analytic_default(problem, device, workspace_limit)


def _register_all() -> None:
    from flce_tune.kernels.strategies.atomic import Atomic
    from flce_tune.kernels.strategies.chunked import Chunked
    from flce_tune.kernels.strategies.factored import Factored
    from flce_tune.kernels.strategies.full import Full
    from flce_tune.kernels.strategies.overlay import Overlay
    from flce_tune.kernels.strategies.recompute import Recompute
    from flce_tune.kernels.strategies.tile_skip import TileSkip

    for strategy in (Chunked(), Full(), Recompute(), Factored(), Overlay(), Atomic()):
        register(strategy)
    register(TileSkip(), on_request=True)


_register_all()
