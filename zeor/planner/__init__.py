"""WHAT IT WILL COST: bytes per rank and role, before anything is allocated."""

from zeor.planner.bytes import Prediction, predict

__all__ = ["Prediction", "predict"]
