"""A plain PyTorch state dict, alone or inside a training checkpoint, as parameters and an optimizer by name.

A state dict does not say which tensors are buffers: zeor.load finds out from the model. It does not say which
parameter is number 7 of an optimizer either: by the names torch keeps in groups, by those the user gives, or by
order, where there is one group and every shape fits. Knows plain values only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zeor.checkpoint.files.errors import CheckpointError
from zeor.optim.parts import mark
from zeor.tools.importers.foreign import Foreign, Value, value_here

_MODEL = ("model", "model_state_dict", "state_dict", "module", "net", "app")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizers", "optimizer_states", "opt")
_STEP = ("step", "global_step", "global_steps", "iteration", "iter")
_PREFIXES = ("module.", "_orig_mod.")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # torch's own buffers, skipped in counting


def read(tree: Any, optimizer: Any, names: Sequence[str] | None, where: str) -> Foreign:
    """`tree` is what the file holds, `optimizer` what a file of its own holds, or None."""
    model = _model_of(tree, where)
    state = _state_dict(model, where)
    found = Foreign({})
    first: dict[str, str] = {}
    for name, value in state.items():
        other = first.setdefault(value.source or name, name)
        if other != name:
            found.aliases[name] = other
        else:
            found.params[name] = value
    steps = [tree.get(key) for key in _STEP] if model is not tree else []
    found.step = next((step for step in steps if type(step) is int and step >= 0), 0)
    if optimizer is None and model is not tree:
        optimizer = next((tree[key] for key in _OPTIMIZER if isinstance(tree.get(key), (dict, list))), None)
    optimizer = _one(optimizer, where)
    if optimizer is not None:
        _add_optimizer(found, optimizer, names, where)
    elif isinstance(tree, Mapping) and _add_flattened(found, tree):
        pass
    else:
        found.notes.append("no optimizer state was found; load it with strict=False, or without an optimizer")
    return found


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Value) for v in value.values())


def _model_of(tree: Any, where: str) -> Any:
    if isinstance(tree, Mapping):
        for key in _MODEL:
            if isinstance(tree.get(key), Mapping) and (_is_state_dict(tree[key]) or key == "app"):
                return _model_of(tree[key], where) if key == "app" else tree[key]
        if _is_state_dict(tree):
            return tree
    keys = ", ".join(repr(str(key)) for key in list(tree)[:8]) if isinstance(tree, Mapping) else type(tree).__name__
    raise CheckpointError(
        f"{where} holds no state dict of a model (it has {keys}); save model.state_dict(), alone or under 'model'."
    )


def _state_dict(model: Mapping[str, Any], where: str) -> dict[str, Value]:
    """Names and tensors, without the prefixes that DDP and torch.compile put before every name."""
    state: dict[str, Value] = {}
    flattened = ("state.", "param_groups.")  # an optimizer's, beside the model's: see _add_flattened
    for name, value in model.items():
        if isinstance(value, Tensor):
            value = value_here(value)
        if isinstance(name, str) and isinstance(value, Value) and not name.startswith(flattened):
            state[name] = value
    for prefix in _PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    if not state:
        raise CheckpointError(f"{where} holds a state dict without tensors.")
    return state


def _one(optimizer: Any, where: str) -> Any:
    """The one optimizer, out of a list of one."""
    if isinstance(optimizer, (list, dict)) and "state" not in optimizer:
        each = [one for one in as_list(optimizer) if isinstance(one, Mapping) and "state" in one]
        if len(each) > 1:
            raise CheckpointError(f"{where} holds {len(each)} optimizers; import them one by one, with --optimizer.")
        optimizer = each[0] if each else None
    return optimizer


def as_list(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else []


# ---- the optimizer


def _add_optimizer(found: Foreign, optimizer: Mapping[str, Any], names: Sequence[str] | None, where: str) -> None:
    groups = [dict(group) for group in as_list(optimizer.get("param_groups"))]
    if mark.KEY in optimizer:
        raise CheckpointError(f"{where} holds optimizer state that cannot be imported: {mark.NOTE}.")
    if not groups or not isinstance(optimizer.get("state"), (dict, list)):
        raise CheckpointError(f"{where} holds an optimizer without 'state' and 'param_groups'.")
    members = [as_list(group.get("params")) for group in groups]
    by_id = _names_of(found, groups, members, names, where)
    given = optimizer["state"]
    state = dict(enumerate(given)) if isinstance(given, list) else given
    for key, entries in state.items():
        name = by_id.get(key)
        if name is None and isinstance(key, str) and key.isdecimal():
            name = by_id.get(int(key))  # DCP writes every key as text
        if name is None:
            raise CheckpointError(f"{where} holds optimizer state of {str(key)[:80]!r}, which is in no group.")
        found.state[name] = dict(entries)
    found.groups = [{**group, "params": [by_id[m] for m in each]} for group, each in zip(groups, members)]
    _check_shapes(found, where)


def _names_of(
    found: Foreign, groups: list[dict[str, Any]], members: list[list[Any]], names: Sequence[str] | None, where: str
) -> dict[Any, str]:
    """The parameter that each member of the groups is."""
    flat = [member for each in members for member in each]
    if all(isinstance(member, str) for member in flat):
        return {member: _known(found, member, where) for member in flat}
    own_names = [as_list(group.get("param_names")) for group in groups]
    if names is None and [len(each) for each in own_names] == [len(each) for each in members]:
        names = [name for each in own_names for name in each]
    if names is not None:
        if len(names) != len(flat):
            raise CheckpointError(f"{where}: the optimizer has {len(flat)} parameters; {len(names)} names were given.")
        return {member: _known(found, name, where) for member, name in zip(flat, names)}
    ordered = [name for name in found.params if name.rpartition(".")[2] not in _STATISTICS]
    if len(groups) > 1 or len(ordered) != len(flat):
        raise CheckpointError(
            f"{where}: the optimizer numbers its {len(flat)} parameters (in {len(groups)} group(s), and the model has "
            f"{len(ordered)}); give their names in its order, one per line, with --names FILE."
        )
    return dict(zip(flat, ordered))


def _known(found: Foreign, name: str, where: str) -> str:
    for prefix in ("", *_PREFIXES):
        short = name.removeprefix(prefix)
        short = found.aliases.get(short, short)
        if short in found.params:
            return short
    raise CheckpointError(f"{where}: the optimizer trains {name!r}, which the model does not have.")


def _check_shapes(found: Foreign, where: str) -> None:
    """State of Adam and its like is as large as the parameter: names that do not fit are found here."""
    for name, entries in found.state.items():
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = entries.get(key)
            if isinstance(value, Value) and value.shape != found.params[name].shape:
                raise CheckpointError(
                    f"{where}: {key!r} of {name!r} has shape {value.shape}, the parameter {found.params[name].shape}; "
                    "give the parameters' names in the optimizer's order with --names FILE."
                )


def _add_flattened(found: Foreign, tree: Mapping[str, Any]) -> bool:
    """torch's get_optimizer_state_dict(flatten_optimizer_state_dict=True): state.NAME.KEY and param_groups.NAME.KEY."""
    settings: dict[str, dict[str, Any]] = {}
    heads = [tree, *(tree[key] for key in _OPTIMIZER if isinstance(tree.get(key), Mapping))]
    flat = {key: value for head in heads for key, value in head.items() if isinstance(key, str)}
    for name in found.params:
        for kind, into in (("state.", found.state), ("param_groups.", settings)):
            start = f"{kind}{name}."
            entries = {key[len(start) :]: value for key, value in flat.items() if key.startswith(start)}
            entries = {key: value for key, value in entries.items() if "." not in key}
            if entries:
                into[name] = entries
    if not settings:
        return False
    found.groups = []
    for name, each in settings.items():  # parameters of equal settings are a group
        like = next((g for g in found.groups if {k: v for k, v in g.items() if k != "params"} == each), None)
        if like is None:
            like = {**each, "params": []}
            found.groups.append(like)
        like["params"].append(name)
    return True
