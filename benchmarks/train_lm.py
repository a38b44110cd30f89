#!/usr/bin/env python
"""Train a small language model several times from one seed; only the head's loss differs.

Heads: ``plain`` (PyTorch, bf16 logits), ``flce_tune`` (this project's op, config as dispatched)
and ``plain_fp32`` (PyTorch with the head in full fp32: the truth the other two round from); on
request ``tile_skip``, the op with that option. Parameters and optimiser are fp32; the model runs
under bf16 autocast, on a CPU too. Since training amplifies any rounding, the question is whether
``flce_tune`` stays as close to ``plain_fp32`` as ``plain`` does.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from corpus import Corpus, collect
from environment import default_device, describe, write_json
from language_model import LanguageModel, Size
from measure import GIB, release
from torch import Tensor

from flce_tune import linear_cross_entropy

SCHEMA = "flce-tune-training/1"
Head = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden [N, D], weight [V, D], target [N]


# The heads -------------------------------------------------------------------------------------


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def plain_fp32(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return F.cross_entropy(F.linear(hidden.float(), weight), target)


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = linear_cross_entropy(hidden, weight, target)
    assert isinstance(loss, Tensor), "only the loss was asked for"
    return loss


def skipping(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = linear_cross_entropy(hidden, weight, target, tile_skip=1e-4)
    assert isinstance(loss, Tensor), "only the loss was asked for"
    return loss


HEADS: dict[str, Head] = {
    "plain": plain,
    "flce_tune": fused,
    "plain_fp32": plain_fp32,
    "tile_skip": skipping,
}
COMPARED = ("plain", "flce_tune", "plain_fp32")


# Data ------------------------------------------------------------------------------------------


def encode(corpus: Corpus, vocab: int, kind: str, training_bytes: int) -> Tensor:
    """Tokenise the corpus: ids [tokens] int64 on the CPU.

    ``bpe``: byte-level BPE with ``vocab`` entries, trained on the corpus' first
    ``training_bytes`` characters. ``bytes``: one id per byte, for tests.
    """
    if kind == "bytes":
        return torch.frombuffer(bytearray(corpus.text.encode()), dtype=torch.uint8).long() % vocab
    try:
        from tokenizers import ByteLevelBPETokenizer
    except ImportError:
        raise SystemExit(
            "train_lm.py needs the package tokenizers for a BPE vocabulary: pip install tokenizers"
            " (or --tokenizer bytes for a small trial)"
        ) from None
    tokenizer = ByteLevelBPETokenizer()
    part = corpus.text[:training_bytes]
    pieces = [part[start : start + 100_000] for start in range(0, len(part), 100_000)]
    tokenizer.train_from_iterator(pieces, vocab_size=vocab, show_progress=False)
    text = corpus.text
    batch = [text[start : start + 100_000] for start in range(0, len(text), 100_000)]
    return torch.tensor([i for e in tokenizer.encode_batch(batch) for i in e.ids])


@dataclass(frozen=True)
class Batches:
    """The same windows in the same order for every run."""

    ids: Tensor  # [tokens]
    batch: int
    context: int
    seed: int

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step, each [batch, context]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last = len(self.ids) - self.context - 1
        starts = torch.randint(last, (self.batch, 1), generator=generator)
        windows = self.ids[starts + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]


# Training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on but the head."""

    size: Size
    steps: int
    learning_rate: float
    seed: int
    device: torch.device

    def rate_at(self, step: int) -> float:
        """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(head: Head, recipe: Recipe, batches: Batches) -> dict[str, Any]:
    """Train once; return the loss per step, step time and peak memory, JSON-ready."""
    device = recipe.device
    torch.manual_seed(recipe.seed)
    model = LanguageModel(recipe.size).to(device)
    optimiser = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses, times = [], []
    for step in range(recipe.steps):
        inputs, targets = (part.to(device) for part in batches.at(step))
        begin = time.perf_counter()
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate_at(step)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = model(inputs).flatten(0, 1)
            loss = head(hidden, model.head.weight, targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the step, so the clock below is right
        times.append((time.perf_counter() - begin) * 1e3)
    return {
        "losses": losses,
        "median_step_ms": statistics.median(times),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def differences(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Largest and mean distance of every two loss curves, in nats."""
    rows = []
    for first, second in combinations(runs, 2):
        pairs = zip(runs[first]["losses"], runs[second]["losses"], strict=True)
        gaps = [abs(a - b) for a, b in pairs]
        rows.append({"heads": [first, second], "max": max(gaps), "mean": statistics.fmean(gaps)})
    return rows


def chosen_config(recipe: Recipe, tokens: int) -> dict[str, Any]:
    """What the dispatcher gives the op in these runs."""
    from flce_tune.api import Problem, explain

    problem = Problem(tokens, recipe.size.hidden, recipe.size.vocab, "bfloat16")
    choice = explain(problem, recipe.device).choice
    return {"config": choice.config.to_dict(), "rule": choice.rule, "detail": choice.detail}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add, size = parser.add_argument, Size()
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=32, help="sequences per step")
    add("--context", type=int, default=size.context)
    add("--hidden", type=int, default=size.hidden)
    add("--layers", type=int, default=size.layers)
    add("--vocab", type=int, default=size.vocab)
    add("--learning-rate", type=float, default=1e-3)
    add("--seed", type=int, default=1)
    add("--heads", default=",".join(COMPARED), help=f"of {tuple(HEADS)}, comma-separated")
    add("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    add("--corpus-bytes", type=int, default=24_000_000)
    add("--tokenizer-bytes", type=int, default=12_000_000, help="of the corpus, to train the BPE")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("train_lm.json"))
    arguments = parser.parse_args(argv)
    arguments.heads = arguments.heads.split(",")
    if unknown := sorted(set(arguments.heads) - set(HEADS)):
        parser.error(f"unknown heads {unknown}; known are {', '.join(HEADS)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = arguments.device or default_device()
    size = Size(arguments.vocab, arguments.hidden, arguments.layers, arguments.context)
    recipe = Recipe(size, arguments.steps, arguments.learning_rate, arguments.seed, device)
    corpus = collect(arguments.corpus_bytes)
    begin = time.perf_counter()
    ids = encode(corpus, size.vocab, arguments.tokenizer, arguments.tokenizer_bytes)
    print(
        f"{corpus.files} files, {len(corpus.text):,} characters, {len(ids):,} tokens"
        f" ({time.perf_counter() - begin:.0f} s)",
        flush=True,
    )
    batches = Batches(ids, arguments.batch, size.context, recipe.seed)
    runs: dict[str, dict[str, Any]] = {}
    for name in arguments.heads:
        runs[name] = run = train(HEADS[name], recipe, batches)
        release(device)
        memory = f", peak {run['peak_bytes'] / GIB:.2f} GiB" if run["peak_bytes"] else ""
        print(
            f"{name:<11} loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f},"
            f" {run['median_step_ms']:.1f} ms a step{memory}",
            flush=True,
        )
    gaps = differences(runs)
    for row in gaps:
        print(f"{' vs '.join(row['heads'])}: max {row['max']:.1e}, mean {row['mean']:.1e} nats")
    document = {
        "schema": SCHEMA,
        "environment": describe(device),
        "model": {"vocab": size.vocab, "hidden": size.hidden, "layers": size.layers},
        "training": {
            "steps": recipe.steps,
            "tokens_per_step": arguments.batch * size.context,
            "learning_rate": recipe.learning_rate,
            "seed": recipe.seed,
            "precision": "fp32 parameters and optimiser, bf16 autocast",
        },
        "corpus": {"files": corpus.files, "sha256": corpus.sha256, "tokens": len(ids)},
        "choice": chosen_config(recipe, arguments.batch * size.context),
        "runs": runs,
        "differences": gaps,
    }
    write_json(arguments.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
