"""Models that tensor parallelism has cut: what users hold, what is sent, and what is refused on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zeor
from tests.parity.divided import Divided, adamw, batch, cut, loss_of, made, new_mesh, one_step, sharded, whole
from zeor.access.sharded import state_of


def backward(model: nn.Module, mesh: Any, step: int = 0) -> None:
    loss_of(model, *batch(step, 0, mesh.get_local_rank("dp"))).backward()


# ---- what users hold


def held(stage: int) -> dict[str, Any]:
    mesh = new_mesh(2, 2)
    model = made("sequence")
    cut("sequence", model, mesh["tp"])
    before, weight = list(model.parameters()), model.blocks[0].up.weight
    told: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda param: told.append((param is weight, param.grad.placements)))
    optimizer = adamw(model)
    zeor.shard(model, optimizer, stage=stage, mesh=mesh["dp"], keep_whole=0)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    backward(model, mesh)
    grad = weight.grad
    seen = [
        weight,
        grad,
        weight.detach(),
        weight.data,
        model.state_dict()["blocks.0.up.weight"],
        torch.zeros_like(grad),
    ]
    assert all(isinstance(each, DTensor) and each.placements == (Shard(0),) for each in seen)
    assert all(each.shape == (64, 16) and each.device_mesh == mesh["tp"] for each in seen)
    assert told == [(True, (Shard(0),))]
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    full = grad.full_tensor()
    grad.mul_(3.0)
    tripled = grad.full_tensor()
    grad.clamp_(-1e-3, 1e-3)
    return {
        "norm": float(grad.norm()), "full": full, "tripled": tripled, "clamped": grad.full_tensor(),
        "reads": reads(weight, grad),
    }  # fmt: skip


def reads(weight: Any, grad: Any) -> list[str]:
    """Of this rank's part along tensor parallelism, which zeor has cut further, or not."""
    found = []
    both = [Replicate()]
    for each in (
        lambda: weight.to_local().shape,
        lambda: grad.to_local().shape,
        lambda: grad.redistribute(placements=both).shape,
        lambda: weight.full_tensor().shape,
    ):
        try:
            found.append(str(tuple(each())))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_and_gradients_stay_dtensors(ranks: Callable, stage: int) -> None:
    model = made("sequence")
    for rank in (0, 1):
        (loss_of(model, *batch(0, 0, rank)) / 2).backward()
    wanted = model.blocks[0].up.weight.grad
    for found in ranks(held, 4, stage):
        assert torch.allclose(found["full"], wanted, rtol=0, atol=1e-12)
        assert torch.equal(found["tripled"], found["full"] * 3)
        assert torch.equal(found["clamped"], found["tripled"].clamp(-1e-3, 1e-3))
        assert abs(found["norm"] - float(found["clamped"].norm())) < 1e-12
        if stage == 0:
            assert found["reads"] == ["(32, 16)", "(32, 16)", "(64, 16)", "(64, 16)"]
        else:
            assert "'blocks.0.up.weight' is sharded" in found["reads"][0] and "full_params" in found["reads"][0]
            assert "gradient of 'blocks.0.up.weight' is sharded" in found["reads"][1] == found["reads"][2]
            assert found["reads"][3] == found["reads"][0]


def averaged(stage: int) -> None:
    """A state of this rank, one of whole parameters, and one that fits neither."""
    model, optimizer, mesh = sharded(Divided("sequence", (2, 2), stage))
    average, other = zeor.ema(model, 0.5), zeor.ema(model, 0.5)
    for step in range(2):
        one_step(model, optimizer, step, mesh.get_local_rank("dp"), Divided("sequence", (2, 2), stage))
        average.update()
    with average.applied():
        wanted = whole(model)
    for values in (wanted, average.state_dict()["values"]):
        for part in other.state_dict()["values"].values():
            part.zero_()
        other.load_state_dict({"updates": 2, "values": values})
        with other.applied():
            assert all(torch.equal(value, wanted[name]) for name, value in whole(model).items())
    wrong = {name: value[:1] for name, value in wanted.items()}
    with pytest.raises(ValueError, match="at another world size or on another mesh; load it there, or give whole"):
        other.load_state_dict({"updates": 2, "values": wrong})


@pytest.mark.parametrize("stage", [1, 3])
def test_the_state_of_an_average_is_loaded_from_whole_parameters(ranks: Callable, stage: int) -> None:
    ranks(averaged, 4, stage)


def written() -> list[float]:
    model, _, mesh = sharded(Divided("sequence", (2, 2), 0, options={"precision": "bf16"}))
    for step in range(2):  # the sum of two is wider than what is handed out, so that is a copy
        backward(model, mesh, step)
    grad = model.blocks[0].up.weight.grad
    before = float(grad.norm())
    grad.to_local().mul_(2.0)
    return [before, float(grad.norm())]


def test_a_write_into_a_local_gradient_counts(ranks: Callable) -> None:
    for before, after in ranks(written, 4):
        assert before > 0 and abs(after / before - 2) < 0.02


def loaded(stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model, _, _ = sharded(Divided("sequence", (2, 2), stage))
    plain = {name: value + 1 for name, value in made("sequence").state_dict().items()}
    model.load_state_dict(plain)
    first = whole(model)
    up = model.blocks[0].up.weight
    with torch.no_grad():
        up.copy_(distribute_tensor(plain["blocks.0.up.weight"] * 2, up.device_mesh, [Replicate()]))
        model.norm.weight.fill_(5.0)
    return plain, first, whole(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_are_loaded(ranks: Callable, stage: int) -> None:
    for plain, first, then in ranks(loaded, 4, stage):
        assert all(torch.equal(first[name], value) for name, value in plain.items())
        assert torch.equal(then["blocks.0.up.weight"], plain["blocks.0.up.weight"] * 2)
        assert bool((then["norm.weight"] == 5).all())


# ---- with whatever else is on

ALIKE: list[dict[str, Any]] = [
    {"overlap": False}, {"recompute": True}, {"release": True}, {"offload": "host"}, {"keep_whole": 0},
    {"offload": {"master": "host", "moments": "host", "grads": "host"}}, {"paths": "static"}, {"prefetch": 2},
]  # fmt: skip


def trained(options: list[dict[str, Any]]) -> list[bytes]:
    found = []
    for number, each in enumerate(options):
        setting = Divided("sequence", (2, 2), (3, 2)[number % 2], options={"precision": "bf16", **each})
        model, optimizer, mesh = sharded(setting)
        for step in range(3):
            one_step(model, optimizer, step, mesh.get_local_rank("dp"), setting)
        found.append(b"".join(value.numpy().tobytes() for value in whole(model).values()))
    return found


def test_options_change_no_bit(ranks: Callable) -> None:
    for found in ranks(trained, 4, [{}, {}, *ALIKE], timeout=240):
        assert [each == found[0] for each in found] == [True] * (2 + len(ALIKE))


WIRES: list[dict[str, Any]] = [{"wire": "int8"}, {"wire": "fp8", "stage": 2}, {"wire": {"reduce": "powersgd"}}]


def shared_by_wires(options: list[dict[str, Any]]) -> list[bytes]:
    """The parameters that tensor parallelism has not cut. They lie in a unit with some that it has."""
    found = []
    for each in options:
        mesh, model = new_mesh(2, 2), made("mlp").float()
        cut("mlp", model, mesh["tp"])
        optimizer = adamw(model)
        zeor.shard(model, optimizer, mesh=mesh["dp"], keep_whole=0, **each)
        for step in range(3):
            one_step(model, optimizer, step, mesh.get_local_rank("dp"), Divided())
        plain = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
        values = whole(model)
        found.append(b"".join(values[name].numpy().tobytes() for name in plain))
    return found


def test_wires_round_what_ranks_share_alike(ranks: Callable) -> None:
    by_rank = ranks(shared_by_wires, 4, WIRES)
    for number, options in enumerate(WIRES):
        assert len({found[number] for found in by_rank}) == 1, options


# ---- what is sent, and held


def counted(micro: str) -> tuple[int, int, dict[str, Any]]:
    model, optimizer, mesh = sharded(Divided("sequence", (2, 2), 3, micro, options={"keep_whole": 0}))
    rank = mesh.get_local_rank("dp")
    one_step(model, optimizer, 0, rank, Divided("sequence", (2, 2), 3, micro))
    before = zeor.traffic(model)
    one_step(model, optimizer, 1, rank, Divided("sequence", (2, 2), 3, micro))
    after = zeor.traffic(model)
    lanes = [lane for unit in state_of(model).engine.units for lane in unit.lanes if lane.key.sums]
    assert {slot.name.rpartition(".")[0][-4:] for slot in state_of(model).engine.slots if slot.lane in lanes} == {
        "norm", "down"
    }  # fmt: skip
    numel = sum(lane.layout.numel for lane in lanes)
    sums = after["calls"]["sum"] - before["calls"]["sum"]
    sent = after["bytes_by_axis"]["tp"]["sum"] - before["bytes_by_axis"]["tp"]["sum"]
    return sums - len(lanes), sent - 8 * numel, zeor.report(model)


@pytest.mark.parametrize("micro", ["1", "3 no_sync"])
def test_partial_gradients_are_summed_once_per_lane_and_step(ranks: Callable, micro: str) -> None:
    """Norms, whose gradients are partial, and biases of row layers, whose are not, lie in lanes that are summed."""
    for more_sums, more_bytes, report in ranks(counted, 4, micro):
        assert (more_sums, more_bytes) == (0, 0)
        numel = sum(param.numel() for param in made("sequence").parameters())
        replicated = 2 * 16 * 3 + 16 * 2  # norms and biases of row layers: every tensor-parallel rank has them
        least = ((numel - replicated) // 2 + replicated) // 2 * 8  # of a float64 model, on one of four ranks
        assert least <= report["compute"] <= least + report["padding"]


def given_back(name: str) -> tuple[list[str], list[str], dict[str, int]]:
    model, optimizer, mesh = sharded(Divided(name, (2, 2), 3, options={"keep_whole": 0}))
    engine = state_of(model).engine
    rank = mesh.get_local_rank("dp")
    one_step(model, optimizer, 0, rank, Divided(name))

    def held() -> list[str]:
        return [unit.name for unit in engine.units if any(lane.full._storage.size() for lane in unit.lanes)]

    loss = loss_of(model, *batch(1, 0, rank))
    between = held()
    loss.backward()
    after = held()
    optimizer.step()
    return between, after, {kind: nbytes for kind, nbytes in engine.ledger.live.items() if nbytes}


@pytest.mark.parametrize(
    ("name", "last"), [("sequence", "head"), ("between", "head"), ("llama", "lm_head"), ("mixtral", "lm_head")]
)
def test_memory_of_dtensors_is_given_back(ranks: Callable, name: str, last: str) -> None:
    """What autograd saved of a parameter, as a DTensor or as a local tensor, holds none of it."""
    for between, after, live in ranks(given_back, 4, name):
        assert between == ["root", last] and after == [] and live == {}


# ---- what is refused


def text_of(do: Callable[[], Any], kind: type[Exception] = Exception) -> str:
    try:
        do()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def divided() -> tuple[nn.Module, Any]:
    mesh = new_mesh(2, 2)
    model = made("mlp")
    cut("mlp", model, mesh["tp"])
    return model, mesh


def refusals() -> dict[str, str]:
    model, mesh = divided()
    found = {
        "all ranks": text_of(lambda: zeor.shard(model)),
        "both dimensions": text_of(lambda: zeor.shard(model, mesh=mesh)),
        "the other dimension": text_of(lambda: zeor.shard(model, mesh=mesh["tp"])),
        "fp8": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], precision="fp8")),
        "compile": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], compile=True)),
        "recompute": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], recompute="auto")),
        "products": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], recompute="products")),
        "wire": text_of(lambda: zeor.shard(model, mesh=mesh["dp"], wire="auto")),
        "drop-in": text_of(lambda: zeor.optim.SGD(model.parameters(), lr=0.1, mesh=mesh["dp"])),
    }
    matrices = torch.optim.Muon([model.blocks[0].up.weight], lr=0.1)
    found["whole matrices"] = text_of(lambda: zeor.shard(model, matrices, mesh=mesh["dp"]))

    other = new_mesh(4, names=("all",))
    mixed, _ = divided()
    mixed.head.weight = nn.Parameter(distribute_tensor(mixed.head.weight.detach(), other, [Shard(0)]))
    found["two meshes"] = text_of(lambda: zeor.shard(mixed, mesh=mesh["dp"]))

    counting, _ = divided()
    counting.norm.register_buffer("count", distribute_tensor(torch.zeros(2), mesh["tp"], [Replicate()]))
    found["buffer"] = text_of(lambda: zeor.shard(counting, mesh=mesh["dp"]))

    apart, _ = divided()
    with torch.no_grad():
        apart.norm.weight += torch.distributed.get_rank()
    found["other values"] = text_of(lambda: zeor.shard(apart, mesh=mesh["dp"]))

    optimizer = adamw(model)
    zeor.shard(model, optimizer, mesh=mesh["dp"], plan="auto")  # nothing was changed by all that
    found["wire later"] = text_of(lambda: zeor.set_wire(model, "int8"))
    found["one rank"] = text_of(lambda: zeor.full_params(model, to_rank=0).__enter__())
    found["whole state"] = text_of(lambda: zeor.full_state(model, optimizer))
    found["penalty"] = text_of(lambda: zeor.penalty(model, lambda p: p.abs().sum()))
    found["initialise"] = text_of(lambda: zeor.init_parameters(model))
    up = model.blocks[0].up.weight
    with torch.no_grad():
        found["shape"] = text_of(lambda: up.copy_(torch.zeros(5, 7)))
    backward(model, mesh)
    found["elements"] = text_of(lambda: up.grad.__setitem__(0, 0.0))
    return found


SAID = {
    "all ranks": ["TypeError", "'blocks.0.up.weight' is a DTensor over mesh dimension 'tp'", "mesh=mesh['dp']"],
    "both dimensions": ["TypeError", "'blocks.0.up.weight' is a DTensor over mesh dimension 'tp'", "mesh=mesh['dp']"],
    "the other dimension": ["TypeError", "over mesh dimension 'tp'", "mesh=mesh['dp']"],
    "fp8": ["ValueError", "precision='fp8'", "use precision='bf16'"],
    "compile": ["ValueError", "compile= cannot trace", "leave it out"],
    "recompute": ["ValueError", "recompute='auto'", "'blocks.0.up.weight'", "recompute=True"],
    "products": ["ValueError", "recompute='products'", "'blocks.0.up.weight'", "recompute=True"],
    "wire": ["ValueError", "wire='auto'", "'blocks.0.up.weight'", "name a format"],
    "wire later": ["ValueError", "zeor.set_wire", "began without a wire"],
    "drop-in": ["TypeError", "is a DTensor", "zeor.shard(model, optimizer, mesh=mesh['dp'])"],
    "whole matrices": ["ValueError", "Muon computes on whole matrices", "'tp'", "AdamW"],
    "two meshes": ["TypeError", "'head.weight'", "over one mesh"],
    "buffer": ["TypeError", "Buffer 'norm.count' is a DTensor", "full_tensor()"],
    "other values": ["ValueError", "'norm.weight' is whole on every tensor-parallel rank", "the same seed"],
    "one rank": ["RuntimeError", "zeor.full_params(to_rank=)", "zeor.iter_full"],
    "whole state": ["RuntimeError", "zeor.full_state knows no tensor parallelism yet", "zeor.save"],
    "penalty": ["RuntimeError", "zeor.penalty", "add the term to the loss", "'blocks.0.up.weight'"],
    "initialise": ["RuntimeError", "zeor.init_parameters", "zeor.load_pretrained"],
    "shape": ["ValueError", "'blocks.0.up.weight' has shape (64, 16)", "(5, 7)"],
    "elements": ["RuntimeError", "Elements of", "mul_(mask)"],
}


def test_refusals_are_one_sentence_on_every_rank(ranks: Callable) -> None:
    for found in ranks(refusals, 4):
        assert found.keys() == SAID.keys()
        for what, parts in SAID.items():
            assert all(part in found[what] for part in parts), (what, found[what])


# ---- ties


def tied() -> dict[str, Any]:
    mesh = new_mesh(2, 2)
    model = made("vocabulary")
    model.head.weight = model.embed.weight
    cut("vocabulary", model, mesh["tp"])
    assert model.head.weight is not model.embed.weight, "parallelize_module unties"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        zeor.shard(model, mesh=mesh["dp"])
    llama = made("tied llama")
    cut("tied llama", llama, mesh["tp"])
    llama.lm_head.weight = nn.Parameter(llama.lm_head.weight.detach().clone())
    return {
        "warned": [str(each.message) for each in heard if "parallelize_module" in str(each.message)],
        "refused": text_of(lambda: zeor.shard(llama, mesh=mesh["dp"])),
    }


@pytest.mark.long
def test_ties_that_were_undone_are_noticed(ranks: Callable) -> None:
    for found in ranks(tied, 4):
        assert len(found["warned"]) == 1 and "'embed.weight' and 'head.weight'" in found["warned"][0]
        assert "ValueError" in found["refused"] and "'lm_head.weight'" in found["refused"]
        assert "are tied in this model" in found["refused"]
