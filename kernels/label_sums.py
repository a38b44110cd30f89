"""Room for the labels' entries of a dW written once: their sums, in float32, before its product.

A hand-scheduled product adds one entry to a row, and many tokens may share a label. So each label's
entries are summed first (``triton.entries``), in a row of their own for each entry or for each
column of the launch, whichever are fewer. Where both are many, dW is written in pieces of whole
blocks, one launch after the other, which take turns with the same memory.

Either way, what stretches of entries add to a row that begins before them is kept beside, see
``triton.carried``.
"""

from __future__ import annotations

PIECE = 8448
"""Columns of a piece: whole waves of tiles on an H200, see ``strategies.stored.SLABS``."""
PLACE_BYTES = 12
"""Beside the sums, for each column: where its sum is, and whether it has one."""
STRETCH = 64
"""Entries that are added up in one go."""
FEW = 1024
"""Entries that are one stretch."""


def carried_bytes(tokens: int, hidden: int) -> int:
    """Bytes of what stretches add to rows that begin before them, in float32."""
    return 4 * hidden * -(-tokens // STRETCH) if tokens > FEW else 0


def piece_columns(tokens: int, slab: int) -> int | None:
    """Columns of dW's pieces, a multiple of ``slab``; None: it need not be cut."""
    piece = max(1, PIECE // slab) * slab
    return piece if tokens > piece else None


def label_sum_bytes(tokens: int, vocab: int, hidden: int, slab: int) -> int:
    """Most bytes of the sums of a piece."""
    columns = min(vocab, piece_columns(tokens, slab) or vocab)
    return 4 * hidden * min(tokens, columns) + PLACE_BYTES * columns
