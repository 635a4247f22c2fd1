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
from zeor.access.sharded import state_of
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files import manifest as manifests
from zeor.checkpoint.files import plain
from zeor.checkpoint.files.errors import CheckpointError
from zeor.layout.boxes import whole

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


# ---- by name


def changed(target: Target, change: Any, tensors: dict[Any, Tensor] | None = None) -> None:
    """The checkpoint with something changed in what it says of its optimizer."""
    body = json.loads(json.dumps(target.body))
    change(body["state"]["optimizers"][0])
    held = {key: value for key, value in target.tensors.items() if key[0].startswith("optimizer.")}
    target.write(body, held if tensors is None else tensors)


def next_step(target: Target) -> dict[str, Any]:
    target.load()
    step(target.model, target.optimizer, STEP)
    return {name: bits(param) for name, param in target.model.named_parameters()}


@pytest.mark.parametrize("number", [STEP, float(STEP), {"$tensor": {"dtype": "int64", "shape": [], "values": [STEP]}}])
def test_a_step_of_an_older_torch_is_converted(targets: dict[str, Target], number: Any) -> None:
    target = targets["AdamW"]
    target.restore()
    right = next_step(target)

    def change(entry: Any) -> None:
        for pairs in entry["scalars"].values():
            for pair in pairs:
                pair[1] = number if pair[0] == ["step"] else pair[1]

    changed(target, change)
    assert next_step(target) == right
    kept = state_of(target.model).steppers[0].segments.whole(target.model.head.weight)["step"]
    assert type(kept) is Tensor and kept.dtype == torch.float32 and kept.item() == STEP + 1
    target.restore()


REFUSED = {
    "a step that is no number": (lambda e: e["scalars"]["head.bias"].__setitem__(0, [["step"], "3"]), "'step' of"),
    "a step below zero": (lambda e: e["scalars"]["head.bias"].__setitem__(0, [["step"], -1]), "was updated -1.0 times"),
    "no step": (lambda e: e["scalars"].__setitem__("head.bias", []), r"lacks 'step' of .* of 'head\.bias'"),
    "one beta": (lambda e: e["groups"][0]["settings"].update(betas={"$tuple": [0.9]}), "'betas' of a group cannot be"),
    "a beta that is a word": (
        lambda e: e["groups"][0]["settings"].update(betas={"$tuple": [0.9, "x"]}), "'betas' of a group cannot be",
    ),
    "betas beyond one": (
        lambda e: e["groups"][1]["settings"].update(betas={"$tuple": [0.9, 1.9]}), "cannot take a step",
    ),
    "capturable on a CPU": (lambda e: e["groups"][0]["settings"].update(capturable=True), "cannot take a step with"),
    "no learning rate": (lambda e: e["groups"][0]["settings"].pop("lr"), "lacks 'lr' of a group's settings"),
    "nothing for a number": (lambda e: e["groups"][0]["settings"].update(eps=None), "'eps' of a group cannot be"),
    "other settings than state": (
        lambda e: e["groups"][0]["settings"].update(amsgrad=False) or e["keys"].pop("optimizer.0.max_exp_avg_sq"),
        "does not say where",
    ),
    "numbers of nobody": (lambda e: e["scalars"].__setitem__("nobody", []), "for 'nobody', which is in no group of it"),
    "no numbers at all": (lambda e: e.pop("scalars"), "'scalars' of optimizer 0 is malformed or missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_optimizer_does_not_keep_is_refused_and_the_good_one_loads_after_it(
    targets: dict[str, Target], name: str
) -> None:
    target = targets["AdamW"]
    target.restore()
    change, words = REFUSED[name]
    changed(target, change)
    with pytest.raises(CheckpointError, match=words):
        target.load()
    assert target.now() == target.truth
    step(target.model, target.optimizer, 9)
    target.restore()
    assert target.now() == target.truth


def test_state_that_got_lost_is_refused_and_what_never_was_is_not(targets: dict[str, Target]) -> None:
    """SGD keeps one tensor of each parameter: without it a parameter looks as one that had no gradient yet."""
    target = targets["SGD"]
    held = {key: value for key, value in target.tensors.items() if key[0].startswith("optimizer.")}
    del held["optimizer.0.momentum_buffer", "tail.weight"]
    changed(target, lambda entry: None, held)
    with pytest.raises(CheckpointError, match=r"lacks the optimizer's state of 'tail\.weight'\."):
        target.load()
    assert "idle" in target.body["state"]["optimizers"][0]["scalars"]  # which never had a gradient
    changed(target, lambda entry: entry.pop("complete"), held)  # as before zeor wrote that down
    target.load()
    target.restore()
    assert target.now() == target.truth


class Lazy(torch.optim.Optimizer):
    """Keeps something more from its fifth step on, and a word."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["word"], state["none"] = "warm", None
                    if state["count"] >= 5:
                        state.setdefault("late", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(param.grad + state.get("late", 0), alpha=group["lr"])


@pytest.mark.parametrize("count", [0, 1, 6])
def test_state_that_is_made_late_loads(tmp_path: Path, count: int) -> None:
    runs = []
    for seed in (1, 2):
        model = net(seed)
        runs.append(zeor.shard(model, Lazy(groups_of(model)), stage=2))
    for number in range(count):
        step(*runs[0], number)
    save(tmp_path, *runs[0], step=count)
    load(tmp_path, *runs[1])
    for run in runs:
        step(*run, 50)
    ours, theirs = ({name: bits(p) for name, p in model.named_parameters()} for model, _ in runs)
    assert ours == theirs
    kept = [state_of(model).steppers[0].segments.whole(model.tail.bias) for model, _ in runs]
    assert kept[0].keys() == kept[1].keys() and ("late" in kept[1]) == (count + 1 >= 5)
