"""zeor: ZeRO (the Zero Redundancy Optimizer) for PyTorch."""

from zeor import data, optim
from zeor.api import (
    accumulate,
    chunked_cross_entropy,
    clip_grad_norm_,
    drop_optimizer,
    ema,
    export,
    full_params,
    full_state,
    init_parameters,
    is_sharded,
    iter_full,
    iter_state,
    join,
    lerp,
    load_full_state,
    load_pretrained,
    mean_loss,
    mesh,
    no_sync,
    on_meta,
    penalty,
    pipeline,
    predict,
    push,
    report,
    set_wire,
    shard,
    sync_buffers,
    total,
    trace,
    traffic,
    unshard,
)  # fmt: skip
from zeor.checkpoint.api import load, save
from zeor.checkpoint.files.errors import CheckpointError
from zeor.checkpoint.preemption import Preempted, preempt
from zeor.checkpoint.saver import Saving
from zeor.comm.launch.launch import RankError, launch
from zeor.comm.links import Link, measure_links
from zeor.plan import Float8, Offload, Plan, PowerSGD, Precision, RandomK, Sign, TopK, Wire
from zeor.planner.choose import choose
from zeor.planner.machine import Machine
from zeor.replan.park import park, unpark
from zeor.replan.replan import replan

__version__ = "0.1.0"

__all__ = [
    "CheckpointError", "Float8", "Link", "Machine", "Offload", "Plan", "PowerSGD", "Precision", "Preempted", "RandomK",
    "RankError", "Saving", "Sign", "TopK", "Wire", "accumulate", "choose", "chunked_cross_entropy", "clip_grad_norm_",
    "data", "drop_optimizer", "ema", "export", "full_params", "full_state", "init_parameters", "is_sharded",
    "iter_full", "iter_state", "join", "launch", "lerp", "load", "load_full_state", "load_pretrained", "mean_loss",
    "measure_links", "mesh", "no_sync", "on_meta", "optim", "park", "penalty", "pipeline", "predict", "preempt",
    "push", "replan", "report", "save", "set_wire", "shard", "sync_buffers", "total", "trace", "traffic", "unpark",
    "unshard",
]  # fmt: skip
