"""Tile skipping: the products leave out the tiles of G in which hardly any probability lies.

In a trained model G = softmax - onehot is almost empty: most of a row's probability lies in few
columns. With E the softmax numerators (see ``numerators``), f their row factors, and the columns
sorted by how probable they are in this batch, G is cut into tiles of ``rows`` × ``columns``. A tile
is kept if any of its tokens has at least the tolerance of its probability there, its label apart
(the labels' entries join the products as a sparse matrix anyway). For a tile that is left out, two
products of rank one stand in, so that rare rows of W, never a label, keep the gradient that pushes
them down:

    dX_i += f_i·(Σ_c E_ic)·w̄_t        w̄_t: mean of the tile's rows of W, by their probability
    dW_c += (Σ_i f_i·E_ic)·x̄_b        x̄_b: mean of the tile's rows of x, by what they leave out

All of one kind together are one more tile of the products: the tile sums Σ_c E_ic are further
columns of E with w̄ as further rows of W, and Σ_i f_i·E_ic further rows with x̄. So both products
are sums over lists of tiles, and no case is special. Which tiles are kept is decided on the
device, without a synchronisation.

The order of the columns comes from a sample of the batch's own tokens, whose logits are a product
SAMPLE / N as large as all tokens'.

FLOPs: (2 + 4·kept)·NDV, and less than 2 % for the sample and what stands in. Bytes beyond the
products': W is copied in the columns' order (read and written once), dW once back, and E of the
tiles that are left out is read once for its column sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from flce_tune.kernels.backends import has_kernels
from flce_tune.kernels.config import Tile
from flce_tune.kernels.loss import scaled_logits, statistics_dtype
from flce_tune.kernels.numerators import Entries, Merged
from flce_tune.kernels.values import Inputs, LossSpec

SAMPLE = 256
"""Tokens whose probabilities give the order of the columns."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How E is cut into tiles, and where what stands in for the others lies."""

    tokens: int  # N
    vocab: int  # V
    rows: int  # of a tile
    columns: int  # of a tile

    @property
    def row_tiles(self) -> int:
        """Tiles of tokens."""
        return -(-self.tokens // self.rows)

    @property
    def column_tiles(self) -> int:
        """Tiles of the vocabulary."""
        return -(-self.vocab // self.columns)

    @property
    def row_end(self) -> int:
        """The first row of column sums, one for each tile of tokens."""
        return self.row_tiles * self.rows

    @property
    def column_end(self) -> int:
        """The first column of tile sums, one for each tile of the vocabulary."""
        return self.column_tiles * self.columns

    @property
    def more_row_tiles(self) -> int:
        """Tiles of column sums."""
        return -(-self.row_tiles // self.rows)

    @property
    def more_column_tiles(self) -> int:
        """Tiles of tile sums."""
        return -(-self.column_tiles // self.columns)

    @property
    def height(self) -> int:
        """Rows of E."""
        return self.row_end + self.more_row_tiles * self.rows

    @property
    def width(self) -> int:
        """Columns of E."""
        return self.column_end + self.more_column_tiles * self.columns


@dataclass(frozen=True, slots=True)
class Lists:
    """Of each tile of a product's rows, the tiles along the other side that it sums over."""

    tiles: Tensor  # [row tiles, most] int32; the first ``count`` of each
    count: Tensor  # [row tiles] int32

    @classmethod
    def of(
        cls,
        keep: Tensor,  # [row tiles, tiles] bool
        more: int,  # tiles of what stands in: for rows that leave some out
    ) -> Lists:
        """Ascending, so that the sums' order is always the same."""
        some = ~keep.all(1, keepdim=True)
        wanted = torch.cat((keep, some.expand(-1, more)), 1)
        order = torch.argsort((~wanted).to(torch.int8), dim=1, stable=True)
        return cls(order.to(torch.int32), wanted.sum(1, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class Sorted:
    """The loss's inputs with the vocabulary in another order."""

    inputs: Inputs
    order: Tensor  # [V] int64, the column that comes first, second, ...
    weight: Tensor  # [width, D]: W in that order, then w̄; zero where E has padding

    @classmethod
    def of(cls, inputs: Inputs, row_weight: Tensor, loss: LossSpec, layout: Layout) -> Sorted:
        """Sort by the mean probability of a sample of the tokens, most probable first."""
        probability = _sampled_probability(inputs, row_weight, loss)
        order = torch.argsort(probability, descending=True, stable=True)
        vocab, tiles = layout.vocab, layout.column_tiles
        weight = inputs.weight.new_empty(layout.width, inputs.weight.shape[1])
        torch.index_select(inputs.weight, 0, order, out=weight[:vocab])
        weight[vocab : layout.column_end].zero_()
        means = weight[layout.column_end :]
        by = torch.zeros(layout.column_end, dtype=probability.dtype, device=order.device)
        by[:vocab] = probability[order]
        _means(weight[: layout.column_end], by, tiles, means[:tiles])
        means[tiles:].zero_()
        place = torch.empty_like(order)
        place[order] = torch.arange(vocab, device=order.device)
        known = (inputs.target >= 0) & (inputs.target < vocab)
        target = torch.where(known, place[inputs.target.clamp(0, vocab - 1)], inputs.target)
        chosen = replace(
            inputs,
            weight=weight[:vocab],
            target=target,
            bias=None if inputs.bias is None else inputs.bias[order],
            class_weight=None if inputs.class_weight is None else inputs.class_weight[order],
        )
        return cls(chosen, order, weight)

    def unsorted(self, gradient: Tensor) -> Tensor:  # [V, ...]
        """A gradient of the sorted columns, in the caller's order."""
        out = torch.empty_like(gradient)
        return out.index_copy_(0, self.order, gradient)


def _sampled_probability(inputs: Inputs, row_weight: Tensor, loss: LossSpec) -> Tensor:  # [V]
    """Mean probability of each column over tokens that count, spread over the batch."""
    n = len(inputs.x)
    counts = row_weight != 0
    first = torch.argsort((~counts).to(torch.int8), stable=True)
    size = min(SAMPLE, n)
    places = torch.arange(size, device=first.device) * counts.sum() // size
    raw = inputs.x[first[places]] @ inputs.weight.t()
    raw = raw.to(statistics_dtype(raw.dtype))
    if inputs.bias is not None:
        raw += inputs.bias
    return torch.softmax(scaled_logits(raw, loss), 1).mean(0)


def scaled_rows_with_means(
    x: Tensor,  # [n, D]
    factor: Tensor,  # [n] f
    e: Tensor,  # [height, width], with its columns of tile sums
    layout: Layout,
) -> Tensor:  # [height, D]
    """diag(f)·x, then x̄ of each tile of tokens; zero where E has padding."""
    n, tiles = layout.tokens, layout.row_tiles
    out = x.new_empty(layout.height, x.shape[1])
    out[n:].zero_()
    out[:n] = x  # for the means
    left_out = e[:n, layout.column_end :].sum(1, dtype=factor.dtype)
    by = torch.zeros(layout.row_end, dtype=factor.dtype, device=x.device)
    by[:n] = (left_out * factor).abs().nan_to_num(0.0)
    _means(out[: layout.row_end], by, tiles, out[layout.row_end :][:tiles])
    torch.mul(x, factor[:, None], out=out[:n])
    return out


def _means(
    rows: Tensor,  # [tiles · size, D]
    by: Tensor,  # [tiles · size], not negative
    tiles: int,
    out: Tensor,  # [tiles, D]
) -> None:
    """The weighted mean of each tile's rows; zero where the weights are."""
    by = by.view(tiles, 1, -1)
    total = by.sum(2, keepdim=True)
    share = torch.where(total > 0, by / total, 0.0).to(rows.dtype)
    out.copy_(torch.bmm(share, rows.view(tiles, -1, rows.shape[1]))[:, 0])


class Kernels(Protocol):
    """What a GPU has kernels for; documented in ``torch_skipping``."""

    def tile_sums(
        self,
        e: Tensor,
        layout: Layout,
        tile_reference: Tensor,
        tile_total: Tensor,
        merged: Merged,
        label: Tensor,
        target: Tensor,
        row_weight: Tensor,
        tolerance: float,
    ) -> Tensor:
        """Decide which tiles are kept, and write the sums of the others."""

    def column_sums(self, e: Tensor, layout: Layout, factor: Tensor, keep: Tensor) -> None:
        """Write the column sums of tiles that are left out."""

    def kept_product(
        self,
        e: Tensor,
        layout: Layout,
        keep: Tensor,
        b: Tensor,
        out: Tensor,
        factor: Tensor | None,
        entries: Entries,
        tile: Tile | None,
        *,
        transposed: bool,
    ) -> None:
        """Multiply the tiles that are kept, and what stands in for the others."""


def kernels_of(tensor: Tensor) -> Kernels:
    """Choose the kernels for tensors like this one."""
    if has_kernels(tensor):
        from flce_tune.kernels.triton import skipping as kernels

        return kernels
    from flce_tune.kernels import torch_skipping

    return torch_skipping
