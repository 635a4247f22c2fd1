"""park and unpark: nothing of a run is left where it computes, everything is refused meanwhile, and no bit is lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import zeor
from tests import offloads
from tests.covering import covering
from tests.parity import divided
from zeor.access.sharded import state_of
from zeor.memory.view import View
from zeor.replan import park as parks

FACTORS = {
    "stage": (0, 1, 2, 3), "precision": (None, "bf16", "fp16"), "offload": (None, "host", "disk"),
    "moments": ("exact", "int8"), "keep_whole": (0, 50), "optimizer": ("AdamW", "SGD"),
}  # fmt: skip


def made(folder: str = "", offload: Any = None, optimizer: str = "AdamW", **options: Any) -> tuple[nn.Module, Any]:
    model = offloads.net()
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[optimizer]
    one = kind(model.parameters(), lr=0.01, **({"momentum": 0.9} if optimizer == "SGD" else {}))
    if offload:
        tiers = {"moments": offload, "master": offload}
        options["offload"] = zeor.Offload(**tiers, folder=folder or None, chunk=offloads.CHUNK)
    return zeor.shard(model, one, **options)


def steps(model: nn.Module, optimizer: Any, which: range) -> list[float]:
    return [offloads.one_step(model, [optimizer], step, "clip") for step in which]


def left(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    with zeor.full_params(model):
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = zeor.full_state(model, optimizer, to_rank=None)["state"]
    entries = {f"{n}.{key}": value for n, entry in state.items() for key, value in entry.items()}
    return {**found, **{key: value for key, value in entries.items() if isinstance(value, Tensor)}}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def check_same_bits(rows: list[dict[str, Any]], folder: str) -> None:
    for number, row in enumerate(rows):
        runs = []
        for parked in (False, True):
            model, optimizer = made(f"{folder}/{number}-{parked}", **row)
            average = zeor.ema(model, 0.5)
            losses = []
            for step in range(4):
                losses += steps(model, optimizer, range(step, step + 1))
                average.update()
                if parked and step in (0, 2):  # before and after the optimizer's state is complete
                    zeor.park(model, optimizer)
                    zeor.unpark(model, optimizer)
            with average.applied():
                averaged = dict(zeor.iter_full(model))
            runs.append((losses, {**left(model, optimizer), **{f"ema {name}": v for name, v in averaged.items()}}))
        (losses, end), (its_losses, its_end) = runs
        assert losses == its_losses, row
        same(end, its_end)


def test_a_run_that_was_parked_goes_on_in_every_bit(ranks, tmp_path):
    ranks(check_same_bits, 2, covering(FACTORS, strength=2), str(tmp_path))


def test_a_run_of_one_rank_too(ranks, tmp_path):
    ranks(check_same_bits, 1, [{"stage": 3}, {"stage": 1, "precision": "bf16"}], str(tmp_path))


@pytest.mark.parametrize("wire", [zeor.TopK(0.1), zeor.PowerSGD(2, warmup=0), zeor.Wire("int4", "int4", feedback=True)])
def test_what_wires_have_left_out_goes_and_comes_too(ranks, tmp_path, wire):
    ranks(check_same_bits, 2, [{"stage": 2, "wire": wire}], str(tmp_path))


def check_accumulating(release: bool) -> None:
    """Trainers of texts that the model itself has written generate in front of a step's first micro-batch, and are
    inside no_sync already."""
    found = []
    for parked in (False, True):
        model, optimizer = made(stage=3, release=release)
        for step in range(3):
            with zeor.accumulate(model) if release else zeor.no_sync(model):
                if parked:
                    zeor.park(model, optimizer)
                    zeor.unpark(model, optimizer)
                offloads.loss_of(model, step).backward()
            offloads.loss_of(model, step + 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(left(model, optimizer))
    same(*found)


@pytest.mark.parametrize("release", [False, True])
def test_in_front_of_the_first_of_several_micro_batches(ranks, release):
    ranks(check_accumulating, 2, release)


def check_divided(stage: int) -> None:
    """Beside tensor parallelism, whose ranks have lanes of their own."""
    setting = divided.Divided("sequence", (2, 2), stage)
    found = []
    for parked in (False, True):
        model, optimizer, mesh = divided.sharded(setting)
        for step in range(divided.STEPS):
            divided.one_step(model, optimizer, step, mesh.get_local_rank("dp"), setting)
            if parked:
                zeor.park(model, optimizer)
                assert zeor.report(model)["on_device"] == 0
                zeor.unpark(model, optimizer)
        found.append(divided.whole(model))
    same(*found)


@pytest.mark.parametrize("stage", [1, 3])
def test_beside_tensor_parallelism(ranks, stage):
    ranks(check_divided, 4, stage)


def tensors_now() -> dict[int, Tensor]:
    gc.collect()
    return {id(each): each for each in gc.get_objects() if isinstance(each, Tensor)}


def check_nothing_left(stage: int, precision: str | None) -> None:
    """Of all tensors that there are in this process and were not before, those of more than a few elements are zero
    while the model is parked, but for the copies themselves."""
    before = tensors_now()
    model, optimizer = made(stage=stage, precision=precision)
    average = zeor.ema(model)
    steps(model, optimizer, range(3))
    average.update()
    held = zeor.report(model)
    with torch._C.DisableTorchFunctionSubclass():
        zeor.park(model, optimizer)
    found = zeor.report(model)
    assert found["on_device"] == 0 and found["parked"] >= held["moments"] + held["master"] + held["ema"] > 0
    assert state_of(model, parked=True).engine.ledger.live_nbytes == 0
    copies = state_of(model, parked=True).parking._host.untyped_storage().data_ptr()
    checked = 0
    for key, each in tensors_now().items():
        # A view's storage is none, and the other two are of torch's own.
        if isinstance(each, View | FakeTensor) or torch._is_functional_tensor(each):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            storage = each.untyped_storage()
            if key in before or each.device.type != "cpu" or storage.nbytes() < 256 or storage.data_ptr() == copies:
                continue
            checked += 1
            assert not torch.tensor(storage, dtype=torch.uint8).any(), (tuple(each.shape), each.dtype, type(each))
    assert checked > 10
    zeor.unpark(model, optimizer)
    steps(model, optimizer, range(3, 4))


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, None), (2, "fp16"), (3, None), (3, "bf16")])
def test_nothing_of_it_is_left(ranks, stage, precision):
    ranks(check_nothing_left, 2, stage, precision)


# ---- what is refused while it is parked

VERBS: dict[str, Callable[[nn.Module, Any, Any, str], object]] = {
    "forward": lambda model, optimizer, average, folder: model(torch.zeros(2, offloads.WIDTH)),
    "evaluation": lambda model, optimizer, average, folder: torch.no_grad()(model)(torch.zeros(2, offloads.WIDTH)),
    "a block": lambda model, optimizer, average, folder: model.blocks[0](torch.zeros(2, offloads.WIDTH)),
    "step": lambda model, optimizer, average, folder: optimizer.step(),
    "save": lambda model, optimizer, average, folder: zeor.save(folder, model, optimizer, step=1),
    "load": lambda model, optimizer, average, folder: zeor.load(folder, model, optimizer),
    "export": lambda model, optimizer, average, folder: zeor.export(model, folder),
    "iter_full": lambda model, optimizer, average, folder: list(zeor.iter_full(model)),
    "full_params": lambda model, optimizer, average, folder: zeor.full_params(model).__enter__(),
    "full_state": lambda model, optimizer, average, folder: zeor.full_state(model, optimizer),
    "push": lambda model, optimizer, average, folder: zeor.push(model, print),
    "unshard": lambda model, optimizer, average, folder: zeor.unshard(model, optimizer),
    "replan": lambda model, optimizer, average, folder: zeor.replan(model, optimizer, stage=1),
    "clipping": lambda model, optimizer, average, folder: zeor.clip_grad_norm_(model, 1.0),
    "reading": lambda model, optimizer, average, folder: model.head.weight.sum(),
    "an element": lambda model, optimizer, average, folder: model.scale.item(),
    "writing": lambda model, optimizer, average, folder: nn.init.zeros_(model.head.weight),
    "state_dict": lambda model, optimizer, average, folder: optimizer.state_dict(),
    "its state": lambda model, optimizer, average, folder: optimizer.state[model.head.weight],
    "average": lambda model, optimizer, average, folder: average.update(),
    "park": lambda model, optimizer, average, folder: zeor.park(model, optimizer),
}  # fmt: skip


def check_refused(stage: int, folder: str) -> list[str]:
    model, optimizer = made(stage=stage)
    average = zeor.ema(model)
    steps(model, optimizer, range(2))
    before = left(model, optimizer)
    zeor.park(model, optimizer)
    texts = []
    for name, verb in VERBS.items():
        try:
            verb(model, optimizer, average, folder)
        except RuntimeError as error:
            texts.append(f"{name}: {error}")
        else:
            raise AssertionError(f"{name} was not refused")
    optimizer.zero_grad()
    assert model.head.weight.grad is None and zeor.is_sharded(model)
    zeor.unpark(model, optimizer)
    same(left(model, optimizer), before)
    with pytest.raises(RuntimeError, match=r"zeor\.unpark was given a model that is not parked"):
        zeor.unpark(model, optimizer)
    steps(model, optimizer, range(2, 3))
    return texts


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_whatever_needs_it_is_refused_in_one_sentence(ranks, tmp_path, stage):
    for texts in ranks(check_refused, 2, stage, str(tmp_path / "nothing")):
        assert len(texts) == len(VERBS)
        for text in texts:
            assert text.endswith("while the model is parked; call zeor.unpark(model, optimizer) first."), text
    assert not (tmp_path / "nothing").exists()


# ---- when it cannot be


def with_gradients(model: nn.Module, optimizer: Any) -> Any:
    offloads.loss_of(model, 0).backward()
    return zeor.park(model, optimizer)


def with_a_view(model: nn.Module, optimizer: Any) -> Any:
    kept = model.head.weight.detach() if zeor.report(model)["grad"] else lent(model)
    try:
        zeor.park(model, optimizer)
    finally:
        del kept


def lent(model: nn.Module) -> Tensor:
    """At stage 3: a tensor over a parameter, taken while it was there."""
    found: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda module, args: found.append(module.weight.detach()))
    with torch.no_grad():
        model(torch.zeros(2, offloads.WIDTH))
    handle.remove()
    return found[0]


def between_micro_batches(model: nn.Module, optimizer: Any) -> Any:
    with zeor.no_sync(model):
        offloads.loss_of(model, 0).backward()
        zeor.park(model, optimizer)


def inside_full_params(model: nn.Module, optimizer: Any) -> Any:
    with zeor.full_params(model):
        zeor.park(model, optimizer)


def without_optimizer(model: nn.Module, optimizer: Any) -> Any:
    zeor.park(model)


def another_optimizer(model: nn.Module, optimizer: Any) -> Any:
    zeor.park(model, [optimizer, torch.optim.SGD([torch.zeros(1)])])


def check_moment(wrong: Callable[[nn.Module, Any], Any], stage: int) -> str:
    model, optimizer = made(stage=stage)
    steps(model, optimizer, range(1))
    with pytest.raises((RuntimeError, ValueError)) as caught:
        wrong(model, optimizer)
    optimizer.zero_grad()
    zeor.park(model, optimizer)
    zeor.unpark(model, optimizer)
    steps(model, optimizer, range(1, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (with_gradients, "has a gradient, which zeor.park does not move"),
        (between_micro_batches, "has a gradient, which zeor.park does not move"),
        (with_a_view, "something still holds a tensor over parameters of unit"),
        (inside_full_params, "zeor.park was called inside zeor.full_params"),
        (without_optimizer, "zeor.park was not given its AdamW"),
        (another_optimizer, "This SGD was not sharded with the model"),
    ],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_wrong_moment_is_refused_and_the_run_goes_on(ranks, wrong, said, stage):
    for text in ranks(check_moment, 2, wrong, stage):
        assert said in text


def check_failing(where: str) -> list[str]:
    """One rank has no memory: on none anything changes, and a second try works."""
    model, optimizer = made(stage=3, precision="bf16")
    steps(model, optimizer, range(2))
    before = left(model, optimizer)
    texts, original = [], getattr(parks.Parking, where)

    def fails(self: Any, *args: Any) -> None:
        raise RuntimeError("Not enough memory")

    if where == "allocate":
        zeor.park(model, optimizer)
    if dist.get_rank() == 1:
        setattr(parks.Parking, where, fails)
    try:
        with pytest.raises(RuntimeError) as caught:
            (zeor.unpark if where == "allocate" else zeor.park)(model, optimizer)
    finally:
        setattr(parks.Parking, where, original)
    texts.append(str(caught.value))
    if where == "allocate":
        assert zeor.report(model)["on_device"] == 0
        with pytest.raises(RuntimeError, match="is parked"):
            optimizer.step()
        zeor.unpark(model, optimizer)
    same(left(model, optimizer), before)
    steps(model, optimizer, range(2, 3))
    return texts


@pytest.mark.parametrize("where", ["copy_out", "allocate"])
def test_where_one_rank_fails_all_stay_as_they_were(ranks, where):
    first, second = ranks(check_failing, 2, where)
    assert first == ["On rank 1: RuntimeError: Not enough memory"] and second == ["Not enough memory"]


def check_memory_again() -> None:
    """The host memory of the first time serves the second."""
    model, optimizer = made(stage=3)
    steps(model, optimizer, range(1))
    addresses = []
    for _ in range(2):
        zeor.park(model, optimizer)
        addresses.append(state_of(model, parked=True).parking._host.data_ptr())
        zeor.unpark(model, optimizer)
    assert addresses[0] == addresses[1]


def test_host_memory_is_kept_for_the_next_time(ranks):
    ranks(check_memory_again, 2)
