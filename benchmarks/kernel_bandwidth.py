"""How near the fused Adam pass comes to the memory's own speed.

Times `zeor.optim.kernels.adam.adam_pass` (bf16 gradient, bf16 compute, fp32 master and moments: 28 bytes per
parameter), the same over a split master (26 bytes) and with moments in bf16 (18) and int8 (14.06), torch's copy_ on
the same GPU, and stock fused AdamW (fp32 gradient: 28 bytes as well, but without the clip factor and the cast). The
median of triton.testing.do_bench counts.

    python benchmarks/kernel_bandwidth.py --out benchmarks/results/kernel_bandwidth.json [--sweep]
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from zeor.memory.small import BLOCK_NUMEL, storage_of
from zeor.optim.kernels.adam import NARROW_LAUNCH, AdamRun, AdamSettings, adam_pass
from zeor.optim.kernels.protocol import DEFAULT_LAUNCH, Launch
from zeor.optim.kernels.registry import unavailable_reason

PASS_NBYTES = 28
SPLIT_NBYTES = 26  # grad 2; compute and remainder 2 + 2 each; exp_avg and exp_avg_sq 4 + 4 each
STOCK_NBYTES = 28  # grad 4; parameter, exp_avg and exp_avg_sq 4 + 4 each
SMALL_NBYTES = {"bf16": 18, "int8": 14 + 16 / BLOCK_NUMEL}  # split; the scales are read and written too
SMALL_SWEEP = [(1024, 4), (1024, 8), (2048, 8), (512, 2), (512, 4), (256, 1), (2048, 16), (4096, 16)]
SWEEP = [(512, 4), (1024, 8), (2048, 16), (1024, 4), (2048, 8), (2048, 4), (256, 2)]


def seconds(work: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(work, warmup=50, rep=300, return_mode="median") / 1e3


def row(name: str, numel: int, nbytes: float, took: float) -> dict[str, object]:
    gb_per_s, gelem_per_s = numel * nbytes / took / 1e9, numel / took / 1e9
    print(f"{name:34s} {numel:>13,d}  {took * 1e3:9.3f} ms  {gb_per_s:7.0f} GB/s  {gelem_per_s:6.1f} Gelem/s")
    return {
        "name": name,
        "numel": numel,
        "bytes_per_parameter": nbytes,
        "ms": took * 1e3,
        "gb_per_s": gb_per_s,
        "gelem_per_s": gelem_per_s,
    }


def time_copy(numel: int, device: torch.device) -> dict[str, object]:
    """fp32 to fp32 over as many bytes as the pass moves: 14 per parameter in, 14 out."""
    source = torch.ones(numel * 14 // 4, device=device)
    target = torch.empty_like(source)
    return row("torch copy_", numel, PASS_NBYTES, seconds(lambda: target.copy_(source)))


def time_passes(numel: int, device: torch.device, launches: list[Launch]) -> list[dict[str, object]]:
    compute = torch.empty(numel, dtype=torch.bfloat16, device=device)
    grad = torch.randn(numel, dtype=torch.bfloat16, device=device)
    moments = torch.zeros(2, numel, device=device)
    run = AdamRun(torch.randn(numel, device=device), grad, moments[0], moments[1], compute)
    settings = AdamSettings(lr=1e-5, weight_decay=0.1, decoupled_weight_decay=True)
    scale = torch.tensor(0.5, device=device)
    rows = []
    for launch in launches:
        name = f"adam_pass block {launch.block_numel} warps {launch.num_warps}"
        took = seconds(functools.partial(adam_pass, run, settings, 10, scale, launch=launch))
        rows.append(row(name, numel, PASS_NBYTES, took))
    step, lr = torch.tensor(10.0, device=device), torch.tensor(1e-5, device=device)
    settings = AdamSettings(lr=lr, weight_decay=0.1, decoupled_weight_decay=True)
    took = seconds(lambda: adam_pass(run, settings, step, scale))
    rows.append(row("adam_pass, lr and step on device", numel, PASS_NBYTES, took))
    return rows


def time_split_passes(numel: int, device: torch.device, launches: list[Launch]) -> list[dict[str, object]]:
    compute = torch.randn(numel, dtype=torch.bfloat16, device=device)
    remainder = torch.zeros(numel, dtype=torch.int16, device=device)
    grad = torch.randn(numel, dtype=torch.bfloat16, device=device)
    moments = torch.zeros(2, numel, device=device)
    run = AdamRun(None, grad, moments[0], moments[1], compute, remainder)
    settings = AdamSettings(lr=1e-5, weight_decay=0.1, decoupled_weight_decay=True)
    scale = torch.tensor(0.5, device=device)
    rows = []
    for launch in launches:
        name = f"split adam_pass block {launch.block_numel} warps {launch.num_warps}"
        took = seconds(functools.partial(adam_pass, run, settings, 10, scale, launch=launch))
        rows.append(row(name, numel, SPLIT_NBYTES, took))
    return rows


def time_small_passes(numel: int, device: torch.device, launches: list[Launch]) -> list[dict[str, object]]:
    """Split master; moments that are not zero, so that nothing takes a short way."""
    compute = torch.randn(numel, dtype=torch.bfloat16, device=device)
    remainder = torch.zeros(numel, dtype=torch.int16, device=device)
    grad = torch.randn(numel, dtype=torch.bfloat16, device=device)
    settings = AdamSettings(lr=1e-5, weight_decay=0.1, decoupled_weight_decay=True)
    scale = torch.tensor(0.5, device=device)
    rows = []
    for format, nbytes in SMALL_NBYTES.items():
        tensors: list[torch.Tensor] = []
        scales: list[torch.Tensor | None] = []
        for signed in (True, False):
            dtype, blocks = storage_of(format, numel, signed)
            tensors.append(torch.full((numel,), 20, dtype=dtype, device=device))
            scales.append(torch.ones(blocks, device=device) if blocks else None)
        run = AdamRun(None, grad, tensors[0], tensors[1], compute, remainder, scales[0], scales[1])
        for launch in launches:
            name = f"{format} adam_pass block {launch.block_numel} warps {launch.num_warps}"
            took = seconds(functools.partial(adam_pass, run, settings, 10, scale, launch=launch))
            rows.append(row(name, numel, nbytes, took))
    return rows


def time_stock(numel: int, device: torch.device) -> dict[str, object]:
    parameter = torch.nn.Parameter(torch.randn(numel, device=device))
    parameter.grad = torch.randn(numel, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.1, fused=True)
    return row("stock fused AdamW (fp32 gradient)", numel, STOCK_NBYTES, seconds(optimizer.step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=float, nargs="+", default=[1e8, 3e8, 1e9])
    parser.add_argument("--sweep", action="store_true", help="try other blocks and numbers of warps as well")
    parser.add_argument("--out", type=Path, help="where to write the results as JSON")
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    if reason := unavailable_reason(device):
        raise SystemExit(f"cannot measure: {reason}")

    launches = [Launch(*pair) for pair in SWEEP] if arguments.sweep else [DEFAULT_LAUNCH]
    small_launches = [Launch(*pair) for pair in SMALL_SWEEP] if arguments.sweep else [NARROW_LAUNCH]
    rows: list[dict[str, object]] = []
    for numel in (int(n) for n in arguments.numel):
        rows.append(time_copy(numel, device))
        rows.extend(time_passes(numel, device, launches))
        rows.extend(time_split_passes(numel, device, launches))
        rows.extend(time_small_passes(numel, device, small_launches))
        rows.append(time_stock(numel, device))
    if arguments.out:
        machine = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
