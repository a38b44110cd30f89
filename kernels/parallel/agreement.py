"""Ranks agree before they compute: what differs is an error on each of them, never a hang.

Each call begins with one all-gather of a few integers: a hash of everything that must be equal,
and the rank's rows. On a mismatch every rank sees it, so all of them describe themselves and all
raise. What follows from equal calls, such as the config, is settled at the first of its kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.errors import InvalidConfigError, RankMismatchError
from flce_tune.kernels import strategies
from flce_tune.kernels.arguments import launching_on
from flce_tune.kernels.config import Config
from flce_tune.kernels.parallel.choice import choose
from flce_tune.kernels.parallel.collectives import gathered
from flce_tune.kernels.parallel.merge import DIFFERENT_TOKENS
from flce_tune.kernels.parallel.shard import Range, Shard, layout
from flce_tune.kernels.problem import Device, Problem, describe_device

Description = Mapping[str, object]

CAPACITY = 4096
_settled: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""What the ranks of a group have settled. All hold the same keys, as each call is compared."""


@dataclass(frozen=True, slots=True)
class _Header:
    """What a rank says of its call."""

    accepted: bool
    signature: int
    rows: int
    vocab_range: Range | None

    def pack(self) -> list[int]:
        start, stop = self.vocab_range or (-1, -1)
        return [int(self.accepted), self.signature, self.rows, start, stop]

    @classmethod
    def unpack(cls, numbers: list[int]) -> _Header:
        accepted, signature, rows, *ends = numbers
        return cls(bool(accepted), signature, rows, None if ends[0] < 0 else (ends[0], ends[1]))


@contextlib.contextmanager
def refusing_together(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Let the other ranks know when this one refuses its arguments, so that they do not wait."""
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        _exchange(group, device, _Header(False, 0, 0, None))
        _everyone(group, device, {"refused": f"{type(error).__name__}: {error}"})
        raise


def agree(
    group: ProcessGroup,
    device: torch.device,
    description: Description,  # everything that must be equal on all ranks
    rows: int,  # of this rank's weight
    vocab_range: Range | None,
) -> Shard:
    """Compare the call with the other ranks', and learn which classes each holds.

    Raises:
        RankMismatchError: the calls differ, or a rank has refused its arguments.
        ValueError: ranges that do not fit together.
    """
    signature = _hash(repr(sorted(description.items())))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _captured(group, signature, rows, vocab_range)
    headers = _exchange(group, device, _Header(True, signature, rows, vocab_range))
    if any(not h.accepted or h.signature != signature for h in headers):
        _report(_everyone(group, device, description))
    ranges = layout([h.rows for h in headers], [h.vocab_range for h in headers])
    shard = Shard(group, dist.get_rank(group), ranges)
    _memory(group)[signature, rows, vocab_range] = shard
    return shard


def require_same_labels(shard: Shard, target: Tensor) -> None:
    """Compare the labels themselves at a group's first call; waits for the device.

    Raises:
        RankMismatchError: other labels on some rank.
    """
    known = _memory(shard.group)
    if "labels" in known:
        return
    place = torch.arange(1, target.numel() + 1, device=target.device)
    sums = _everyone(shard.group, target.device, int((target * place).sum()))
    if len(set(sums)) > 1:
        raise RankMismatchError(
            f"labels differ between the ranks of process_group: {DIFFERENT_TOKENS}"
        )
    known["labels"] = True


def agreed_config(
    shard: Shard,
    problem: Problem,
    device: torch.device,
    workspace_limit: int | None,
    explicit: Config | None,
) -> Config:
    """The config all ranks run: the given one, or what the group's first rank chooses.

    Raises:
        InvalidConfigError: it cannot run on the device of some rank.
    """
    problem = replace(problem, tokens=problem.bucket)  # so that few lengths are settled
    key = (problem, workspace_limit, explicit)
    known = _memory(shard.group)
    if key not in known:
        mine = explicit or choose(problem, describe_device(device), workspace_limit)
        answers = _everyone(shard.group, device, (mine, describe_device(device)))
        known[key] = _chosen(problem, answers)
    config: Config = known[key]
    return config


def _chosen(problem: Problem, answers: list[tuple[Config, Device]]) -> Config:
    config = answers[0][0]
    for rank, (_, device) in enumerate(answers):
        if reason := strategies.reject(config, problem, device):
            raise InvalidConfigError(
                f"config {config}, the same for all ranks of process_group, cannot run on rank "
                f"{rank} ({device.name}): {reason}"
            )
    return config


def _captured(group: ProcessGroup, signature: int, rows: int, vocab_range: Range | None) -> Shard:
    shard = _memory(group).get((signature, rows, vocab_range))
    if shard is None:
        raise RuntimeError(
            "with process_group the ranks compare their calls on the host, which cannot be "
            "captured in a CUDA graph: make the same call once before capturing it"
        )
    return shard  # type: ignore[no-any-return]


def _memory(group: ProcessGroup) -> dict[Any, Any]:
    known = _settled.setdefault(group, {})
    if len(known) > CAPACITY:  # on every rank at once
        known.clear()
    return known


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _exchange(group: ProcessGroup, device: torch.device, header: _Header) -> list[_Header]:
    kinds = {kind.type for kind in group._device_types}
    place = torch.device("cpu") if "cpu" in kinds else device  # a host need not wait for its GPU
    mine = torch.tensor(header.pack(), dtype=torch.int64, device=place)
    return [_Header.unpack(row) for row in gathered(group, mine).tolist()]


def _everyone(group: ProcessGroup, device: torch.device, mine: Any) -> list[Any]:
    """What each rank says, by rank."""
    answers: list[Any] = [None] * group.size()
    with launching_on(device):
        dist.all_gather_object(answers, mine, group=group)
    return answers


def _report(descriptions: list[Description]) -> None:
    for rank, description in enumerate(descriptions):
        if "refused" in description:
            raise RankMismatchError(f"rank {rank} of process_group refused its call with "
                                    f"{description['refused']}")  # fmt: skip
    first = descriptions[0]
    names = [name for name in first if len({repr(d.get(name)) for d in descriptions}) > 1]
    what = "; ".join(
        f"{name}: " + ", ".join(f"{d.get(name)!r} on rank {r}" for r, d in enumerate(descriptions))
        for name in names
    )
    raise RankMismatchError(
        f"the ranks of process_group must make the same call, with other rows of weight; {what}"
    )
