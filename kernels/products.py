"""Products and their accumulation over chunks: dX = G·W, dW = Gᵀ·x.

``Sum`` holds Σ_parts a·b in the form the config asks for and gives the rounded result. A part
may be diag(f)·E·b with numerators E kept in blocks (see ``numerators``).
Reference: plain ``torch.mm`` in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_tune.kernels.config import Accumulator, Tile
from flce_tune.kernels.numerators import Blocks


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
        _tiled_product(a, b, out, None, tile, contraction, "weight_dtype", False, True)


class Sum:
    """Σ of products, exact to the rounding of its accumulator, with one rounding at the end.

    Workspace: nothing for one part or ``weight_dtype``; else 4 (``fp32``) or 1 (``split24``)
    bytes an element.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,  # of the result
        device: torch.device,
        parts: int,
        accumulator: Accumulator,
        tile: Tile | None,
        contraction: str,
        *,
        scaled: bool = False,  # some parts have a row factor
    ) -> None:
        self._parts, self._done = parts, 0
        self._tile, self._contraction = tile, contraction
        self._accumulator: Accumulator = accumulator if dtype.itemsize == 2 else "weight_dtype"
        if parts == 1 and not (scaled and tile is None):  # a library product has no epilogue
            self._accumulator = "weight_dtype"
        self._extra: Tensor | None = None
        self._out: Tensor | None = None
        if self._accumulator != "weight_dtype":
            kind = torch.float32 if self._accumulator == "fp32" else torch.uint8
            self._extra = torch.empty(shape, dtype=kind, device=device)
        if tile is not None or self._accumulator == "weight_dtype":
            self._out = torch.empty(shape, dtype=dtype, device=device)
        self._dtype = dtype

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add a·b."""
        prior, last = self._done > 0, self._done == self._parts - 1
        self._done += 1
        if self._tile is not None:
            assert self._out is not None
            _tiled_product(
                a, b, self._out, self._extra, self._tile, self._contraction,
                self._accumulator, prior, last,
            )  # fmt: skip
            return
        _library_product(a, b, self._target(), add=prior)

    def add_numerators(
        self,
        stored: Sequence[Blocks],  # E [m, v], each of some columns of the vocabulary; a part each
        b: Tensor,  # [V, n]
        factor: Tensor,  # [m] f
    ) -> None:
        """Add Σ diag(f)·E·b[columns], as the first parts."""
        if self._done:
            raise RuntimeError("a library product scales the whole sum: numerators come first")
        for blocks in stored:
            prior, last = self._done > 0, self._done == self._parts - 1
            if self._tile is None:
                for index, (columns, e) in enumerate(blocks.parts()):
                    _library_product(e, b[columns], self._target(), add=prior or index > 0)
            else:
                assert self._out is not None
                _tiled_product(
                    blocks.data[: blocks.rows], b[blocks.columns], self._out, self._extra,
                    self._tile, self._contraction, self._accumulator, prior, last, factor,
                    blocks.padded_rows,
                )  # fmt: skip
            self._done += 1
        if stored and self._tile is None:
            self._target().mul_(factor[:, None])

    def _target(self) -> Tensor:
        """What a library product writes."""
        target = self._out if self._extra is None else self._extra
        assert target is not None
        return target

    def result(self) -> Tensor:
        """Return the sum, rounded to the result's dtype."""
        if self._done != self._parts:
            raise RuntimeError(f"{self._done} of {self._parts} parts were added")
        if self._out is not None:
            return self._out
        assert self._extra is not None
        return self._extra.to(self._dtype)


def _library_product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    if a.device.type == "cuda":
        if out.dtype == a.dtype:
            torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        elif add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif out.dtype == a.dtype:
        out.addmm_(a, b, beta=1.0 if add else 0.0)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=1.0 if add else 0.0)


def _tiled_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    extra: Tensor | None,
    tile: Tile,
    contraction: str,
    accumulator: Accumulator,
    prior: bool,
    last: bool,
    row_factor: Tensor | None = None,
    block_rows: int = 0,
) -> None:
    from flce_tune.kernels.triton.launch import launch_product

    launch_product(
        a, b, out, extra, tile, contraction, accumulator, prior, last, row_factor, block_rows
    )
