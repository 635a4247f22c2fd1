"""What fits where: the host memory a model needs beside a GPU, from bytes per parameter alone.

    python -m benchmarks.offload_fits                        # the tables of docs/offload.md
    python -m benchmarks.offload_fits --gpu 16 24 --batch 4
    python -m benchmarks.offload_fits --into docs/offload.md

Counts, not measurements: state as zeor keeps it, plus an estimate of the activations of the benchmarks' decoder with
recomputation per block. The GPU is filled first; what is left goes to the host. Nothing is allocated.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# So that `python benchmarks/offload_fits.py` finds benchmarks, as `python -m` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decoder import SIZES, Shape, parameter_numel
from benchmarks.table import markdown

GIB = 2**30
MARKED = re.compile(r"(<!-- fits -->\n).*?(<!-- end of fits -->)", re.DOTALL)
COMPUTE = 2.0  # bf16: what forward reads, kept on the GPU
INT8_MOMENTS = 2 * (1 + 4 / 256)  # a code each, and an fp32 scale for every 256 of them


@dataclass(frozen=True)
class Way:
    """A way to keep the state; bytes per parameter on all tiers together, compute included."""

    name: str
    state: float
    gradient: float = 0.0

    @property
    def total(self) -> float:
        return self.state + self.gradient


WAYS = [
    Way("exact, clipping (gradients kept until the step)", COMPUTE + 2 + 8, 2.0),
    Way("exact, gradients released in backward", COMPUTE + 2 + 8),
    Way("int8 moments, clipping", COMPUTE + 2 + INT8_MOMENTS, 2.0),
    Way("int8 moments, gradients released", COMPUTE + 2 + INT8_MOMENTS),
]


@dataclass(frozen=True)
class Room:
    """What of a GPU is not there for state: the context and torch's slack, and windows that state passes through."""

    reserved_gib: float = 1.5
    window_gib: float = 1.5

    @property
    def nbytes(self) -> float:
        return (self.reserved_gib + self.window_gib) * GIB


def activation_nbytes(shape: Shape, batch: int, tokens: int, chunked_loss: bool) -> int:
    """Inputs of every block, one block's own tensors while it is recomputed, and the logits unless they are chunked.

    Inside a block backward wants, per token: both norms' inputs and outputs, q, k, v and the attention's result (10
    widths with what their gradients take), and gate, up, their product and its gradient (5 inner widths). A logit costs
    bf16 (2), float (4) and its gradient (4).
    """
    rows = batch * tokens
    inputs = shape.layers * rows * shape.width * 2
    block = rows * (10 * shape.width + 5 * shape.inner_width) * 2
    logits = 0 if chunked_loss else rows * shape.vocabulary * (2 + 4 + 4)
    return inputs + max(block, logits)


def largest_unit_nbytes(shape: Shape) -> int:
    """Gradients of one block: where they are released, so much is there for a moment."""
    return 2 * (4 * shape.width**2 + 3 * shape.width * shape.inner_width)


def host_nbytes(numel: int, way: Way, gpu_nbytes: float, taken_nbytes: float) -> float | None:
    """Bytes of state that do not fit on the GPU; None where not even compute does."""
    room = gpu_nbytes - taken_nbytes
    if room < COMPUTE * numel:
        return None
    return max(0.0, way.total * numel - room)


def fits_table(way: Way, gpus_gib: list[float], options: argparse.Namespace) -> str:
    """GiB of host memory that each model needs beside each GPU."""
    header = ["model", "parameters", "state GiB", *(f"{gib:g} GiB GPU" for gib in gpus_gib)]
    rows = []
    for name in options.sizes:
        shape = SIZES[name]
        numel, tokens = parameter_numel(shape), min(options.tokens, shape.positions)
        taken = Room().nbytes + activation_nbytes(shape, options.batch, tokens, options.chunked_loss)
        if not way.gradient:
            taken += 2 * largest_unit_nbytes(shape)
        cells = []
        for gib in gpus_gib:
            host = host_nbytes(numel, way, gib * GIB, taken)
            cells.append("-" if host is None else f"{host / GIB:,.0f}" if host else "0")
        rows.append([name, f"{numel / 1e9:.2f}B", f"{way.total * numel / GIB:,.0f}", *cells])
    return markdown(header, rows)


def document(options: argparse.Namespace) -> str:
    parts = []
    for way in WAYS:
        made = fits_table(way, options.gpu, options)
        parts.append(f"**{way.name}**: {way.total:.2f} bytes per parameter\n\n{made}\n")
    return "\n".join(parts)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", type=float, nargs="+", default=[24, 40, 80, 139], help="GiB of GPU memory")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=[s for s in SIZES if s.endswith("B")])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--chunked-loss", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--into", type=Path, help="document whose tables are made anew")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    made = document(options)
    if options.into is None:
        print(made)
        return
    text = options.into.read_text()
    if not MARKED.search(text):
        raise SystemExit(f"{options.into} has no place marked for these tables")
    options.into.write_text(MARKED.sub(lambda match: f"{match[1]}\n{made}\n{match[2]}", text))


if __name__ == "__main__":
    main()
