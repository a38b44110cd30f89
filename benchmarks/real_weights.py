#!/usr/bin/env python
"""Fine-tune a trained model on real text with and without the patch: losses, memory, step time.

    python benchmarks/real_weights.py --gguf gemma-3-270m-q4_k_m.gguf

The weights come from a GGUF file, whole or in parts that are joined in the order given, or from a
folder (--model). Both runs start from the same weights and see the same batches; the text is what
``corpus.py`` finds on the machine. Memory is the peak above what is held before the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from corpus import collect
from environment import default_device, describe, write_json
from measure import GIB, release
from torch import Tensor

from flce_tune.integrations.transformers import applied
from flce_tune.kernels.problem import DTYPES

SCHEMA = "flce-tune-real-weights/1"


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer; nothing is looked up in a hub."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = DTYPES[arguments.dtype]
    if arguments.model is not None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "model.gguf")
        with whole.open("wb") as out:
            for part in arguments.gguf:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, out)
        source = {"pretrained_model_name_or_path": folder, "gguf_file": whole.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(**source)


def batches(tokenizer: Any, steps: int, sequences: int, length: int) -> Tensor:
    """Consecutive windows of the text: ids [steps, sequences, length]."""
    needed = steps * sequences * length
    text = collect(12 * needed).text  # a token is a few bytes
    pieces = [text[start : start + 20_000] for start in range(0, len(text), 20_000)]
    ids = [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False).input_ids]
    if len(ids) < needed:
        raise SystemExit(f"the text has {len(ids)} tokens, {needed} are needed: fewer --steps")
    return torch.tensor(ids[:needed]).view(steps, sequences, length)


class PeakMemory:
    """Peak of allocated bytes (GPU) or of resident memory (CPU) since it was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.held = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self.held = _resident("VmRSS")

    def above(self) -> int:
        """Bytes above what was held at first."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.held
        return _resident("VmHWM") - self.held


def _resident(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(entry + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {entry}")


def fine_tune(
    model: Any, data: Tensor, learning_rate: float, patch: contextlib.AbstractContextManager[Any]
) -> dict[str, Any]:
    """Train from the model's present weights; losses, step times and peak memory, JSON-ready."""
    device = data.device
    optimiser = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.0)
    model.train()
    losses, times = [], []
    peak = PeakMemory(device)
    with patch:
        for ids in data:
            begin = time.perf_counter()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            losses.append(loss.item())  # waits for the step, so the clock is right
            times.append((time.perf_counter() - begin) * 1e3)
            del loss
    return {
        "losses": losses,
        "median_step_ms": statistics.median(times[1:] or times),
        "step_ms": times,
        "peak_bytes_above_model": peak.above(),
    }


@contextlib.contextmanager
def restored(model: Any, weights: dict[str, Tensor]) -> Iterator[None]:
    """Put the weights back at the end."""
    yield
    model.load_state_dict(weights)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| | ms a step | peak above the model, GiB | first loss | last loss |"]
    lines.append("|---|---|---|---|---|")
    for name, run in runs.items():
        memory, losses = run["peak_bytes_above_model"] / GIB, run["losses"]
        lines.append(
            f"| {name} | {run['median_step_ms']:.0f} | {memory:.2f} | {losses[0]:.4f} |"
            f" {losses[-1]:.4f} |"
        )
    return "\n".join(lines) + "\n"


def add_weights(parser: argparse.ArgumentParser) -> Any:
    """Where ``load`` finds a model; the group can take what stands for one."""
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--gguf", type=Path, nargs="+", help="a file, or its parts in order")
    weights.add_argument("--model", type=Path, help="a folder written by save_pretrained")
    return weights


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add_weights(parser)
    add("--steps", type=int, default=8)
    add("--sequences", type=int, default=2)
    add("--length", type=int, default=256)
    add("--learning-rate", type=float, default=1e-3)
    add("--tile-skip", type=float, default=None, help="a third run with this tolerance")
    add("--dtype", choices=sorted(DTYPES), default="float32")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("real_weights.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = arguments.device or default_device()
    model, tokenizer = load(arguments)
    model.to(device)
    given = arguments
    data = batches(tokenizer, given.steps, given.sequences, given.length).to(device)
    weights = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    runs = {}
    patches = {"transformers": contextlib.nullcontext(), "with apply": applied(model)}
    if (tolerance := arguments.tile_skip) is not None:
        patches[f"with apply, tile_skip={tolerance:g}"] = applied(model, tile_skip=tolerance)
    for name, patch in patches.items():
        with restored(model, weights):
            runs[name] = fine_tune(model, data, arguments.learning_rate, patch)
        print(f"{name}: {runs[name]['median_step_ms']:.0f} ms a step", file=sys.stderr, flush=True)
    first, *others = (run["losses"] for run in runs.values())
    document = {
        "schema": SCHEMA,
        "environment": describe(device),
        "model": {
            "name": [path.name for path in arguments.gguf or [arguments.model]],
            "class": type(model).__name__,
            "vocab": model.config.vocab_size,
            "hidden": model.config.hidden_size,
            "dtype": arguments.dtype,
        },
        "tokens_per_step": arguments.sequences * arguments.length,
        "largest_loss_difference": max(
            abs(a - b) for other in others for a, b in zip(first, other, strict=True)
        ),
        "runs": runs,
    }
    write_json(arguments.out, document)
    arguments.out.with_suffix(".md").write_text(table(runs))
    print(table(runs), end="")
    print(f"largest difference of losses: {document['largest_loss_difference']:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
