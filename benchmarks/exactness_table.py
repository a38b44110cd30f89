#!/usr/bin/env python
"""Tables of what ``exactness.py`` measured; as a program, the short one of docs/accuracy.md.

    python benchmarks/exactness_table.py docs/accuracy.md exactness-h200.json --place gpu

replaces what stands between ``<!-- exactness gpu -->`` and ``<!-- end -->`` in the page.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OUTPUTS = {"token_loss": "token losses", "dx": "dX", "dw": "dW", "db": "db"}
PLAINS = {"plain": "plain PyTorch", "plain, float32 logits": "plain PyTorch with float32 logits"}
COMPARED = ("strategies", "tiles")
"""The kinds of case that compare everybody on one problem."""


def markdown(document: dict[str, Any]) -> str:
    """Everything a reader needs: where it was measured, what, and what is missing."""
    results = document["results"]
    parts = [
        _provenance(document["environment"]),
        *(_ratios(results, name, title) for name, title in PLAINS.items()),
        *(_by_strategy(results, kind) for kind in COMPARED),
        _chunks(results),
        _upstream(results),
        _left_out(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _provenance(environment: dict[str, Any]) -> str:
    device, versions = environment["device"], environment["versions"]
    where = "a CPU" if device["kind"] == "cpu" else "a GPU"
    return (
        f"Measured on {where}: {device['name']}, torch {versions['torch']}, "
        f"flce-tune {versions['flce-tune']}, {environment['date'][:10]}, by\n\n"
        f"    {environment['command']}\n\n"
        "Errors are ‖value − truth‖ / ‖truth‖ against float64 on the same inputs."
    )


def _ratios(results: Sequence[dict[str, Any]], plain: str, title: str) -> str:
    lines = [
        f"### Error of ours / error of {title}",
        "",
        "Each cell is the largest of all strategies that ran and both kinds of data. "
        "The mean loss is one number, so its errors are shown, not their ratio.",
        "",
        _row(["dtype", "V", *OUTPUTS.values(), "mean loss, ours", "mean loss, plain"]),
        _rule(4 + len(OUTPUTS)),
    ]
    for dtype, vocab, group in _groups(results):
        pairs = _pairs(group, plain)
        if not pairs:
            continue
        cells = _largest_ratios(pairs)
        for side in (0, 1):
            cells.append(f"{max(pair[side]['loss'] for pair in pairs):.1e}")
        lines.append(_row([dtype, str(vocab), *cells]))
    return "\n".join(lines) if len(lines) > 6 else ""


def short_table(documents: Sequence[dict[str, Any]]) -> str:
    """Ratios to plain PyTorch's errors, with where they were measured; later documents win."""
    rows: dict[tuple[str, int], list[str]] = {}
    sources = []
    for document in documents:
        sources.append(_source(document["environment"]))
        for dtype, vocab, group in _groups(document["results"]):
            if pairs := _pairs(group, "plain"):
                rows[dtype, vocab] = _largest_ratios(pairs)
    lines = [_row(["dtype", "V", *OUTPUTS.values()]), _rule(2 + len(OUTPUTS))]
    lines += [_row([dtype, str(vocab), *rows[dtype, vocab]]) for dtype, vocab in sorted(rows)]
    return "\n".join([*dict.fromkeys(sources), "", *lines])


def replace_place(page: str, place: str, text: str) -> str:
    """Put the text where the page says that it belongs."""
    start, end = f"<!-- exactness {place} -->\n", "\n<!-- end -->"
    before, found, after = page.partition(start)
    if not found or end not in after:
        raise ValueError(f"the page has no place {start.strip()} ... {end.strip()}")
    return before + start + "\n" + text + "\n" + after[after.index(end) :]


def _source(environment: dict[str, Any]) -> str:
    device, versions = environment["device"], environment["versions"]
    triton = f", Triton {versions['triton']}" if device["kind"] == "cuda" else ""
    return f"{device['name']}, torch {versions['torch']}{triton}, {environment['date'][:10]}."


def _pairs(
    group: Sequence[dict[str, Any]], plain: str
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Errors of ours, each with plain PyTorch's on the same problem."""
    return [
        (row["errors"], plain_errors)
        for result in group
        if (plain_errors := _errors_of(result, plain)) is not None
        for row in _ours(result)
    ]


def _largest_ratios(pairs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> list[str]:
    return [f"{max(mine[output] / base[output] for mine, base in pairs):.2f}" for output in OUTPUTS]


def _by_strategy(results: Sequence[dict[str, Any]], kind: str) -> str:
    """dX and dW of each strategy, at the largest vocabulary that was measured."""
    largest = max((r["vocab"] for r in results if r["kind"] == kind and _ours(r)), default=0)
    chosen = [r for r in results if r["kind"] == kind and r["vocab"] == largest]
    products = "library products" if kind == "strategies" else "tiles"
    lines = [
        f"### Errors by strategy, {products}, V = {largest}",
        "",
        _row(["dtype", "data", "", *OUTPUTS.values()]),
        _rule(3 + len(OUTPUTS)),
    ]
    for result in chosen:
        for row in result["rows"]:
            if "errors" in row:
                cells = [f"{row['errors'][output]:.2e}" for output in OUTPUTS]
                lines.append(_row([result["dtype"], result["data"], row["name"], *cells]))
    return "\n".join(lines) if chosen else ""


def _chunks(results: Sequence[dict[str, Any]]) -> str:
    chosen = [r for r in results if r["kind"] == "chunks"]
    counts = sorted({row["chunks"] for r in chosen for row in r["rows"] if "chunks" in row})
    lines = [
        "### Error of dW against the number of chunks",
        "",
        _row(["data", "dtype", "V", "N", "accumulate", "plain", *map(str, counts)]),
        _rule(6 + len(counts)),
    ]
    for result in chosen:
        plain = _errors_of(result, "plain")
        for accumulate in ("fp32", "weight_dtype"):
            found = {
                row["chunks"]: row["errors"]["dw"]
                for row in _ours(result)
                if row["accumulate"] == accumulate
            }
            if plain is None or not found:
                continue
            cells = [f"{found[count]:.2e}" if count in found else "-" for count in counts]
            place = [result["data"], result["dtype"], str(result["vocab"]), str(result["tokens"])]
            lines.append(_row([*place, accumulate, f"{plain['dw']:.2e}", *cells]))
    return "\n".join(lines) if len(lines) > 4 else ""


def _upstream(results: Sequence[dict[str, Any]]) -> str:
    chosen = [r for r in results if r["kind"] == "upstream"]
    lines = [
        "### A factor on the loss",
        "",
        "Root mean square over divisors that are spread over an octave.",
        "",
        _row(["data", "dtype", "V", "", "dX", "dW", "db"]),
        _rule(7),
    ]
    for result in chosen:
        by_name: dict[str, list[dict[str, float]]] = {}
        for row in result["rows"]:
            if "errors" in row:
                by_name.setdefault(row["name"], []).append(row["errors"])
        for name, errors in by_name.items():
            cells = [f"{_rms([e[output] for e in errors]):.2e}" for output in ("dx", "dw", "db")]
            place = [result["data"], result["dtype"], str(result["vocab"])]
            lines.append(_row([*place, name, *cells]))
    return "\n".join(lines) if chosen else ""


def _rms(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5


def _left_out(document: dict[str, Any]) -> str:
    """Whole cases by kind, to keep it short; single rows one by one."""
    cases = Counter((entry["case"].split()[0], entry["reason"]) for entry in document["left_out"])
    reasons = [f"- {kind}, {count} cases: {reason}" for (kind, reason), count in cases.items()]
    for r in document["results"]:
        for row in r["rows"]:
            if "reason" in row:
                place = f"{r['kind']} V = {r['vocab']} {r['dtype']} {r['data']}"
                count = f", {row['chunks']} chunks" if "chunks" in row else ""
                reasons.append(f"- {place}, {row['name']}{count}: {row['reason']}")
    return "\n".join(["### Left out", "", *reasons]) if reasons else ""


def _groups(
    results: Iterable[dict[str, Any]],
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        if result["kind"] in COMPARED:
            groups.setdefault((result["dtype"], result["vocab"]), []).append(result)
    return [(*key, groups[key]) for key in sorted(groups)]


def _errors_of(result: dict[str, Any], name: str) -> dict[str, float] | None:
    return next((row.get("errors") for row in result["rows"] if row["name"] == name), None)


def _ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if "config" in row and "errors" in row]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Put the table of measured ratios into a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("documents", type=Path, nargs="+", help="JSON of exactness.py")
    parser.add_argument("--place", choices=("cpu", "gpu"), required=True)
    arguments = parser.parse_args(argv)
    text = short_table([json.loads(path.read_text()) for path in arguments.documents])
    arguments.page.write_text(replace_place(arguments.page.read_text(), arguments.place, text))


if __name__ == "__main__":
    main()
