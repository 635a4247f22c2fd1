"""One training run of the benchmarks' decoder under zeor's placements and formats: speed, memory, losses.

    python -m benchmarks.offload --size 3B --zeor '{"offload": "host"}'
    python -m benchmarks.offload --size 20B --batch 4 --zeor '{"offload": "auto", "release": true}'
    python -m benchmarks.offload --size 1.3B --zeor '{"offload": {"moments": "disk", "master": "host"}}'
    python -m benchmarks.offload --size tiny --batch 2 --device cpu          # a check without a GPU

The model is built on the meta device, sharded, and filled parameter by parameter where it will live, so that no
copy of the whole in fp32 ever exists. --zeor holds arguments of zeor.shard as JSON, passed on as they are; a disk
tier without a folder gets --folder. Tokens are those of benchmarks/text.py, so losses mean something: they fall, and
runs of one size and batch see the same text. Gradients are clipped at 1.0 unless --clip says otherwise or `release` is
asked for.
Run several with `offload_suite`, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

# So that `python benchmarks/offload.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import text
from benchmarks.decoder import SIZES, Decoder, flops_per_token, loss_of, parameter_numel, random_batch
from benchmarks.gpu_single import Clock, memory_figures, phase_times, start_memory_peaks, step_times
from benchmarks.measure import io_nbytes, write_json
from benchmarks.offload_watch import HostWatch, Lines, die_first

BORN = time.perf_counter()
# Peak learning rates by size, after those of GPT-3's models of like size; a linear rise comes before.
LEARNING_RATES = {"tiny": 1e-3, "36.7M": 6e-4, "1.3B": 2e-4, "3B": 1.6e-4, "7B": 1.2e-4, "32B": 8e-5}
PREDICT_TAKES = ("offload", "moments", "release", "delay", "recompute", "prefetch", "compile")


# 1. The model, without ever holding it in fp32


class ScoredDecoder(Decoder):
    """tokens and targets -> mean loss, the logits never whole."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        zeor = importlib.import_module("zeor")
        hidden = self.hidden(tokens).flatten(0, 1)
        return zeor.chunked_cross_entropy(hidden, self.head, targets.flatten())


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)


def build(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any] | None]:
    """The sharded, filled model, its optimizer, and what zeor.predict said beforehand."""
    zeor = importlib.import_module("zeor")
    kind = ScoredDecoder if options.chunked_loss else Decoder
    with torch.device("meta"):
        model = kind(SIZES[options.size], recompute=not options.no_recompute)
    predicted = predict(zeor, model, options)
    optimizer = adamw(model, options.lr)
    device = f"cuda:{torch.cuda.current_device()}" if options.device == "cuda" else "cpu"
    zeor.shard(model, optimizer, stage=options.stage, precision="bf16", device=device, **options.extra)
    fill(zeor, model)
    return model, optimizer, predicted


def fill(zeor: Any, model: nn.Module) -> None:
    """Norms at one, matrices normal with deviation 0.02, as Decoder.init_weights does."""

    def start(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)

    zeor.init_parameters(model, seed=0, init=start)


def predict(zeor: Any, model: nn.Module, options: argparse.Namespace) -> dict[str, Any] | None:
    """What zeor.predict says of this run, with as many of the run's options as it takes; None where it refuses."""
    plain: dict[str, Any] = {"stage": options.stage, "precision": "bf16", "native_reduce": options.device == "cuda"}
    given = {name: value for name, value in options.extra.items() if name in PREDICT_TAKES}
    batch = {"batch": (options.batch, min(options.tokens, SIZES[options.size].positions))}
    batch |= {"accumulation": options.micro, "sums_each": True} if options.micro > 1 else {}
    for more in ({**given, **batch}, given, {}):
        try:
            found = zeor.predict(model, **plain, **more)
        except (TypeError, ValueError) as error:
            logging.getLogger("zeor").debug("predict: %s", error)
            continue
        return {"with": sorted(more), **found.as_dict()}
    return None


# 2. The loop


class Loop:
    """The plain training loop over real text, or over random tokens where asked for."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options
        self.zeor = importlib.import_module("zeor")
        self.clock = Clock(options.device)
        self.shape = SIZES[options.size]
        self.tokens = min(options.tokens, self.shape.positions)
        self.windows: text.Windows | None = None
        self.what = "random tokens"
        if options.data == "text":
            found = text.read(self.shape.vocabulary)
            self.windows, self.what = text.Windows(found.ids, self.tokens), found.what
        self.generator = torch.Generator().manual_seed(1)
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.number = 0  # batches read
        self.steps = 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.windows is None:
            pair = random_batch(self.shape, self.options.batch, self.tokens, self.generator)
        else:
            pair = self.windows.batch(self.number, self.options.batch)
        return self._there(*pair)

    def _there(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.clock.on_gpu:
            return inputs, targets
        return tuple(part.pin_memory().to("cuda", non_blocking=True) for part in (inputs, targets))  # type: ignore[return-value]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.options.chunked_loss:
            return self.model(inputs, targets)
        return loss_of(self.model, inputs, targets)

    def step(self) -> list[Any]:
        """One step; the marks at its start and after the last micro-batch's forward, backward, clip and step."""
        mark = self.clock.mark
        for _ in range(self.options.micro - 1):
            (self.loss(*self.batch()) / self.options.micro).backward()
            self.number += 1
        inputs, targets = self.batch()
        self._set_rate()
        marks = [mark()]
        loss = self.loss(inputs, targets)
        marks.append(mark())
        (loss / self.options.micro).backward()
        marks.append(mark())
        if self.options.clip > 0:
            self.norms.append(self.zeor.clip_grad_norm_(self.model, self.options.clip))
        marks.append(mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(mark())
        self.losses.append(loss.detach())  # read after the run: .item() here would stop the GPU's queue
        self.number += 1
        self.steps += 1
        return marks

    def _set_rate(self) -> None:
        rising = min(1.0, (self.steps + 1) / max(1, self.options.rise))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * rising

    def run(self, steps: int) -> tuple[float, list[list[Any]]]:
        """Seconds of `steps` steps, the device idle at both ends, and every step's marks; fewer steps past the
        deadline. What zeor still has under way at the end it also had at the beginning."""
        self.clock.wait()
        start = time.perf_counter()
        marks = []
        for done in range(steps):
            if done and time.perf_counter() - BORN > self.options.deadline:
                break
            marks.append(self.step())
        self.clock.wait()
        return time.perf_counter() - start, marks

    def settle(self) -> float:
        """Seconds until everything that was deferred is done."""
        from zeor.access.sharded import state_of

        start = time.perf_counter()
        state_of(self.model).engine.drain()
        self.clock.wait()
        return time.perf_counter() - start

    @torch.no_grad()
    def held_out_loss(self, batches: int) -> float | None:
        """The mean loss over text that training has not seen."""
        if self.windows is None or not batches:
            return None
        self.model.eval()
        size = self.options.batch
        pairs = (self._there(*self.windows.held_out_batch(number, size)) for number in range(batches))
        losses = [self.loss(*pair) for pair in pairs]
        self.model.train()
        return float(torch.stack(losses).mean())


# 3. Figures


def checksum(zeor: Any, model: nn.Module) -> str:
    """Of every parameter's exact value: equal where two runs have the same bits."""
    found = hashlib.sha256()
    for name, value in zeor.iter_full(model, dtype=torch.float32):
        found.update(name.encode())
        found.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def report_of(zeor: Any, model: nn.Module) -> dict[str, Any]:
    """zeor.report as it is, in whatever detail; JSON keeps what it can."""
    return dict(json.loads(json.dumps(zeor.report(model), default=str)))


def measure(options: argparse.Namespace, seen: dict[str, Any]) -> None:
    """Prepare, warm up, time; everything goes into `seen` when it is known, so that a run that fails has said most."""
    if options.device == "cuda":
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # the context's own memory belongs to no model
    if options.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    seen["parameters"] = parameter_numel(SIZES[options.size])
    lines, watch, started = Lines(), HostWatch(), time.perf_counter()
    seen["said"] = lines.lines
    try:
        model, optimizer, seen["predicted"] = build(options)
        loop = Loop(model, optimizer, options)
        seen["trained_on"] = loop.what
        seen["setup_s"] = round(time.perf_counter() - started, 2)
        setup_peak_nbytes = start_memory_peaks(options.device)
        try:
            train(loop, options, seen)
        finally:
            with contextlib.suppress(Exception):  # after an error of the device nothing may answer
                seen.update(memory_figures(options.device, setup_peak_nbytes))
                seen["report"] = report_of(loop.zeor, model)
        seen["held_out_loss"] = loop.held_out_loss(options.evaluate)
        seen["checksum"] = checksum(loop.zeor, model) if options.checksum else None
    finally:
        seen.update(watch.figures(seen["parameters"]))
        watch.stop()


def train(loop: Loop, options: argparse.Namespace, seen: dict[str, Any]) -> None:
    """Warm-up and timed steps, and their figures."""
    warmup_s, _ = loop.run(options.warmup)
    before = io_nbytes()
    seconds, marks = loop.run(options.steps)
    read, written = (now - then for now, then in zip(io_nbytes(), before))
    tail_s = loop.settle()
    tokens_per_s = len(marks) * options.micro * options.batch * loop.tokens / seconds
    times_ms = step_times(loop.clock, marks)
    seen.update(
        {
            "tokens_per_s": round(tokens_per_s, 1),
            "step_ms": round(1e3 * seconds / len(marks), 3),
            "median_step_ms": round(median(times_ms), 3),
            "step_times_ms": [round(ms, 1) for ms in times_ms],
            "timed_steps": len(marks),
            "tflops_per_s": round(tokens_per_s * flops_per_token(loop.shape, loop.tokens) / 1e12, 3),
            "warmup_s": round(warmup_s, 2),
            "tail_s": round(tail_s, 3),  # what was deferred beyond the last step
            "disk_read_gb_per_s": round(read / seconds / 1e9, 3),
            "disk_written_gb_per_s": round(written / seconds / 1e9, 3),
            "profile": phase_times(loop.clock, marks),
            "losses": [round(float(loss), 6) for loss in loop.losses],
            "norms": [round(float(norm), 5) for norm in loop.norms],
        }
    )


# 4. The command line


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1.3B", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches of --batch sequences in a step")
    parser.add_argument("--tokens", type=int, default=2_048, help="tokens per sequence, cut to the model's positions")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--zeor", default="{}", help="more arguments of zeor.shard, as JSON")
    parser.add_argument("--folder", help="of a disk tier that names none (default: one of the system's temporary ones)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before; they train as well")
    parser.add_argument("--clip", type=float, help="gradient norm limit; 0: none (default: 1.0; 0 with release)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: by size)")
    parser.add_argument("--rise", type=int, default=10, help="steps in which the learning rate rises to its peak")
    parser.add_argument("--data", default="text", choices=["text", "random"])
    parser.add_argument("--evaluate", type=int, default=0, help="batches of held-out text after the run")
    parser.add_argument("--no-recompute", action="store_true", help="leave recomputation to zeor (recompute=)")
    parser.add_argument("--chunked-loss", action="store_true", help="zeor.chunked_cross_entropy")
    parser.add_argument("--deterministic", action="store_true", help="deterministic kernels: equal bits are meant")
    parser.add_argument("--checksum", action="store_true", help="hash every parameter's exact value after the run")
    parser.add_argument("--expandable", action="store_true", help="torch's allocator with expandable segments")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no step is begun")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--label", default="", help="shown in tables")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args(argv)
    try:
        options.extra = json.loads(options.zeor)
    except json.JSONDecodeError as error:
        parser.error(f"--zeor {options.zeor!r} is not JSON: {error}")
    options.stage = options.extra.pop("stage", options.stage)
    options.extra["offload"] = with_folder(options.extra.get("offload"), options.folder)
    if options.clip is None:
        options.clip = 0.0 if options.extra.get("release") else 1.0
    if options.lr is None:
        options.lr = LEARNING_RATES.get(options.size, 1e-4)
    if options.extra["offload"] is None:
        del options.extra["offload"]
    return options


def with_folder(offload: Any, folder: str | None) -> Any:
    """The same placement, with a folder where it speaks of the disk and names none."""
    if offload == "disk":
        offload = {"moments": "disk", "master": "disk"}
    if not isinstance(offload, dict) or "folder" in offload or "disk" not in json.dumps(offload):
        return offload
    return {**offload, "folder": folder or str(Path(tempfile.gettempdir(), "zeor-benchmark"))}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as they go into the results; paths of the machine stay out."""
    left_out = ("out", "deadline", "extra", "folder", "checksum", "evaluate")
    return {name: value for name, value in vars(options).items() if name not in left_out}


def with_environment(options: argparse.Namespace, module: str = "benchmarks.offload") -> None:
    """Start this program again where a setting must be there before torch is."""
    wanted = {}
    if options.expandable:
        wanted["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if options.deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if any(name not in os.environ for name in wanted):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def main() -> None:
    options = parse()
    with_environment(options)
    die_first()
    offload = options.extra.get("offload")
    if isinstance(offload, dict) and offload.get("folder"):
        Path(offload["folder"]).mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = settings_of(options)
    try:
        measure(options, result)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:600]
        raise
    finally:
        if options.out is not None:
            write_json(options.out, result)
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
