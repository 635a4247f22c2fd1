"""Small programs made at random: models that read, write, hook, keep and pass parameters in every way we know of.

`make(seed)` gives a `Program`: how to build its model, its loss and its loop, all decided by the seed. The same program
runs plain in one process (`run_plain`, on all ranks' batches) and under zeor on each rank (`run_sharded`). Each block
kind below is one habit of real programs; a program is a few of them in a row.
"""

from __future__ import annotations

import random
import types
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

WIDTH, ROWS, STEPS = 6, 3, 3


class Fused(torch.autograd.Function):
    """A custom Function over a weight, as fused losses are: the weight is saved for backward, or kept on ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keeps: bool) -> Tensor:
        ctx.save_for_backward(x, *(() if keeps else (weight,)))
        if keeps:
            ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, *rest = ctx.saved_tensors
        weight = rest[0] if rest else ctx.weight
        return grads[0] @ weight, grads[0].t() @ x, None


class Slots:
    """A box with slots: no __dict__ to look into."""

    __slots__ = ("inside",)

    def __init__(self, inside: Any):
        self.inside = inside


class Box(UserDict):
    """A mapping that is no dict."""


BOXES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda b: b),
    "tuple": (lambda t: (t,), lambda b: b[0]),
    "list": (lambda t: [t], lambda b: b[0]),
    "dict": (lambda t: {"y": t}, lambda b: b["y"]),
    "user dict": (lambda t: Box(y=t), lambda b: b["y"]),
    "proxy": (lambda t: types.MappingProxyType({"y": t}), lambda b: b["y"]),
    "slots": (lambda t: Slots(t), lambda b: b.inside),
    "closure": (lambda t: (lambda: t), lambda b: b()),
    "set": (lambda t: {t}, lambda b: next(iter(b))),
    "iterator": (lambda t: iter([t]), lambda b: next(b)),
    "nested": (lambda t: {"a": [Slots((t,))]}, lambda b: b["a"][0].inside[0]),
}


class Block(nn.Module):
    """A linear layer with a bias and a gain, and one habit."""

    def __init__(self, habit: str, box: str):
        super().__init__()
        self.habit, self.box = habit, box
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.kept: Any = None
        self.aux: Any = None

    def forward(self, x: Tensor, notes: list, cache: dict, head: nn.Linear) -> Any:
        if self.habit in WRITES:
            with torch.no_grad():
                WRITES[self.habit](self)
        y = torch.tanh(self.lin(x)) * self.gain
        y = HABITS[self.habit](self, x, y, notes, cache, head)
        return BOXES[self.box][0](y)


def _plain(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y


def _appends(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    notes.append((y * block.gain).square().mean())
    return y


def _caches(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    for other in list(cache.values()):
        y = y + 0.1 * other
    cache[len(cache)] = y
    return y


def _late_loss(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    block.aux = torch.softmax(block.lin(x.detach() * 0.5), -1).square().sum()
    return y


def _weight_loss(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    block.aux = block.lin.weight.square().sum() * 0.01 + block.lin.weight.norm()
    return y


def _detached(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y - block.gain.detach() * 0.3 + (x * block.lin.bias.data).sum(-1, keepdim=True) * 0.1


def _others_detached(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y - head.weight.detach().mean(0) + head.weight.data.mean()


def _fused_own(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y + Fused.apply(x, block.lin.weight, False)


def _fused_other(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y + Fused.apply(y, head.weight, False)


def _fused_kept(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y + Fused.apply(y, block.lin.weight, True)


def _other_linear(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y + nn.functional.linear(y, head.weight).tanh()


def _norms(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    own = torch.linalg.vector_norm(block.lin.weight, dim=1) + torch._foreach_norm([block.gain])[0]
    return y * own + torch.norm(head.weight, keepdim=True).view(()) * 0.1


def _keeps_alias(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    if block.kept is not None:
        y = y + block.kept.sum() * 0.1
    block.kept = block.lin.weight.detach().view(-1)
    return y


def _keeps_parameter(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    if block.kept is not None:
        y = y + nn.functional.linear(y, block.kept[0]) * 0.1
    block.kept = (block.lin.weight, head.weight)
    return y


def _keeps_activation(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    block.aux = block.lin(x).tanh().sum() * 0.1
    return y.detach() + x


def _gives_weight(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    notes.append(Slots(block.lin.weight))
    notes.append(block.gain.view(2, -1))
    return y


def _attributes(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    return y * block.gain.factor * cache["ids"][id(block.gain)]  # type: ignore[attr-defined]


def _hooked_inside(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    handle = block.gain.register_hook(lambda grad: grad * 0.5)
    cache["handles"].append(handle)
    return y


def _checkpointed(block: Block, x: Tensor, y: Tensor, notes: list, cache: dict, head: nn.Linear) -> Tensor:
    def again(x: Tensor) -> Tensor:
        return torch.tanh(block.lin(x) + nn.functional.linear(x, head.weight)) * block.gain

    return y + torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False)


HABITS: dict[str, Callable[..., Tensor]] = {
    name.lstrip("_").replace("_", " "): function
    for name, function in list(globals().items())
    if name.startswith("_") and isinstance(function, types.FunctionType)
}


def clamp(block: Block) -> None:
    block.gain.clamp_(0.7, 1.1)


def write_elements(block: Block) -> None:
    block.lin.bias[0] = 0.25
    nn.functional.relu(block.lin.bias[2:3], inplace=True)
    torch.ops.aten.mul_.Scalar(block.gain, 1.01)


def write_aliases(block: Block) -> None:
    block.gain.detach()[1] = 0.9
    block.lin.weight.view(-1).mul_(0.99)
    block.lin.bias.copy_(block.gain * 0.1)


WRITES: dict[str, Callable[[Block], None]] = {"clamps": clamp, "writes": write_elements, "aliases": write_aliases}
HABITS.update(dict.fromkeys(WRITES, _plain))


class Model(nn.Module):
    def __init__(self, program: Program):
        super().__init__()
        self.blocks = nn.ModuleList(Block(habit, box) for habit, box in program.blocks)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.program = program
        self.notes: list = []

    def forward(self, x: Tensor, ids: dict, handles: list) -> Any:
        notes: list = []
        cache: dict = {"ids": ids, "handles": handles}
        for block in self.blocks:
            tensors = {key: value for key, value in cache.items() if isinstance(key, int)}
            x = BOXES[block.box][1](block(x, notes, cache if block.habit != "caches" else tensors, self.head))
            cache.update(tensors)
        self.notes = notes
        return self.head(x) * self.scale


@dataclass
class Program:
    seed: int
    blocks: list[tuple[str, str]]
    early_hook: bool  # a hook on a parameter, put on before it is sharded
    early_after: bool  # a post-accumulate hook, likewise
    inner_only: bool  # the loss looks at what blocks kept alone
    backward: str  # one, two (with retain_graph), penalty (create_graph)
    optimizer: str
    micro: int  # backward calls per step
    observed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{habit} in {box}" for habit, box in self.blocks)
        flags = [name for name in ("early_hook", "early_after", "inner_only") if getattr(self, name)]
        return f"program {self.seed}: {kinds}; {self.backward}, {self.optimizer}, {self.micro} micro; {' '.join(flags)}"


def make(seed: int) -> Program:
    draw = random.Random(seed)
    habits, boxes = list(HABITS), list(BOXES)
    blocks = [(draw.choice(habits), draw.choice(boxes)) for _ in range(draw.randint(1, 4))]
    return Program(
        seed,
        blocks,
        early_hook=draw.random() < 0.3,
        early_after=draw.random() < 0.3,
        inner_only=draw.random() < 0.15,
        backward=draw.choice(["one", "one", "two", "penalty"]),
        optimizer=draw.choice(["SGD", "AdamW"]),
        micro=draw.choice([1, 1, 2]),
    )


# ---- running


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def build(program: Program) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(program.seed)
    model = Model(program).double()
    for block in model.blocks:
        block.gain.factor = 1.25  # type: ignore[attr-defined]
    if program.early_hook:
        model.blocks[0].lin.weight.register_hook(lambda grad: grad * 2.0)
    if program.early_after:
        model.head.weight.register_post_accumulate_grad_hook(
            lambda param: program.observed.append(f"{tuple(param.shape)} {param.grad is not None}")
        )
    kind = getattr(torch.optim, program.optimizer)
    return model, kind(model.parameters(), lr=0.05)


def loss_of(model: Model, x: Tensor, ids: dict, handles: list) -> Tensor:
    """The loss of one rank's batch: outputs, what blocks noted, and what they kept as attributes."""
    y = model(x, ids, handles)
    total = y.new_zeros(()) if model.program.inner_only else y.square().mean()
    for note in model.notes:
        total = total + (note.inside.square().sum() * 0.01 if isinstance(note, Slots) else note.square().sum() * 0.1)
    for block in model.blocks:
        if isinstance(block.aux, Tensor):
            total = total + 0.1 * block.aux
    if not total.requires_grad:
        total = total + y.mean()
    return total


def backward(program: Program, loss: Tensor, x: Tensor) -> None:
    if program.backward == "two":
        (loss * 0.5).backward(retain_graph=True)
        (loss * 0.5).backward()
    elif program.backward == "penalty":
        (slope,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        (loss if slope is None else loss + slope.square().sum() * 0.1).backward()
    else:
        loss.backward()


def one_backward(program: Program, model: Model, step: int, micro: int, rank: int) -> float:
    """One rank's forward and backward; its loss."""
    ids = {id(block.gain): 1.5 for block in model.blocks}
    handles: list = []
    x = batch(step, micro, rank).requires_grad_(program.backward == "penalty")
    loss = loss_of(model, x, ids, handles)
    backward(program, loss, x)
    for handle in handles:
        handle.remove()
    return loss.item()


def steps(program: Program, model: Model, optimizer: Any, rank: int) -> float:
    """One rank's loop; the loss of the last step."""
    last = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        last = sum(one_backward(program, model, step, micro, rank) for micro in range(program.micro))
        optimizer.step()
    return last


def run_plain(program: Program, world: int) -> tuple[float, dict[str, Tensor]]:
    """The same in one process: a replica for each rank, whose gradients are averaged before each step."""
    replicas = [build(program) for _ in range(world)]
    last = 0.0
    for step in range(STEPS):
        last = 0.0
        for rank, (model, optimizer) in enumerate(replicas):
            optimizer.zero_grad()
            last += sum(one_backward(program, model, step, micro, rank) for micro in range(program.micro)) / world
        for params in zip(*(model.parameters() for model, _ in replicas)):
            grads = [param.grad for param in params if param.grad is not None]
            for param in params:
                param.grad = torch.stack(grads).sum(0) / world if grads else None
        for _, optimizer in replicas:
            optimizer.step()
    return last, {name: param.detach().clone() for name, param in replicas[0][0].named_parameters()}
