"""Sums of products against exact ones: of integers, which any order adds alike, between NaNs."""

from __future__ import annotations

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.numerators import ROW_MULTIPLE, Blocks, Entries, padded
from flce_tune.kernels.products import Sum

SLAB = 256
ROWS = 128  # of a product's tile


class Case:
    """Tokens, hidden size and vocabulary, and random numbers."""

    def __init__(self, shape: tuple[int, int, int], device: str) -> None:
        self.n, self.hidden, self.vocab = shape
        self.device = device
        self.generator = torch.Generator(device).manual_seed(sum(shape))

    def integers(self, *shape: int, largest: int = 3) -> Tensor:
        """Small ones, in bfloat16."""
        some = torch.randint(
            -largest, largest + 1, shape, generator=self.generator, device=self.device
        )
        return some.to(torch.bfloat16)

    def labels(self) -> tuple[Tensor, Tensor]:
        """Label gradients and labels, of which one has many tokens; the first token is ignored."""
        target = torch.randint(
            0, self.vocab, (self.n,), generator=self.generator, device=self.device
        )
        target[::3] = self.vocab // 2
        value = self.integers(self.n).float() / 2
        value[0], target[0] = 0.0, -100
        return value, target

    def output(self, rows: int) -> tuple[Tensor, Tensor]:
        """A NaN matrix [rows, D] between NaNs, and all of them."""
        shape = (rows + 2, self.hidden + 8)
        around = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        return around[1 : rows + 1, : self.hidden], around

    def blocks(self, e: Tensor) -> Blocks:  # [n, V]
        """As a tile of logits leaves them: zero beyond the matrix; NaN in rows that none fills."""
        count = -(-self.vocab // SLAB)
        filled = e.new_full((count, padded(self.n), SLAB), torch.nan)
        filled[:, : -(-self.n // ROWS) * ROWS] = 0
        for i, some in enumerate(e.split(SLAB, 1)):
            filled[i, : self.n, : some.shape[1]] = some
        return Blocks(filled.view(-1, SLAB), self.n, slice(0, self.vocab))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Exactly."""
    return (a.double() @ b.double()).float()


def added(kept: Tensor | None, value: Tensor, accumulator: str) -> Tensor:
    """What a sum keeps of a value more; all of it in split24, whose bits suffice here."""
    total = value if kept is None else kept + value
    return total.bfloat16().float() if accumulator == "weight_dtype" else total


def assert_only(out: Tensor, around: Tensor, expected: Tensor) -> None:
    """Exactly the result, and nothing beyond it."""
    torch.testing.assert_close(out, expected.bfloat16(), rtol=0.0, atol=0.0)
    rows, columns = out.shape
    assert around[0].isnan().all()
    assert around[rows + 1 :].isnan().all()
    assert around[:, columns:].isnan().all()


def check_plain(case: Case, tile: Tile, contraction: str, accumulator: str, parts: int) -> None:
    """Σ G·W or Σ Gᵀ·x."""
    out, around = case.output(case.n if contraction == "v" else case.vocab)
    total = Sum(out, parts, accumulator, tile, contraction)
    kept = None
    for _ in range(parts):
        g = case.integers(case.n, -(-case.vocab // 64) * 64)[:, : case.vocab]
        a = g if contraction == "v" else g.t()
        b = case.integers(a.shape[1], case.hidden)
        total.add(a, b)
        kept = added(kept, product(a, b), accumulator)
    total.result()
    assert_only(out, around, kept)


def check_pieces(case: Case, tile: Tile, accumulator: str) -> None:
    """G·W, whose rows overwrite those of G that belong to the piece before, and one more G·W."""
    n, hidden, ahead = case.n, case.hidden, ROW_MULTIPLE
    storage = torch.full(
        (ahead + padded(n), hidden), torch.nan, dtype=torch.bfloat16, device=case.device
    )
    out, inside = storage[:n], storage[ahead:][:n]
    total, kept = Sum(out, 2, accumulator, tile, "v"), None
    for pieces in ([slice(i, min(i + ahead, n)) for i in range(0, n, ahead)], None):
        g, b = case.integers(n, hidden), case.integers(hidden, hidden)
        kept = added(kept, product(g, b), accumulator)
        if pieces:
            inside.copy_(g)
        total.add(inside if pieces else g, b, pieces)
    torch.testing.assert_close(total.result(), kept.bfloat16(), rtol=0.0, atol=0.0)


def check_dx(case: Case, tile: Tile, accumulator: str, parts: int) -> None:
    """Σ diag(f)·E·W over blocks, and the labels' rows of W."""
    e, weight = case.integers(case.n, case.vocab), case.integers(case.vocab, case.hidden)
    value, target = case.labels()
    factor = torch.exp2(case.integers(case.n, largest=1).float())
    blocks = case.blocks(e)
    some = -(-len(blocks) // parts)
    groups = [blocks.some(i, min(i + some, len(blocks))) for i in range(0, len(blocks), some)]
    out, around = case.output(case.n)
    total = Sum(out, len(groups), accumulator, tile, "v", scaled=True)
    total.add_blocks(groups, weight, factor, Entries.of_dx(value, target, weight, ROWS))
    total.result()
    kept, joined = None, value[:, None] * weight[target.clamp(0)].float()
    for group in groups:
        part = product(e[:, group.columns], weight[group.columns]) * factor[:, None]
        kept = added(kept, part + joined, accumulator)
        joined = torch.zeros_like(joined)
    assert_only(out, around, kept)


def check_dw(case: Case, tile: Tile, accumulator: str, parts: int) -> None:
    """Σ Eᵀ·x over blocks, and the tokens' own rows of x."""
    out, around = case.output(case.vocab)
    total = Sum(out, parts, accumulator, tile, "n")
    kept = None
    for part in range(parts):
        e, x = case.integers(case.n, case.vocab), case.integers(case.n, case.hidden)
        scaled = x.clone()
        x[0], scaled[0] = torch.nan, 0.0  # an ignored token's: nobody may look there
        value, target = case.labels()
        blocks = case.blocks(e)
        groups = [blocks.some(0, 1), blocks.some(1, len(blocks))][: len(blocks)]
        entries = Entries.of_dw(value, target, x, case.vocab, ROWS)
        total.add_transposed(groups, scaled, entries)
        terms = [product(e.t(), scaled), torch.zeros(case.vocab, case.hidden, device=case.device)]
        terms[1].index_add_(0, target[1:], value[1:, None] * x[1:].float())
        if parts == 1:
            terms = [terms[0] + terms[1]]
        for term in terms[:: 1 if part == 0 else -1]:  # each is rounded, in the output's dtype
            kept = added(kept, term, accumulator)
    total.result()
    assert_only(out, around, kept)
