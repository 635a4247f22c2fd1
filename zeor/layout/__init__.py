"""WHERE: which element of which parameter lies where in a lane, and who holds it.

Integers only: no tensors, no devices, no process groups. Every rank computes the same
layout from names, shapes and the world size without talking to anybody.
"""

from zeor.layout.grid import Cut, Grid, Span
from zeor.layout.lane import LaneLayout, Segment, lay_out

__all__ = ["Cut", "Grid", "LaneLayout", "Segment", "Span", "lay_out"]
