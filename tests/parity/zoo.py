"""The zoo: small models of the families people train, each with a joint batch and a loss that is a mean over rows.

Built from configurations, with random weights and dropout 0. Every loss weighs rows equally, so that the mean of
two ranks' losses is the loss of the joint batch. This file knows nothing of zeor.

Note [No float32]
~~~~~~~~~~~~~~~~~
Models of transformers compute norms, softmaxes and losses in float32 whatever their own dtype. In a float64 comparison
that would turn a difference of one bit into one of 1e-7, so `no_float32()` makes those casts do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS, LENGTH, VOCABULARY = 4, 10, 61
Batch = dict[str, Tensor]


class Kind(NamedTuple):
    """build() a model; batch(generator) of ROWS rows; loss(model, batch), a mean over rows."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


class no_float32(TorchFunctionMode):
    """See Note [No float32]."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return func(*args, **kwargs)
        if first.dtype == torch.float64:
            if func is Tensor.float:
                return first
            if func is Tensor.to:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        elif func is Tensor.float and not first.is_floating_point():  # positions, to be multiplied by frequencies
            return first.double()
        return func(*args, **kwargs)


# ---- batches


def tokens(generator: torch.Generator, high: int = VOCABULARY) -> Tensor:
    return torch.randint(3, high, (ROWS, LENGTH), generator=generator)


def causal(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator)}


def pictures(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)


def labelled_pictures(generator: torch.Generator) -> Batch:
    return {"pixel_values": pictures(generator), "labels": torch.randint(0, 7, (ROWS,), generator=generator)}


def captions(generator: torch.Generator) -> Batch:
    return {"pixel_values": pictures(generator), "input_ids": tokens(generator)}


def noisy(generator: torch.Generator) -> Batch:
    noise = pictures(generator)
    time = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    return {"noisy": pictures(generator), "time": time, "noise": noise}


# ---- losses


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def agreement(model: nn.Module, batch: Batch) -> Tensor:
    """A pair's picture and text should agree, row by row: a contrast between rows would not be a mean over them."""
    out = model(**batch)
    return (1 - (out.image_embeds * out.text_embeds).sum(-1)).square().mean()


def denoising(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["noisy"], batch["time"]), batch["noise"])


# ---- models


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_sizes()))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_llama_sizes(), num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the grouped product takes no float64
    return MixtralForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=3,
        dropout_rate=0, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=40, image_size=16, patch_size=4,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=7,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    width = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = {**width, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**width, "image_size": 16, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


class Residual(nn.Module):
    """A residual convolution block that is told the time."""

    def __init__(self, inner: int, outer: int, time_width: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(time_width, outer)
        self.norm2, self.conv2 = nn.GroupNorm(4, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """A diffusion-style UNet: down, middle with attention, up with skip connections that cross half the model."""

    def __init__(self, width: int = 8, time_width: int = 16):
        super().__init__()
        self.embed_time = nn.Sequential(nn.Linear(1, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(Residual(a, b, time_width) for a, b in zip([width, *widths], widths))
        self.middle = nn.MultiheadAttention(widths[-1], 4, batch_first=True)
        ups = list(zip([widths[-1], *widths[:0:-1]], widths[::-1]))
        self.up = nn.ModuleList(Residual(a + b, b, time_width) for a, b in ups)
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        told, h, skips = self.embed_time(time[:, None]), self.first(x), []
        for block in self.down:
            h = block(h, told)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.middle(flat, flat, flat, need_weights=False)[0].transpose(1, 2).view_as(h)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2.0)
            h = block(torch.cat([h, skips.pop()], 1), told)
        return self.last(h)


ZOO: dict[str, Kind] = {
    "gpt2": Kind(gpt2, causal, own_loss),
    "llama": Kind(llama, causal, own_loss),
    "mixtral": Kind(mixtral, causal, own_loss),
    "bert": Kind(bert, masked, own_loss),
    "t5": Kind(t5, masked, own_loss),
    "vit": Kind(vit, labelled_pictures, own_loss),
    "mamba": Kind(mamba, causal, own_loss),
    "clip": Kind(clip, captions, agreement),
    "unet": Kind(UNet, noisy, denoising),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    return ZOO[name].build().double().train()


def joint_batch(name: str, step: int) -> Batch:
    return ZOO[name].batch(torch.Generator().manual_seed(1000 + step))
