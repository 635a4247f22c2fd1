"""zeor: ZeRO (the Zero Redundancy Optimizer) for PyTorch."""

from zeor import data, optim
from zeor.api import clip_grad_norm_, full_params, no_sync, predict, report, shard, traffic, unshard
from zeor.comm.launch import RankError, launch
from zeor.plan import Plan, Precision

__version__ = "0.1.0"

__all__ = [
    "Plan", "Precision", "RankError", "clip_grad_norm_", "data", "full_params", "launch", "no_sync", "optim",
    "predict", "report", "shard", "traffic", "unshard",
]  # fmt: skip
