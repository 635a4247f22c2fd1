"""A Llama that is cut by tensor parallelism and sharded by zeor over what is left, on Shakespeare.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --tensor 2          # dp x tp = 1 x 2
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2          # dp x tp = 2 x 2
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --tensor 1 --checkpoints FOLDER   # goes on from any of them

The model is transformers' own, cut by its own plan. Ranks of one tensor-parallel group share their batches, so data and
evaluation are divided over the data-parallel dimension of the mesh. Prints the loss per token on held-out text.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.start import Place, parser
from examples.texts import Windows, endless, gpt2_tokenizer, tokens


def loss_sum(model: nn.Module, rows: Tensor) -> Tensor:
    """The cross entropy of every next token, added up."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, mesh: DeviceMesh, batch: int) -> float:
    """The loss per token over all of the data, each window seen by one data-parallel rank."""
    model.eval()
    parts = data.parts(mesh.get_local_rank("dp"), mesh["dp"].size(), batch)
    summed = sum(loss_sum(model, rows).item() for rows in parts)
    count = sum(rows[:, 1:].numel() for rows in parts)
    model.train()
    summed, count = zeor.total(summed, count, mesh=mesh["dp"])
    return summed / count


def divide(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """By the plan that comes with the model; before an optimizer is made, for it makes new parameters."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--tensor", type=int, default=2, help="ranks that share one batch, and each matrix")
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--batch", type=int, default=8, help="windows per data-parallel rank and step")
    asked.add_argument("--context", type=int, default=128)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--width", type=int, default=256)
    asked.add_argument("--lr", type=float, default=1e-3)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--precision", default="fp32")
    asked.add_argument("--checkpoints", help="save there at the end, and go on from what is there")
    asked.add_argument("--limit", type=int, help="take so many texts only")
    options = asked.parse_args()
    place = Place(options.seed)
    if not dist.is_initialized():  # python, without torchrun
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if place.world % options.tensor:
        raise SystemExit(f"--tensor {options.tensor} does not divide the {place.world} ranks.")
    mesh = init_device_mesh(
        place.device.type, (place.world // options.tensor, options.tensor), mesh_dim_names=("dp", "tp")
    )

    train, held_out = tokens(["shakespeare"], gpt2_tokenizer(), options.limit)
    config = LlamaConfig(
        vocab_size=50257, hidden_size=options.width, intermediate_size=4 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=options.context, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(place.device)  # the same seed on every rank, so the same values
    if options.tensor > 1:
        divide(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = zeor.shard(model, optimizer, mesh=mesh["dp"], stage=options.stage, precision=options.precision)
    windows = Windows(train, options.context + 1, place.device)
    unseen = Windows(held_out, options.context + 1, place.device)
    loader = zeor.data.shard(windows.loader(options.batch), mesh=mesh["dp"])
    batches = endless(loader)
    done = 0
    if options.checkpoints is not None and any(Path(options.checkpoints).glob("step-*")):
        done = zeor.load(options.checkpoints, model, optimizer, data=loader).step

    before = evaluate(model, unseen, mesh, options.batch)
    for step in range(done + 1, done + options.steps + 1):
        rows = next(batches)
        loss = loss_sum(model, rows) / rows[:, 1:].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the whole model's
        optimizer.step()
        optimizer.zero_grad()
        place.progress(step, options.steps, loss, norm)
    after = evaluate(model, unseen, mesh, options.batch)
    if options.checkpoints is not None:
        zeor.save(options.checkpoints, model, optimizer, step=done + options.steps, data=loader)
    held = zeor.report(model)
    place.say(
        f"dp x tp = {' x '.join(map(str, mesh.mesh.shape))}: held-out loss {before:.3f} -> {after:.3f}, perplexity "
        f"{math.exp(after):.1f}; {sum(p.numel() for p in model.parameters()):,} parameters, of which rank 0 keeps "
        f"{held['compute'] / 1e6:.1f} MB for forward and {(held['master'] + held['moments']) / 1e6:.1f} MB for updates"
    )
    place.end(options, example="tensor_parallel", loss_before=before, loss=after, begun_at=done)


if __name__ == "__main__":
    main()
