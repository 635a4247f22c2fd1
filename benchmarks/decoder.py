"""The workload of every benchmark: a Llama-shaped decoder in plain PyTorch.

Token and learned position embeddings, pre-RMSNorm blocks (fused qkv, causal attention, SwiGLU), a final norm
and an untied head. It knows nothing of zeor, of its peers or of process groups: what shards it finds the
blocks in `Decoder.blocks`. Weights are made on the device and in the dtype they will have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """The integers that describe one decoder."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 32_000
    positions: int = 2_048

    @property
    def inner_width(self) -> int:
        """The SwiGLU's width: 8/3 of the model's, rounded up to a multiple of 256."""
        return -(-8 * self.width // (3 * 256)) * 256


SIZES: dict[str, Shape] = {
    "tiny": Shape(2, 64, 2, vocabulary=256, positions=64),
    "36.7M": Shape(8, 512, 8, vocabulary=8_192),
    "wide": Shape(4, 1_024, 16, vocabulary=8_192),  # as many parameters a layer as a larger model, few layers
    "125M": Shape(12, 768, 12),
    "1.3B": Shape(24, 2048, 16),
    "3B": Shape(26, 3072, 24),
    "7B": Shape(32, 4096, 32),
    "13B": Shape(40, 5120, 40),
    "16B": Shape(34, 6144, 48),
    "18B": Shape(39, 6144, 48),
    "20B": Shape(44, 6144, 48),
    "32B": Shape(60, 6656, 52),
}


class Attention(nn.Module):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner_width, bias=False)
        self.up = nn.Linear(shape.width, shape.inner_width, bias=False)
        self.down = nn.Linear(shape.inner_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer block: what the benchmarks shard and compile as one unit."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = SwiGLU(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: Shape, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position_embedding = nn.Embedding(shape.positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the head is given; for use inside forward, where a sharded model's parameters are at hand."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Norms at one, every matrix normal with deviation 0.02 (the usual start of such models)."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)


def build(
    shape: Shape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    seed: int = 0,
) -> Decoder:
    """A decoder with weights, shaped on meta and then allocated once, where it will live."""
    with torch.device("meta"):
        model = Decoder(shape, recompute).to(dtype)
    model.to_empty(device=device)
    torch.manual_seed(seed)
    model.init_weights()
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over float logits, which get no name here: only autograd keeps them."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def random_batch(
    shape: Shape, batch: int, tokens: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and, as targets, the same tokens one place on; made on the generator's own device."""
    size = (batch, tokens + 1)
    ids = torch.randint(shape.vocabulary, size, generator=generator, device=generator.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def parameter_numel(shape: Shape) -> int:
    """How many parameters a decoder of this shape has, without making it."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(shape).parameters())


def flops_per_token(shape: Shape, tokens: int) -> int:
    """6 x parameters + 6 x layers x width x sequence; recomputation is not counted."""
    return 6 * parameter_numel(shape) + 6 * shape.layers * shape.width * tokens
