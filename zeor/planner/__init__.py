"""WHAT IT WILL COST: bytes per rank and role, before anything is allocated."""

from zeor.planner.bytes import Prediction, predict
from zeor.planner.choose import Choice, choose

__all__ = ["Choice", "Prediction", "choose", "predict"]
