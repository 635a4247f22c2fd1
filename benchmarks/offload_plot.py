"""docs/offload.svg from the committed results: speed by placement, the largest models, and loss curves.

    python -m benchmarks.offload_plot                                   # benchmarks/results/offload*.json
    python -m benchmarks.offload_plot a.json b.json --out plot.svg

Panels without results are left out. The SVG is written by hand: standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.offload_rows import PEER, words

ROOT = Path(__file__).resolve().parents[1]
WIDTH, MARGIN, ROW = 920, 20, 22
LABEL = 320  # room for a bar's name
COLOURS = ["#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a"]
SMOOTHED = 20  # steps of the moving mean that a curve shows

Panel = tuple[int, str]  # height, elements


# 1. Pieces of SVG


def text(x: float, y: float, words: str, more: str = "") -> str:
    """A colour is given as a style: fill= would yield to the style sheet."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 7}" rx="2" fill="{colour}"/>'


def rule(x0: float, y0: float, x1: float, y1: float, more: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" {more}/>'


def path(points: list[tuple[float, float]], colour: str) -> str:
    where = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="{where}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def nice_step(span: float, count: int) -> float:
    """A step of 1, 2 or 5 times a power of ten that cuts `span` into about `count`."""
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= raw)


# 2. Panels


def bars(title: str, entries: list[tuple[str, float, str]], reference: tuple[str, float] | None = None) -> Panel:
    """One bar for each (name, value, what stands behind it)."""
    most = max([value for _, value, _ in entries] + ([reference[1]] if reference else []))
    scale = (WIDTH - LABEL - 2 * MARGIN - 190) / most
    made, bottom = [text(MARGIN, 16, title, 'class="title"')], 30 + len(entries) * ROW
    made += [bar(LABEL, 30 + number * ROW, value * scale, COLOURS[0]) for number, (_, value, _) in enumerate(entries)]
    after = bottom
    if reference:  # before the words, which then stand out against it
        name, value = reference
        x, after = LABEL + value * scale, bottom + 20
        made.append(rule(x, 24, x, bottom, f'stroke="{COLOURS[1]}" stroke-dasharray="4 3"'))
        made.append(text(x, bottom + 14, f"{name}: {value:,.0f}", f'text-anchor="middle" style="fill: {COLOURS[1]}"'))
    for number, (name, value, behind) in enumerate(entries):
        y = 42 + number * ROW
        made.append(text(LABEL - 8, y, name, 'text-anchor="end"'))
        made.append(text(LABEL + value * scale + 6, y, behind, 'class="quiet"'))
    return after + 20, "\n".join(made)


def curves(title: str, series: list[tuple[str, list[float]]], first_colour: int = 0) -> Panel:
    """Lines over steps, smoothed, with what each ended at."""
    height, left, right, top = 260, 60, WIDTH - 230, 34
    smooth = [(name, moving_mean(values, SMOOTHED)) for name, values in series]
    longest = max(len(values) for _, values in smooth)
    low, high = min(min(v) for _, v in smooth), max(max(v) for _, v in smooth)
    step = nice_step(high - low or 1.0, 5)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    high = max(high, low + step)
    at_x: Callable[[float], float] = lambda n: left + (right - left) * n / max(1, longest - 1)
    at_y: Callable[[float], float] = lambda v: top + (height - top) * (high - v) / (high - low)
    made = [text(MARGIN, 16, title, 'class="title"')]
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        made.append(rule(left, at_y(value), right, at_y(value), 'class="grid"'))
        made.append(text(left - 6, at_y(value) + 4, f"{value:g}", 'text-anchor="end" class="quiet"'))
    steps = nice_step(longest, 5)
    for number in range(int(longest / steps) + 1):
        where = at_x(number * steps)
        made.append(text(where, height + 16, f"{number * steps:g}", 'text-anchor="middle" class="quiet"'))
    for number, (name, values) in enumerate(smooth):
        colour = COLOURS[(first_colour + number) % len(COLOURS)]
        made.append(path([(at_x(n), at_y(v)) for n, v in enumerate(values)], colour))
        made.append(text(right + 12, top + 14 + number * 18, f"{name}: {values[-1]:.4f}", f'style="fill: {colour}"'))
    return height + 36, "\n".join(made)


def moving_mean(values: list[float], width: int) -> list[float]:
    """The mean of the last `width` values at every step (of fewer at the beginning)."""
    return [sum(values[max(0, n + 1 - width) : n + 1]) / min(n + 1, width) for n in range(len(values))]


# 3. From results to panels


def panels(runs: list[dict[str, Any]]) -> list[Panel]:
    good = [run for run in runs if not run.get("error") and run.get("device") == "cuda"]
    made = []
    three = [run for run in good if run["size"] == "3B" and run["batch"] == 8]
    if three:
        entries = [(_name(run), run["tokens_per_s"], _behind(run)) for run in three]
        made.append(bars("3B, batch 8 x 2,048: tokens/s", entries, ("DeepSpeed, host", PEER["3B"])))
    large = [run for run in good if run["parameters"] > 1e10]
    if large:
        entries = [
            (f"{run['size']}, batch {run['batch']}, {_name(run)}", run["tflops_per_s"], _behind(run, "TFLOP/s"))
            for run in large
        ]
        made.append(bars("Models that no peer trains here: TFLOP/s", entries))
    long = [run for run in good if len(run["losses"]) >= 200]
    if long:
        title = f"{long[0]['size']} on real text: loss (mean of {SMOOTHED} steps) by format, and where it ended"
        made.append(curves(title, [(words(run), run["losses"]) for run in long]))
        exact = next((run for run in long if run["zeor"] == "{}"), None)
        others = [run for run in long if run is not exact]
        if exact is not None and others:
            apart = [(words(run), [a - b for a, b in zip(run["losses"], exact["losses"])]) for run in others]
            made.append(curves(f"The same, less the loss of {words(exact)!r} at that step", apart, first_colour=1))
    return made


def _name(run: dict[str, Any]) -> str:
    return words(run) + ("" if run["clip"] else ", no clipping")


def _behind(run: dict[str, Any], unit: str = "") -> str:
    speed = f"{run['tflops_per_s']:,.0f} {unit}" if unit else f"{run['tokens_per_s']:,.0f}"
    return f"{speed}; GPU {run['gpu_allocated_gib']:.0f}, host {run['host_peak_gib']:.0f} GiB"


def svg(made: list[Panel]) -> str:
    height = sum(panel[0] for panel in made) + 2 * MARGIN
    style = (
        "text { font: 12px sans-serif; fill: #1f2328 } .title { font-weight: bold; font-size: 13px } "
        ".quiet { fill: #57606a; paint-order: stroke; stroke: white; stroke-width: 4px } .grid { stroke: #d0d7de }"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{style}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    y = MARGIN
    for tall, elements in made:
        parts.append(f'<g transform="translate(0 {y})">\n{elements}\n</g>')
        y += tall
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: benchmarks/results/offload*.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "offload.svg")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "benchmarks" / "results").glob("offload*.json"))
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    made = panels(runs)
    if not made:
        raise SystemExit("no results of GPU runs to draw; run benchmarks.offload_suite first")
    options.out.write_text(svg(made))
    print(f"{options.out}: {len(made)} panels from {len(files)} files")


if __name__ == "__main__":
    main()
