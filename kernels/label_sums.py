"""Room for the labels' entries of a dW written once: their sums, in float32, before its product.

A hand-scheduled product adds one entry to a row, and many tokens may share a label. So each label's
entries are summed first (``triton.entries``), in a row of their own for each entry or for each
column of the launch, whichever are fewer. Where both are many, dW is written in pieces of whole
blocks, one launch after the other, which take turns with the same memory.
"""

from __future__ import annotations

PIECE = 8448
"""Columns of a piece: whole waves of tiles on an H200, see ``strategies.stored.SLABS``."""
PLACE_BYTES = 12
"""Beside the sums, for each column: where its sum is, and whether it has one."""


def piece_columns(tokens: int, slab: int) -> int | None:
    """Columns of dW's pieces, a multiple of ``slab``; None: it need not be cut."""
    piece = max(1, PIECE // slab) * slab
    return piece if tokens > piece else None


def label_sum_bytes(tokens: int, vocab: int, hidden: int, slab: int) -> int:
    """Most bytes of the sums of a piece."""
    columns = min(vocab, piece_columns(tokens, slab) or vocab)
    return 4 * hidden * min(tokens, columns) + PLACE_BYTES * columns
