#!/usr/bin/env python
"""Errors of the loss and its gradients against a float64 truth, beside plain PyTorch's.

Four kinds of case, on the same inputs for everybody:

- ``upstream``: what a factor on the loss does to gradients that are already rounded;
- ``strategies``: library products in every strategy, per dtype, vocabulary and kind of data;
- ``chunks``: ``chunked`` with 1 to 1024 chunks, in both accumulators;
- ``tiles``: on a GPU, our own products in every strategy. Last, because they take long to compile.

An error is ‖value - truth‖ / ‖truth‖ over all elements. Factors on the loss are divided out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cases import DATA_KINDS, Shape
from environment import default_device, describe, write_json
from exactness_runs import (
    Candidate,
    Case,
    float64_truth,
    make_case,
    ours,
    plain,
    relative_errors,
)
from exactness_table import markdown
from measure import Deadline, release

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Accumulate, Problem, describe_device
from flce_tune.kernels.strategies.atomic import article_config
from flce_tune.kernels.strategies.common import gemm_bases

SCHEMA = "flce-tune-exactness/1"
VOCABULARIES = (1000, 32777, 50257, 128256, 256000)
HIDDEN = {"cpu": 64, "cuda": 256}
TILED = (128256, 32777)  # the vocabularies of tiles: even, then ragged; others come afterwards
DEFAULT_DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("upstream", "strategies", "chunks", "tiles")
CHUNK_COUNTS = (1, 4, 16, 64, 256, 1024)
DIVISORS = tuple(2 ** ((i + 0.5) / 16) for i in range(16))
"""Times N: what the mean divides by. The label's entry of G is about 1/divisor in every row, so
its rounding error is one draw for a whole run; these are spread over an octave."""


# what runs where


def candidates(case: Case, device: torch.device) -> Iterator[Candidate]:
    """Plain PyTorch, then ours, some of which may be rejected here."""
    ask = (_of_upstream, _of_strategies, _of_chunks, _of_tiles)
    yield from dict(zip(KINDS, ask, strict=True))[case.kind](case, device)


def _of_upstream(case: Case, device: torch.device) -> Iterator[Candidate]:
    config = Config("chunked", chunk=-(-case.shape.tokens // 4))
    for s in DIVISORS:
        for candidate in (
            plain("plain, loss", divided=s),
            plain("plain, loss / 3", divided=s, upstream=1 / 3),
            plain("plain, float32 logits, loss", torch.float32, divided=s),
            plain("plain, float32 logits, loss / 3", torch.float32, divided=s, upstream=1 / 3),
            ours("chunked, loss", config, divided=s),
            ours("chunked, loss / 4", config, divided=s, upstream=1 / 4),
            ours("chunked, loss / 3", config, divided=s, upstream=1 / 3),
            ours("chunked, divisor 3 times as large", config, divided=3 * s),
        ):
            yield replace(candidate, details={**candidate.details, "divisor": s})


def _of_strategies(case: Case, device: torch.device) -> Iterator[Candidate]:
    yield plain("plain")
    if case.dtype != "float32":
        yield plain("plain, float32 logits", torch.float32)
    for config in _library(case):
        yield ours(config.strategy, config)
    if device.type == "cuda":
        yield ours("atomic", article_config())


def _library(case: Case) -> list[Config]:
    return [
        Config("chunked", chunk=-(-case.shape.tokens // 16)),
        Config("full"),
        Config("recompute", slab=min(16384, -(-case.shape.vocab // 4))),
    ]


def _of_tiles(case: Case, device: torch.device) -> Iterator[Candidate]:
    yield plain("plain")
    yield plain("plain, float32 logits", torch.float32)
    problem, described = _problem(case), describe_device(device)
    tiles = gemm_bases(problem, described)[-1]
    configs = _library(case)
    known = {"atomic", *(config.strategy for config in configs)}
    others = [strategies.get(name) for name in strategies.names() if name not in known]
    configs += [strategy.default(problem, described) for strategy in others]
    # Those scheduled by hand keep no float32 sums.
    dx, dw = (tile and tile.compiled for tile in (tiles.dx, tiles.dw))
    tiled = [replace(c, logits=tiles.logits, dx=dx, dw=dw) for c in configs]
    for config in tiled:
        yield ours(f"{config.strategy}, tiles", config)
    if case.dtype == "bfloat16":
        for config in (tiled[0], tiled[2]):
            split = replace(config, dx=tiles.dx, dw=tiles.dw, accumulator="split24")
            yield ours(f"{config.strategy}, tiles, split24", split)


def _of_chunks(case: Case, device: torch.device) -> Iterator[Candidate]:
    yield plain("plain")
    for count in CHUNK_COUNTS:
        if case.shape.tokens % count:
            continue
        config = Config("chunked", chunk=case.shape.tokens // count)
        runs = [ours("chunked", config)]
        if case.dtype == "bfloat16":  # the others sum in float32 whatever is asked for
            rounded = replace(config, accumulator="weight_dtype")
            runs.append(ours("chunked", rounded, "weight_dtype"))
        for run in runs:
            yield replace(run, details={**run.details, "chunks": count})


def _problem(case: Case, accumulate: Accumulate = "fp32") -> Problem:
    sizes = (case.shape.tokens, case.shape.hidden, case.shape.vocab)
    return Problem(*sizes, case.dtype, accumulate=accumulate, features=("bias",))


def default_shapes(device: torch.device) -> list[Shape]:
    """The vocabularies that are published, at a hidden size that takes minutes at most."""
    return [Shape(1024, HIDDEN[device.type], vocab) for vocab in VOCABULARIES]


def plan(kinds: Sequence[str], shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Case]:
    """Every case, the claims first and the longest last; dtypes in the order they are given."""
    ordered = sorted(shapes, key=lambda shape: shape.vocab)
    halves = [dtype for dtype in dtypes if dtype != "float32"]
    cases = [Case("upstream", ordered[0], d, k) for d in halves for k in DATA_KINDS]
    cases += [Case("strategies", s, d, k) for s in ordered for d in dtypes for k in DATA_KINDS]
    cases += [Case("chunks", s, d, k) for d in dtypes for k in DATA_KINDS for s in ordered]
    places = {vocab: place for place, vocab in enumerate(TILED)}
    ordered = sorted(ordered, key=lambda shape: places.get(shape.vocab, len(TILED)))
    cases += [Case("tiles", s, d, k) for d in halves for s in ordered for k in DATA_KINDS]
    return [case for case in cases if case.kind in kinds]


# measuring


def measure(case: Case, device: torch.device, deadline: Deadline) -> dict[str, Any]:
    """All candidates of one case; those that did not run come with their reason."""
    inputs, bias = make_case(case, device)
    truth = float64_truth(inputs, bias)
    rows: list[dict[str, Any]] = []
    for candidate in candidates(case, device):
        row = {"name": candidate.name, **candidate.details}
        if reason := _unable(case, candidate, device, deadline):
            row["reason"] = reason
        else:
            row["errors"] = relative_errors(candidate.run(inputs, bias), truth, candidate.factor)
        rows.append(row)
    release(device)
    return {
        "kind": case.kind,
        **asdict(case.shape),
        "dtype": case.dtype,
        "data": case.data,
        "mean_loss": float(truth["loss"]),
        "rows": rows,
    }


def _unable(
    case: Case, candidate: Candidate, device: torch.device, deadline: Deadline
) -> str | None:
    if deadline.remaining <= 0:
        return "no time left"
    if "config" not in candidate.details:
        return None
    problem = _problem(case, candidate.details["accumulate"])
    config = Config.from_dict(candidate.details["config"])
    return strategies.reject(config, problem, describe_device(device))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    add("--shapes", type=Shape.parse, nargs="+", default=None, metavar="N,D,V")
    add("--dtypes", choices=DEFAULT_DTYPES, nargs="+", default=list(DEFAULT_DTYPES))
    add("--time-budget", type=float, default=600.0, help="seconds after which nothing starts")
    add("--device", type=torch.device, default=None)
    add("--out", type=Path, default=Path("exactness.json"), help="the .md lands beside it")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = arguments.device or default_device()
    deadline = Deadline(arguments.time_budget)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": describe(device),
        "results": [],
        "left_out": [],
    }
    kinds = [kind for kind in arguments.kinds if device.type == "cuda" or kind != "tiles"]
    shapes = arguments.shapes or default_shapes(device)
    for case in plan(kinds, shapes, arguments.dtypes):
        title = f"{case.kind} {case.shape} {case.dtype} {case.data}"
        print(f"{title}, {deadline.remaining:.0f} s left", file=sys.stderr, flush=True)
        if deadline.remaining <= 0:
            document["left_out"].append({"case": title, "reason": "no time left"})
        else:
            document["results"].append(measure(case, device, deadline))
        write_json(arguments.out, document)
    text = markdown(json.loads(arguments.out.read_text()))
    arguments.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
