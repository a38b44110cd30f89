"""A small decoder-only language model from plain torch modules. Its head is left to the caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """How large the model is; heads are 64 wide, the feed-forward 4·D."""

    vocab: int = 32768
    hidden: int = 512
    layers: int = 6
    context: int = 512


class Block(nn.Module):
    """Causal attention and a feed-forward, each behind a norm and around a skip."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.feed_norm = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden, bias=False)
        self.narrow = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.feed_norm(x))))
        return out


class LanguageModel(nn.Module):
    """Tokens [B, T] to hidden states [B, T, D]; ``head.weight`` [V, D] turns them into logits."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.positions = nn.Embedding(size.context, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # keeps the residual stream's variance flat in depth
            for layer in (block.project, block.narrow):
                assert isinstance(layer, nn.Linear)
                nn.init.normal_(layer.weight, std=0.02 / (2 * size.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
