"""Training over a slow link: seconds and bytes of a step on two hosts made of network namespaces, systems one by one.

Each host has `--per-host` ranks and its half of this machine's cores. A system gets a pair of namespaces of its own,
warms up, and is timed over whole steps between two barriers, with the interface's own counter beside the clock. What a
link-bound step takes at least is the larger of its computation (the system `compute`) and its bytes over the link.

    python -m benchmarks.two_hosts --out benchmarks/results/two_hosts_100mbit.json
    python -m benchmarks.two_hosts --rate 1gbit --systems "ddp,zeor2,zeor2 precision=bf16" --steps 4
    python -m benchmarks.two_hosts --systems zeor2 --before ../before       # zeor of another checkout beside
    python -m benchmarks.two_hosts --seconds 120 ...        # as many steps as fit: losses after equal time
    python -m benchmarks.two_hosts --table RESULTS.json     # the tables of a file

A system is a name of cpu_systems.py, `ddp bf16` (the bf16 compression hook), `ddp powersgd1` or `ddp powersgd4` (the
PowerSGD hook of that rank, from the second step on), `fsdp2` or `hsdp` (torch's, cut over a host and repeated across
hosts) followed by `bf16` or `whole` (no resharding after forward), `deepspeed2` where DeepSpeed is installed, or any
zeorN followed by arguments of zeor.shard, such as `zeor2 precision=bf16`, `zeor3 hierarchy=2` or `zeor2 wire=int4`
(`wire=int2/int4`: weights by int2, gradients by int4; `wire=int4/int4+stochastic+rotate`; gradients may also go by
`powersgd4`, `topk1%`, `randomk10%` or `sign`, alone or behind a slash: `zeor2 wire=int4/powersgd4`; `wire=auto` chooses
after five steps, so give it `--warmup 6`).

All read the same windows of real text (benchmarks/text.py), step by step, and are evaluated on the same held-out ones
when their time is over; losses after equal steps are those of one joint batch. Needs root and iproute2; the same file
is the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# So that `python benchmarks/two_hosts.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import netns
from benchmarks.measure import command_line, describe_machine, write_json
from benchmarks.table import markdown

ROOT = Path(__file__).resolve().parents[1]
BEFORE = " before"  # ends the name of a system that runs from another checkout
SYSTEMS = "compute,ddp,zeor2,zeor1,zeor3,ddp bf16,zeor2 precision=bf16,fsdp2"


# The worker: one rank


def prepare(system: str, model: Any) -> Any:
    """The model and AdamW in the hands of a system; see the module's docstring for names."""
    import importlib

    import torch

    from benchmarks import cpu_systems

    name, *settings = system.split()
    arguments = cpu_systems.adamw_arguments("fused")
    if name.startswith("zeor"):
        chosen: dict[str, Any] = {"stage": int(name[4:]), "precision": "fp32"}
        chosen |= {key: _value(text) for key, text in (setting.split("=", 1) for setting in settings)}
        if isinstance(chosen.get("wire"), str):
            chosen["wire"] = _wire(chosen["wire"])
        optimizer = torch.optim.AdamW(model.parameters(), **arguments)
        return cpu_systems.Trained(*importlib.import_module("zeor").shard(model, optimizer, **chosen))
    if system == "ddp bf16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        trained = cpu_systems.prepare("ddp", model)
        # By a name of ours: DDP refuses this hook over Gloo by its name, and it runs there all the same.
        trained.model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        return trained
    if system.startswith("ddp powersgd"):
        return _ddp_powersgd(int(system.removeprefix("ddp powersgd")), model, arguments)
    if name == "deepspeed2":
        return _deepspeed(model, arguments)
    if name in ("fsdp2", "hsdp"):
        return _fully_shard(model, arguments, settings, across=name == "hsdp")
    if settings:
        raise ValueError(f"unknown system {system!r}")
    return cpu_systems.prepare(name, model)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _wire(text: str) -> Any:
    """Such as int8/int4+stochastic+rotate: weights / gradients, and how these are rounded; int8, which is both; or a
    method for gradients."""
    formats, *more = text.split("+")
    gather, slash, reduce = formats.partition("/")
    if not slash:
        return _method(text)
    found: dict[str, Any] = {"gather": gather, "reduce": _method(reduce)}
    for name, value in {"rotate": True, "feedback": True, "rounding": "stochastic"}.items():
        if (value if isinstance(value, str) else name) in more:
            found[name] = value
    return found


def _method(text: str) -> Any:
    """powersgd4, topk1%, randomk10%, or a name that zeor knows. Two steps are exact first, as with DDP's hook."""
    import zeor

    found = re.fullmatch(r"(powersgd|topk|randomk)([0-9.]+)%?", text)
    if found is None:
        return zeor.Sign(warmup=2) if text == "sign" else text
    number = float(found[2])
    if found[1] == "powersgd":
        return zeor.PowerSGD(int(number), warmup=2)
    return {"topk": zeor.TopK, "randomk": zeor.RandomK}[found[1]](number / 100, warmup=2)


def _ddp_powersgd(rank: int, model: Any, arguments: dict[str, Any]) -> Any:
    """In one bucket: with several the hook's collectives overtake each other on Gloo, and the ranks abort."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks import cpu_systems

    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 32
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1 << 12)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return cpu_systems.Trained(wrapped, torch.optim.AdamW(wrapped.parameters(), **arguments))


def _fully_shard(model: Any, arguments: dict[str, Any], settings: list[str], across: bool) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from benchmarks import cpu_systems

    hosts, ranks = 2, torch.distributed.get_world_size()
    shape = (hosts, ranks // hosts) if across else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu")[-len(shape) :])
    chosen: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": "whole" not in settings}
    if "bf16" in settings:
        chosen["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, **chosen)
    return cpu_systems.Trained(model, torch.optim.AdamW(model.parameters(), **arguments))


class _Engine(NamedTuple):
    """DeepSpeed's engine in the place of a model and an optimizer: its own loop, seen from the plain one."""

    engine: Any

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        """engine.step has done it."""


def _deepspeed(model: Any, arguments: dict[str, Any]) -> Any:
    """ZeRO stage 2 with the settings that its own documentation gives, fp32."""
    import deepspeed
    import torch

    from benchmarks import cpu_systems

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_scatter": True},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **arguments)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return cpu_systems.Trained(engine, _Engine(engine))


def _backward(optimizer: Any, loss: Any) -> None:
    optimizer.engine.backward(loss) if isinstance(optimizer, _Engine) else loss.backward()


def work(options: argparse.Namespace) -> None:
    """Train, and write what the steps took on this rank."""
    if options.tree:
        sys.path.insert(0, options.tree)
    import torch.distributed as dist

    from benchmarks import cpu_systems
    from benchmarks.decoder import SIZES, build, loss_of
    from benchmarks.text import Windows, read

    cores = sorted(os.sched_getaffinity(0))
    half, node = max(1, len(cores) // 2), int(os.environ["GROUP_RANK"])
    os.sched_setaffinity(0, cores[node * half : (node + 1) * half] or cores)
    import torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (system,), rank, shape = options.systems, dist.get_rank(), SIZES[options.size]
    windows, world = Windows(read(shape.vocabulary).ids, options.tokens), dist.get_world_size()
    model, optimizer = prepare(system, build(shape))
    losses: list[float] = []
    ends: list[float] = []
    begun = time.perf_counter()

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = loss_of(model, *windows.batch(len(losses) * world + rank, options.batch))
            _backward(optimizer, loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            ends.append(time.perf_counter() - begun)
        cpu_systems.settle(system, model)

    train(options.warmup)
    dist.barrier()
    steps = _how_many(options, time.perf_counter() - begun)
    before, start, cpu = netns.sent_nbytes(os.environ["GLOO_SOCKET_IFNAME"]), time.perf_counter(), time.process_time()
    train(steps)
    dist.barrier()
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    sent = netns.sent_nbytes(os.environ["GLOO_SOCKET_IFNAME"]) - before
    answer = {"seconds": seconds / steps, "cpu_seconds": used / steps, "steps": steps, "losses": losses, "ends": ends}
    answer["interface_nbytes"] = sent / steps
    answer["held_out_loss"] = _held_out(model, windows, options.batch)
    Path(options.worker, f"rank{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _how_many(options: argparse.Namespace, warmup_seconds: float) -> int:
    """Steps to time: those asked for, or as many as fit into the rest of --seconds, the same on every rank."""
    import torch
    import torch.distributed as dist

    if not options.seconds:
        return int(options.steps)
    each = warmup_seconds / max(1, options.warmup)
    told = torch.tensor([max(options.steps, round((options.seconds - warmup_seconds) / each))])
    dist.broadcast(told, 0)
    return int(told)


def _held_out(model: Any, windows: Any, batch: int) -> float:
    """The mean loss over the same windows that nobody trains on."""
    import torch

    from benchmarks.decoder import loss_of

    model.eval()
    with torch.no_grad():
        found = [float(loss_of(model, *windows.held_out_batch(number, batch))) for number in range(8)]
    model.train()
    return sum(found) / len(found)


# The parent


def run_system(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """One system over a link of its own; figures are those of the slowest rank, and of the host that sent more."""
    tree = str(options.before.resolve()) if system.endswith(BEFORE) else ""
    with tempfile.TemporaryDirectory() as folder, netns.two_hosts(options.rate) as hosts:
        script = ["-m", "benchmarks.two_hosts", "--worker", folder, "--tree", tree]
        script += ["--systems", system.removesuffix(BEFORE)]
        for name in ("size", "batch", "tokens", "steps", "warmup", "seconds"):
            script += [f"--{name}", str(getattr(options, name))]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        finished = netns.torchrun(hosts, script, options.per_host, environment, options.timeout)
        for node, (status, output) in enumerate(finished):
            if status != 0:
                raise RuntimeError(f"{system}: node {node} ended with status {status}:\n{output[-4000:]}")
        ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2 * options.per_host)]
    said = [line for each in finished for line in each.output.splitlines() if "wire='auto'" in line]
    return {
        "system": system,
        "seconds": max(rank["seconds"] for rank in ranks),
        "cpu_seconds": max(rank["cpu_seconds"] for rank in ranks),
        "interface_nbytes": max(rank["interface_nbytes"] for rank in ranks),
        "steps": ranks[0]["steps"],
        "held_out_loss": sum(rank["held_out_loss"] for rank in ranks) / len(ranks),
        "losses": [round(sum(each) / len(each), 5) for each in zip(*(rank["losses"] for rank in ranks))],
        "ends": [round(each, 3) for each in ranks[0]["ends"]],
        **({"said": said} if said else {}),
    }


def show(run: dict[str, Any]) -> None:
    """One line: MB/s is what the busier host sent, over the whole step."""
    megabytes = run["interface_nbytes"] / 1e6
    words = f"{run['seconds']:7.2f} s/step {megabytes:7.1f} MB {megabytes / run['seconds']:7.2f} MB/s"
    print(f"{run['system']:28} {words} cpu {run['cpu_seconds']:.2f} s  held-out {run['held_out_loss']:.4f}", flush=True)
    for line in run.get("said", ()):
        print(f"    {line}", flush=True)


def table(document: dict[str, Any]) -> str:
    """A row for each system: seconds, bytes, speed beside FSDP2, and losses after equal steps and equal time."""
    runs = {run["system"]: run for run in document["runs"]}
    anchor = runs.get("fsdp2", document["runs"][0])
    step = min(len(run["losses"]) for run in document["runs"])
    rows = []
    for system, run in runs.items():
        row = [system, f"{run['seconds']:.2f}", f"{run['interface_nbytes'] / 1e6:.1f}"]
        row += [f"{anchor['seconds'] / run['seconds']:.2f}", f"{run['losses'][step - 1]:.4f}"]
        rows.append([*row, f"{run['held_out_loss']:.3f} after {len(run['losses'])} steps, {run['ends'][-1]:.0f} s"])
    heads = ["system", "s/step", "MB/step", f"x {anchor['system']}", f"loss at step {step}", "held-out loss at the end"]
    return markdown(heads, rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=SYSTEMS, help="comma-separated")
    parser.add_argument("--size", default="36.7M")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=3, help="steps timed")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.0, help="train this long instead, --steps steps at least")
    parser.add_argument("--rate", default="100mbit", help="limit of the link, as tc writes it")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier version of zeor")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds one system may take")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--table", type=Path, help="print the table of this file, and run nothing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--tree", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.systems = options.systems.split(",")
    if options.before is not None and options.worker is None:
        names = [[name, name + BEFORE] if name.startswith("zeor") else [name] for name in options.systems]
        options.systems = [each for pair in names for each in pair]
    return options


def main() -> None:
    options = parse()
    if options.worker is not None:
        work(options)
        return
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    if reason := netns.missing():
        raise SystemExit(f"cannot make network namespaces: {reason}")
    names = ("size", "batch", "tokens", "steps", "warmup", "seconds", "rate", "per_host")
    document: dict[str, Any] = {"kind": "two_hosts", "machine": describe_machine(options.date)}
    document |= {"command": command_line(), "workload": {name: getattr(options, name) for name in names}, "runs": []}
    for system in options.systems:
        document["runs"].append(run_system(system, options))
        show(document["runs"][-1])
        if options.out is not None:
            write_json(options.out, document)


if __name__ == "__main__":
    main()
