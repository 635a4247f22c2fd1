"""zeor.choose beside brute force: every plan that may fit is run within the same limit, and the fastest is told.

    python -m benchmarks.choice_gpu --budget 560                 # the pairs of PAIRS, in their order, until time is up
    python -m benchmarks.choice_gpu --pairs 1.3B:8:40 3B:4:60    # size : sequences : GiB of the GPU
    python -m benchmarks.choice_gpu --table                      # prints the table of the file there is

Another process takes what is above the limit, so that the GPU is as small as the pair says, for whoever asks it. Run
are: nothing computed again, all blocks, and as many as must be, with and without state on the host, in one to four
micro-batches; less what lacks more than a tenth by zeor's own figures. What runs out of memory is written down as that.
The JSON goes to --out, or else to $OUT/choice_gpu.json where OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

# So that `python benchmarks/choice_gpu.py` finds benchmarks and zeor, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zeor
from benchmarks.decoder import SIZES, Decoder
from benchmarks.gpu_suite import describe_machine_apart, run_one
from benchmarks.measure import GIB, command_line, write_json
from benchmarks.table import markdown
from zeor.planner import Choice, Prediction
from zeor.planner.plans import AWAY, Option, micro_batches
from zeor.planner.shape import Shape

OUT = Path(__file__).resolve().parent / "results" / "choice_gpu.json"
PAIRS = ("1.3B:8:40", "1.3B:8:28", "3B:4:48", "3B:8:56", "7B:2:100", "7B:4:90")
NEAR = 1.1  # plans that are foreseen to take at most so much of the limit are run too
MOST_CUT = 4  # micro-batches
LEAST_S = 25.0  # that a run takes
CONTEXT = int(0.6 * GIB)  # what a process's CUDA context takes beside tensors
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("there", flush=True)
sys.stdin.read()
"""


class Pair(NamedTuple):
    """A model, sequences of 2,048 tokens a step, and what the GPU has."""

    size: str
    batch: int
    gib: float

    @staticmethod
    def parse(text: str) -> Pair:
        size, batch, gib = text.split(":")
        if size not in SIZES:
            raise SystemExit(f"no size is called {size!r}; there are {list(SIZES)}")
        return Pair(size, int(batch), float(gib))

    @property
    def limit_nbytes(self) -> int:
        return int(self.gib * GIB)

    @property
    def machine(self) -> zeor.Machine:
        return replace(zeor.Machine.parse("H200"), memory=self.limit_nbytes)

    def __str__(self) -> str:
        return f"{self.size}:{self.batch}:{self.gib:g}"


# 1. The plans of a pair


def plans_of(pair: Pair) -> list[Option]:
    """All of them, whatever zeor.choose looks at."""
    counts = [count for count in micro_batches(pair.batch) if count <= MOST_CUT]
    base = Option(Shape.parse(1), nodes=False, stage=3)
    every = product(counts, ("", AWAY), (False, "auto", True))
    return [base._replace(accumulation=count, away=away, recompute=again) for count, away, again in every]


def chosen(pair: Pair, options: argparse.Namespace) -> Choice:
    """What zeor.choose says of a GPU of this size, with nothing asked of the GPU that is here."""
    with torch.device("meta"):
        model = Decoder(SIZES[pair.size])
    batch = (pair.batch, 2_048)
    return zeor.choose(model, "AdamW", batch, world=1, gpu=pair.machine, host=options.host, compile=options.compile)


def foreseen(pair: Pair, option: Option, options: argparse.Namespace) -> Prediction | None:
    """None where it does not fit, or lacks more than NEAR allows."""
    plan: dict[str, Any] = {"recompute": option.recompute}
    if option.away:
        plan["offload"] = {"auto": True, "device_budget": pair.limit_nbytes, "host_budget": options.host}
    with torch.device("meta"):
        model = Decoder(SIZES[pair.size])
    batch = (pair.batch // option.accumulation, 2_048)
    try:
        said = zeor.predict(
            model, precision="bf16", batch=batch, gpu=pair.machine, accumulation=option.accumulation,
            compile=options.compile, **plan,
        )  # fmt: skip
    except ValueError:
        return None
    return said if said.device_peak <= NEAR * pair.limit_nbytes else None


def arguments_of(pair: Pair, option: Option, options: argparse.Namespace) -> list[str]:
    """Of gpu_single."""
    plan = {name: value for name, value in option.shard().items() if name != "stage"}
    plan |= {"compile": True} if options.compile else {}
    batch = ["--batch", str(pair.batch // option.accumulation), "--micro", str(option.accumulation)]
    words = ["--system", "zeor", "--stage", "3", "--size", pair.size, *batch]
    # Four steps until recompute="auto" has decided and its graphs are compiled.
    return [*words, "--no-recompute", "--warmup", "5", "--steps", str(options.steps), "--zeor", json.dumps(plan)]


# 2. One pair


@contextlib.contextmanager
def only(limit_nbytes: int, total_nbytes: int) -> Iterator[None]:
    """The GPU has no more than so much for whoever starts inside."""
    spare = total_nbytes - limit_nbytes - 2 * CONTEXT  # the context of the process that holds it, and that of a run
    command = [sys.executable, "-c", BALLAST, str(max(0, spare))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        if holder.stdout.readline().strip() != "there":
            raise SystemExit(f"{spare / GIB:.1f} GiB of the GPU could not be taken away")
        try:
            yield
        finally:
            holder.stdin.close()
            holder.wait()


def run_pair(pair: Pair, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """The choice first, then the others, the fastest foreseen first: so that time runs out where it matters least."""
    choice = chosen(pair, options)
    found = [(option, said) for option in plans_of(pair) if (said := foreseen(pair, option, options)) is not None]
    best = str(choice.best.option)
    found.sort(key=lambda each: (str(each[0]) != best, each[1].time.seconds if each[1].time else 0.0))
    runs = []
    with only(pair.limit_nbytes, options.total_nbytes):
        for option, said in found:
            assert said.time is not None
            run: dict[str, Any] = {
                "plan": str(option),
                "foreseen_s": round(said.time.seconds, 4),
                "foreseen_gib": round(said.device_peak / GIB, 2),
            }
            left_s = deadline - time.monotonic()
            if left_s < LEAST_S:
                runs.append({**run, "error": "not run: the time was spent"})
                continue
            figures = run_one(arguments_of(pair, option, options), min(120.0, left_s))
            kept = ("median_step_ms", "gpu_allocated_gib", "gpu_reserved_gib", "host_peak_gib", "said", "error", "log")
            runs.append({**run, **{name: figures[name] for name in kept if figures.get(name)}})
            print(f"{pair}  {option}: {figures.get('median_step_ms') or figures.get('error')}", flush=True)
    return {"pair": str(pair), "chosen": best, "runs": runs}


# 3. The table


def table(document: dict[str, Any]) -> str:
    """By pair: what was chosen, its time, the best of all that ran, and by how much it is faster."""
    rows = []
    for pair in document["pairs"]:
        ran = [run for run in pair["runs"] if "median_step_ms" in run]
        own = next((run for run in ran if run["plan"] == pair["chosen"]), None)
        best = min(ran, key=lambda run: run["median_step_ms"], default=None)
        failed = sum("error" in run for run in pair["runs"])
        if own is None or best is None:
            rows.append([pair["pair"], pair["chosen"], "did not run", "", "", f"{len(ran)}, {failed} failed"])
            continue
        behind = own["median_step_ms"] / best["median_step_ms"] - 1
        told = f"{best['median_step_ms']:.0f} ms: {best['plan']}"
        cells = [f"{own['median_step_ms']:.0f} ms", told, f"{behind:+.1%}", f"{len(ran)}, {failed} failed"]
        rows.append([pair["pair"], pair["chosen"], *cells])
    return markdown(["model : batch : GiB", "chosen", "took", "fastest of all", "behind it", "plans run"], rows)


# 4. All of them


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {
        "kind": "choice_gpu",
        "command": command_line(),
        "machine": describe_machine_apart(options.date),
        "compiled": options.compile,
        "pairs": [],
    }
    options.total_nbytes = torch.cuda.get_device_properties(0).total_memory
    deadline = time.monotonic() + options.budget
    for text in options.pairs:
        if deadline - time.monotonic() > LEAST_S:
            document["pairs"].append(run_pair(Pair.parse(text), options, deadline))
            write_json(options.out, document)
    return document


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), help="size:sequences:GiB")
    parser.add_argument("--compile", action="store_true", help="blocks are compiled")
    parser.add_argument("--host", default="100GiB", help="host memory that may be used")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table of the file")
    parser.add_argument("--date", help="written into the results as it is")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"], OUT.name) if "OUT" in os.environ else OUT)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    print(table(json.loads(options.out.read_text()) if options.table else run_all(options)))


if __name__ == "__main__":
    main()
