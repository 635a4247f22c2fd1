"""A small GPT over bytes: what `zeor train` trains and `zeor plan` counts.

Plain PyTorch, as a user would write it: learned positions, pre-norm blocks, stock attention, a GELU MLP
and an untied head. It knows nothing of zeor. The vocabulary is the 256 byte values, so any file is a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The sizes that decide a GPT's parameters. `heads` must divide `width`."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"a GPT needs {name} of at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Widen by four, GELU, narrow again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.down(functional.gelu(self.up(x)))
        return narrow


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Tokens of shape (batch, length) to logits of shape (batch, length, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(_init)
        for name, weight in self.named_parameters():
            # Each block adds twice to the stream: smaller outputs keep its variance as it is with one block.
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.config.context:
            raise ValueError(f"{length} tokens do not fit a context of {self.config.context}")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per token, in nats; in fp32, whatever the model computes in."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def encode(text: str | bytes) -> Tensor:
    """Text as a vector of byte values."""
    data = text.encode() if isinstance(text, str) else text
    return torch.tensor(list(data), dtype=torch.long)


def decode(tokens: Tensor) -> str:
    """The inverse of encode; bytes that are no UTF-8 become question marks."""
    return bytes(tokens.tolist()).decode(errors="replace")


@torch.no_grad()
def generate(
    model: GPT, prompt: Tensor, n: int, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """The prompt (a vector of tokens) followed by n sampled tokens, at temperature 0 the likeliest.

    A sharded model's forward is collective: call this on every rank, with the same n. Ranks whose
    generators hold the same seed sample the same text.
    """
    if prompt.numel() == 0:
        raise ValueError("generate() needs a prompt of at least one token to go on from")
    tokens = prompt
    was_training = model.training
    model.eval()
    for _ in range(n):
        logits = model(tokens[-model.config.context :][None])[0, -1].float().to(tokens.device)
        if temperature == 0:
            following = logits.argmax().view(1)
        else:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following])
    model.train(was_training)
    return tokens
