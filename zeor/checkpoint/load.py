"""load(): a checkpoint of any world, stage and precision into this run; each rank reads what it keeps.

1. Rank 0 finds the checkpoint; every rank reads the manifest, and all agree that it is the same and that it fits.
2. Every rank reads and verifies what it needs into host memory of its own.
3. All ranks agree that nothing was wrong. Until here nothing of the run has changed.
4. The values go where they belong: through masters, to optimizers, generators, loaders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeor.checkpoint import contents as parts
from zeor.checkpoint import plain
from zeor.checkpoint.commit import find, read_manifest
from zeor.checkpoint.errors import CheckpointError
from zeor.checkpoint.manifest import FileInfo, Manifest, Stored, digest
from zeor.checkpoint.reading import Need, need, read_all
from zeor.checkpoint.save import Run
from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh
from zeor.layout import Segment
from zeor.optim.ema import EMA
from zeor.optim.pieces import Piece
from zeor.runtime.unit import Slot


class Loaded(NamedTuple):
    """step and extra as they were saved; names that did not match, with strict=False; where it was loaded from."""

    step: int
    extra: dict[str, Any]
    path: Path
    world: int
    missing: list[str]
    unexpected: list[str]


class Load:
    """One load into one run."""

    def __init__(self, run: Run, path: Path, manifest: Manifest, strict: bool):
        self.run, self.path, self.manifest, self.strict = run, path, manifest, strict
        self._stored = manifest.by_key()
        for name in parts.persistent_buffers(run.model):  # a state dict of others does not say what is a buffer
            if (parts.PARAM, name) in self._stored and (parts.BUFFER, name) not in self._stored:
                self._stored[parts.BUFFER, name] = self._stored.pop((parts.PARAM, name))
        self._needs: dict[tuple[str, str], Need] = {}  # whole tensors of plain values
        self._all: list[Need] = []
        self._params: list[tuple[Slot, Segment, Need]] = []
        self._whole: list[tuple[Tensor, Need]] = []
        self._pieces: list[list[tuple[Piece, Need | None]]] = []
        self._averages: list[tuple[str, EMA, list[Piece]]] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    # ---- step 1: what is needed

    def plan(self, averages: Mapping[str, EMA]) -> None:
        self._plan_parameters()
        self._plan_buffers()
        self._check_names()
        self._plan_optimizers()
        for key, average in averages.items():
            self._plan_average(key, average)
        self.value("extra")
        self.value("data")
        if self._same_world:
            self._rng()

    @property
    def _same_world(self) -> bool:
        rng = self.manifest.state.get("rng")
        return self.manifest.world == self.run.mesh.world and isinstance(rng, list) and len(rng) == self.manifest.world

    def _need(self, stored: Stored, start: int, numel: int) -> Need:
        made = need(stored, start, numel)
        self._all.append(made)
        return made

    def _want_whole(self, name: str) -> Tensor:
        """A stored tensor of a plain value; read with everything else, so that what stands here now is empty."""
        for role in (parts.EXTRA, parts.RNG):
            stored = self._stored.get((role, name))
            if stored is not None:
                if (role, name) not in self._needs:
                    self._needs[role, name] = self._need(stored, 0, torch.Size(stored.shape).numel())
                return self._needs[role, name].into.view(stored.shape)
        raise CheckpointError(f"{self.path}: the manifest speaks of {str(name)[:80]!r}, a tensor it does not hold.")

    def _plan_parameters(self) -> None:
        aliases, known = self.manifest.state.get("aliases", {}), set()
        others: dict[str, list[str]] = {}
        for other, name in self.run.aliases.items():
            others.setdefault(name, []).append(other)
        for slot in self.run.engine.slots:
            name = self.run.names[id(slot.user)]
            names = [name, *others.get(name, ()), *(aliases[n] for n in [name, *others.get(name, ())] if n in aliases)]
            found = next((n for n in names if (parts.PARAM, n) in self._stored), None)
            if found is None:
                self.missing.append(name)
                continue
            known.update(names)
            stored = self._stored[parts.PARAM, found]
            if stored.shape != slot.shape:
                raise CheckpointError(
                    f"{self.path} holds {found!r} in shape {stored.shape}; the model has {slot.shape}."
                )
            for segment in slot.lane.segments:
                if segment.param == slot.index:
                    self._params.append((slot, segment, self._need(stored, segment.start, segment.numel)))
        for name, param in self.run.plain_params.items():
            known.add(name)
            self._plan_whole(parts.PARAM, name, param)
        self.unexpected += [n for role, n in self._stored if role == parts.PARAM and n not in known]

    def _plan_buffers(self) -> None:
        buffers = parts.persistent_buffers(self.run.model)
        for name, buffer in buffers.items():
            self._plan_whole(parts.BUFFER, name, buffer)
        self.unexpected += [n for role, n in self._stored if role == parts.BUFFER and n not in buffers]

    def _plan_whole(self, role: str, name: str, tensor: Tensor) -> None:
        """A plain tensor of the model, the same on every rank."""
        stored = self._stored.get((role, name))
        if stored is None:
            self.missing.append(name)
        elif stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{self.path} holds {name!r} in shape {stored.shape}; the model has {tuple(tensor.shape)}."
            )
        else:
            self._whole.append((tensor, self._need(stored, 0, tensor.numel())))

    def _check_names(self) -> None:
        if self.strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self.path} does not fit this model: {_listed('missing in it', self.missing)}"
                f"{'; ' if self.missing and self.unexpected else ''}{_listed('not in the model', self.unexpected)}. "
                "Pass strict=False to load what fits."
            )

    def _plan_optimizers(self) -> None:
        saved = self.manifest.state.get("optimizers", [])
        given = len(self.run.steppers)
        if len(saved) < given or (self.strict and len(saved) != given):
            raise CheckpointError(
                f"{self.path} holds the state of {len(saved)} optimizer(s), and {given} were given; give those it was "
                "saved with, or none and strict=False."
            )
        for number, stepper in enumerate(self.run.steppers):
            self._check_groups(number, stepper, saved[number])
            self._pieces.append(list(self._plan_optimizer(number, stepper, saved[number])))

    def _check_groups(self, number: int, stepper: Any, saved: dict[str, Any]) -> None:
        theirs = [set(group["params"]) for group in saved["groups"]]
        ours = [{self.run.names[id(p)] for p in group["params"]} for group in stepper.optimizer.param_groups]
        if self.strict and theirs != ours:
            raise CheckpointError(
                f"{self.path}: the groups of optimizer {number} ({saved['class']}) hold other parameters than those of "
                f"the {type(stepper.optimizer).__name__} given; make it with the same groups, or pass strict=False."
            )

    def _plan_optimizer(self, number: int, stepper: Any, saved: dict[str, Any]) -> Any:
        """This rank's pieces of an optimizer's state, each with what must be read for it."""
        for group in stepper.optimizer.param_groups:
            for param in group["params"]:
                slot = stepper.segments.slots[id(param)]
                name = self.run.names[id(slot.user)]
                if stepper.segments.of(param) is None:
                    continue
                where = stepper.segments.at(param)
                for role, key in saved["keys"].items():
                    stored = self._stored.get((role, name))
                    if stored is None:
                        continue
                    if stored.shape == slot.shape:
                        each = self._need(stored, where.start, where.numel)
                        yield Piece(slot.name, tuple(key), where.start, each.into), each
                    else:
                        each = self._need(stored, 0, torch.Size(stored.shape).numel())
                        yield Piece(slot.name, tuple(key), None, each.into.view(stored.shape)), each
                for key, value in saved["scalars"].get(name, ()):
                    yield Piece(slot.name, tuple(key), None, plain.decode(value, self._want_whole)), None

    def _plan_average(self, key: str, average: EMA) -> None:
        slots = {slot.name: slot for slot in self.run.engine.slots}
        pieces = []
        for mine in average.pieces():
            name = self.run.names[id(slots[mine.name].user)]
            stored = self._stored.get((f"ema.{key}", name))
            if stored is None or mine.begin is None:
                raise CheckpointError(f"{self.path} has no average {key!r} of {name!r}; leave it out of extra=.")
            each = self._need(stored, mine.begin, mine.value.numel())
            pieces.append(Piece(mine.name, mine.key, mine.begin, each.into))
        self._averages.append((key, average, pieces))

    # ---- step 2

    def read(self) -> int:
        return read_all(self.path, self.manifest, self._all)

    # ---- step 4

    @torch.no_grad()
    def apply(self) -> None:
        engine = self.run.engine
        engine.drain()
        for slot, segment, each in self._params:
            slot.lane.store_part(segment.offset, each.into)
            engine.unfilled.slots.pop(slot, None)
        for unit in engine.units:
            for lane in unit.lanes:
                if engine.mesh.world > 1 and not lane.frees and not lane.updates_whole:
                    lane.start_gather(f"gather of unit {unit.name!r} after loading")
                    lane.wait()
        torch.autograd.graph.increment_version([slot.full for slot in engine.slots])
        for tensor, each in self._whole:
            tensor.copy_(each.into.view(tensor.shape))
        for number, stepper in enumerate(self.run.steppers):
            self._apply_optimizer(stepper, self.manifest.state["optimizers"][number], self._pieces[number])
        for key, average, pieces in self._averages:
            average.put(pieces, int(self.value("extra")[key]["updates"]))

    def _apply_optimizer(self, stepper: Any, saved: dict[str, Any], pieces: list[tuple[Piece, Need | None]]) -> None:
        stepper.optimizer.state.clear()
        stepper.put(piece for piece, _ in pieces)
        for group, old in zip(stepper.optimizer.param_groups, saved["groups"]):
            for key, value in plain.decode(old["settings"], self._want_whole).items():
                if isinstance(group.get(key), Tensor) and isinstance(value, (Tensor, float, int)):
                    group[key].copy_(torch.as_tensor(value))  # whoever holds it, a scheduler say, sees the new value
                else:
                    group[key] = value

    def value(self, name: str) -> Any:
        return plain.decode(self.manifest.state.get(name), self._want_whole)

    def _rng(self) -> Any:
        return plain.decode(self.manifest.state["rng"][self.run.mesh.rank], self._want_whole)

    def restore_rng(self) -> None:
        if self._same_world:
            set_rng(self._rng(), self.run.mesh.device)


def open_checkpoint(mesh: Mesh, folder: Path) -> tuple[Path, Manifest]:
    """Rank 0's choice of checkpoint; its manifest, the same on every rank."""
    problem, place = "", ""
    if mesh.rank == 0:
        try:
            place = str(find(folder))
        except CheckpointError as error:
            problem = str(error)
    answers = exchange(mesh, [problem, place], "choice of a checkpoint")
    if answers[0][0]:
        raise CheckpointError(answers[0][0])
    path = Path(answers[0][1])
    manifest = together(mesh, lambda: _whole_manifest(path), "exchange about a checkpoint's manifest")
    hashes = exchange(mesh, digest(manifest.to_bytes()), "comparison of manifests")
    if len(set(hashes)) > 1:
        raise CheckpointError(f"{path} is not the same checkpoint on every rank; load from a folder all ranks share.")
    return path, manifest


def _whole_manifest(path: Path) -> Manifest:
    """A manifest all of whose files are there, as long as it says: nothing is allocated for one that lies."""
    manifest = read_manifest(path)
    for file in manifest.files:
        try:
            found = (path / file.name).stat().st_size
        except OSError as error:
            lost = _held(manifest, file)
            raise CheckpointError(f"{path / file.name} cannot be read: {error.strerror}.{lost}") from error
        if found != file.nbytes:
            raise CheckpointError(f"{path / file.name} has {found} bytes; its manifest says {file.nbytes}.")
    return manifest


def _held(manifest: Manifest, file: FileInfo) -> str:
    """Which parameters a lost file takes with it."""
    number = manifest.files.index(file)
    names = [t.name for t in manifest.tensors if t.role == parts.PARAM and any(p.file == number for p in t.pieces)]
    return f" It holds parts of {_listed('parameters', names)}." if names else ""


def together(mesh: Mesh, do: Callable[[], Any], label: str) -> Any:
    """What every rank does; where it fails on any, all raise the first failure."""
    result, problem = None, ""
    try:
        result = do()
    except CheckpointError as error:
        problem = str(error)
    everyone = exchange(mesh, problem, label)
    for rank, text in enumerate(everyone):
        if text:
            raise CheckpointError(text if all(everyone) else f"On rank {rank}: {text}")
    return result


def load(run: Run, folder: Path, extra: Mapping[str, Any] | None, data: Any, strict: bool) -> Loaded:
    """The steps at the top of this file."""
    mesh = run.mesh
    path, manifest = open_checkpoint(mesh, folder)
    this = Load(run, path, manifest, strict)
    averages = {key: value for key, value in (extra or {}).items() if isinstance(value, EMA)}
    together(mesh, lambda: _guarded(lambda: this.plan(averages), path), "exchange about whether a checkpoint fits")
    together(mesh, lambda: _guarded(this.read, path), "exchange about the reading of a checkpoint")
    this.apply()
    this.restore_rng()
    found = this.value("extra") or {}
    for key, value in (extra or {}).items():
        if hasattr(value, "load_state_dict") and key in found and key not in averages:
            value.load_state_dict(found[key])
    positions = this.value("data") or []
    if data is not None and positions and positions[mesh.rank % len(positions)] is not None:
        data.load_state_dict(positions[mesh.rank % len(positions)])
    return Loaded(manifest.step, found, path, manifest.world, this.missing, this.unexpected)


def _guarded(do: Callable[[], Any], path: Path) -> Any:
    """A manifest that is consistent in itself may still say nonsense of optimizers: that is its fault, not ours."""
    try:
        return do()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} holds malformed values ({type(error).__name__}: {error}).") from error


def set_rng(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{what}: {', '.join(map(repr, names[:10]))}{more}"
