"""Seconds that zeor.init_parameters takes to fill a large model, state and all, on one GPU and its host.

    python -m benchmarks.init_gpu --size 20B --out benchmarks/results/init_20b.json
    python -m benchmarks.init_gpu --size tiny --device cpu                   # a check without a GPU

The model is built on meta and sharded, which is where host memory is pinned; that is timed apart. Then every parameter
is drawn: matrices normal, norms at one, as Decoder.init_weights does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

# So that `python benchmarks/init_gpu.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeor
from benchmarks.decoder import SIZES, Decoder, parameter_numel
from benchmarks.measure import GIB, command_line, describe_machine, status_nbytes, write_json


def start(module: nn.Module) -> None:
    """Norms at one, matrices normal with deviation 0.02."""
    for parameter in module.parameters(recurse=False):
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    if on_gpu:
        torch.zeros(1, device="cuda")
    with zeor.on_meta():
        model = Decoder(SIZES[options.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    begun = time.perf_counter()
    extra = json.loads(options.zeor)
    zeor.shard(model, optimizer, precision="bf16", device=options.device, **extra)
    wait()
    sharded = time.perf_counter()
    zeor.init_parameters(model, seed=0, init=start)
    wait()
    drawn = time.perf_counter()
    return {
        "parameters": parameter_numel(SIZES[options.size]),
        "shard_s": round(sharded - begun, 2),
        "init_parameters_s": round(drawn - sharded, 2),
        "gpu_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if on_gpu else 0.0,
        "host_peak_gib": round(status_nbytes("VmHWM") / GIB, 2),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="20B", choices=list(SIZES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--zeor", default='{"offload": "auto", "release": true}', help="of zeor.shard, as JSON")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    return parser.parse_args()


def main() -> None:
    options = parse()
    document = {"kind": "init", "machine": describe_machine(options.date), "command": command_line()}
    document |= {"size": options.size, "zeor": json.loads(options.zeor), **measure(options)}
    if options.out is not None:
        write_json(options.out, document)
    print(json.dumps({name: value for name, value in document.items() if name != "machine"}), flush=True)


if __name__ == "__main__":
    main()
