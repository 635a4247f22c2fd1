"""Models that tensor parallelism has cut, trained by zeor over what is left, and the same in one process.

A `Divided` says which model, on which mesh and how; `train` gives what ranks hold at the end, whole, and `reference`
what one process has that sees the batches of all data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zeor

STEPS, ROWS, LENGTH, VOCABULARY, WIDTH = 3, 2, 6, 24, 16
SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))  # (dp, tp)


@dataclass(frozen=True)
class Divided:
    model: str = "mlp"
    shape: tuple[int, int] = (1, 2)
    stage: int = 3
    micro: str = "1"  # micro-batches: "1", "3" (each reduced), "3 no_sync"
    clip: str = "none"  # "none", "stock", "zeor"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    plain: bool = False  # the model is not cut, and has no DTensor
    device: str = "cpu"  # where ranks train; the reference is always computed on the host

    @property
    def micros(self) -> int:
        return int(self.micro[0])


def new_mesh(*sizes: int, names: tuple[str, ...] = ("dp", "tp"), device: str = "cpu") -> Any:
    """torch remembers layouts with the mesh they were made for, and takes an equal one of another process group for it:
    the pool's ranks have had others."""
    _clear_sharding_prop_cache()
    return init_device_mesh(device, sizes, mesh_dim_names=names)


# ---- models of plain torch: (made in one process, cut over a mesh dimension)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, blocks: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def column_and_row(model: nn.Module, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_sequence(model: nn.Module, mesh: Any, local: bool = True) -> None:
    """Norms are cut by sequence: their weights are replicated, and their gradients partial. `local`: units hand each
    other plain tensors, else DTensors."""
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
        "norm": SequenceParallel(use_local_output=local),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        inner = {
            "norm": SequenceParallel(use_local_output=local),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=local),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        }
        parallelize_module(block, mesh, inner)


def by_vocabulary(model: nn.Module, mesh: Any) -> None:
    """Embedding and head are cut by vocabulary, and so is the loss."""
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outer)
    column_and_row(model, mesh)


PLANS: dict[str, Callable[[nn.Module, Any], None]] = {
    "mlp": column_and_row,
    "sequence": by_sequence,
    "between": functools.partial(by_sequence, local=False),
    "vocabulary": by_vocabulary,
}


# ---- models of transformers


def config_of(name: str) -> Any:
    import transformers

    common = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "tie_word_embeddings": name == "tied llama", "attn_implementation": "eager",
    }  # fmt: skip
    if name == "qwen3":
        return transformers.Qwen3Config(**common, head_dim=4)
    if name == "mixtral":
        return transformers.MixtralConfig(**common, num_local_experts=4, experts_implementation="eager")
    return transformers.LlamaConfig(**common)


def by_transformers(model: Any, mesh: Any) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    if model.config.tie_word_embeddings:  # its name is none of the model's parameters
        plan.pop("lm_head.weight")
    apply_tensor_parallelism(model, mesh, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


TRANSFORMERS = ("llama", "tied llama", "qwen3", "mixtral")


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name not in TRANSFORMERS:
        return Language().double()
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config_of(name)).double()


def cut(name: str, model: nn.Module, mesh: Any) -> None:
    (by_transformers if name in TRANSFORMERS else PLANS[name])(model, mesh)


# ---- training


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Of one data-parallel rank: tensor-parallel ranks see the same."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@functools.cache
def reference(name: str, ranks: int, micros: int, clips: bool) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters, norms) of one process over the batches of all data-parallel ranks."""
    model = made(name)
    optimizer, norms = adamw(model), []
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(ranks):
                (loss_of(model, *batch(step, micro, rank)) / ranks).backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def sharded(setting: Divided, make: Callable = adamw) -> tuple[nn.Module, Any, Any]:
    """(model, optimizer, mesh)."""
    mesh = new_mesh(*setting.shape, device=setting.device)
    model = made(setting.model).to(setting.device)
    if not setting.plain:
        cut(setting.model, model, mesh["tp"])
    optimizer = make(model)
    options = {"keep_whole": 32, **setting.options}  # norms lie with the small ones, matrices and some biases do not
    zeor.shard(model, optimizer, stage=setting.stage, mesh=mesh["dp"], **options)
    return model, optimizer, mesh


def one_step(model: nn.Module, optimizer: Any, step: int, rank: int, setting: Divided) -> float:
    """The norm, where it clips."""
    for micro in range(setting.micros):
        last = micro == setting.micros - 1
        with zeor.no_sync(model) if "no_sync" in setting.micro and not last else contextlib.nullcontext():
            with loss_parallel() if setting.model == "vocabulary" else contextlib.nullcontext():
                tokens, targets = (part.to(setting.device) for part in batch(step, micro, rank))
                loss_of(model, tokens, targets).backward()
    norm = 0.0
    if setting.clip == "zeor":
        norm = float(zeor.clip_grad_norm_(model, 0.1))
    elif setting.clip == "stock":
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter in its global shape, on the host: torch 2.11 crashes where it gathers a DTensor of a GPU over
    Gloo."""
    with zeor.full_params(model):
        return {name: _on_host(param).clone() for name, param in model.named_parameters()}


def _on_host(param: Tensor) -> Tensor:
    if not isinstance(param, DTensor) or param.device.type == "cpu":
        return (param.full_tensor() if isinstance(param, DTensor) else param).detach().cpu()
    mesh = DeviceMesh("cpu", param.device_mesh.mesh)
    return DTensor.from_local(param.to_local().detach().cpu(), mesh, param.placements).full_tensor()


def train(setting: Divided) -> tuple[dict[str, Tensor], list[float]]:
    """(parameters, norms)."""
    model, optimizer, mesh = sharded(setting)
    rank = mesh.get_local_rank("dp")
    norms = [one_step(model, optimizer, step, rank, setting) for step in range(STEPS)]
    return whole(model), norms if setting.clip != "none" else []


def compared(setting: Divided) -> tuple[float, bytes]:
    """The largest difference to one process, of parameters and norms, and what tells the bits of the parameters."""
    found, norms = train(setting)
    wanted, their_norms = reference(setting.model, setting.shape[0], setting.micros, setting.clip != "none")
    assert list(found) == list(wanted)
    differences = [float((found[name] - wanted[name]).abs().max()) for name in wanted]
    differences += [abs(a - b) for a, b in zip(norms, their_norms, strict=True)]
    return max(differences), b"".join(value.numpy().tobytes() for value in found.values())
