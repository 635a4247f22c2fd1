"""What of torch and transformers is relied on past their public names: each test says which of it has changed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zeor.parallel import partial_norms

# (what is relied on, where, whether it holds)
OF_TORCH: list[tuple[str, str, bool]] = [
    ("DTensor keeps its local tensor and its layout in slots", "memory/placed.py: _slot",
     {"_local_tensor", "_spec"} <= vars(DTensor).keys()),
    ("DTensor(local, spec, requires_grad=) makes one without a collective", "memory/placed.py: wrapped",
     callable(getattr(DTensor, "__new__", None))),
    ("a layout is made of mesh, placements and tensor_meta", "memory/placed.py: wrapped",
     {"mesh", "placements", "tensor_meta"} <= inspect.signature(DTensorSpec).parameters.keys()),
    ("tensor_meta is a named tuple of shape, stride, dtype", "memory/placed.py: wrapped",
     TensorMeta._fields == ("shape", "stride", "dtype")),
    ("Shard divides a tensor by _split_tensor", "memory/placed.py: _runs_of",
     {"tensor", "num_chunks", "with_padding"} <= inspect.signature(Shard._split_tensor).parameters.keys()),
    ("_StridedShard divides a tensor by _split_tensor, and has a dim", "memory/placed.py: _runs_of",
     hasattr(_StridedShard, "_split_tensor") and _StridedShard(1, split_factor=2).dim == 1),
    ("a Replicate has no dim", "memory/placed.py: _is_shard", not hasattr(Replicate(), "dim")),
    ("a DTensor can be a parameter, by its attribute _is_param", "memory/param.py: classes_of",
     "_is_param" in inspect.getsource(nn.Parameter)),
    ("DTensor's operations do not ask __torch_function__", "memory/param.py: _placed_classes",
     DTensor.__torch_function__ is torch._C._disabled_torch_function_impl),
]  # fmt: skip


@pytest.mark.parametrize(("what", "where", "holds"), OF_TORCH, ids=[what for what, _, _ in OF_TORCH])
def test_torch_is_as_it_was(what: str, where: str, holds: bool) -> None:
    assert holds, f"torch {torch.__version__} has changed: {what}. {where} relies on it."


def test_shards_of_torch_are_those_of_chunk() -> None:
    parts, _ = Shard(0)._split_tensor(torch.arange(7), 3, with_padding=False)
    assert [part.tolist() for part in parts] == [part.tolist() for part in torch.arange(7).chunk(3)]
    parts, _ = _StridedShard(0, split_factor=2)._split_tensor(torch.arange(8), 2, with_padding=False)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def hooked_norm() -> Any:
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    module = nn.LayerNorm(4)
    ReplicatedWithGradAllReduce().install_forward(module, None)
    return module


def test_the_hook_of_transformers_is_where_it_was() -> None:
    module = hooked_norm()
    model = nn.Sequential(nn.Linear(4, 4), module)
    [found] = partial_norms.find_hooked(model)
    assert (found.name, found.module, sorted(found.params)) == ("1", module, ["bias", "weight"])
    module(torch.rand(2, 4))
    assert set(found.done) == {"weight", "bias"}, "transformers remembers elsewhere which parameters it has hooked"
    [hook] = module.weight._post_accumulate_grad_hooks.values()
    assert hook.__qualname__ == partial_norms.HOOK, "transformers sums gradients in a hook of another name"


def test_a_norm_is_told_that_its_hooks_are_there_and_forgets_it() -> None:
    module = hooked_norm()
    module(torch.rand(2, 4))
    hooked = partial_norms.find_hooked(module)
    partial_norms.mark(hooked)
    assert not module.weight._post_accumulate_grad_hooks, "a hook of an earlier forward is taken off"
    module(torch.rand(2, 4))
    assert not module.weight._post_accumulate_grad_hooks, "and none is put on"
    partial_norms.unmark(hooked)
    module(torch.rand(2, 4))
    assert len(module.weight._post_accumulate_grad_hooks) == 1


def test_another_way_of_summing_is_refused_by_name() -> None:
    module = hooked_norm()
    module.forward = lambda x: x  # as a later version may have it
    module._is_hooked = True
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"q_norm": module})])})
    model.tp_plan = {"layers.*.q_norm": partial_norms.STYLE}
    with pytest.raises(RuntimeError, match=r"gradients of 'layers\.0\.q_norm' are parts of sums.*use transformers 5"):
        partial_norms.find_hooked(model)
    model.tp_plan = {}
    assert partial_norms.find_hooked(model) == []
