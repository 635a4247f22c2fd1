"""export(): plain Hugging Face style safetensors out of a live model or a checkpoint, never held whole by anyone.

1. What will be written is known from names, shapes and dtypes alone, and checked: nothing is touched before. What
   is wrong on one rank all ranks raise.
2. Rank 0 makes a hidden folder beside or in `out` (hf_folder.py).
3. Values stream through: parameter by parameter from a sharded model (access/stream.py), range by range from a
   checkpoint. Rank 0 writes them; a failure ends the stream on every rank.
4. One rename makes the folder visible; in a folder that holds other things, that of the last file. All ranks hear how
   it ended.
Casts are zeor's own (memory/formats.py), so that a live export and one from a checkpoint are the same bits.
The config.json beside the weights is a transformers model's own, or copied from where the user says. transformers is
never imported: a config is whatever has a `to_json_string()`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeor.access.stream import DEFAULT_NBYTES, iter_slots
from zeor.checkpoint.files.commit import find, read_manifest
from zeor.checkpoint.files.errors import CheckpointError, all_there
from zeor.checkpoint.files.manifest import BUFFER, PARAM, Manifest, Stored
from zeor.checkpoint.files.opening import with_newest
from zeor.checkpoint.files.plain import DTYPES
from zeor.checkpoint.files.reading import Need, read_all
from zeor.checkpoint.files.urls import Place, place_of
from zeor.checkpoint.weights.conversions import Reverse, shapes_of
from zeor.checkpoint.weights.hf_folder import OutFiles, Planned, check_free, local_folder, parse_size
from zeor.checkpoint.weights.live import LiveModel
from zeor.checkpoint.weights.matching import Target
from zeor.checkpoint.weights.naming import Naming, naming_of, state_around
from zeor.checkpoint.weights.of_stages import of_all_stages
from zeor.comm.agree import everywhere, exchange
from zeor.comm.axes import Axis, make_axis
from zeor.memory import device as devices
from zeor.memory.formats import cast_into
from zeor.memory.param import own_dtype
from zeor.model.wrapped import unwrapped
from zeor.plan import Plan

_SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_CAST = tuple(_SHORT.values())  # what dtype= changes: quantised values and integers stay as they are
NAME, GENERATION = "config.json", "generation_config.json"
_BATCH_NBYTES = 64 << 20  # read from a checkpoint at a time
Values = Iterator[tuple[str, Tensor, int]]  # name, elements, and the first of them


@dataclass
class Export:
    """What is written, and where its values come from, on one rank."""

    planned: list[Planned]
    values: Callable[[], Values]
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied tensors
    texts: dict[str, str] = field(default_factory=dict)  # files beside the tensors, by name
    reverse: Reverse | None = None  # from a model: how its parameters become what files hold
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)  # of the model's parameters


def export(
    source: str | os.PathLike[str] | nn.Module,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    max_file: int | str = "5GB",
    trainable_only: bool = False,
    config: Any = None,
) -> Path:
    """Write plain safetensors, as Hugging Face lays them out, from a model (every rank calls it) or from a checkpoint
    (one process, no process group). Returns the folder.

    Names are those of the state dict, tied parameters once, persistent buffers included; those of a transformers model
    are what its save_pretrained writes (experts apart). Values are the masters', in each parameter's own dtype.
    `out` is a local folder: a new one appears whole, by one rename, or not at all. One that holds other things (a
    Trainer's checkpoints, a tokenizer) keeps them, and the export appears with the last file; where it holds weights or
    another config.json, the export is refused.

    dtype           "bf16", "fp16", "fp32" or a torch.dtype, for everything in floating point.
    max_file        where to begin another file; with several there is an index.
    trainable_only  what requires gradients alone: adapters.
    config          a folder with a config.json, or a config, to go beside the weights; None takes model.config.
    """
    if not isinstance(source, (nn.Module, str, os.PathLike)):
        raise TypeError(f"zeor.export takes a model or the folder of a checkpoint, not a {type(source).__name__}.")
    model = unwrapped(source) if isinstance(source, nn.Module) else None
    live = _live_of(model)
    axis = _axis_of(model, live)
    if live is not None and model is not None:
        live.learn_names()
        model = live.naming.first_module(model)

    def prepare() -> tuple[Export, Path, int]:
        folder, wanted, max_nbytes = local_folder(out, "zeor.export"), _dtype_of(dtype), parse_size(max_file)
        if model is not None:
            this = _from_model(model, live, wanted, trainable_only, max_nbytes)
        else:
            this = _from_checkpoint(place_of(source), wanted, trainable_only)  # type: ignore[arg-type]
        if not this.planned:
            raise ValueError("zeor.export: there is nothing to write; no parameter trains (trainable_only=True).")
        this.texts = config_texts(model, config, [tensor.dtype for tensor in this.planned])
        return this, folder, max_nbytes

    def once() -> Path:
        this, folder, max_nbytes = everywhere(axis, prepare, "exchange about what an export writes", CheckpointError)
        _write(axis, this, folder, max_nbytes)
        return Path(folder)

    return once() if isinstance(source, nn.Module) else with_newest(axis, place_of(source), once)


def _dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = _SHORT.get(dtype, DTYPES.get(dtype)) if isinstance(dtype, str) else dtype
    if (found is not None and found not in _CAST) or (dtype is not None and found is None):
        raise ValueError(f"dtype={dtype!r} is not known; use one of {list(_SHORT)} or the torch.dtype.")
    return found


# ---- writing


def _write(axis: Axis, this: Export, out: Path, max_nbytes: int) -> None:
    """Steps 2 to 4 of the module's docstring."""
    files: OutFiles | None = None
    problem = ""
    if axis.rank == 0:
        files = OutFiles(out, this.planned, max_nbytes, {**this.aliases, "format": "pt"})
        problem = _attempt(lambda: check_free(out, this.texts), out) or _attempt(files.begin, out)
    _agree(axis, problem, "beginning of an export", files)
    problem = _attempt(lambda: _stream(this, files), out)
    if files is not None and not problem:
        problem = _attempt(lambda: _end(files, this.texts), out)
    _agree(axis, problem, "end of an export", files)


def _stream(this: Export, files: OutFiles | None) -> None:
    """Rank 0 writes. The others take part in silence, and all stop where it does."""
    wanted = {name: dtype for name, (dtype, _) in this.kinds.items()} or {t.name: t.dtype for t in this.planned}
    values = this.values()
    try:
        for name, value, start in values:
            if files is None:
                break
            value = _cast(value, wanted[name])
            made = {name: value} if this.reverse is None else this.reverse.put(name, value)
            del value
            for each, tensor in made.items():
                files.put(each, tensor, start)
            del made
    finally:
        values.close()  # type: ignore[attr-defined]


def _end(files: OutFiles, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        files.write_text(name, text)
    files.commit()


def _attempt(do: Callable[[], None], out: Path) -> str:
    """Nothing, or what failed."""
    try:
        do()
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError) as error:  # the second of a name that no file can have
        reason = getattr(error, "strerror", None) or error
        return f"The export to {out} could not be written: {reason}. Nothing of it is visible."
    return ""


def _agree(axis: Axis, problem: str, label: str, files: OutFiles | None) -> None:
    found = next(filter(None, exchange(axis, problem, label)), "")
    if found:
        if files is not None:
            files.abandon()
        raise CheckpointError(found)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """zeor's one cast: what forward reads of a master."""
    if value.dtype == dtype:
        return value
    result = torch.empty(value.shape, dtype=dtype, device=value.device)
    cast_into(result, value.detach().contiguous())
    return result


def _target(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own in _CAST else own


# ---- from a model


def _from_model(
    model: nn.Module, live: LiveModel | None, wanted: torch.dtype | None, trainable_only: bool, max_nbytes: int
) -> Export:
    naming = Naming() if live is None else live.naming
    targets = [target for target in naming.targets(model) if naming.writes(target)]
    everything = [_chosen(model, target) for target in targets] if naming.pipeline is None else list(naming.everywhere)
    if trainable_only:
        targets = [target for target in targets if not target.is_buffer and target.tensor.requires_grad]
    names = {id(target.tensor): _chosen(model, target) for target in targets}
    kinds = {names[id(t.tensor)]: (_target(own_dtype(t.tensor), wanted), tuple(t.tensor.shape)) for t in targets}
    aliases = {
        other: names[id(target.tensor)]
        for target in targets
        for other in target.names
        if other != names[id(target.tensor)]
    }
    if naming.pipeline is not None:  # of all stages: each rank knows what rank 0 writes
        kinds = {
            name: (_target(DTYPES[each.dtype], wanted), each.shape)
            for name, each in naming.everywhere.items()
            if each.trains or not trainable_only
        }
        aliases = {other: name for other, name in naming.all_aliases.items() if name in kinds}

    def reverse() -> Reverse:
        found = Reverse(model, everything)
        found.only(kinds)
        return found

    made = shapes_of(reverse(), kinds)
    planned = [Planned(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()]
    found = reverse()
    # By the names of files; of a parameter that is converted there are no others.
    in_files = {found.name(k): found.name(v) for k, v in aliases.items() if not found.converts(v)}
    values = lambda: _model_values(live, targets, names, wanted, min(max_nbytes, DEFAULT_NBYTES))
    if naming.pipeline is None:
        return Export(planned, values, in_files, reverse=found, kinds=kinds)
    pipes = naming.pipeline
    return Export(planned, lambda: of_all_stages(pipes, values()), in_files, reverse=found, kinds=kinds)


def _live_of(model: nn.Module | None) -> LiveModel | None:
    """None of a plain model."""
    state = state_around(model) if model is not None else None
    if model is None or state is None:
        return None
    if state.shown:
        raise RuntimeError("zeor.export cannot run inside zeor.full_params; close that first.")
    return LiveModel(state.engine, naming_of(model, state))


def _axis_of(model: nn.Module | None, live: LiveModel | None) -> Axis:
    """Who exports: the ranks of a sharded model, those of the process group with a model nobody shards (a drop-in
    optimizer leaves it plain), one process alone from a checkpoint. Rank 0 writes."""
    if live is not None:
        live.announce_if_joining("zeor.export")
        all_there(live.everyone, "zeor.export")
        return live.everyone
    if model is None or not dist.is_initialized():
        return Axis(0, 1, torch.device("cpu"))
    world = Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), control=dist.group.WORLD)
    world.fake = "fake" in str(dist.get_backend_config())
    all_there(world, "zeor.export")  # to make a mesh is a matter of all ranks
    plan = Plan()
    return make_axis(None, devices.device_of(model), plan.deterministic, plan.timeout)


def _chosen(model: nn.Module, target: Target) -> str:
    """A tied parameter's first name, but none that transformers ties to another by itself."""
    tied = getattr(model, "all_tied_weights_keys", None) or ()
    return next((name for name in target.names if name not in tied), target.name)


def _model_values(
    live: LiveModel | None, targets: list[Target], names: Mapping[int, str], wanted: torch.dtype | None, max_nbytes: int
) -> Values:
    slots = {id(slot.param): slot for slot in live.slots} if live is not None else {}
    chosen = [slots[id(target.tensor)] for target in targets if id(target.tensor) in slots]
    if live is not None and chosen:
        # A wider dtype is asked of the masters themselves; a narrower one is cast on rank 0.
        widened = lambda slot: max(slot.dtype, _target(slot.dtype, wanted), key=lambda dtype: dtype.itemsize)
        named = {slot.name: names[id(slot.param)] for slot in chosen}
        for name, value in iter_slots(live.engine, chosen, max_nbytes, widened):
            yield named[name], value, 0
            del value
    for target in targets:
        if id(target.tensor) not in slots:
            yield names[id(target.tensor)], target.tensor.detach().clone(), 0


# ---- from a checkpoint


def _from_checkpoint(path: Place, wanted: torch.dtype | None, trainable_only: bool) -> Export:
    path = find(path)
    manifest = read_manifest(path)
    stored = [t for t in manifest.tensors if t.role == PARAM or (t.role == BUFFER and not trainable_only)]
    params = manifest.params
    if trainable_only:
        stored = [tensor for tensor in stored if params.get(tensor.name, {}).get("trains") is True]
    stored.sort(key=lambda tensor: _natural(tensor.name))
    planned = [Planned(t.name, _target(_own_dtype(t, params), wanted), t.shape) for t in stored]
    written = {tensor.name for tensor in stored}
    aliases = manifest.state.get("aliases")
    names = {str(o): str(n) for o, n in aliases.items() if n in written} if isinstance(aliases, dict) else {}
    return Export(planned, lambda: _stored_values(path, manifest, stored), names)


def _own_dtype(tensor: Stored, params: Mapping[str, Mapping[str, Any]]) -> torch.dtype:
    """A parameter's own, of which a checkpoint keeps the wider master."""
    own = DTYPES.get(str(params.get(tensor.name, {}).get("dtype"))) if tensor.role == PARAM else None
    stored = DTYPES[tensor.dtype]
    return own if own is not None and own in _CAST and stored in _CAST else stored


def _stored_values(path: Place, manifest: Manifest, tensors: list[Stored]) -> Values:
    """In ranges, a batch at a time: neighbours lie in the same blocks of a file."""
    batch: list[Need] = []
    nbytes = 0
    for tensor in tensors:
        numel = torch.Size(tensor.shape).numel()
        most = _BATCH_NBYTES // DTYPES[tensor.dtype].itemsize
        for start in range(0, numel, most):
            count = min(most, numel - start)
            if batch and nbytes + count * DTYPES[tensor.dtype].itemsize > _BATCH_NBYTES:
                yield from _read(path, manifest, batch)
                batch, nbytes = [], 0
            batch.append(Need(tensor, start, count))
            nbytes += batch[-1].nbytes
    yield from _read(path, manifest, batch)


def _read(path: Place, manifest: Manifest, batch: list[Need]) -> Values:
    read_all(path, manifest, batch)
    for each in batch:
        yield each.stored.name, each.into, each.start
        each.drop()


def _natural(name: str) -> list[Any]:
    """Layer 2 before layer 10."""
    return [(-1, part) if n % 2 == 0 else (int(part), "") for n, part in enumerate(re.split(r"([0-9]+)", name))]


# ---- the config beside the weights


def config_texts(model: Any, given: Any, dtypes: Iterable[torch.dtype]) -> dict[str, str]:
    """File names and their texts: `given` (a folder, a config.json, or a config object), else what the model has.

    dtypes: of the exported parameters; where it is one, the config says so, as transformers loads by it."""
    texts: dict[str, str] = {}
    if isinstance(given, (str, os.PathLike)):
        texts = _copied(Path(given))
    else:
        for name, config in (
            (NAME, given or getattr(model, "config", None)), (GENERATION, getattr(model, "generation_config", None)),
        ):  # fmt: skip
            text = _text_of(config)
            if text:
                texts[name] = text
        if given is not None and NAME not in texts:
            raise ValueError(
                f"config={type(given).__name__} is no config; give a folder with a {NAME}, that file, or a config with "
                "to_json_string()."
            )
    if NAME in texts:
        texts[NAME] = _adjusted(texts[NAME], model, set(dtypes), copied=isinstance(given, (str, os.PathLike)))
    return texts


def _copied(path: Path) -> dict[str, str]:
    file = path
    try:
        folder = path if path.is_dir() else path.parent
        file = folder / NAME if folder is path else path
        texts = {NAME: file.read_text()}
        if (folder / GENERATION).is_file():
            texts[GENERATION] = (folder / GENERATION).read_text()
        if not isinstance(json.loads(texts[NAME]), dict):
            raise ValueError
    except OSError as error:
        raise ValueError(f"config={str(path)!r}: {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {file} is not a JSON object.") from error
    return texts


def _text_of(config: Any) -> str:
    if hasattr(config, "to_json_string"):
        return str(config.to_json_string())
    if isinstance(config, dict):
        try:
            return json.dumps(config, indent=2) + "\n"
        except (TypeError, ValueError):
            return ""
    return ""


def _adjusted(text: str, model: Any, dtypes: set[torch.dtype], copied: bool) -> str:
    """Architecture and dtype, as save_pretrained writes them; in a copied file only what it says already."""
    config = json.loads(text)
    if not isinstance(config, dict) or ("model_type" not in config and "architectures" not in config):
        return text  # not transformers': it says what its owner meant
    floating = {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if len(floating) == 1 and (not copied or key in config):
        config[key] = floating.pop()
    if model is not None and not copied:
        config["architectures"] = [type(model).__name__]
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
