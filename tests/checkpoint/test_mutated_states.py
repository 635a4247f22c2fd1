"""Optimizer state changed with care, every hash right: refused by name with nothing changed, or the next step gives
what torch's own optimizer gives from what the checkpoint says, bit for bit. Then the good one loads again."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zeor
from tests.checkpoint.mutants import mutated_state, signed
from zeor.checkpoint import manifest as manifests
from zeor.checkpoint import plain
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.training import load, save
from zeor.layout.boxes import whole
from zeor.runtime.sharded import state_of

EACH = 800  # of each optimizer; `make test` takes a few
FEW = 60
STEP = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(5, 6), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.idle = nn.Parameter(torch.ones(3))  # without a gradient, so without state
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(torch.relu(self.head(x))) * self.scale + self.shift


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5, centered=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    model(torch.rand(8, 5, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(value: Any) -> Any:
    return (
        bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if isinstance(value, Tensor) else value
    )


class Target:
    """A checkpoint to change, and the run that loads it."""

    def __init__(self, kind: str, folder: Path) -> None:
        model = net(1)
        model, optimizer = zeor.shard(model, OPTIMIZERS[kind](groups_of(model)), stage=2)
        for number in range(STEP):
            step(model, optimizer, number)
        self.kind = kind
        self.path = Path(str(save(folder, model, optimizer, step=STEP, extra={"tensor": torch.arange(40.0)})))
        self.manifest = (self.path / manifests.NAME).read_bytes()
        self.body = json.loads(self.manifest)["manifest"]
        [self.file] = [self.path / file["name"] for file in self.body["files"]]
        self.data = self.file.read_bytes()
        values = safetensors.torch.load(self.data)
        parsed = manifests.parse(self.manifest, "it")
        self.tensors = {(t.role, t.name): values[t.key(whole(t.shape))] for t in parsed.tensors if t.pieces}
        made = net(2)
        self.model, self.optimizer = zeor.shard(made, OPTIMIZERS[kind](groups_of(made)), stage=2)
        self.load()
        self.truth = self.now()

    def load(self) -> None:
        load(self.path, self.model, self.optimizer)

    def now(self) -> dict[str, Any]:
        """Everything a load changes, as bytes."""
        segments = state_of(self.model).steppers[0].segments
        found: dict[str, Any] = {}
        for name, param in self.model.named_parameters():
            found.update({f"{name}/{key}": (str(v), bits(v)) for key, v in segments.whole(param).items()})
            found[name] = bits(param)
        for number, group in enumerate(self.optimizer.param_groups):
            found.update({f"{number}/{key}": repr(value) for key, value in group.items() if key != "params"})
        return found

    def write(self, body: Any, optimizers: dict[Any, Tensor]) -> None:
        """A checkpoint of these: the file says what the manifest says, and every hash is right."""
        rest = {key: value for key, value in self.tensors.items() if not key[0].startswith("optimizer.")}
        entries, values = [], {}
        for (role, name), value in {**rest, **optimizers}.items():
            shape, dtype = tuple(value.shape), plain.dtype_name(value.dtype)
            stored = manifests.Stored(role, name, shape, dtype, [])
            pieces = [[0, [0] * len(shape), list(shape)]] if value.numel() else []
            entries.append({"role": role, "name": name, "shape": list(shape), "dtype": dtype, "pieces": pieces})
            if pieces:
                values[stored.key(whole(shape))] = value.contiguous()
        data = safetensors.torch.save(values)
        body["tensors"] = entries
        body["files"][0] |= {"nbytes": len(data), "blocks": [manifests.digest(data)]}
        self.put(signed(body), data)

    def put(self, manifest: bytes, data: bytes) -> None:
        (self.path / manifests.NAME).write_bytes(manifest)
        self.file.write_bytes(data)

    def restore(self) -> None:
        self.put(self.manifest, self.data)
        self.load()


def reference(target: Target) -> dict[str, Any]:
    """The parameters after a step of torch's own optimizer, from what the checkpoint says."""
    body = json.loads((target.path / manifests.NAME).read_bytes())["manifest"]
    values = safetensors.torch.load(target.file.read_bytes())
    parsed = manifests.parse(signed(body), "it")
    tensors = {(t.role, t.name): values[t.key(whole(t.shape))] for t in parsed.tensors if t.pieces}
    model = net(5)
    model.load_state_dict({name: value for (role, name), value in tensors.items() if role in ("param", "buffer")})
    optimizer = OPTIMIZERS[target.kind](groups_of(model))
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    entry, state = body["state"]["optimizers"][0], {}
    for number, name in enumerate(order):
        held = {
            entry["keys"][role][0]: value for (role, n), value in tensors.items() if role in entry["keys"] and n == name
        }
        held.update({key[0]: plain.decode(value, None) for key, value in entry["scalars"].get(name, ())})  # type: ignore[arg-type]
        if held:
            held = {
                k: torch.tensor(float(v)) if k == "step" and type(v) in (int, float) else v for k, v in held.items()
            }
            held = {k: v.float() if isinstance(v, Tensor) else v for k, v in held.items()}
            state[number] = held
    numbers, groups = itertools.count(), []
    for group, saved in zip(optimizer.param_groups, entry["groups"], strict=True):
        settings = {k: v for k, v in group.items() if k != "params"} | plain.decode(saved["settings"], None)  # type: ignore[arg-type]
        for key, value in settings.items():
            if isinstance(value, list) and isinstance(group.get(key), tuple):
                settings[key] = tuple(value)
            if isinstance(value, Tensor) and key in group:
                settings[key] = value.item()  # this run's is a number
        groups.append({**settings, "params": [next(numbers) for _ in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    step(model, optimizer, STEP)
    return {name: bits(param) for name, param in model.named_parameters()}


def attempt(target: Target, what: str) -> str:
    """Whether it was refused or loaded; both as they must be."""
    before = target.now()
    try:
        target.load()
    except CheckpointError as error:
        assert str(target.path) in str(error) and "\n" not in str(error), what
        assert "holds malformed values (" not in str(error), (what, str(error))
        assert target.now() == before, what
        return "refused"
    step(target.model, target.optimizer, STEP)
    found = {name: bits(param) for name, param in target.model.named_parameters()}
    assert found == reference(target), what
    return "loaded"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {kind: Target(kind, tmp_path_factory.mktemp(kind)) for kind in OPTIMIZERS}


@pytest.mark.parametrize("count", [FEW, pytest.param(EACH, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_changed_with_care_is_refused_or_steps_as_torch_would(
    targets: dict[str, Target], kind: str, count: int
) -> None:
    target, source = targets[kind], random.Random(f"{kind} {count}")
    held = {key: value for key, value in target.tensors.items() if key[0].startswith("optimizer.")}
    outcomes = {"refused": 0, "loaded": 0}
    for _ in range(count):
        body, tensors, what = mutated_state(target.body, held, source)
        target.write(body, tensors)
        outcome = attempt(target, f"{kind}: {what}")
        outcomes[outcome] += 1
        if outcome == "loaded":
            target.restore()
            assert target.now() == target.truth, what  # the good one, into the same objects
    target.restore()
    assert target.now() == target.truth and min(outcomes.values()) > count // 20, outcomes
