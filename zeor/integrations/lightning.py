"""zeor inside Lightning: a strategy for its Trainer and one for Fabric; importing this module registers both as "zeor".

    import zeor.integrations.lightning
    Trainer(strategy="zeor", ...)    or  Trainer(strategy=ZeorStrategy(zeor={"stage": 3, "precision": "bf16"}), ...)
    Fabric(strategy="zeor", ...)     or  Fabric(strategy=ZeorFabricStrategy(zeor={"stage": 3}), ...)

A checkpoint is a folder: `meta.ckpt` with what Lightning keeps, and `zeor` with masters and optimizer state, which
loads on any number of ranks. Plain weights for others are written by zeor.export(model, folder).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

import zeor
from zeor.access.sharded import state_of

META, FOLDER = "meta.ckpt", "zeor"
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ZeorStrategy(DDPStrategy):
    """Trainer(strategy=ZeorStrategy(zeor={...})): `zeor` holds options of zeor.shard; the rest is DDPStrategy's."""

    model: Any
    optimizers: list[Optimizer]

    def __init__(self, *args: Any, zeor: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._options = dict(zeor or {})
        self._folder: Path | None = None  # of the checkpoint that is being restored

    # ---- set-up

    def setup(self, trainer: Any) -> None:
        check_precision(self.precision_plugin.precision)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not zeor.is_sharded(self.lightning_module):
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
        if fitting:
            self.setup_optimizers(trainer)
        self._shard(self.optimizers if fitting else [])
        self.setup_precision_plugin()

    def _shard(self, optimizers: list[Optimizer]) -> None:
        model = self.lightning_module
        if not zeor.is_sharded(model):
            # Lightning calls the steps, not forward; those of manual optimisation run backward and step() inside.
            methods = tuple(name for name in STEPS if is_overridden(name, model))
            options = {"device": self.root_device, **self._options}
            options["methods"] = (*methods, *options.get("methods", ()))
            zeor.shard(model, optimizers or None, **options)
        elif optimizers:  # a second fit() has made new ones
            zeor.drop_optimizer(model)
            zeor.shard(model, optimizers)

    def model_to_device(self) -> None:
        """zeor.shard has placed it."""

    def teardown(self) -> None:
        # Lightning would bring model and optimizer state to the CPU, which a sharded model on a GPU refuses.
        model, optimizers = self.lightning_module, self.optimizers
        self.optimizers = []
        model.cpu = lambda: model
        try:
            super().teardown()
        finally:
            self.optimizers = optimizers
            del model.cpu

    # ---- the loop

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with _waiting(self.lightning_module, self._options):
            yield

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # zeor.load does

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # in FOLDER

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # in FOLDER

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = Path(self.broadcast(filepath))
        _save(self, path, self.lightning_module, checkpoint["global_step"], checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._folder = Path(checkpoint_path)
        return _load_meta(self._folder, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self._folder is not None
        model = self.lightning_module
        if state_of(model).steppers:
            zeor.load(self._folder / FOLDER, model, strict=strict)
        else:
            zeor.load(self._folder / FOLDER, model, strict=strict, only="weights")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """zeor.load has brought it."""


class _Waiting(_BackwardSyncControl):
    def __init__(self, options: Mapping[str, Any]):
        self._options = options

    def no_backward_sync(self, module: Any, enabled: bool) -> Any:
        return _waiting(module, self._options) if enabled else contextlib.nullcontext()


class ZeorFabricStrategy(FabricDDP):
    """Fabric(strategy=ZeorFabricStrategy(zeor={...})): `zeor` holds options of zeor.shard."""

    def __init__(self, *args: Any, zeor: Mapping[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._options = dict(zeor or {})
        self._backward_sync_control = _Waiting(self._options)
        self._modules: list[nn.Module] = []

    def setup_module_and_optimizers(self, module: Any, optimizers: Any, scheduler: Any = None) -> Any:
        self._shard(module, list(optimizers))
        return module, list(optimizers), scheduler

    def setup_module(self, module: Any) -> Any:
        self._shard(module, [])
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Of a module that was set up before it."""
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for module in self._modules:
            if any(id(param) in own for param in module.parameters()):
                zeor.shard(module, [optimizer])
                return optimizer
        raise ValueError(
            "This optimizer has parameters of no module that was set up; call fabric.setup(model, optimizer)."
        )

    def _shard(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        check_precision(self.precision.precision)
        if not zeor.is_sharded(module):
            zeor.shard(module, optimizers or None, **{"device": self.root_device, **self._options})
            self._modules.append(module)
        elif optimizers:
            zeor.shard(module, optimizers)

    def module_to_device(self, module: Any) -> None:
        """zeor.shard places it."""

    # ---- checkpoints

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        if filter:
            raise ValueError("fabric.save(filter=) is not for sharded models; zeor.export(trainable_only=True) is.")
        rest = {key: value for key, value in state.items() if not isinstance(value, (nn.Module, Optimizer))}
        rest = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        _save(self, Path(self.broadcast(path)), _module_in(state), 0, rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        rest = _load_meta(Path(path), weights_only)
        if not state:
            return rest
        zeor.load(Path(path) / FOLDER, _module_in(state), strict=strict)
        for key, value in state.items():
            if key in rest and hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            elif key in rest:
                state[key] = rest.pop(key)
        return rest

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        """The whole state dict on the CPU of rank 0; {} on the others."""
        with zeor.full_params(module, to_rank=0):
            if not self.is_global_zero:
                return {}
            return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def check_precision(precision: str) -> None:
    """ValueError where Lightning is to change dtypes or run autocast."""
    if precision != "32-true":
        short = "bf16" if "bf16" in precision else "fp16"
        raise ValueError(
            f"precision={precision!r} is Lightning's own; leave it out and give the strategy "
            f"zeor={{'precision': {short!r}}}."
        )


def _waiting(module: Any, options: Mapping[str, Any]) -> Any:
    return zeor.accumulate(module) if options.get("release") else zeor.no_sync(module)


def _module_in(state: Any) -> nn.Module:
    found = [value for value in state.values() if isinstance(value, nn.Module)] if isinstance(state, dict) else []
    if len(found) != 1:
        raise ValueError(
            f"A checkpoint of zeor holds one model; the state has {len(found)}. Save each to its own path."
        )
    return found[0]


def _save(strategy: Any, path: Path, model: nn.Module, step: int, rest: dict[str, Any]) -> None:
    zeor.save(path / FOLDER, model, step=step, keep=1)
    if strategy.is_global_zero:
        torch.save(rest, path / META)
    strategy.barrier()


def _load_meta(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """What Lightning keeps. It is a pickle: classes in it are refused unless weights_only=False asks for them."""
    if not (path / META).is_file():
        raise ValueError(f"{path} is no checkpoint of the zeor strategy: it has no {META}.")
    found: dict[str, Any] = torch.load(path / META, weights_only=weights_only is None or weights_only)
    return found


for _registry, _kind in ((StrategyRegistry, ZeorStrategy), (FABRIC_REGISTRY, ZeorFabricStrategy)):
    _registry.register("zeor", _kind, description="ZeRO by zeor", override=True)
