"""The public API, written down: names, parameters and their defaults, and the options of the `zeor` command.

A change of what users may write is a change of the lists below, which a reader of the diff sees. Annotations are left
out: they may change without breaking anybody. Print what is found with `python -m tests.test_public_api`.
"""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zeor
from zeor.access.push import Bucket
from zeor.checkpoint.preemption import Preemption
from zeor.checkpoint.saver import Saving
from zeor.data.loader import Counting
from zeor.optim.ema import EMA
from zeor.tools import cli

# Users meet objects of these and do not make any.
ONLY_MET = (zeor.CheckpointError, Saving)
# What users call on an object of zeor's.
MEMBERS: dict[type, tuple[str, ...]] = {
    Saving: ("done", "wait"),
    Bucket: ("tensors",),
    EMA: ("decay", "update", "applied", "state_dict", "load_state_dict"),
    Preemption: ("check", "close"),
    Counting: ("epoch", "set_epoch", "state_dict", "load_state_dict"),
    zeor.data.RankSampler: ("epoch", "seed", "set_epoch", "state_dict", "load_state_dict"),
    zeor.data.RankStream: ("set_epoch", "state_dict", "load_state_dict"),
}

PYTHON = """
zeor.CheckpointError(...): ValueError
zeor.Float8(recipe='tensorwise', filter=None, codes=None, pad=False)
zeor.Link(bandwidth, latency=1e-05, message=None)
zeor.Machine(name, memory, products, products32, attention, hbm, elementwise, products8=0.0, pcie=49000000000.0, host_update=3800000000.0, disk=1400000000.0, launch=0.0001, fused=0.25, inside=Link(bandwidth=20000000000.0, latency=1e-05, message=None), across=Link(bandwidth=12500000000.0, latency=1.4e-05, message=2.7e-06), per_host=8, hides=True, native=True, cores=0, present=False)
zeor.Offload(moments='host', master='host', grads='device', compute='device', update='device', folder=None, device_budget=None, host_budget=None, chunk=None, threads=None, pin=True, auto=False, ahead=None)
zeor.Plan(stage=3, precision=Precision(compute=None, reduce=None, master=None, fp8=None), reduction='mean', overlap=True, prefetch=1, kernel='auto', deterministic=False, buffers='mean', nonfinite='warn', timeout=600.0, methods=(), offload=None, moments='exact', release=False, delay=0, recompute=False, compile=False, paths='auto', keep_whole=0, across=None, wire=None)
zeor.PowerSGD(rank=4, warmup=10)
zeor.Precision(compute=None, reduce=None, master=None, fp8=None)
zeor.Preempted(path, step): Exception
zeor.RandomK(fraction=0.1, warmup=0)
zeor.RankError(rank, text): RuntimeError
zeor.Saving(...)
zeor.Saving.done
zeor.Saving.wait(self)
zeor.Sign(warmup=100)
zeor.TopK(fraction=0.01, warmup=0)
zeor.Wire(gather='exact', reduce='exact', across=None, rounding='nearest', rotate=False, auto=False, feedback=False)
zeor.accumulate(model)
zeor.choose(model, optimizer='AdamW', batch=None, *, world=None, gpu=None, host=None, link=None, precision='bf16', allow=(), **options)
zeor.chunked_cross_entropy(hidden, head, targets, *, bias=None, chunk=None, ignore_index=-100, reduction='mean', label_smoothing=0.0)
zeor.clip_grad_norm_(model, max_norm, norm_type=2.0, error_if_nonfinite=False)
zeor.drop_optimizer(model, optimizer=None)
zeor.ema(model, decay=0.999, *, dtype=None, warmup=False, optimizer=None)
zeor.export(source, out, *, dtype=None, max_file='5GB', trainable_only=False, config=None)
zeor.full_params(model, write=False, grads=False, *, to_rank=None, device=None)
zeor.full_state(model, optimizer, *, to_rank=0, device='cpu')
zeor.init_parameters(model, seed=0, init=None, missing_only=False, eager=False)
zeor.is_sharded(model)
zeor.iter_full(model, max_bytes=None, dtype=None, buffers=False)
zeor.iter_state(model, optimizer)
zeor.join(model, on_step=None)
zeor.launch(fn, *args, ranks=2, timeout=None, threads=None, env=None, **kwargs)
zeor.lerp(target, source, alpha)
zeor.load(folder, model, optimizer=None, *, extra=None, data=None, strict=True, only=None)
zeor.load_full_state(model, optimizer, state_dict, *, from_rank=0)
zeor.load_pretrained(model, path, *, strict=True, rename=None)
zeor.mean_loss(model, loss_sum, count)
zeor.measure_links(mesh=None, hierarchy=None)
zeor.mesh(device=None, timeout=600.0, **sizes)
zeor.no_sync(model)
zeor.on_meta()
zeor.park(model, optimizer=None)
zeor.penalty(model, fn, *, params=None, named=False, whole=False)
zeor.pipeline(schedule, keep='step', *, reduce='step', tied=None, names=None)
zeor.predict(model, *, world=1, stage=3, precision=None, optimizer='AdamW', **options)
zeor.preempt(folder, model, optimizer=None, *, extra=None, data=None, keep=3, signals='SIGTERM', within=None, exit_code=0)
zeor.push(model, send, max_bytes=None, *, to=0, dtype=None, buffers=False)
zeor.replan(model, optimizer=None, **options)
zeor.report(model)
zeor.save(folder, model, optimizer=None, *, step, extra=None, data=None, keep=3, asynchronous=False, busy='wait')
zeor.set_wire(model, wire)
zeor.shard(model, optimizer=None, *, plan=None, stage=3, precision=None, reduction='mean', units=None, mesh=None, hierarchy=None, experts=None, device=None, overlap=True, prefetch=1, kernel='auto', deterministic=False, buffers='mean', nonfinite='warn', paths='auto', timeout=None, offload=None, moments='exact', release=False, delay=0, methods=(), keep_whole=None, recompute=False, compile=False, wire=None, **unknown)
zeor.sync_buffers(model, how='mean', mesh=None)
zeor.total(*values, mesh=None)
zeor.trace(model, path, steps=None)
zeor.traffic(model)
zeor.unpark(model, optimizer=None)
zeor.unshard(model, optimizer=None)
zeor.data.RankSampler(inner, rank, world, *, seed=0, drop_last=False, history=None): Sampler
zeor.data.RankSampler.epoch
zeor.data.RankSampler.seed
zeor.data.RankSampler.set_epoch(self, epoch)
zeor.data.RankSampler.state_dict(self)
zeor.data.RankSampler.load_state_dict(self, state)
zeor.data.RankStream(source, share, history=None): IterableDataset
zeor.data.RankStream.set_epoch(self, epoch)
zeor.data.RankStream.state_dict(self)
zeor.data.RankStream.load_state_dict(self, state)
zeor.data.fingerprint(batch)
zeor.data.shard(data, *, shuffle=None, seed=None, drop_last=None, uneven=False, mesh=None, device=None)
zeor.optim.NAME(params, *args, stage=1, mesh=None, nonfinite='warn', **kwargs)
zeor.ema().decay(self)
zeor.ema().update(self)
zeor.ema().applied(self)
zeor.ema().state_dict(self)
zeor.ema().load_state_dict(self, state_dict)
zeor.preempt().check(self, step, extra=None)
zeor.preempt().close(self)
zeor.data.shard().epoch
zeor.data.shard().set_epoch(self, epoch)
zeor.data.shard().state_dict(self)
zeor.data.shard().load_state_dict(self, state)
zeor.push().bucket(names, dtypes, shapes, flat, offsets, number, last)
zeor.push().bucket.tensors
"""  # noqa: E501

COMMANDS = """
train --stage=3 --ranks=2 --steps=600 --layers=3 --width=128 --batch=16 --lr=0.004 --seed=0 --precision=None --wire=None --text=moby-dick.txt --save=None
plan --size=tiny --layers=None --width=None --heads=None --context=None --vocab=None --stages=[0, 1, 2, 3] --worlds=[1, 2, 8, 64] --pp=1 --tp=1 --precision=None --optimizer=AdamW --offload=None --moments=exact --release --recompute=blocks --batch=None --device-budget=None --host-budget=None --fits=None --gpu=None --model=None --ranks=1 --host=None --link=None --allow=()
schedule --size=tiny --layers=None --width=None --heads=None --context=None --vocab=None --stage=3 --ranks=2 --hierarchy=None --prefetch=1 --offload=None --record
inspect FOLDER --verify
export FOLDER OUT --dtype=None --max-file=5GB --trainable-only --config=None
import SOURCE OUT --from=None --allow-pickle --optimizer=None --names=None --step=None
"""  # noqa: E501


def signature(function: Any) -> str:
    """Names, kinds and defaults of the parameters."""
    found = inspect.signature(function)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def of_class(name: str, kind: type) -> Iterator[str]:
    """What it is, how a user may make one, and what it may be asked."""
    others = [base.__name__ for base in kind.__bases__ if not base.__module__.startswith("zeor") and base is not object]
    yield f"{name}{'(...)' if kind in ONLY_MET else signature(kind)}{''.join(f': {base}' for base in others)}"
    yield from of_members(name, kind)


def of_members(name: str, kind: type) -> Iterator[str]:
    for key in MEMBERS.get(kind, ()):
        value = inspect.getattr_static(kind, key)
        yield f"{name}.{key}{'' if isinstance(value, property) else signature(value)}"


def of_module(name: str, module: Any) -> Iterator[str]:
    for key in sorted(module.__all__):
        value = getattr(module, key)
        if inspect.isclass(value):
            yield from of_class(f"{name}.{key}", value)
        elif not inspect.ismodule(value):
            yield f"{name}.{key}{signature(value)}"


def of_python() -> list[str]:
    optim = {f"zeor.optim.NAME{signature(getattr(zeor.optim, name))}" for name in dir(zeor.optim)}
    given = {"zeor.ema()": EMA, "zeor.preempt()": Preemption, "zeor.data.shard()": Counting}
    returned = [line for name, kind in given.items() for line in of_members(name, kind)]
    returned += of_class("zeor.push().bucket", Bucket)
    return [*of_module("zeor", zeor), *of_module("zeor.data", zeor.data), *sorted(optim), *returned]


def of_option(action: argparse.Action) -> str:
    name = action.option_strings[-1] if action.option_strings else action.dest.upper()
    if not action.option_strings or action.nargs == 0:
        return name
    default = action.default
    return f"{name}={Path(default).name if os.sep in str(default) else default}"


def of_commands() -> list[str]:
    _, parsers = cli._parsers()
    return [
        " ".join([name, *(of_option(action) for action in parser._actions if action.dest != "help")])
        for name, parser in parsers.items()
    ]


def test_python_names_parameters_and_defaults() -> None:
    assert of_python() == PYTHON.strip().splitlines()


def test_every_optimizer_of_torch_is_in_optim() -> None:
    kinds = {name for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    wanted = {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)} - {"Optimizer"}
    assert set(dir(zeor.optim)) == wanted and {"AdamW", "SGD"} <= wanted


def test_commands_and_their_options() -> None:
    assert of_commands() == COMMANDS.strip().splitlines()


if __name__ == "__main__":
    print("\n".join([*of_python(), "", *of_commands()]))
