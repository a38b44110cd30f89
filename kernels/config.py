"""Configs: frozen values that say which strategy runs, with which parameters.

A config says nothing about whether it can run: that is ``strategies.reject``, the one validity
predicate, shared by the tuner and the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from flce_tune.errors import InvalidConfigError

Accumulator = Literal["fp32", "split24", "weight_dtype"]
ACCUMULATORS: tuple[Accumulator, ...] = ("fp32", "split24", "weight_dtype")
Schedule = Literal["compiler", "ping_pong", "shared"]
SCHEDULES: tuple[Schedule, ...] = ("compiler", "ping_pong", "shared")


@dataclass(frozen=True, slots=True)
class Tile:
    """How one Triton kernel cuts its work: a tile is N_BLOCK tokens × V_BLOCK × D_BLOCK.

    ``schedule`` says who orders its work: Triton's compiler, or a kernel of ``kernels.hopper``,
    where two groups of four warps multiply a tile each in turn (``ping_pong``), or half of the
    rows of each tile (``shared``).
    """

    n_block: int  # N_BLOCK
    v_block: int  # V_BLOCK
    d_block: int  # D_BLOCK
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8  # output tiles that share an operand are visited in groups of this many
    schedule: Schedule = "compiler"

    @property
    def compiled(self) -> Tile:
        """The same tile, scheduled by the compiler, which has room for fewer stages."""
        if self.schedule == "compiler":
            return self
        return replace(self, schedule="compiler", num_stages=min(self.num_stages, 3))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the schedule only where it is not the compiler's."""
        full = asdict(self)
        if self.schedule == "compiler":
            del full["schedule"]
        return full

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        schedule = "" if self.schedule == "compiler" else f', "schedule": "{self.schedule}"'
        return (
            f'{{"n_block": {self.n_block}, "v_block": {self.v_block}, "d_block": {self.d_block}, '
            f'"num_warps": {self.num_warps}, "num_stages": {self.num_stages}, '
            f'"group": {self.group}{schedule}}}'
        )

    def __str__(self) -> str:
        schedule = "" if self.schedule == "compiler" else f" {self.schedule.replace('_', '-')}"
        return (
            f"{self.n_block}×{self.v_block}×{self.d_block}"
            f" w{self.num_warps} s{self.num_stages} g{self.group}{schedule}"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """A strategy and its parameters.

    ``logits``, ``dx`` and ``dw`` choose how each GEMM runs: a Tile for our Triton kernel, None
    for cuBLAS (on a CPU: whatever ``torch.mm`` uses). Fields a strategy has no use for stay at
    their defaults, so that equal configs compare equal.
    """

    strategy: str
    chunk: int | None = None  # tokens per chunk of logits; None: all of them
    slab: int | None = None  # vocabulary columns per slab of logits
    logits: Tile | None = None  # x·Wᵀ
    dx: Tile | None = None  # G·W
    dw: Tile | None = None  # Gᵀ·x
    accumulator: Accumulator = "fp32"  # how dW (dX, for recompute) is held between chunks (slabs)
    tolerance: float | None = None  # for tile_skip: least probability of a token in a kept tile

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the fields that are at their defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            f.name: value.to_dict() if isinstance(value, Tile) else value
            for f in fields(self)
            if (value := values[f.name]) != f.default
        }

    def to_json(self) -> str:
        """``to_dict`` as JSON. By hand: torch.compile traces this, and json not."""
        parts = [f'"strategy": "{self.strategy}"']
        numbers = (("chunk", self.chunk), ("slab", self.slab), ("tolerance", self.tolerance))
        parts += [f'"{name}": {value}' for name, value in numbers if value is not None]
        tiles = (("logits", self.logits), ("dx", self.dx), ("dw", self.dw))
        parts += [f'"{name}": {tile.to_json()}' for name, tile in tiles if tile is not None]
        if self.accumulator != "fp32":
            parts.append(f'"accumulator": "{self.accumulator}"')
        return "{" + ", ".join(parts) + "}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Config:
        """Read back what ``to_dict`` wrote.

        Raises:
            InvalidConfigError: unknown or missing fields, or values of the wrong type.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("strategy"), str):
            raise InvalidConfigError(f"a config needs a 'strategy' string, got {data!r}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise InvalidConfigError(f"unknown config fields {unknown}; known are {sorted(known)}")
        values = dict(data)
        for name in ("logits", "dx", "dw"):
            if values.get(name) is not None:
                values[name] = _tile_from_dict(name, values[name])
        for name in ("chunk", "slab"):
            if values.get(name) is not None:
                _require_positive_int(name, values[name])
        if values.get("accumulator", "fp32") not in ACCUMULATORS:
            raise InvalidConfigError(
                f"accumulator must be one of {ACCUMULATORS}, got {values['accumulator']!r}"
            )
        if values.get("tolerance") is not None:
            require_tolerance("tolerance", values["tolerance"])
        return cls(**values)

    def __str__(self) -> str:
        parts = [self.strategy]
        if self.chunk is not None:
            parts.append(f"chunk={self.chunk}")
        if self.slab is not None:
            parts.append(f"slab={self.slab}")
        parts += [
            f"{name}=[{tile}]"
            for name in ("logits", "dx", "dw")
            if (tile := getattr(self, name)) is not None
        ]
        if self.accumulator != "fp32":
            parts.append(f"accumulator={self.accumulator}")
        if self.tolerance is not None:
            parts.append(f"tolerance={self.tolerance:g}")
        return " ".join(parts)


def _tile_from_dict(name: str, data: object) -> Tile:
    known = {f.name for f in fields(Tile)}
    if not isinstance(data, Mapping) or not {"n_block", "v_block", "d_block"} <= set(data) <= known:
        raise InvalidConfigError(f"{name} must be a tile with fields {sorted(known)}, got {data!r}")
    for key, value in data.items():
        if key != "schedule":
            _require_positive_int(f"{name}.{key}", value)
        elif value not in SCHEDULES:
            raise InvalidConfigError(f"{name}.schedule must be one of {SCHEDULES}, got {value!r}")
    return Tile(**data)


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfigError(f"{name} must be a positive integer, got {value!r}")


def require_tolerance(name: str, value: object) -> None:
    """Raise InvalidConfigError unless the value is a probability above 0 and below 1."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 < value < 1.0:  # type: ignore[operator]
        raise InvalidConfigError(f"{name} must be a number between 0 and 1, got {value!r}")
