"""A small decoder of plain torch modules, for the examples that need a model of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flce_tune import linear_cross_entropy


class Decoder(nn.Module):
    """Causal transformer whose forward gives the loss; the head is ``head.weight`` [V, D]."""

    def __init__(self, vocab: int, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, max(1, hidden // 64), 4 * hidden, dropout=0.0, batch_first=True,
                norm_first=True, bias=False,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(
        self,
        ids: Tensor,  # [B, T]
        divisor: Tensor | float | None = None,
    ) -> Tensor:
        """Loss of predicting each next token: a mean, or the sum over ``divisor``."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        # shift=True: position t predicts ids[t + 1], and nothing is copied
        loss = linear_cross_entropy(
            self.norm(x), self.head.weight, ids, shift=True, divisor=divisor
        )
        assert isinstance(loss, Tensor)  # no other outputs were asked for
        return loss
