"""A GPT over bytes whose blocks are mixtures of experts, divided over an `ep` dimension: dp x ep ranks, on Shakespeare.

    torchrun --nproc-per-node 4 examples/experts.py --ep 2                       # dp x ep = 2 x 2
    torchrun --nproc-per-node 4 examples/experts.py --ep 4                       # every rank has two of eight experts
    torchrun --nproc-per-node 2 examples/experts.py --ep 1 --checkpoints FOLDER  # goes on from any of them

Every rank reads batches of its own. Ranks along `ep` hold different experts and send each other tokens, by the
all-to-all below; zeor shards all else over all ranks, and each expert over the ranks along `dp`. Prints the loss per
byte on held-out text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where zeor is not installed

import zeor
from examples.start import Place, parser
from examples.texts import Bytes, Windows, endless, tokens
from zeor.tools import gpt

# ---- a mixture of experts, as in Mixtral; it knows nothing of zeor


class Exchange(torch.autograd.Function):
    """Rows to other ranks: `sends[r]` of them to rank r, `takes[r]` from it. Backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], takes: list[int], group: Any) -> Tensor:
        ctx.back = takes, sends, group
        found = rows.new_empty(sum(takes), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), takes, sends, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(*grads, *ctx.back), None, None, None


class Experts(nn.Module):
    """Gated MLPs, side by side in three parameters: expert number e is row e of each."""

    def __init__(self, count: int, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """`counts[e]` rows for each expert that this rank has, one expert after another."""
        weights = [p.to_local() if isinstance(p, DTensor) else p for p in (self.gate, self.up, self.down)]
        found = [
            (functional.silu(part @ gate) * (part @ up)) @ down
            for part, gate, up, down in zip(rows.split(list(counts)), *weights, strict=True)
        ]
        return torch.cat(found)


class Mixture(nn.Module):
    """Each token goes to the `chosen` experts that its router likes best, on whatever rank of `group` they are."""

    def __init__(self, width: int, hidden: int, count: int, chosen: int):
        super().__init__()
        self.count, self.chosen = count, chosen
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, hidden)
        self.group: Any = None  # the ranks that have the other experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores, numbers = self.router(rows).softmax(-1).topk(self.chosen)
        scores = scores / scores.sum(-1, keepdim=True)
        order = numbers.flatten().argsort(stable=True)  # by expert
        counts = numbers.flatten().bincount(minlength=self.count)
        token = order // self.chosen
        found = self._through(rows[token], counts) * scores.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token, found).view_as(x)

    def _through(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Of each row what its expert makes of it. A rank without rows for anybody takes part all the same."""
        if self.group is None:
            return self.experts(rows, counts.tolist())
        ranks = dist.get_world_size(self.group)
        sent = counts.view(ranks, -1)  # for each rank: of each of its experts
        taken = torch.empty_like(sent)
        dist.all_to_all_single(taken, sent.contiguous(), group=self.group)
        sends, takes = sent.sum(1).tolist(), taken.sum(1).tolist()
        came = Exchange.apply(rows, sends, takes, self.group)
        # They came by rank and then by expert; experts take them by expert.
        here = torch.arange(taken.shape[1], device=rows.device).repeat(ranks).repeat_interleave(taken.flatten())
        order = here.argsort(stable=True)
        made = self.experts(came[order], taken.sum(0).tolist())
        return Exchange.apply(made[order.argsort()], takes, sends, self.group)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank along this dimension keeps its experts: before an optimizer is made, for parameters are new ones. All
    ranks have made the same model, so nothing is sent."""
    for mixture in model.modules():
        if isinstance(mixture, Mixture):
            mixture.group = mesh.get_group()
            for name, weight in list(mixture.experts.named_parameters()):
                part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(mixture.experts, name, nn.Parameter(part))


# ---- the program


def make(options: Any) -> gpt.GPT:
    config = gpt.GPTConfig(options.layers, options.width, max(1, options.width // 32), options.context)
    model = gpt.GPT(config)
    for block in model.blocks:
        block.mlp = Mixture(options.width, 2 * options.width, options.experts, options.chosen)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, place: Place, batch: int) -> float:
    """The mean loss per byte over all of the data, each window seen by one rank; all ranks go equally often."""
    model.eval()
    found = [(gpt.loss(model(rows[:, :-1]), rows[:, 1:]).item(), len(rows)) for rows in
             data.parts(place.rank, place.world, batch)]  # fmt: skip
    model.train()
    summed, count = zeor.total(sum(loss * rows for loss, rows in found), sum(rows for _, rows in found))
    return summed / count


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--ep", type=int, default=2, help="ranks that hold different experts")
    asked.add_argument("--experts", type=int, default=8, help="in each block")
    asked.add_argument("--chosen", type=int, default=2, help="experts of each token")
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    asked.add_argument("--context", type=int, default=64)
    asked.add_argument("--layers", type=int, default=3)
    asked.add_argument("--width", type=int, default=128)
    asked.add_argument("--lr", type=float, default=2e-3)
    asked.add_argument("--stage", type=int, default=3)
    asked.add_argument("--precision", default="fp32")
    asked.add_argument("--checkpoints", help="save there at the end, and go on from what is there")
    asked.add_argument("--limit", type=int, help="take so many texts only")
    options = asked.parse_args()
    place = Place(options.seed)
    if not dist.is_initialized():  # python, without torchrun
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if place.world % options.ep or options.experts % options.ep:
        raise SystemExit(f"--ep {options.ep} must divide the {place.world} ranks and the {options.experts} experts.")
    mesh = init_device_mesh(place.device.type, (place.world // options.ep, options.ep), mesh_dim_names=("dp", "ep"))

    train, held_out = tokens(["shakespeare"], Bytes(), options.limit)
    model = make(options).to(place.device)  # the same seed on every rank, so the same values
    divide(model, mesh["ep"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = zeor.shard(
        model, optimizer, experts=mesh["ep"], stage=options.stage, precision=options.precision
    )  # all else over all ranks
    windows = Windows(train, options.context + 1, place.device)
    unseen = Windows(held_out[: 64 * options.batch * (options.context + 1)], options.context + 1, place.device)
    loader = zeor.data.shard(windows.loader(options.batch))
    batches = endless(loader)
    done = 0
    if options.checkpoints is not None and any(Path(options.checkpoints).glob("step-*")):
        done = zeor.load(options.checkpoints, model, optimizer, data=loader).step

    before = evaluate(model, unseen, place, options.batch)
    for step in range(done + 1, done + options.steps + 1):
        rows = next(batches)
        loss = gpt.loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all experts, wherever they are
        optimizer.step()
        optimizer.zero_grad()
        place.progress(step, options.steps, loss, norm)
    after = evaluate(model, unseen, place, options.batch)
    if options.checkpoints is not None:
        zeor.save(options.checkpoints, model, optimizer, step=done + options.steps, data=loader)
    held = zeor.report(model)
    place.say(
        f"dp x ep = {' x '.join(map(str, mesh.mesh.shape))}: held-out loss {before:.3f} -> {after:.3f} per byte "
        f"({after / math.log(2):.2f} bits); {sum(p.numel() for p in model.parameters()):,} parameters, of which rank 0 "
        f"keeps {held['compute'] / 1e6:.1f} MB for forward and {(held['master'] + held['moments']) / 1e6:.1f} MB for "
        "updates"
    )
    place.end(options, example="experts", loss_before=before, loss=after, begun_at=done)


if __name__ == "__main__":
    main()
