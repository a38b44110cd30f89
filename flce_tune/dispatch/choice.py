"""What the dispatcher answers: a choice, and the account of how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.tuning_db.records import Winner

Rule = Literal[
    "explicit",
    "exact",
    "nearest tokens",
    "nearest shape",
    "pretuned",
    "same architecture",
    "default",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """The config to run, and why."""

    config: Config
    rule: Rule
    detail: str  # one sentence for a reader
    winner: Winner | None = None  # the measurement behind it; None for "explicit" and "default"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stored config that a rule found and did not take."""

    config: str
    origin: str  # what it was measured on
    reason: str
    broken: bool = False  # it should have been usable: the row itself is at fault


@dataclass(frozen=True, slots=True)
class Step:
    """One rule, and what came of it."""

    rule: Rule
    outcome: Literal["chosen", "nothing usable", "not needed"]
    detail: str
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every rule in the order tried, and the choice they led to."""

    problem: Problem
    device: Device
    workspace_limit: int | None  # bytes
    source: str  # where the snapshot came from
    steps: tuple[Step, ...]
    choice: Choice
    stale: str = ""  # how the winner's toolchain differs from this one; "" if it does not

    @property
    def broken(self) -> tuple[Skipped, ...]:
        """The stored configs met on the way that should have been usable and are not."""
        return tuple(skip for step in self.steps for skip in step.skipped if skip.broken)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        problem, device = problem_record(self.problem), device_record(self.device)
        return {
            "problem": {
                "mode": problem.mode,
                "dtype": problem.dtype,
                "accumulate": problem.accumulate,
                "tokens": self.problem.tokens,
                "token_bucket": problem.token_bucket,
                "hidden": problem.hidden,
                "vocab": problem.vocab,
                "features": list(problem.features),
            },
            "device": {
                "kind": device.kind,
                "name": device.name,
                "capability": device.capability,
                "architecture": device.architecture,
                "sm_count": device.sm_count,
                "shared_memory_per_block": device.shared_memory_per_block,
            },
            "workspace_limit": self.workspace_limit,
            "source": self.source,
            "config": self.choice.config.to_dict(),
            "rule": self.choice.rule,
            "detail": self.choice.detail,
            "stale": self.stale,
            "steps": [
                {
                    "rule": step.rule,
                    "outcome": step.outcome,
                    "detail": step.detail,
                    "skipped": [
                        {
                            "config": skip.config,
                            "origin": skip.origin,
                            "reason": skip.reason,
                            "broken": skip.broken,
                        }
                        for skip in step.skipped
                    ],
                }
                for step in self.steps
            ],
        }

    def to_text(self, *, skipped_per_rule: int = 3) -> str:
        """For a terminal; of each rule's skipped configs the first few."""
        problem, device = self.problem, self.device
        limit = "none" if self.workspace_limit is None else f"{self.workspace_limit:,} bytes"
        features = ", ".join(problem.features) or "none"
        units = "SMs" if device.kind == "cuda" else "threads"
        lines = [
            f"problem   N={problem.tokens} (bucket {problem.bucket}) D={problem.hidden}"
            f" V={problem.vocab} {problem.dtype} {problem.mode}"
            f" accumulate={problem.accumulate} features: {features}",
            f"device    {device.name} ({device.architecture}, {device.sm_count} {units})",
            f"workspace limit: {limit}",
            f"snapshot  {self.source}",
            f"config    {self.choice.config}",
            f"because   {self.choice.rule}: {self.choice.detail}",
        ]
        if self.stale:
            lines.append(f"stale     {self.stale}")
        lines.append("rules:")
        for number, step in enumerate(self.steps, 1):
            lines.append(f"  {number}. {step.rule}: {step.outcome}. {step.detail}".rstrip())
            lines += [
                f"       skipped {skip.config} ({skip.origin}): {skip.reason}"
                for skip in step.skipped[:skipped_per_rule]
            ]
            if (more := len(step.skipped) - skipped_per_rule) > 0:
                lines.append(f"       and {more} more")
        return "\n".join(lines)
