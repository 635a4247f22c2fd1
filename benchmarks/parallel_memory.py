"""Memory of one rank of pp x dp x tp = 4 x 8 x 8 ranks beside its prediction, in a process group that is imagined.

    python -m benchmarks.parallel_memory --model small --step         # on a CPU, as the tests run it
    python -m benchmarks.parallel_memory --model 70b                  # at rest, on whatever device there is
    python -m benchmarks.parallel_memory --model 70b --step --tokens 2048    # on a GPU of 80 GiB or more

torch's fake process group sends nothing and returns at once, so one process computes what one rank of 256 would: with
values that mean nothing, and memory that does. A stage of a Llama-like model is built on the meta device, cut by
parallelize_module, sharded by zeor over dp, and (--step) run through a 1F1B schedule. Prints one line of JSON: bytes by
role as zeor.report says them, the device's own peak where it counts one, what zeor.predict said of the model before it
was cut, and of the stage that is cut with the activations of its micro-batches.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeor
from zeor.access.sharded import state_of

COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("out", "down")
CUT = {f"*.{name}.weight": 0 for name in COLUMNS} | {f"*.{name}.weight": 1 for name in ROWS}
CUT |= {"tokens.weight": 0, "head.weight": 0}


class Size(NamedTuple):
    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    vocabulary: int


SIZES = {"70b": Size(80, 8192, 28672, 64, 8, 128256), "small": Size(8, 256, 512, 16, 8, 1024)}


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.head = size.width // size.heads
        keys = size.key_heads * self.head
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.q, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, keys, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """All of it, or one stage of `count`."""

    def __init__(self, size: Size, number: int = 0, count: int = 1):
        super().__init__()
        first, last = number == 0, number == count - 1
        mine = range(number * size.layers // count, (number + 1) * size.layers // count)
        self.tokens = nn.Embedding(size.vocabulary, size.width) if first else None
        self.blocks = nn.ModuleList(Block(size) for _ in mine)
        self.norm = nn.RMSNorm(size.width) if last else None
        self.head = nn.Linear(size.width, size.vocabulary, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def divide(stage: Model, mesh: Any) -> None:
    for block in stage.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(block, mesh, {**plan, **{name: RowwiseParallel() for name in ROWS}})
    if stage.tokens is not None:
        parallelize_module(stage, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})
    if stage.head is not None:
        parallelize_module(stage, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    size, pp, dp, tp = SIZES[options.model], options.pp, options.dp, options.tp
    with torch.device("meta"):
        whole = Model(size)
    settings = {"world": dp, "stage": options.stage, "precision": "bf16"}
    known = zeor.predict(whole, **settings, pp=pp, tp=tp, cut=CUT, native_reduce=device.type == "cuda")

    mesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    with zeor.on_meta():
        stage = Model(size, mesh.get_local_rank("pp"), pp)  # rank 0 has the first: the one with the embedding
    divide(stage, mesh["tp"])
    cut = None if not options.step else foreseen(stage, settings, options, device.type == "cuda")
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)
    zeor.shard(stage, optimizer, stage=options.stage, precision="bf16", mesh=mesh["dp"], device=device)
    engine = state_of(stage).engine
    for slot in engine.slots:
        engine.unfilled.fill(slot)  # whatever values there are will do
    found = step(stage, optimizer, mesh, size, options, device) if options.step else zeor.report(stage)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    predicted = {**known.as_dict(), "partial": known.accumulated}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "model": options.model, "ranks": pp * dp * tp, "mesh": [pp, dp, tp], "stage": options.stage,
        "step": options.step, "device": name, "torch": torch.__version__,
        "parameters": sum(param.numel() for param in whole.parameters()), "measured": found, "device_peak": peak,
        "predicted": predicted, "predicted_cut": cut,
    }  # fmt: skip


def foreseen(stage: Model, settings: dict[str, Any], options: argparse.Namespace, native: bool) -> dict[str, int]:
    """Of the first stage, cut by tensor parallelism: 1F1B keeps as many micro-batches there as the pipeline is long."""
    rows = torch.zeros(1, options.tokens, dtype=torch.long, device="meta")
    given = {"inputs": (rows,), "loss": lambda model, tokens: model(tokens).sum(), "native_reduce": native}
    return zeor.predict(stage, **settings, **given, pipeline="step", in_flight=options.pp).as_dict()


def imagine_votes() -> None:
    """From torch 2.13 on stages agree by messages whether shapes are known, and an imagined neighbour sends none: it
    votes as this one does."""
    dist.recv = lambda tensor, *_, **__: tensor.fill_(1)


def step(
    stage: Model, optimizer: Any, mesh: Any, size: Size, options: Any, device: torch.device
) -> dict[str, int]:  # fmt: skip
    """Two steps of the first stage: what its neighbour would send are values nobody has written. Returns what is held
    when the second backward is over, with gradients and moments."""
    micros = 2 * options.pp
    rows = torch.zeros(micros, options.tokens, dtype=torch.long, device=device)
    hidden = torch.empty(1, options.tokens, size.width, dtype=torch.bfloat16, device="meta")
    group, given = mesh["pp"].get_group(), (rows[:1].to("meta"),)
    shapes: dict[str, Any] = {"input_args": given, "output_args": hidden}
    if "output_grads" in inspect.signature(PipelineStage).parameters:  # torch 2.13 on: with all of them none are asked
        shapes |= {"input_grads": (None,), "output_grads": hidden}
    piped = PipelineStage(stage, 0, options.pp, device, group=group, **shapes)
    schedule = schedules.Schedule1F1B(piped, micros, loss_fn=functional.mse_loss)  # the last stage's
    zeor.pipeline(schedule, tied=[])
    imagine_votes()
    found = {}
    for _ in range(2):
        schedule.step(rows)
        found = zeor.report(stage)
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    asked.add_argument("--model", choices=SIZES, default="small")
    for name, count in (("pp", 4), ("dp", 8), ("tp", 8)):
        asked.add_argument(f"--{name}", type=int, default=count)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--step", action="store_true", help="run two steps, not only what is at rest")
    asked.add_argument("--tokens", type=int, default=16, help="of a micro-batch")
    options = asked.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = options.pp * options.dp * options.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    print(json.dumps(measure(options, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
