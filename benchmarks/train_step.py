#!/usr/bin/env python
"""Whole training steps of a Llama-3-shaped model under several heads: tokens/s and peak memory.

    python benchmarks/train_step.py --out benchmarks/results/train_step.json

Forward, backward and AdamW; parameters, gradients and optimiser state in bfloat16. All heads train
the same model in one process, in interleaved rounds, so nothing differs but the head's loss.
Writes JSON and a table beside it.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import Shape
from environment import default_device, describe, write_json
from implementations import Implementation, Loss, ours, parse_size, peers
from measure import GIB, Deadline, OutOfTime, Stopwatch, at_most, half_quartile_range, release
from torch import Tensor
from train_step_model import Decoder, Size

SCHEMA = "flce-tune-train-step/1"
DEFAULT_HEADS = "eager_fp32,eager,liger,liger_fp32,cce,ours"
LAST_GRACE = 10.0  # seconds past the budget after which a hung device call is cut off


@dataclass(frozen=True)
class Trainer:
    """One model, its optimiser and its batch; the head's loss comes with each step."""

    model: Decoder
    optimiser: torch.optim.Optimizer
    inputs: Tensor  # [B, T]
    targets: Tensor  # [B·T]

    @classmethod
    def make(
        cls, size: Size, sequences: int, length: int, device: torch.device, *, recompute: bool
    ) -> Trainer:
        """Random weights and random tokens; the same for the same arguments."""
        torch.manual_seed(0)
        with torch.device(device):
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = Decoder(size, recompute_blocks=recompute)
            finally:
                torch.set_default_dtype(default)
            ids = torch.randint(0, size.vocab, (sequences, length + 1))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
        return cls(model, optimiser, ids[:, :-1].contiguous(), ids[:, 1:].flatten())

    def loss(self, head: Loss) -> Tensor:
        """The mean loss of the batch."""
        hidden = self.model(self.inputs).flatten(0, 1)
        return head(hidden, self.model.head.weight, self.targets)

    def step(self, head: Loss) -> Tensor:
        """One training step; its loss."""
        loss = self.loss(head)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()


@dataclass
class Contestant:
    """A head and what became of it."""

    implementation: Implementation
    head: Loss | None = None  # None: not built, or out of the race
    reason: str = ""
    first_loss: float | None = None  # of the untrained model, the same for all but rounding
    peak_bytes: int | None = None
    samples_ms: list[float] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Note why it dropped out."""
        self.head, self.reason = None, f"{type(error).__name__}: {error}".strip()[:300]

    def to_dict(self, tokens: int) -> dict[str, Any]:
        """JSON-ready."""
        row: dict[str, Any] = {
            "name": self.implementation.name,
            "family": self.implementation.family,
            "first_loss": self.first_loss,
            **self.implementation.details,
        }
        if self.reason:
            row["reason"] = self.reason
        if self.samples_ms:
            median = statistics.median(self.samples_ms)
            row |= {
                "median_ms": median,
                "spread_ms": half_quartile_range(self.samples_ms),
                "tokens_per_second": tokens / median * 1e3,
                "peak_bytes": self.peak_bytes,
                "samples_ms": self.samples_ms,
            }
        return row


def prepare(
    contestant: Contestant, trainer: Trainer, device: torch.device, deadline: Deadline
) -> None:
    """Build a head and take its loss on the untrained model; whatever it raises is noted."""
    print(f"  {contestant.implementation.name}", file=sys.stderr, flush=True)
    try:
        with at_most(deadline.remaining / 2):  # a slow compiler must not starve all who follow
            head = contestant.implementation.build()
            loss = trainer.loss(head)
            loss.backward()  # type: ignore[no-untyped-call]
            contestant.first_loss, contestant.head = loss.item(), head
    except (Exception, OutOfTime) as error:  # noqa: BLE001 isolation is the purpose
        contestant.fail(error)
        print(f"    {contestant.reason}", file=sys.stderr, flush=True)
    trainer.optimiser.zero_grad(set_to_none=True)
    release(device)


def race(
    contestants: Sequence[Contestant],
    trainer: Trainer,
    device: torch.device,
    rounds: int,
    deadline: Deadline,
) -> int:
    """Interleave the heads' steps; return the rounds done. The first of each takes its peak."""
    stopwatch = Stopwatch(device)
    trainer.step(next(c.head for c in contestants if c.head))  # makes the optimiser's state
    gc.disable()
    try:
        for done in range(-1, rounds):  # round -1 warms up and weighs
            runners = [contestant for contestant in contestants if contestant.head]
            longest = max((max(c.samples_ms) for c in runners if c.samples_ms), default=0.0)
            if deadline.remaining < 1.5 * len(runners) * longest / 1e3:
                print(f"  time is up after {done} of {rounds} rounds", file=sys.stderr, flush=True)
                return max(done, 0)
            turn = max(done, 0) % max(len(runners), 1)  # nobody always follows the same neighbour
            for contestant in runners[turn:] + runners[:turn]:
                take_step(contestant, trainer, stopwatch, counts=done >= 0)
    finally:
        gc.enable()
    return rounds


def take_step(
    contestant: Contestant, trainer: Trainer, stopwatch: Stopwatch, *, counts: bool
) -> None:
    """Time one step, or weigh it where it does not count."""
    head, device = contestant.head, stopwatch.device
    assert head is not None, "only heads that still run take steps"
    try:
        if counts:
            contestant.samples_ms.append(stopwatch.time(lambda: trainer.step(head)))
            return
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainer.step(head)
        if device.type == "cuda":
            contestant.peak_bytes = torch.cuda.max_memory_allocated(device)
    except Exception as error:  # noqa: BLE001 isolation is the purpose
        contestant.fail(error)
        trainer.optimiser.zero_grad(set_to_none=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, the fastest first."""
    lines = ["| head | tokens/s | ms a step | peak, GiB |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row.get("median_ms", float("inf"))):
        if "median_ms" not in row:
            lines.append(f"| {row['name']} | {row.get('reason', 'no time left')} | | |")
            continue
        peak = f"{row['peak_bytes'] / GIB:.2f}" if row["peak_bytes"] else "-"
        speed, time = f"{row['tokens_per_second']:,.0f}", f"{row['median_ms']:.1f}"
        lines.append(f"| {row['name']} | {speed} | {time} | {peak} |")
    return "\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add, size = parser.add_argument, Size()
    add("--heads", default=DEFAULT_HEADS, help="'ours' and families of compare.py's peers")
    add("--workspace-limits", default="none,256MiB", help="where 'ours' is asked")
    add("--sequences", type=int, default=2)
    add("--length", type=int, default=4096)
    for name in asdict(size):
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(size, name))
    add("--recompute-blocks", action="store_true", help="activation checkpointing of each block")
    add("--rounds", type=int, default=9)
    add("--time-budget", type=float, default=85.0, help="seconds for the whole run")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("train_step.json"))
    arguments = parser.parse_args(argv)
    arguments.size = Size(**{name: getattr(arguments, name) for name in asdict(size)})
    return arguments


def chosen(arguments: argparse.Namespace, device: torch.device) -> list[Implementation]:
    """The heads asked for, the peers first."""
    wanted, size = arguments.heads.split(","), arguments.size
    shape = Shape(arguments.sequences * arguments.length, size.hidden, size.vocab)
    known = {peer.family: peer for peer in peers(shape)}
    if unknown := sorted(set(wanted) - {"ours", *known}):
        raise SystemExit(f"unknown heads {unknown}; known are {', '.join([*known, 'ours'])}")
    found = [known[name] for name in wanted if name != "ours"]
    if "ours" in wanted:
        limits = [parse_size(text) for text in arguments.workspace_limits.split(",")]
        found += ours(shape, torch.bfloat16, device, limits, "fp32")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = arguments.device or default_device()
    faulthandler.dump_traceback_later(arguments.time_budget + LAST_GRACE, exit=True, file=2)
    deadline = Deadline(arguments.time_budget)
    try:
        heads = [Contestant(implementation) for implementation in chosen(arguments, device)]
        trainer = Trainer.make(
            arguments.size, arguments.sequences, arguments.length, device,
            recompute=arguments.recompute_blocks,
        )  # fmt: skip
        for contestant in heads:
            prepare(contestant, trainer, device, deadline)
        if not any(contestant.head for contestant in heads):
            raise SystemExit("no head could be built: " + "; ".join(c.reason for c in heads))
        rounds = race(heads, trainer, device, arguments.rounds, deadline)
    finally:
        faulthandler.cancel_dump_traceback_later()
    tokens = trainer.inputs.numel()
    rows = [contestant.to_dict(tokens) for contestant in heads]
    document = {
        "schema": SCHEMA,
        "environment": describe(device),
        "model": asdict(arguments.size)
        | {"parameters": sum(parameter.numel() for parameter in trainer.model.parameters())},
        "batch": {"sequences": arguments.sequences, "length": arguments.length, "tokens": tokens},
        "recompute_blocks": arguments.recompute_blocks,
        "rounds": rounds,
        "heads": rows,
    }
    write_json(arguments.out, document)
    arguments.out.with_suffix(".md").write_text(table(rows))
    print(table(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
