"""The public verbs from a user's side: full parameters, state, buffers, precision, no_sync, meshes, teardown."""

from __future__ import annotations

import copy
import gc
import io
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeor
from tests import loops

STAGES = [0, 1, 2, 3]


def sharded(stage: int, dtype: torch.dtype = torch.float64, seed: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    model = loops.net(dtype, seed)
    return zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01), stage=stage, **options)


def plain_pair(dtype: torch.dtype = torch.float64, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = loops.net(dtype, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def full_values(model: nn.Module) -> dict[str, Tensor]:
    with zeor.full_params(model):
        return loops.values(model)


# ---- full_params


def check_full_read(stage: int) -> None:
    model, optimizer = sharded(stage)
    plain, theirs = plain_pair()
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, theirs, range(2))
    views = dict(model.named_parameters())
    with zeor.full_params(model) as given:
        assert given is model
        assert all(type(param) is nn.Parameter and param.requires_grad for param in model.parameters())
        loops.assert_close(loops.values(model), loops.values(plain))
    with pytest.raises(RuntimeError, match=r"'head.weight' was written inside zeor.full_params, and the change"):
        with zeor.full_params(model), torch.no_grad():
            model.head.weight.data.zero_()
    assert all(views[name] is param for name, param in model.named_parameters())
    loops.assert_close(full_values(model), loops.values(plain))
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    loops.train(plain, theirs, range(2, 4))
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_full_params_shows_plain_values_and_refuses_writes(ranks, stage):
    ranks(check_full_read, 2, stage)


def check_full_grads(stage: int) -> None:
    model, _ = sharded(stage)
    plain, _ = plain_pair()
    x, y = loops.batch(0)
    model.head.bias.requires_grad_(False)
    (model(loops.mine(x)) - loops.mine(y)).square().mean().backward()
    loops.joint_loss(plain, 0).backward()
    with zeor.full_params(model, grads=True):
        for (name, param), wanted in zip(model.named_parameters(), plain.parameters()):
            if name == "head.bias":
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad, wanted.grad, **loops.TIGHT)
    with zeor.full_params(model):
        assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_full_params_with_gradients(ranks, stage):
    ranks(check_full_grads, 2, stage)


def check_full_write(stage: int, precision: str | None) -> None:
    model, optimizer = sharded(stage, torch.float32, precision=precision)
    loops.train(model, optimizer, range(1), lambda m, s: loops.own_loss(m, s, torch.float32))
    with torch.no_grad(), zeor.full_params(model, write=True):
        model.head.weight.fill_(0.123456789 + dist.get_rank())  # rank 0's counts
        nn.init.ones_(model.scale)
    found = full_values(model)
    assert torch.equal(found["head.weight"], torch.full((5, 6), 0.123456789)), "exact: the master was written"
    assert found["scale"].item() == 1.0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    loops.train(model, optimizer, range(1, 2), lambda m, s: loops.own_loss(m, s, torch.float32))
    loops.assert_equal(full_values(model), found)
    plain = loops.net(torch.float32)
    plain.load_state_dict(found)
    x, _ = loops.batch(3, torch.float32)
    with torch.no_grad():
        tolerance = 1e-5 if precision is None else 0.05
        torch.testing.assert_close(model(x).float(), plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_on_rank_0_reaches_all_ranks_and_masters(ranks, stage, precision):
    ranks(check_full_write, 2, stage, precision)


def check_exchange() -> None:
    model, _ = sharded(3)
    before = full_values(model)
    with pytest.raises(RuntimeError, match=r"'head.weight' was replaced by one of shape \(9, 6\).*zeor.unshard"):
        with zeor.full_params(model, write=True):
            model.head.weight = nn.Parameter(torch.zeros(9, loops.FEATURES))
    with pytest.raises(RuntimeError, match=r"'head.bias' was removed"):
        with zeor.full_params(model, write=True):
            model.head.bias = None
    with pytest.raises(RuntimeError, match=r"'head.bias' was removed inside zeor.full_params \(on rank 1\)"):
        with zeor.full_params(model, write=True):
            if dist.get_rank() == 1:
                model.head.bias = None
    with pytest.raises(KeyError, match="of the user's own"):
        with zeor.full_params(model, write=True):
            raise KeyError("of the user's own")
    loops.assert_equal(full_values(model), before)


def test_exchanging_a_parameter_inside_full_params_raises(ranks):
    ranks(check_exchange, 2)


def check_forward_inside(stage: int) -> None:
    """Inside, the model is plain: it can be run, copied and run as a copy, and nothing of it is sharded."""
    model, optimizer = sharded(stage)
    plain, theirs = plain_pair()
    x, _ = loops.batch(5)
    with zeor.full_params(model):
        before = zeor.traffic(model)["collectives"]
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), **loops.TIGHT)
        assert all(type(param) is nn.Parameter for param in model.parameters())
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        with zeor.full_params(model):
            assert type(model.head.weight) is nn.Parameter
        assert type(model.head.weight) is nn.Parameter
        torch.save(model.state_dict(), io.BytesIO())
        assert zeor.traffic(model)["collectives"] == before
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, theirs, range(2))
    collectives = zeor.traffic(model)["collectives"]
    with torch.no_grad():
        torch.testing.assert_close(twin(x), loops.net()(x), **loops.TIGHT)
    file.seek(0)
    loops.assert_equal(loops.values(torch.load(file, weights_only=False)), loops.values(twin))
    loops.joint_loss(twin, 0).backward()
    assert twin.head.weight.grad is not None and model.head.weight.grad is None
    assert zeor.traffic(model)["collectives"] == collectives, "the copy has nothing to do with the ranks"
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_inside_full_params_the_model_runs_and_copies_as_a_plain_one(ranks, stage):
    ranks(check_forward_inside, 2, stage)


# ---- state dicts


def check_state_dict(stage: int) -> None:
    model, optimizer = sharded(stage)
    loops.train(model, optimizer, range(1), loops.own_loss)
    before = zeor.traffic(model)
    state = model.state_dict()
    assert zeor.traffic(model) == before, "state_dict() moves nothing"
    plain = loops.net(seed=8)
    assert list(state) == list(plain.state_dict())
    assert all(state[name].shape == value.shape for name, value in plain.state_dict().items())
    file = io.BytesIO()
    with zeor.full_params(model):
        torch.save(model.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True), strict=True)
    loops.assert_equal(loops.values(plain), full_values(model))


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_moves_nothing_and_is_plain_inside_full_params(ranks, stage):
    ranks(check_state_dict, 2, stage)


def check_load(stage: int, precision: str | None) -> None:
    """The next step starts from what was loaded, in the master's precision."""

    def loss(model: nn.Module, step: int) -> Tensor:
        return loops.own_loss(model, step, torch.float32)

    source = loops.values(loops.net(torch.float32, seed=8))
    fresh, fresh_optimizer = sharded(stage, torch.float32, seed=8, precision=precision)
    model, optimizer = sharded(stage, torch.float32, precision=precision)
    views = list(model.parameters())
    result = model.load_state_dict(source)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(a is b for a, b in zip(views, model.parameters(), strict=True))
    loops.assert_equal(full_values(model), source)
    loops.train(model, optimizer, range(2), loss)
    loops.train(fresh, fresh_optimizer, range(2), loss)
    loops.assert_equal(full_values(model), full_values(fresh))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_loading_plain_tensors_refreshes_the_masters(ranks, stage, precision):
    ranks(check_load, 2, stage, precision)


def check_bad_loads() -> None:
    model, _ = sharded(3)
    before, good = full_values(model), loops.values(loops.net(seed=8))
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({**good, "head.weight": torch.zeros(2, 2)})
    model.load_state_dict(before)
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
        model.load_state_dict({name: value for name, value in good.items() if name != "head.bias"})
    with pytest.raises(RuntimeError, match="assign=True"):
        model.load_state_dict(good, assign=True)
    assert all(param.numel() for param in model.parameters())


def test_loads_that_do_not_fit_raise(ranks):
    ranks(check_bad_loads, 2)


# ---- what all ranks start from


def check_rank_0(stage: int) -> dict[str, list[float]]:
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    nn.init.normal_(model[1].running_mean)
    model[1].num_batches_tracked += dist.get_rank() + 5
    model.register_buffer("scratch", torch.full((2,), float(dist.get_rank())), persistent=False)
    zeor.shard(model, stage=stage)
    with zeor.full_params(model):
        values = loops.values(model)
    buffers = dict(model.named_buffers())
    assert buffers["1.running_mean"].abs().sum() > 0 and buffers["1.num_batches_tracked"].item() == 5
    return {name: value.flatten().tolist() for name, value in {**values, **buffers}.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_and_buffers_start_as_rank_0s(ranks, stage):
    first, second = ranks(check_rank_0, 2, stage)
    assert first == second and first["scratch"] == [0.0, 0.0]


# ---- precision


class Watch(nn.Module):
    """Notes the dtypes that a forward meets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.ones(4))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, index: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        self.seen = {
            "x": x.dtype,
            "index": index.dtype,
            "scale": scale.dtype,
            "linear": self.linear.weight.dtype,
            "norm": self.norm.weight.dtype,
            "layer_norm": self.layer_norm.weight.dtype,
            "running": self.norm.running_mean.dtype,
            "table": self.table.dtype,
        }
        return {"out": self.layer_norm(self.norm(self.linear(x) * scale)), "index": index}


def check_precision(stage: int, name: str, compute: torch.dtype) -> None:
    model = Watch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage, precision=name, units=[])  # forward looks at all from the root
    out = model(torch.rand(3, 6), torch.arange(3), scale=torch.ones(()))
    assert model.seen == {
        "x": compute,
        "index": torch.int64,
        "scale": compute,
        "linear": compute,
        "norm": torch.float32,
        "layer_norm": compute,
        "running": torch.float32,
        "table": torch.float32,
    }
    assert out["out"].dtype == compute, "outputs are left alone"
    out["out"].float().square().sum().backward()
    norm = model.norm.weight  # it has running statistics, and stays as it is
    for param in model.parameters():
        expected = torch.float32 if param is norm or param is model.norm.bias else compute
        assert param.dtype == expected and param.grad.dtype == (torch.float32 if name == "fp16" else expected)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.dim() > 0]
    assert moments and all(moment.dtype == torch.float32 for moment in moments)
    with zeor.full_params(model):
        assert all(param.dtype == torch.float32 for param in model.parameters())


@pytest.mark.parametrize(("name", "compute"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("stage", STAGES)
def test_dtypes_by_role(ranks, stage, name, compute):
    ranks(check_precision, 2, stage, name, compute)


def check_bytes(stage: int) -> dict[str, int]:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    precision = zeor.Precision(compute=torch.bfloat16, reduce=torch.float32)
    zeor.shard(model, optimizer, stage=stage, precision=precision)
    model(torch.rand(2, 64)).sum().backward()
    optimizer.step()
    return zeor.report(model)


def test_bytes_follow_the_precision(ranks):
    numel = 64 * 64
    # The master costs two bytes: compute is its upper half.
    full = {"compute": 2 * numel, "grad": 4 * numel, "master": 2 * numel, "moments": 8 * numel}
    found = {stage: ranks(check_bytes, 2, stage)[0] for stage in STAGES}
    assert {role: found[0][role] for role in full} == full
    assert {role: found[3][role] for role in full} == {role: nbytes // 2 for role, nbytes in full.items()}
    assert found[1]["compute"] == found[2]["compute"] == 2 * numel
    assert found[1]["master"] == found[2]["master"] == numel
    assert found[2]["grad"] == 2 * numel


def check_own_dtype(stage: int) -> None:
    """A bf16 model gets an fp32 master by default: an update too small for bf16 is not lost."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.fill_(1.0)
    zeor.shard(model, optimizer, stage=stage)
    assert model.weight.dtype == torch.bfloat16
    for _ in range(16):
        (model(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * 2.0**-10).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zeor.full_params(model):
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, torch.full((4, 4), 1 - 2.0**-6, dtype=torch.bfloat16))


@pytest.mark.parametrize("stage", STAGES)
def test_a_bf16_model_has_an_fp32_master(ranks, stage):
    ranks(check_own_dtype, 2, stage)


# ---- no_sync


def check_no_sync(stage: int) -> None:
    model, optimizer = sharded(stage)
    plain, theirs = plain_pair()
    for round_ in range(3):
        before = zeor.traffic(model)["calls"].get("reduce", 0)
        for micro in range(2):
            with zeor.no_sync(model):
                loops.own_loss(model, 10 * round_ + micro).backward()
        assert zeor.traffic(model)["calls"].get("reduce", 0) == before, "nothing is reduced inside"
        assert model.head.weight.grad is not None
        with pytest.raises(RuntimeError, match=r"inside zeor\.no_sync and is not reduced yet"):
            model.head.weight.grad.norm()
        loops.own_loss(model, 10 * round_ + 2).backward()
        for micro in range(3):
            loops.joint_loss(plain, 10 * round_ + micro).backward()
        with zeor.full_params(model, grads=True):
            for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(param.grad, wanted.grad, **loops.TIGHT)
        for each, other in ((model, optimizer), (plain, theirs)):
            other.step()
            each.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_sums_without_talking(ranks, stage):
    ranks(check_no_sync, 2, stage)


def check_no_sync_dropped(stage: int) -> None:
    model, optimizer = sharded(stage)
    plain, theirs = plain_pair()
    with zeor.no_sync(model):
        loops.own_loss(model, 0).backward()
    optimizer.zero_grad()
    loops.train(model, optimizer, range(1, 3), loops.own_loss)
    loops.train(plain, theirs, range(1, 3))
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_no_sync_can_be_dropped(ranks, stage):
    ranks(check_no_sync_dropped, 2, stage)


def check_sum(stage: int) -> None:
    model, _ = sharded(stage, reduction="sum")
    plain, _ = plain_pair()
    loops.own_loss(model, 0).backward()
    (loops.joint_loss(plain, 0) * dist.get_world_size()).backward()
    with zeor.full_params(model, grads=True):
        for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, wanted.grad, **loops.TIGHT)


@pytest.mark.parametrize("stage", [0, 3])
def test_reduction_sum_adds(ranks, stage):
    ranks(check_sum, 2, stage)


# ---- meshes


def part_of(tensor: Tensor, rank: int, world: int) -> Tensor:
    return tensor[rank::world]


def train_on(mesh: Any, stage: int, seed: int) -> dict[str, Tensor]:
    model = loops.net(seed=seed + 10 * dist.get_rank())  # rank 0 of the mesh decides
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    zeor.shard(model, optimizer, stage=stage, mesh=mesh)
    group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for step in range(3):
        x, y = loops.batch(step)
        (model(part_of(x, rank, world)) - part_of(y, rank, world)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return full_values(model)


def check_two_models(stage: int) -> None:
    """Two different models on disjoint pairs of ranks, at the same time."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    found = train_on(groups[mine], stage, seed=mine)
    plain, optimizer = plain_pair(seed=mine + 20 * mine)
    for step in range(3):
        loops.joint_loss(plain, step).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    loops.assert_close(found, loops.values(plain))


@pytest.mark.parametrize("stage", [1, 3])
def test_two_models_on_disjoint_ranks(ranks, stage):
    ranks(check_two_models, 4, stage)


def check_device_mesh() -> None:
    found = train_on(init_device_mesh("cpu", (2,)), 3, seed=5)
    other = train_on(dist.group.WORLD, 3, seed=5)
    loops.assert_equal(found, other)
    grid = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "ep", "tp"))
    with pytest.raises(ValueError, match=r"has 3 dimensions; give zeor the one or two .* such as mesh\['dp'\] or mesh"):
        zeor.shard(loops.net(), mesh=grid)
    loops.assert_equal(train_on(grid["dp"], 3, seed=5), other)
    with pytest.raises(TypeError, match="mesh is a int; give a DeviceMesh or a process group"):
        zeor.shard(loops.net(), mesh=2)


def test_a_device_mesh_of_one_dimension(ranks):
    ranks(check_device_mesh, 2)


def check_outsider() -> None:
    group = dist.new_group([0])
    model = loops.net()
    if dist.get_rank() == 0:
        zeor.shard(model, mesh=group)
    else:
        with pytest.raises(ValueError, match="This rank is not in the mesh given to zeor"):
            zeor.shard(model, mesh=group)


def test_a_rank_outside_the_mesh_is_told(ranks):
    ranks(check_outsider, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_world_of_one_needs_no_process_group(stage):
    assert not dist.is_initialized()
    model, optimizer = sharded(stage)
    plain, theirs = plain_pair()
    for each, other in ((model, optimizer), (plain, theirs)):
        for step in range(4):
            loops.joint_loss(each, step).backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            other.step()
            other.zero_grad()
    loops.assert_close(full_values(model), loops.values(plain))
    assert not dist.is_initialized() and zeor.traffic(model)["collectives"] == 0
    zeor.unshard(model, optimizer)
    loops.assert_close(loops.values(model), loops.values(plain))


# ---- without an optimizer


def check_eval_only(stage: int) -> None:
    model = zeor.shard(loops.net(), stage=stage)
    plain, theirs = plain_pair()
    x, _ = loops.batch(0)
    model.eval()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            torch.testing.assert_close(model(x), plain(x), **loops.TIGHT)
    model.train()
    given, optimizer = zeor.shard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert given is model
    loops.train(model, optimizer, range(2), loops.own_loss)
    loops.train(plain, theirs, range(2))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x), **loops.TIGHT)
    loops.train(model, optimizer, range(2, 4), loops.own_loss)
    loops.train(plain, theirs, range(2, 4))
    loops.assert_close(full_values(model), loops.values(plain))


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_before_an_optimizer_is_given(ranks, stage):
    ranks(check_eval_only, 2, stage)


# ---- teardown


def hooks_of(model: nn.Module) -> int:
    names = [name for name in vars(model) if name.endswith("_hooks")]
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def live_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def settles(measure: Callable[[], int], limit: int, seconds: float = 5.0) -> bool:
    """Whether the measure comes down to the limit: Gloo's threads let go of a tensor a moment after the wait."""
    deadline = time.monotonic() + seconds
    while measure() > limit and time.monotonic() < deadline:
        time.sleep(0.05)
    return measure() <= limit


def check_teardown(stage: int) -> None:
    loops.train(*sharded(stage), range(1), loops.own_loss)  # what torch itself makes once and keeps
    before = live_tensors()
    for _ in range(5):
        model, optimizer = sharded(stage)
        loops.train(model, optimizer, range(2), loops.own_loss)
        with torch.no_grad():
            model(loops.batch(0)[0])
        refs = [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.modules())]
        del model, optimizer
        gc.collect()
        assert [ref() for ref in refs if ref() is not None] == []
        assert settles(live_tensors, before)


@pytest.mark.parametrize("stage", STAGES)
def test_deleting_model_and_optimizer_frees_everything(ranks, stage):
    ranks(check_teardown, 2, stage)


def check_unshard_leaves_no_hooks(stage: int) -> None:
    plain, _ = plain_pair()
    model, optimizer = sharded(stage)
    loops.train(model, optimizer, range(1), loops.own_loss)
    before = zeor.traffic(model)
    zeor.unshard(model, optimizer)
    assert hooks_of(model) == hooks_of(plain) and set(vars(model)) == set(vars(plain))
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
    for name in ("step", "state_dict", "zero_grad"):
        assert name not in vars(optimizer)
    assert before["collectives"] > 0
    with pytest.raises(ValueError, match="This model is not sharded"):
        zeor.traffic(model)
    copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    zeor.shard(model, optimizer, stage=3 - stage)  # and again, at another stage
    loops.train(model, optimizer, range(1, 2), loops.own_loss)


@pytest.mark.parametrize("stage", STAGES)
def test_unshard_leaves_nothing_behind(ranks, stage):
    ranks(check_unshard_leaves_no_hooks, 2, stage)


def check_flat_memory(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    zeor.shard(model, optimizer, stage=stage)
    tensors, report, objects = 0, {}, 0
    for step in range(1, 501):
        loops.own_loss(model, step % 7).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 50:
            time.sleep(0.2)
            tensors, report, objects = live_tensors(), zeor.report(model), len(gc.get_objects())
    assert zeor.report(model) == report
    assert settles(live_tensors, tensors), "tensors pile up"
    assert settles(lambda: len(gc.get_objects()), objects + 50), "Python objects pile up"


@pytest.mark.long
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.whole), 3])
def test_500_steps_with_flat_memory(ranks, stage):
    ranks(check_flat_memory, 2, stage)


# ---- the first batch


def first_batch_warnings(same: bool, how: Callable[[], tuple[nn.Module, Any]]) -> list[str]:
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                records.append(record.getMessage())

    handler = Keep()
    logging.getLogger("zeor").addHandler(handler)
    try:
        model, optimizer = how()
        for step in range(3):
            (loops.joint_loss if same else loops.own_loss)(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("zeor").removeHandler(handler)
    return records


def with_drop_in() -> tuple[nn.Module, Any]:
    model = loops.net()
    return model, zeor.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("how", [lambda: sharded(3), lambda: sharded(1), with_drop_in], ids=["3", "1", "drop-in"])
def test_one_warning_when_all_ranks_see_the_same_first_batch(ranks, how):
    first, second = ranks(first_batch_warnings, 2, True, how)
    assert len(first) == 1 and "zeor.data.shard" in first[0] and second == []
    assert ranks(first_batch_warnings, 2, False, how) == [[], []]


# ---- other models


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True)
        self.gru = nn.GRU(4, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(self.lstm(x.unsqueeze(1))[0])
        return self.head(out.squeeze(1))


def check_recurrent(stage: int) -> None:
    torch.manual_seed(1)
    plain = Recurrent().double()
    model = copy.deepcopy(plain)
    theirs, mine = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model))
    zeor.shard(model, mine, stage=stage)
    loops.train(plain, theirs, range(3))
    loops.train(model, mine, range(3), loops.own_loss)
    loops.assert_close(full_values(model), loops.values(plain))
    zeor.unshard(model, mine)
    loops.train(plain, theirs, range(3, 5))
    loops.train(model, mine, range(3, 5))
    loops.assert_close(loops.values(model), loops.values(plain))
    copy.deepcopy(model)(loops.batch(0)[0])


@pytest.mark.parametrize("stage", STAGES)
def test_recurrent_models(ranks, stage):
    ranks(check_recurrent, 2, stage)


class Adapted(nn.Module):
    """A frozen base in bf16, a trainable adapter in fp32 and integer codes, all in one block."""

    def __init__(self):
        super().__init__()
        self.base = nn.Parameter(torch.rand(32, 6).bfloat16(), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(0, 255, (40,), dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(6, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base.float() + self.adapter.weight).t() + self.codes[:32].float() / 255


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Adapted(), Adapted()])

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(x) for block in self.blocks)


def check_frozen(stage: int) -> dict[str, int]:
    torch.manual_seed(2)
    plain = Frozen()
    model = copy.deepcopy(plain)
    theirs, mine = (torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.01) for m in (plain, model))
    zeor.shard(model, mine, stage=stage)

    def train(each: nn.Module, optimizer: Any, take: Callable) -> None:
        for step in range(3):
            each(take(loops.batch(step, torch.float32)[0])).square().mean().backward()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()

    train(plain, theirs, lambda x: x)
    train(model, mine, loops.mine)
    assert model.blocks[0].base.grad is None and model.blocks[1].codes.grad is None
    assert model.blocks[0].codes.dtype == torch.uint8 and model.blocks[0].base.dtype == torch.bfloat16
    loops.assert_close(full_values(model), loops.values(plain), rtol=1e-5, atol=1e-6)
    with zeor.full_params(model):
        assert torch.equal(model.blocks[1].codes, plain.blocks[1].codes)
        assert torch.equal(model.blocks[1].base, plain.blocks[1].base)
    return zeor.report(model)


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_integer_parameters_cost_no_gradient_or_state(ranks, stage):
    report = ranks(check_frozen, 2, stage)[0]
    trainable, part = 2 * 32 * 6, 1 if stage == 0 else 2
    assert report["moments"] == 2 * 4 * trainable // part and report["master"] == 0, "an fp32 master is compute"
    assert report["grad"] == 4 * trainable // (part if stage >= 2 else 1)
    compute = 2 * (32 * 6 * 2 + 40 + 32 * 6 * 4)
    padding = report["compute"] - compute // (2 if stage == 3 else 1)
    assert 0 <= padding <= 0.05 * compute
