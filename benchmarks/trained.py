#!/usr/bin/env python
"""``tile_skip`` on the logits of a trained model: what it keeps, what it costs, what it changes.

    python benchmarks/trained.py --gguf gemma-3-270m-q4_k_m.gguf --tokens 4096

The inputs are the model's last hidden states over real text (``corpus.py``), its head and the next
tokens. ``--repeat-hidden k`` puts k copies of both side by side, W divided by k: the same logits,
and so the same tiles, at k times the hidden size. ``--save`` writes the inputs in a few bits each
(``states.py``), for ``--states`` to read elsewhere. Times are interleaved with the dense GEMMs' and
with the dispatcher's choice; errors are against float32. Rare rows are those of the less probable
half of the vocabulary that are no token's label.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import Inputs, Result, Shape, fp32_truth, make_inputs
from comparison import Comparison, Contestant, forward_backward
from environment import default_device, describe, write_json
from implementations import Implementation, ours, ours_from_configs
from measure import GIB, Deadline, release
from real_weights import add_weights, batches, load
from states import pack, unpack
from torch import Tensor

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import DTYPES, Problem, describe_device
from flce_tune.kernels.skipping import kernels_of

SCHEMA = "flce-tune-trained/1"
SAVED_PARTS = 2


def trained_inputs(arguments: argparse.Namespace, device: torch.device) -> Inputs:
    """Hidden states, head and labels, with as many copies of the hidden size as asked for."""
    dtype, copies = DTYPES[arguments.compute], arguments.repeat_hidden
    if arguments.states:
        inputs = unpack(arguments.states, dtype, device)
        some = slice(arguments.tokens)
        inputs = Inputs(inputs.x[some], inputs.weight, inputs.target[some])
    else:
        inputs = states(arguments, device)
    if arguments.save:
        for path in pack(inputs, arguments.save, SAVED_PARTS):
            print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB", file=sys.stderr)
    return Inputs(
        x=inputs.x.detach().to(dtype).repeat(1, copies).requires_grad_(),
        weight=(inputs.weight.detach() / copies).to(dtype).repeat(1, copies).requires_grad_(),
        target=inputs.target,
    )


@torch.no_grad()
def states(arguments: argparse.Namespace, device: torch.device) -> Inputs:
    """Hidden states of a model over text, its head, and the labels."""
    model, tokenizer = load(arguments)
    tokens = arguments.tokens or 4096
    ids = batches(tokenizer, 1, -(-tokens // 512), 513)[0].to(device)
    model.to(device).eval()
    hidden = [model.model(part[:, :-1]).last_hidden_state for part in ids.split(4)]
    x = torch.cat(hidden).flatten(0, 1)[:tokens]
    head = model.get_output_embeddings().weight
    return Inputs(x, head, ids[:, 1:].flatten()[:tokens].clone())


def skipping(
    shape: Shape, dtype: str, device: torch.device, tolerances: Sequence[float]
) -> list[Implementation]:
    """The default tiles with each tolerance."""
    problem = Problem(shape.tokens, shape.hidden, shape.vocab, dtype)
    configs = [
        strategies.completed(Config("tile_skip", tolerance=t), problem, describe_device(device))
        for t in tolerances
    ]
    return ours_from_configs(configs, "fp32")


class Kept:
    """The share of tiles that calls inside the block keep."""

    def __init__(self, inputs: Inputs) -> None:
        self.share = float("nan")
        self._kernels: Any = kernels_of(inputs.x)
        self._decide = self._kernels.tile_sums

    def __enter__(self) -> Kept:
        def decide(*arguments: Any) -> Tensor:
            keep: Tensor = self._decide(*arguments)
            self.share = float(keep.float().mean())
            return keep

        self._kernels.tile_sums = decide
        return self

    def __exit__(self, *_: object) -> None:
        self._kernels.tile_sums = self._decide


@torch.no_grad()
def rare_rows(inputs: Inputs) -> Tensor:  # [V] bool
    """The less probable half of the vocabulary, without the labels."""
    total = torch.zeros(len(inputs.weight), device=inputs.x.device)
    for x in inputs.x.split(512):
        total += torch.softmax((x @ inputs.weight.T).float(), 1).sum(0)
    rare = torch.zeros_like(total, dtype=torch.bool)
    rare[torch.argsort(total)[: len(total) // 2]] = True
    rare[inputs.target] = False
    return rare


def look_at(contestant: Contestant, inputs: Inputs, truth: Result, rare: Tensor) -> dict[str, Any]:
    """What one tolerance keeps, and what it makes of rare rows."""
    assert contestant.loss is not None
    with Kept(inputs) as kept:
        result = forward_backward(contestant.loss, inputs)
    ours, exact = result.dw[rare].float().flatten(), truth.dw[rare].flatten()
    return {
        "kept": kept.share,
        "rare_rows": int(rare.sum()),
        "rare_norm": float(ours.norm() / exact.norm()),
        "rare_cosine": float(ours @ exact / (ours.norm() * exact.norm())),
        "rare_share_of_dw": float(exact.norm() / truth.dw.norm()),
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| | kept | × floor | GiB | dX error | dW error | rare rows' norm, cosine |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in found["implementations"]:
        if row["status"] != "ok":
            lines.append(f"| {row['name']} | {row['status']}: {row['reason']} | | | | | |")
            continue
        kept = f"{row['kept']:.3f}" if "kept" in row else ""
        rare = f"{row['rare_norm']:.2f}, {row['rare_cosine']:.2f}" if "kept" in row else ""
        memory = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / GIB:.2f}"
        floor = f"{row['times_floor']:.3f}" if row.get("times_floor") else ""
        errors = row["errors"]
        lines.append(
            f"| {row['name']} | {kept} | {floor} | {memory} | {errors['dx']:.1e} |"
            f" {errors['dw']:.1e} | {rare} |"
        )
    return "\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    source = add_weights(parser)
    source.add_argument("--untrained", help="N,D,V of flat logits instead of a model's")
    source.add_argument("--states", type=Path, nargs="+", help="what --save wrote")
    add("--save", type=Path, help="folder to write the inputs to")
    add("--tokens", type=int, help="of the text (4096), or of --states (all of them)")
    add("--repeat-hidden", type=int, default=1, help="copies of the hidden size, side by side")
    add("--tolerances", default="1e-3,3e-4,1e-4,3e-5")
    add("--rounds", type=int, default=9)
    add("--time-budget", type=float, default=240.0)
    add("--dtype", choices=sorted(DTYPES), default="bfloat16", help="the model's")
    add("--compute", choices=sorted(DTYPES), default="bfloat16", help="the comparison's")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("trained.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device, deadline = arguments.device or default_device(), Deadline(arguments.time_budget)
    dtype = DTYPES[arguments.compute]
    begin = time.perf_counter()
    if arguments.untrained:
        inputs = make_inputs(Shape.parse(arguments.untrained), "flat", dtype, device)
    else:
        inputs = trained_inputs(arguments, device)
    (tokens, hidden), vocab = inputs.x.shape, len(inputs.weight)
    shape = Shape(tokens, hidden, vocab)
    print(f"{shape}, made in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    tolerances = [float(text) for text in arguments.tolerances.split(",")]
    ours_exact = ours(shape, dtype, device, [None], "fp32")
    full = ours_from_configs([Config("full")], "fp32")
    contestants = [
        Contestant(i)
        for i in (*ours_exact, *full, *skipping(shape, arguments.compute, device, tolerances))
    ]
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    comparison = Comparison(device, dtype, arguments.rounds, arguments.time_budget / 4, log)
    data = "flat" if arguments.untrained else "a trained model's"
    found = comparison.run_on(inputs, shape, data, contestants, deadline)
    release(device)
    truth, rare = fp32_truth(inputs), rare_rows(inputs)
    for contestant, row in zip(contestants, found["implementations"], strict=True):
        if contestant.loss is not None and row["config"]["strategy"] == "tile_skip":
            row |= look_at(contestant, inputs, truth, rare)
    found |= {
        "bf16_rounding": {
            name: float((g.to(torch.bfloat16).float() - g).norm() / g.norm())
            for name, g in (("dx", truth.dx), ("dw", truth.dw))
        },
        "repeat_hidden": arguments.repeat_hidden,
    }
    write_json(arguments.out, {"schema": SCHEMA, "environment": describe(device), **found})
    print(table(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
