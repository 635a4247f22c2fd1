"""zeor inside Hugging Face Accelerate: an Accelerator that shards models where Accelerate would wrap them in DDP.

    accelerator = ZeorAccelerator(zeor={"stage": 3}, gradient_accumulation_steps=4, mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of the loop stays. What is Accelerate's own (loaders, schedulers, metrics, trackers) is left to it; here are
models, optimizers, precision and checkpoints. Only methods that Accelerate documents are overridden.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer

import zeor
from zeor.access.sharded import state_of

# How Accelerate is told to shard a model by other means; on CPUs, or in one process, it would not say that it did not.
PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM",
             "ACCELERATE_USE_PARALLELISM_CONFIG")  # fmt: skip
SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
WEIGHTS = "weights"  # an option of the adapters: a folder from which a model on the meta device is filled


class ZeorAccelerator(Accelerator):
    """`ZeorAccelerator(zeor={...}, ...)`: `zeor` holds options of zeor.shard, and "weights": a folder of safetensors
    for models that are on the meta device. Everything else is Accelerator's."""

    zeor_options: dict[str, Any]
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zeor: Mapping[str, Any] | None = None, **kwargs: Any):
        check_settings(kwargs)
        super().__init__(*args, **kwargs)
        self._adopt(zeor)

    @classmethod
    def adopt(cls, accelerator: Accelerator, zeor: Mapping[str, Any] | None = None) -> ZeorAccelerator:
        """An Accelerator that another library made, as one of these, in place."""
        check_settings({})
        check_supported(accelerator)
        accelerator.__class__ = cls
        adopted: ZeorAccelerator = accelerator
        adopted._adopt(zeor)
        return adopted

    def _adopt(self, options: Mapping[str, Any] | None) -> None:
        check_supported(self)
        self.zeor_options = dict(options or {})
        self._take_precision()
        self._take_compile()
        # None would mean True for iterable datasets, where rank 0 reads for all.
        self.dataloader_config.dispatch_batches = False

    def _take_precision(self) -> None:
        """zeor computes in 16 bits by itself, so autocast stays off."""
        asked = self.mixed_precision
        if asked not in ("bf16", "fp16"):
            return
        given = self.zeor_options.setdefault("precision", asked)
        if given is None or (isinstance(given, str) and given not in (asked, "fp8")):
            raise ValueError(
                f"mixed_precision={asked!r} and zeor's precision={given!r} contradict each other; leave one of them "
                "out."
            )
        self.native_amp = False

    def _take_compile(self) -> None:
        """zeor compiles block by block, so that its hooks stay outside graphs."""
        plugin = self.state.dynamo_plugin
        self._compiles = plugin.backend != DynamoBackend.NO
        if self._compiles:
            given = {"backend": str(plugin.backend.value).lower(), "mode": plugin.mode, "dynamic": plugin.dynamic}
            self.zeor_options.setdefault("compile", {key: value for key, value in given.items() if value is not None})

    # ---- prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        optimizers = [raw(each) for each in args if isinstance(each, Optimizer)]
        for model in (each for each in args if isinstance(each, nn.Module)):
            own = {id(param) for param in model.parameters()}
            self._shard(model, [each for each in optimizers if own & _ids(each)])
        prepared = [model for model in self._models if zeor.is_sharded(model)]
        for optimizer in optimizers:  # whose model was prepared by an earlier call
            for model in prepared:
                if {id(param) for param in model.parameters()} & _ids(optimizer):
                    self._shard(model, [optimizer])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        self._shard(model, [])
        if all(each is not model for each in self._models):
            self._models.append(model)
        model._is_accelerate_prepared = True
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        # Placing its state on a device would load it into the optimizer once more.
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        prepared._is_accelerate_prepared = True
        return prepared

    def _shard(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        if not zeor.is_sharded(model):
            options = dict(self.zeor_options)
            weights, blank = options.pop(WEIGHTS, None), any(param.is_meta for param in model.parameters())
            if blank and weights is None:
                raise ValueError(
                    "The model is on the meta device and has no values; name the folder of its safetensors: "
                    f"zeor={{{WEIGHTS!r}: folder}}."
                )
            if callable(getattr(model, "generate", None)):  # called beside forward
                options["methods"] = ("generate", *_listed(options.get("methods", ())))
            zeor.shard(model, optimizers or None, device=options.pop("device", self.device), **options)
            if blank:
                zeor.load_pretrained(model, weights)
            return
        new = [each for each in optimizers if not drives(model, each)]
        if new:
            zeor.shard(model, new)

    # ---- the loop

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if not zeor.is_sharded(model):
            with super().no_sync(model):
                yield
            return
        with zeor.accumulate(model) if self.zeor_options.get("release") else zeor.no_sync(model):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        if self.zeor_options.get("release"):
            raise ValueError(
                "zeor's release=True updates inside backward, so there is nothing left to clip; leave one of them out."
            )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Ranks with unequal numbers of batches: zeor.join over the sharded models among `joinables`."""
        samplers = [loader.batch_sampler for loader in self._dataloaders if hasattr(loader, "batch_sampler")]
        kept = [(each, each.even_batches) for each in samplers if hasattr(each, "even_batches")]
        for each, _ in kept if even_batches is not None else ():
            each.even_batches = even_batches
        try:
            with zeor.join([each for each in joinables if isinstance(each, nn.Module) and zeor.is_sharded(each)]):
                yield
        finally:
            for each, before in kept:
                each.even_batches = before

    # ---- weights and checkpoints

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Every rank calls it; the main process gets the whole state dict on the CPU, the others {}."""
        if not zeor.is_sharded(model):
            return super().get_state_dict(model, unwrap)
        with zeor.full_params(model, to_rank=0):
            if not self.is_main_process:
                return {}
            live = {id(buffer) for buffer in model.buffers()}
            found = model.state_dict(keep_vars=True)
            return {
                name: value.detach().to("cpu", copy=id(value) in live) if isinstance(value, torch.Tensor) else value
                for name, value in found.items()
            }

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerator's, with a zeor checkpoint for each model and its optimizers, which loads on any number of
        ranks. Hooks that were registered for models are called with none."""
        with self._without_sharded() as models:
            where = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()
        for number, model in enumerate(models):
            zeor.save(_folder(where, number), model, step=0, keep=1)
        return where

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        # Models first: loading sets random generators, and Accelerate's own are the ones that count.
        where = self._latest() if input_dir is None else os.path.expanduser(input_dir)
        models = [model for model in self._models if zeor.is_sharded(model)]
        for number, model in enumerate(models):
            if not os.path.isdir(_folder(where, number)):
                raise ValueError(
                    f"{where} holds no checkpoint of zeor for model {number}; load a plain one's weights by "
                    "zeor.load_pretrained(model, folder)."
                )
            zeor.load(_folder(where, number), model)
        with self._without_sharded():
            super().load_state(where, load_kwargs, **kwargs)

    def _latest(self) -> str:
        """As Accelerator finds it under automatic_checkpoint_naming."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        folder = Path(self.project_dir, "checkpoints")
        return str(max(folder.iterdir(), key=lambda each: int(each.name.rpartition("_")[2])))

    @contextlib.contextmanager
    def _without_sharded(self) -> Iterator[list[nn.Module]]:
        """Inside, Accelerate sees neither sharded models nor their optimizers, whose state dicts it would pickle."""
        kept = self._models, self._optimizers
        models = [model for model in self._models if zeor.is_sharded(model)]
        self._models = [model for model in self._models if not zeor.is_sharded(model)]
        self._optimizers = [each for each in self._optimizers if not any(drives(m, raw(each)) for m in models)]
        try:
            yield models
        finally:
            self._models, self._optimizers = kept


def check_settings(given: Mapping[str, Any]) -> None:
    """ValueError where arguments or the environment (`accelerate launch`) ask for another way to shard."""
    found = [f"{name}=" for name in PLUGINS if given.get(name) is not None]
    found += [f"{name}=true" for name in VARIABLES if os.environ.get(name, "false").lower() == "true"]
    if found:
        raise ValueError(
            f"Accelerate is given {found[0]}, and zeor shards the model itself; leave fsdp, deepspeed, megatron and "
            "parallelism settings out (`accelerate config`, ACCELERATE_USE_..., arguments)."
        )


def check_supported(accelerator: Accelerator) -> None:
    """ValueError where Accelerate is to shard by other means, or reads data in a way zeor cannot follow."""
    kind = accelerator.distributed_type
    parallel = getattr(accelerator, "parallelism_config", None)
    if kind not in SUPPORTED or parallel is not None:
        what = f"distributed_type={kind.value}" if kind not in SUPPORTED else "parallelism_config="
        raise ValueError(
            f"Accelerate is set up with {what}, and zeor shards the model itself; leave fsdp, deepspeed, megatron and "
            "parallelism settings out (`accelerate config`, ACCELERATE_USE_..., arguments)."
        )
    if accelerator.mixed_precision == "fp8":
        raise ValueError("mixed_precision='fp8' is Accelerate's own; leave it out and give zeor={'precision': 'fp8'}.")
    if accelerator.dataloader_config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True lets rank 0 read for all ranks, which then depend on it at every batch; leave it "
            "out: each rank reads its own part."
        )


def raw(optimizer: Any) -> Optimizer:
    """The torch optimizer inside."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    found: Optimizer = optimizer
    return found


def drives(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether zeor steps the sharded model with this optimizer."""
    return any(stepper.optimizer is optimizer for stepper in state_of(model).steppers)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _listed(methods: Any) -> tuple[str, ...]:
    return (methods,) if isinstance(methods, str) else tuple(each for each in methods if each != "generate")


def _folder(where: Any, number: int) -> str:
    return os.path.join(where, f"zeor_{number}")
