"""One system, one model, one GPU, one process: speed and memory of the plain training loop.

    plain       bf16 autocast over fp32 parameters, fused AdamW
    pure-bf16   everything bf16, no master: a ceiling, not a rival
    fsdp2       fully_shard on every block and on the root, bf16 compute over fp32 shards, fused AdamW
    zeor        zeor.shard(stage=..., precision="bf16") over the fp32 model and fused AdamW

    python -m benchmarks.gpu_single --system fsdp2 --size 1.3B --batch 8
    python -m benchmarks.gpu_single --system zeor --stage 3 --size 7B --batch 4 --world 64
    python -m benchmarks.gpu_single --system fsdp2 --tiny --device cpu            # a check without a GPU

With --world above 1 torch's fake process group stands for the other ranks: memory is that of one rank of
many, and every collective delivers copies of this rank's own part (see imagine_values), so speeds compare only
with other runs on the fake group, and losses mean nothing.
Run several with `gpu_suite`, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

# So that `python benchmarks/gpu_single.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoder import SIZES, Decoder, build, flops_per_token, loss_of, parameter_numel, random_batch
from benchmarks.measure import GIB, free_port, status_nbytes, write_json

LEARNING_RATE = 3e-4
PHASES = ("forward", "backward", "clip", "step")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Trained(NamedTuple):
    """A model and its optimizer, with what the loop must know to use them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: bool = False
    clip: Callable[[float], Any] | None = None  # None: the stock call over model.parameters()
    alone: Callable[[], contextlib.AbstractContextManager[Any]] | None = None  # around micro-batches but the last


# 1. Preparing a system


def start_group(options: argparse.Namespace) -> None:
    """A process group of one real rank, or of `world` imagined ones."""
    if options.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
        imagine_values(options.world)
        return
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)


def imagine_values(world: int) -> None:
    """Let fake collectives deliver numbers: everybody else's part is a copy of this rank's own.

    The fake group moves nothing, so full parameters would be whatever memory held: zeros, on which matrix
    products run faster, or NaN. The copies cost every system the same.
    """

    def repeat(out: torch.Tensor, given: torch.Tensor) -> None:
        rows = out.view(world, -1)
        rows[1:].copy_(given)
        if rows.data_ptr() != given.data_ptr():  # a gather in place has its own part there already
            rows[0].copy_(given)

    def deliver(name: str, fill: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        stock = getattr(dist, name, None)
        if stock is None:
            return

        def collective(*args: Any, **kwargs: Any) -> Any:
            named = [
                value for key, value in kwargs.items() if key in ("output", "output_tensor", "input", "input_tensor")
            ]
            out, given = [*args, *named][:2]
            fill(out.view(-1), given.view(-1))
            return stock(*args, **kwargs)

        setattr(dist, name, collective)

    for name in ("all_gather_single", "all_gather_into_tensor"):
        deliver(name, repeat)
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        deliver(name, lambda out, given: out.copy_(given.view(world, -1)[0]))
    # Codes travel so: what another rank would send here is taken to be what this one sends there.
    deliver("all_to_all_single", lambda out, given: out[: given.numel()].copy_(given[: out.numel()]))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True)


def compile_blocks(model: Decoder, how: str | None) -> None:
    """Block by block: `module` is block.compile(); `forward` leaves the block's hooks out of the graph."""
    for block in model.blocks:
        if how == "module":
            block.compile()
        elif how == "forward":
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]


def convert_blocks(model: Decoder, recipe: str) -> None:
    """Linears of blocks multiply in 8 bits, by torchao: how FSDP2's users do it."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model.blocks, config=config)


def prepare(options: argparse.Namespace) -> Trained:
    """Build the model on its device and hand it to the system."""
    compute_only = options.system == "pure-bf16"
    dtype = torch.bfloat16 if compute_only else torch.float32
    model = build(SIZES[options.size], options.device, dtype, recompute=not options.no_recompute)
    if options.torchao:
        convert_blocks(model, options.torchao)
    compile_blocks(model, options.compile)
    if options.system in ("plain", "pure-bf16"):
        return Trained(model, adamw(model), autocast=options.system == "plain")
    if options.system == "fsdp2":
        return prepare_fsdp2(model, options)
    return prepare_zeor(model, options)


def prepare_fsdp2(model: Decoder, options: argparse.Namespace) -> Trained:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_group(options)
    mesh = init_device_mesh(options.device, (options.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=DTYPES[options.fsdp_reduce])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[attr-defined]  # of its class since fully_shard
        yield
        model.set_requires_gradient_sync(True)  # type: ignore[attr-defined]

    return Trained(model, adamw(model), alone=alone)


def prepare_zeor(model: Decoder, options: argparse.Namespace) -> Trained:
    """World 1 leaves the process group to zeor, as a user would; an imagined world must be there before."""
    if options.world > 1:
        start_group(options)
    zeor = importlib.import_module("zeor")  # after imagine_values: it takes the collectives as it finds them
    chosen = {"stage": options.stage, "precision": "bf16", **json.loads(options.zeor)}
    sharded, optimizer = zeor.shard(model, adamw(model), **chosen)
    clip = None if options.stock_clip else (lambda limit: zeor.clip_grad_norm_(sharded, limit))
    return Trained(sharded, optimizer, clip=clip, alone=lambda: zeor.accumulate(sharded))


# 2. The loop


class Clock:
    """Marks in time: CUDA events where there is a GPU (they do not stop it), the host's clock elsewhere."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self.on_gpu else 1e3 * (end - start)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class Loop:
    """The plain training loop over random tokens."""

    def __init__(self, trained: Trained, options: argparse.Namespace) -> None:
        self.trained, self.options = trained, options
        self.clock = Clock(options.device)
        shape = SIZES[options.size]
        self.tokens = min(options.tokens, shape.positions)
        generator = torch.Generator(device=options.device).manual_seed(1)
        # Two batches made beforehand, so that the clock sees training only.
        self.batches = [random_batch(shape, options.batch, self.tokens, generator) for _ in range(2 * options.micro)]
        self.losses: list[torch.Tensor] = []

    def step(self, number: int) -> list[Any]:
        """One step; the marks at its start and after each of PHASES: the first micro-batch's forward, what is left of
        the others and all backwards, clipping, and the update."""
        model, optimizer, autocast, clip, alone = self.trained
        mark, micro = self.clock.mark, self.options.micro
        marks = [mark()]
        for place in range(micro):
            with alone() if alone and place + 1 < micro else contextlib.nullcontext():
                with torch.autocast(self.options.device, torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, *self.batches[number % 2 * micro + place])
                if not place:
                    marks.append(mark())
                (loss / micro if micro > 1 else loss).backward()
        marks.append(mark())
        if self.options.clip > 0:
            if clip is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)
            else:
                clip(self.options.clip)
        marks.append(mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
        self.losses.append(loss.detach())  # read after the run: .item() here would stop the GPU's queue
        return marks

    def run(self, steps: int) -> tuple[float, list[list[Any]]]:
        """Seconds of `steps` steps, the device idle at both ends, and every step's marks."""
        self.clock.wait()
        start = time.perf_counter()
        marks = [self.step(number) for number in range(steps)]
        self.clock.wait()
        return time.perf_counter() - start, marks


# 3. Figures


class Said(logging.Handler):
    """Lines that zeor logs: what recompute="auto" and offload="auto" have chosen explains a figure later."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        log = logging.getLogger("zeor")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def step_times(clock: Clock, marks: list[list[Any]]) -> list[float]:
    """Milliseconds from one step's start to the next one's; the last step ends with its own last mark."""
    starts = [step[0] for step in marks] + [marks[-1][-1]]
    return [clock.ms_between(start, end) for start, end in pairwise(starts)]


def phase_times(clock: Clock, marks: list[list[Any]]) -> dict[str, float]:
    """Median milliseconds of each phase. Work a system defers into the next forward is counted there."""
    return {
        phase: round(median(clock.ms_between(step[i], step[i + 1]) for step in marks), 3)
        for i, phase in enumerate(PHASES)
    }


def memory_figures(device: str, setup_peak_nbytes: int) -> dict[str, float]:
    """GPU peaks of training, the GPU's peak while the model was set up, and the host's peak, in GiB."""
    on_gpu = device == "cuda"
    return {
        "gpu_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3) if on_gpu else 0.0,
        "gpu_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3) if on_gpu else 0.0,
        "gpu_setup_gib": round(setup_peak_nbytes / GIB, 3),
        "host_peak_gib": round(status_nbytes("VmHWM") / GIB, 3),
    }


def start_memory_peaks(device: str) -> int:
    """Forget the peak of setting up (and give its cached blocks back); returns that peak in bytes."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def kernel_table(loop: Loop, rows: int) -> str:
    """The most expensive kernels of two more steps, after the timed ones."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loop.clock.on_gpu else [])
    with profile(activities=activities) as profiler:
        loop.run(2)
    key = "self_cuda_time_total" if loop.clock.on_gpu else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=key, row_limit=rows, max_name_column_width=60))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare, warm up, time, and say everything that was seen."""
    if options.device == "cuda":
        torch.cuda.set_device(0)
    said = Said()
    started = time.perf_counter()
    loop = Loop(prepare(options), options)
    setup_peak_nbytes = start_memory_peaks(options.device)
    loop.run(options.warmup)
    setup_s = time.perf_counter() - started
    seconds, marks = loop.run(options.steps)
    shape = SIZES[options.size]
    tokens_per_s = options.steps * options.micro * options.batch * loop.tokens / seconds
    figures: dict[str, Any] = {
        "tokens_per_s": round(tokens_per_s, 1),
        "step_ms": round(1e3 * seconds / options.steps, 3),
        "median_step_ms": round(median(step_times(loop.clock, marks)), 3),
        "step_times_ms": [round(ms, 3) for ms in step_times(loop.clock, marks)],
        "tflops_per_s": round(tokens_per_s * flops_per_token(shape, loop.tokens) / 1e12, 3),
        "parameters": parameter_numel(shape),
        "setup_s": round(setup_s, 1),
        **memory_figures(options.device, setup_peak_nbytes),
        "profile": phase_times(loop.clock, marks) if options.profile else None,
        "losses": [round(float(loss), 6) for loss in loop.losses],
        "said": said.lines,
    }
    if options.kernels:
        figures["kernels"] = kernel_table(loop, options.kernels)
    return figures


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", required=True, choices=["plain", "pure-bf16", "fsdp2", "zeor"])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="of zeor")
    parser.add_argument("--size", default="1.3B", choices=list(SIZES))
    parser.add_argument("--tiny", action="store_true", help="the same as --size tiny")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--tokens", type=int, default=2_048, help="tokens per sequence, cut to the model's positions")
    parser.add_argument("--compile", nargs="?", const="module", choices=["module", "forward"])
    parser.add_argument("--world", type=int, default=1, help="above 1: one rank of so many, on a fake group")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm limit; 0: no clipping")
    parser.add_argument("--stock-clip", action="store_true", help="torch's clip_grad_norm_ for zeor as well")
    parser.add_argument("--fsdp-reduce", default="bf16", choices=list(DTYPES), help="FSDP2's reduce_dtype")
    parser.add_argument("--zeor", default="{}", help="more arguments of zeor.shard, as JSON")
    parser.add_argument("--torchao", choices=["tensorwise", "rowwise"], help="convert blocks to its float8 linears")
    parser.add_argument("--no-recompute", action="store_true", help="no activation checkpointing")
    parser.add_argument("--profile", action="store_true", help="split a step into " + ", ".join(PHASES))
    parser.add_argument("--kernels", type=int, default=0, help="profile two more steps, list so many kernels")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--label", default="", help="shown in tables")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args(argv)
    if options.tiny:
        options.size = "tiny"
    if options.world > 1 and options.system in ("plain", "pure-bf16"):
        parser.error(f"--world is for fsdp2 and zeor; {options.system} knows no process group")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as they go into the results."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "tiny", "profile")}


def main() -> None:
    options = parse()
    result = {**settings_of(options), **measure(options)}
    if options.out is not None:
        write_json(options.out, result)
    kernels = result.pop("kernels", None) if options.kernels else None
    print(json.dumps(result), flush=True)
    if kernels:
        print(kernels, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
