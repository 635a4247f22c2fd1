"""Do two versions of zeor compute the same bits? Hashes of losses and weights after 20 steps, over many settings.

    python -m benchmarks.same_bits --out record.json --saved saved          # with the old version
    python -m benchmarks.same_bits --against record.json --saved saved      # with the new: 1 where one differs

Bits depend on the machine and on torch, so both runs belong to one machine. `--zeor FOLDER` takes zeor from another
checkout. With --saved the first run also saves a checkpoint half-way of some settings; the second loads each and goes
on from there, and must end at the same hashes. Settings are data: `SETTINGS` below.

The steps of a run: 1. one world of CPU ranks after another; 2. each trains every setting of its size; 3. compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import command_line, describe_machine, write_json

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROWS, WIDTH, WORDS = 20, 12, 24, 50
HALF = STEPS // 2
LIMIT = 0.5  # of the gradient's norm: low enough to clip in every step


def settings() -> Iterator[dict[str, Any]]:
    """Each a world size, options of zeor.shard, and how the loop is written."""
    stages = (0, 1, 2, 3)
    for stage in stages:
        for precision in ("fp32", "bf16", "fp16"):
            for clip in ("none", "zeor"):
                yield {"world": 2, "stage": stage, "precision": precision, "clip": clip}
        yield {"world": 2, "stage": stage, "clip": "stock"}
        for world in (1, 3):
            yield {"world": world, "stage": stage, "precision": "bf16", "clip": "zeor"}
        for moments in ("bf16", "int8"):
            yield {"world": 2, "stage": stage, "moments": moments, "precision": "bf16"}
        for micro, how in ((3, "no_sync"), (3, "accumulate")):
            yield {"world": 2, "stage": stage, "micro": micro, "how": how, "precision": "bf16", "clip": "zeor"}
        for world in (2, 3):
            yield {"world": world, "stage": stage, "join": True, "clip": "zeor"}
            yield {"world": world, "stage": stage, "optimizer": "Muon", "clip": "zeor"}
        yield {"world": 2, "stage": stage, "release": True, "precision": "bf16"}
        yield {"world": 3, "stage": stage, "optimizer": "SGD", "keep_whole": 0}
        yield {"world": 2, "stage": stage, "recompute": True, "overlap": False}
    for stage in (1, 2, 3):
        for offload in ("host", "disk"):
            yield {"world": 2, "stage": stage, "offload": offload, "precision": "bf16", "clip": "zeor"}
        yield {"world": 2, "stage": stage, "offload": "host", "moments": "int8", "release": True}
        yield {"world": 2, "stage": stage, "reduction": "sum", "prefetch": 2, "deterministic": True}
    yield {"world": 1, "stage": 3, "offload": "disk", "precision": "bf16"}
    yield {"world": 2, "stage": 2, "offload": "host", "delay": 1}
    yield {"world": 2, "stage": 3, "recompute": "offload", "precision": "bf16", "clip": "zeor"}


LOOP = {"world", "clip", "micro", "how", "join", "optimizer"}  # the rest goes to zeor.shard as it is


def name_of(setting: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in setting.items())


def is_saved(setting: dict[str, Any]) -> bool:
    """Settings of which a checkpoint is made: every stage, masters, moments in formats, tiers, owners."""
    kinds = ("moments", "offload", "optimizer") if setting["stage"] in (1, 3) else ("precision",)
    return any(kind in setting for kind in kinds) and not {"micro", "join", "release", "delay"} & setting.keys()


class Model(nn.Module):
    """An embedding, three blocks with a buffer each, a tied head: several units, none of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37), nn.Tanh(), nn.Linear(37, WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x * self.scale))


def optimizer_of(model: nn.Module, name: str) -> Any:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "Muon":
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, step: int, micro: int = 0) -> Tensor:
    """The loss of this rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, WORDS, (ROWS, 2), generator=generator)[dist.get_rank() :: dist.get_world_size()]
    return nn.functional.cross_entropy(model(tokens[:, 0]).float(), tokens[:, 1])


def train(setting: dict[str, Any], saved: Path | None, resume: bool, folder: str) -> dict[str, str]:
    """One setting on this rank; `saved`: save there half-way, or (resume) begin there."""
    import zeor

    options = {key: value for key, value in setting.items() if key not in LOOP}
    if options.get("offload") == "disk":
        options["offload"] = zeor.Offload(moments="disk", master="disk", folder=folder)
    torch.manual_seed(7)
    model = Model()
    optimizers = optimizer_of(model, setting.get("optimizer", "AdamW"))
    zeor.shard(model, optimizers, **options)
    each = optimizers if isinstance(optimizers, list) else [optimizers]
    losses: list[float] = []
    first = HALF if saved and resume else 0
    if saved and resume:
        losses = zeor.load(saved, model, optimizers).extra["losses"]
    last = STEPS - dist.get_rank() if setting.get("join") else STEPS
    with zeor.join(model) if setting.get("join") else nullcontext():
        for step in range(first, last):
            losses += one_step(zeor, model, each, setting, step)
            if saved and not resume and step + 1 == HALF:
                zeor.save(saved, model, optimizers, step=HALF, extra={"losses": losses})
    with zeor.full_params(model):
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    zeor.unshard(model, optimizers)
    return {"losses": hash_of([torch.tensor(losses, dtype=torch.float64)]), "weights": hash_of(weights.values())}


def one_step(zeor: Any, model: nn.Module, optimizers: list, setting: dict[str, Any], step: int) -> list[float]:
    losses, count = [], setting.get("micro", 1)

    def waits(micro: int) -> AbstractContextManager[None]:
        return zeor.no_sync(model) if setting.get("how") == "no_sync" and micro + 1 < count else nullcontext()

    with zeor.accumulate(model) if setting.get("how") == "accumulate" else nullcontext():
        for micro in range(count):
            with waits(micro):
                loss = loss_of(model, step, micro)
                (loss / count).backward()
            losses.append(loss.item())
    if setting.get("clip") == "zeor":
        losses.append(float(zeor.clip_grad_norm_(model, LIMIT)))
    elif setting.get("clip") == "stock":
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return losses


def hash_of(tensors: Any) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def rank_main(options: argparse.Namespace) -> None:
    """All settings of this world, one after another; rank 0 writes what came out."""
    torch.set_num_threads(1)
    logging.getLogger("zeor").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    world, found = dist.get_world_size(), {}
    for setting in settings():
        if setting["world"] != world:
            continue
        name = name_of(setting)
        place = Path(options.saved) / name.replace(" ", ",") if options.saved and is_saved(setting) else None
        with tempfile.TemporaryDirectory() as folder:
            mine = train(setting, place, options.resume, folder)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        found[name] = {
            "weights": everyone[0]["weights"],
            "alike": len({one["weights"] for one in everyone}) == 1,
            "losses": [one["losses"] for one in everyone],
        }
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(found))
    dist.destroy_process_group()


def run_worlds(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tree = Path(options.zeor or ROOT).resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    for world in sorted({setting["world"] for setting in settings()}):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
                       str(Path(__file__)), "--rank", "--out", str(out)]  # fmt: skip
            command += ["--saved", options.saved] if options.saved else []
            command += ["--resume"] if options.resume else []
            subprocess.run(command, check=True, env=environment, cwd=folder)
            found.update(json.loads(out.read_text()))
        print(f"world {world}: {len(found)} settings so far", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", help="JSON file for the hashes")
    parser.add_argument("--against", help="hashes of an earlier run to compare with")
    parser.add_argument("--saved", help="folder of checkpoints: written by the first run, loaded with --against")
    parser.add_argument("--zeor", help="a checkout whose zeor to take; this one's by default")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return 0
    options.saved = options.saved and str(Path(options.saved).resolve())
    saved, options.saved = options.saved, None if options.against else options.saved
    found = run_worlds(options)
    unlike = [name for name, one in found.items() if not one["alike"]]
    print(f"{len(found)} settings; weights differ between ranks in {len(unlike)}: {unlike}")
    if options.out:
        write_json(Path(options.out), {"command": command_line(), "machine": describe_machine(), "settings": found})
    if not options.against:
        return bool(unlike)
    wanted = json.loads(Path(options.against).read_text())["settings"]
    different = [name for name in wanted if found.get(name) != wanted[name]]
    print(f"{len(wanted) - len(different)} of {len(wanted)} settings have the same bits; different: {different}")
    if saved:
        options.saved, options.resume = saved, True
        resumed = run_worlds(options)
        # `extra` is rank 0's on every rank, so of the losses rank 0's are compared.
        other = [
            name for name, one in wanted.items()
            if (resumed[name]["weights"], resumed[name]["losses"][0]) != (one["weights"], one["losses"][0])
        ]  # fmt: skip
        print(f"resumed from the earlier version's checkpoints: different: {other}")
        different += other
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
