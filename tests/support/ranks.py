"""A few processes that form a process group and run what they are sent."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60.0
"""Seconds after which silence is a hang."""


class Ranks:
    """``size`` processes with a group each of the first 1, 2, ... of them."""

    def __init__(self, size: int, rendezvous: Path, backend: str = "gloo") -> None:
        context = mp.get_context("forkserver" if backend == "gloo" else "spawn")
        if backend == "gloo":
            context.set_forkserver_preload(["flce_tune.kernels.parallel.linear"])
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, backend, str(rendezvous), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(
        self, ranks: int, function: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> list[Any]:
        """What ``function(group, ...)`` of an importable module returns on each rank of a group."""
        ends = self._ends[:ranks]
        for end in ends:
            end.send((ranks, function, arguments, keywords))
        answers = [self._answer(rank, end) for rank, end in enumerate(ends)]
        failures = [text for ok, text in answers if not ok]
        assert not failures, failures[0]
        return [value for _, value in answers]

    def _answer(self, rank: int, end: Connection) -> tuple[bool, Any]:
        if not end.poll(PATIENCE):
            self.close()
            raise AssertionError(f"rank {rank} did not answer: a hang")
        answer: tuple[bool, Any] = end.recv()
        return answer

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(rank: int, size: int, backend: str, rendezvous: str, end: Connection) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE),
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    while True:
        ranks, function, arguments, keywords = end.recv()
        try:
            end.send((True, function(groups[ranks], *arguments, **keywords)))
        except Exception:  # noqa: BLE001
            end.send((False, traceback.format_exc()))
