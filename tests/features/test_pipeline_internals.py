"""What zeor relies on of torch.distributed.pipelining: each line says which of it has changed in this version of torch.

Nothing of it is torch's public promise. What fails here is to be looked at in zeor/features/stages.py and pipeline.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, _backward, schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

SINGLE = (schedules.ScheduleGPipe, schedules.Schedule1F1B)
RUNTIME = schedules._PipelineScheduleRuntime


def names(of: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(of).parameters)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("forward_maybe_with_nosync", ["self", "args", "kwargs"]),
        ("backward_maybe_with_nosync", ["self", "backward_type", "bwd_kwargs", "last_backward"]),
        ("perform_reduce_grad", ["self", "grad_scale_factor"]),
        ("get_local_bwd_output", ["self", "mb_index"]),
        ("set_local_bwd_input", ["self", "next_stage_bwd_outputs", "mb_index"]),
    ],
)
def test_methods_that_are_bound_have_these_parameters(method: str, parameters: list[str]) -> None:
    assert names(getattr(_PipelineStageBase, method)) == parameters
    assert method not in vars(PipelineStage), f"PipelineStage has a {method} of its own"


CALLS = [
    (_PipelineStageBase.forward_one_chunk, "self.forward_maybe_with_nosync("),
    (_PipelineStageBase.backward_one_chunk, "self.backward_maybe_with_nosync("),
    (_PipelineStageBase.backward_weight_one_chunk, "self.backward_maybe_with_nosync("),
    *((kind._step_microbatches, "self._stage.perform_reduce_grad(") for kind in SINGLE),
    (RUNTIME._step_microbatches, "stage.perform_reduce_grad(grad_scale_factor)"),
    # Shapes are found inside these, and nothing else runs a stage past the methods above.
    *((kind._step_microbatches, "self._initialize_stage(") for kind in SINGLE),
    (RUNTIME._step_microbatches, "self._initialize_stages("),
    # The halves of a backward ask the module for its parameters, and look at no more of them than a stand-in has.
    (_PipelineStageBase.backward_maybe_with_nosync, "self.submod.parameters()"),
    (_backward._get_grad_fn_or_grad_acc, "if t.requires_grad and t.grad_fn is None:"),
    (_backward._get_grad_fn_or_grad_acc, "return t.grad_fn"),
    (_backward.stage_backward_weight, "if weight.grad is None:\n                        weight.grad = dw"),
    # Why stages' outputs are no views.
    (_backward.stage_backward_input, "t.detach_()"),
    # An evaluation is a step.
    (schedules._PipelineSchedule.eval, "return self.step("),
    (schedules._PipelineSchedule.eval, "self._has_backward = False"),
    # Who asks that gathers begin.
    (RUNTIME._step_microbatches, "self._comp_type_to_function_map[action.computation_type]("),
]


@pytest.mark.parametrize(("where", "what"), CALLS, ids=[f"{f.__qualname__} {what[:30]}" for f, what in CALLS])
def test_torch_calls_what_is_bound(where: Callable[..., Any], what: str) -> None:
    text = inspect.getsource(where)
    assert what in text, f"{where.__qualname__} holds no {what!r} any more (torch {torch.__version__})"


def test_schedules_and_stages_have_these_attributes() -> None:
    stage = PipelineStage.__init__
    text = inspect.getsource(_PipelineStageBase.__init__) + inspect.getsource(stage)
    for name in ("stage_index", "num_stages", "submod", "group", "device", "has_backward", "dw_builder"):
        assert name in text, f"a stage has no {name}"
    made = "".join(inspect.getsource(kind.__init__) for kind in (schedules._PipelineSchedule, RUNTIME.__mro__[1]))
    for name in ("_n_microbatches", "scale_grads", "_has_backward", "_internal_losses", "_stages"):
        assert f"self.{name}" in made, f"a schedule has no {name}"
    single = inspect.getsource(schedules.PipelineScheduleSingle.__init__)
    assert "self._stage = stage" in single
    for name in ("_stage_forward_initialized", "_stage_backward_initialized"):
        assert f"self.{name}" in single, f"a schedule has no {name}, so shapes are taken to be looked for in every step"
    assert "stage_index_to_group_rank" in inspect.getsource(_PipelineStageBase)
    assert names(RUNTIME.register_custom_function) == ["self", "computation_type", "custom_function"]
    assert schedules.UNSHARD is schedules._ComputationType.UNSHARD


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS"]
)
def test_schedules_that_are_named_in_errors_can_be_driven(name: str) -> None:
    kind = schedules.get_schedule_class(name)
    assert issubclass(kind, (schedules.PipelineScheduleSingle, RUNTIME))


def test_a_node_that_accumulates_needs_no_byte_of_its_parameter() -> None:
    """What a stand-in shows: the node of a parameter whose memory was given back, the one a graph has for it."""
    param = torch.nn.Parameter(torch.ones(1000))
    hook = param.register_post_accumulate_grad_hook(lambda param: None)  # zeor's own keeps the node alive
    output = (param * 2).sum()
    param.untyped_storage().resize_(0)
    seen = param.view_as(param).grad_fn.next_functions[0][0]
    assert seen is output.grad_fn.next_functions[0][0].next_functions[0][0]
    hook.remove()
