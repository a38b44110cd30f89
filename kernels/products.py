"""Products and their accumulation over chunks: dX = G·W, dW = Gᵀ·x.

``Sum`` holds Σ_parts a·b in the form the config asks for and gives the rounded result. A part
may be diag(f)·E·b with numerators E kept in blocks (see ``numerators``).
Reference: plain ``torch.mm`` in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flce_tune.kernels.config import Accumulator, Tile
from flce_tune.kernels.limits import ALIGNMENT
from flce_tune.kernels.numerators import Blocks, Entries


def multiply(
    a: Tensor,  # [m, k], or the transposed view of a [k, m]
    b: Tensor,  # [k, n]
    out: Tensor,  # [m, n]
    tile: Tile | None,
    contraction: str,  # "v" for dX, "n" for dW
) -> None:
    """out = a·b, rounded once."""
    if tile is None or out.dtype != a.dtype:
        _library_product(a, b, out, add=False)
    else:
        from flce_tune.kernels.triton.launch import launch_product

        launch_product(a, b, out, None, tile, contraction, "weight_dtype", False, True)


def some_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows; the tensor itself, which takes the host no time, where these are all."""
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


def row_bytes(columns: int) -> int:
    """Bytes of a row that split24 keeps beside the result: the copy engine wants aligned rows."""
    return -(-columns // ALIGNMENT) * ALIGNMENT


class Sum:
    """Σ of products, exact to the rounding of its accumulator, with one rounding at the end.

    Workspace: nothing for one part, ``weight_dtype`` or a wider ``out``, which is its own
    accumulator; else 4 (``fp32``) or 1 (``split24``) bytes an element. While a hand-scheduled tile
    adds a part, also what ``splits`` and, with entries, ``label_sums`` say.
    """

    def __init__(
        self,
        out: Tensor,  # [m, n], holds the result in the end
        parts: int,
        accumulator: Accumulator,
        tile: Tile | None,
        contraction: str,
        *,
        scaled: bool = False,  # some parts have a row factor
        yielding: bool = False,  # let other kernels in: one program a tile, where there are tiles
    ) -> None:
        self._out, self._parts, self._done = out, parts, 0
        self._tile, self._contraction, self._yielding = tile, contraction, yielding
        self._accumulator: Accumulator = accumulator
        one = parts == 1 and not (scaled and tile is None)  # a library has no epilogue
        if one or out.element_size() != 2:
            self._accumulator = "weight_dtype"
        self._extra: Tensor | None = None
        if self._accumulator == "fp32":
            self._extra = torch.empty_like(out, dtype=torch.float32)
        elif self._accumulator == "split24":
            rows, columns = out.shape
            self._extra = out.new_empty(rows, row_bytes(columns), dtype=torch.uint8)

    @property
    def accumulator(self) -> Tensor | None:
        """[m, n], or more columns, beside the result; None where there is none."""
        return self._extra

    def add(
        self,
        a: Tensor,  # [m, k]
        b: Tensor,  # [k, n]
        pieces: Iterable[slice] | None = None,  # of the m rows, in order
    ) -> None:
        """Add a·b, as one part; piece by piece where the sum overwrites what was read of a."""
        prior, last = self._next_part()
        for rows in pieces or (slice(0, len(a)),):
            some = some_rows(a, rows)
            if self._tile is None:
                _library_product(some, b, some_rows(self._target, rows), add=prior)
                continue
            from flce_tune.kernels.triton.launch import launch_product

            launch_product(
                some, b, *self._rows(rows), self._tile, self._contraction, self._accumulator,
                prior, last, self._yielding,
            )  # fmt: skip

    def add_blocks(
        self,
        stored: Sequence[Blocks],  # A [m, v] each, of some columns of the vocabulary
        b: Tensor,  # [V, n]
        factor: Tensor | None = None,  # [m]
        entries: Entries | None = None,
    ) -> None:
        """Add diag(factor)·A·b[columns], each as one part, and the entries.

        With a factor they must be the first parts. Only tiles can add entries.
        """
        if factor is not None and self._done:
            raise RuntimeError("a library product can be scaled only with all before it")
        for blocks in stored:
            prior, last = self._next_part()
            if self._tile is not None:
                part = some_rows(b, blocks.columns)
                self._launch(blocks, part, slice(0, len(self._out)), factor, entries, prior, last)
                entries = None
                continue
            for index, (columns, a) in enumerate(blocks.parts()):
                _library_product(a, b[columns], self._target, add=prior or index > 0)
        if factor is not None and self._tile is None:
            self._target.mul_(factor[:, None])

    def add_transposed(
        self,
        groups: Sequence[Blocks],  # A [k, v] each, disjoint columns of the vocabulary
        b: Tensor,  # [k, n]
        entries: Entries | None = None,
    ) -> None:
        """Add Aᵀ·b and the entries to the rows of each group's columns, in order, as one part.

        Only tiles can add entries.
        """
        prior, last = self._next_part()
        for blocks in groups:
            if self._tile is not None:
                self._launch(blocks, b, blocks.columns, None, entries, prior, last)
                continue
            for columns, a in blocks.parts():
                _library_product(a.t(), b, self._target[columns], add=prior)

    def result(self) -> Tensor:
        """Return the sum, rounded to the result's dtype."""
        if self._done != self._parts:
            raise RuntimeError(f"{self._done} of {self._parts} parts were added")
        if self._target is not self._out:
            self._out.copy_(self._target)
        return self._out

    def _next_part(self) -> tuple[bool, bool]:
        """Whether there were parts before this one, and whether it is the last."""
        self._done += 1
        return self._done > 1, self._done == self._parts

    @property
    def _target(self) -> Tensor:
        """Where the sum is: tiles leave the last one in ``out``, libraries in the accumulator."""
        return self._out if self._extra is None or self._tile is not None else self._extra

    def _rows(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Some rows of the result, and of what is kept beside it."""
        extra = None if self._extra is None else some_rows(self._extra, rows)
        return some_rows(self._out, rows), extra

    def _launch(
        self,
        blocks: Blocks,
        b: Tensor,
        rows: slice,
        factor: Tensor | None,
        entries: Entries | None,
        prior: bool,
        last: bool,
    ) -> None:
        from flce_tune.kernels.triton.launch import launch_block_product

        assert self._tile is not None
        launch_block_product(
            blocks, b, *self._rows(rows), factor, entries, self._tile, self._contraction,
            self._accumulator, prior, last, self._yielding,
        )  # fmt: skip


def _library_product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    if a.device.type == "cuda":
        if out.dtype == a.dtype:
            torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        elif add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif out.dtype == a.dtype:
        if a.dtype == torch.bfloat16 and a.stride(0) > a.shape[1] and a.stride(1) == 1:
            # With AMX, torch 2.13 multiplies what follows a row by zero: a NaN there gets in.
            a = a.contiguous()
        out.addmm_(a, b, beta=1.0 if add else 0.0)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=1.0 if add else 0.0)
