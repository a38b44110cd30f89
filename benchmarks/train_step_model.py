"""A decoder shaped like Llama 3, from plain torch modules; its head is left to the caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROPE_BASE = 500_000.0
EPSILON = 1e-5


@dataclass(frozen=True)
class Size:
    """Llama 3 8B's, but for the number of layers."""

    vocab: int = 128256
    hidden: int = 4096
    layers: int = 4
    feed_forward: int = 14336
    query_heads: int = 32
    key_value_heads: int = 8


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [length, width]."""
    rates = ROPE_BASE ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Block(nn.Module):
    """Grouped-query attention and a gated feed-forward, each behind an RMS norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.hidden // size.query_heads
        narrow = size.key_value_heads * self.width
        self.attention_norm = nn.RMSNorm(size.hidden, EPSILON)
        self.query = nn.Linear(size.hidden, size.hidden, bias=False)
        self.key = nn.Linear(size.hidden, narrow, bias=False)
        self.value = nn.Linear(size.hidden, narrow, bias=False)
        self.output = nn.Linear(size.hidden, size.hidden, bias=False)
        self.feed_norm = nn.RMSNorm(size.hidden, EPSILON)
        self.gate = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.up = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.down = nn.Linear(size.feed_forward, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x [B, T, D]
        batch, length, hidden = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, self.width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, hidden))
        normed = self.feed_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Decoder(nn.Module):
    """Tokens [B, T] to hidden states [B, T, D]; ``head.weight`` [V, D] turns them into logits."""

    def __init__(self, size: Size, *, recompute_blocks: bool) -> None:
        super().__init__()
        self.recompute_blocks = recompute_blocks
        self.width = size.hidden // size.query_heads
        self.tokens = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, EPSILON)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotations(tokens.shape[1], self.width, tokens.device)
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.recompute_blocks:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        out: Tensor = self.norm(x)
        return out
