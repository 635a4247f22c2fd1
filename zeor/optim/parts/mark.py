"""The mark on a state dict that holds one rank's part of an optimizer's state.

`optimizer.state_dict()` of a sharded optimizer is this rank's alone. Nothing in the stock format says so: another
rank would load it without an error, and train on with moments of other elements. So it carries

    "zeor": {"world", "rank", "layout"}   who made it, and a number for how the parameters were cut
    "params": [0, 1, ..., NOTE]           in every group: one entry too many, which a plain optimizer's own check
                                          of lengths refuses

Where every rank updates everything (stage 0, a world of one) the state is whole, and the dict is a plain one.
"""

from __future__ import annotations

import zlib
from typing import Any

from torch import Tensor

from zeor.optim.parts.segments import Segments, of_shape

KEY = "zeor"
NOTE = "this is one rank's part of a sharded optimizer's state; save by zeor.save, or call zeor.unshard first"
_INSTEAD = (
    "save with zeor.save and load with zeor.load, which fit any world and stage, or call zeor.unshard first for a "
    "plain one"
)


def mark(segments: Segments, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that says whose it is."""
    if not segments.owners.cut:
        return state_dict
    groups = [{**group, "params": [*group["params"], NOTE]} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups, KEY: _made_here(segments)}


def unmark(segments: Segments, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict that this rank may load, without its mark; ValueError where it is another's part."""
    found, here = state_dict.get(KEY), _made_here(segments)
    if found is None:
        if segments.owners.cut:
            check_whole(segments, state_dict)
        return state_dict
    name = type(segments.optimizer).__name__
    if (found["world"], found["rank"]) != (here["world"], here["rank"]):
        raise ValueError(
            f"This state dict of {name} is the part of rank {found['rank']} of {found['world']}, and this is rank "
            f"{here['rank']} of {here['world']}: it holds the state of other elements. Each rank can load its own; or "
            f"{_INSTEAD}."
        )
    if found["layout"] != here["layout"]:
        raise ValueError(
            f"This state dict of {name} was made where the parameters were cut differently (other shapes, units, "
            f"groups or frozen parameters), so it holds the state of other elements; {_INSTEAD}."
        )
    groups = [{**group, "params": group["params"][:-1]} for group in state_dict["param_groups"]]
    return {**{key: value for key, value in state_dict.items() if key != KEY}, "param_groups": groups}


def _made_here(segments: Segments) -> dict[str, int]:
    """`layout`: a number for which elements of which parameters this rank steps on, group by group."""
    axis = segments.owners.axis
    found: list[Any] = []
    for group in segments.optimizer.param_groups:
        for param in group["params"]:
            at = segments.at(param) if segments.of(param) is not None else None
            found.append((segments.slots[id(param)].shape, None if at is None else (at.start, at.numel)))
        found.append("end of the group")
    return {"world": axis.size, "rank": axis.rank, "layout": zlib.crc32(repr(found).encode())}


def check_whole(segments: Segments, state_dict: dict[str, Any]) -> None:
    """A dict without a mark must be that of whole parameters."""
    order = [param for group in segments.optimizer.param_groups for param in group["params"]]
    for key, state in state_dict["state"].items():
        if not isinstance(key, int) or key >= len(order) or id(order[key]) in segments.owners.owned:
            continue
        slot = segments.slots[id(order[key])]
        arrays = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
        if arrays and not any(of_shape(value, slot.shape) for value in arrays.values()):
            name, value = next(iter(arrays.items()))
            raise ValueError(
                f"This state dict holds {name!r} of parameter {slot.name!r} with shape {tuple(value.shape)}, and the "
                f"parameter has shape {slot.shape}: it is not a plain optimizer's over this model, and has no mark of "
                f"a rank's part; {_INSTEAD}."
            )
