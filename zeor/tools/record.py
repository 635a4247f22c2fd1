"""`zeor schedule --record`: a few steps of the built-in model on CPU ranks, and what the last of them did on rank 0.

The first steps agree on the order of units; then each action that was recorded stands beside the one that the schedule
lists, with when it began, how long the host took for it and the bytes it concerns.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch

import zeor
from zeor.access.sharded import state_of
from zeor.comm.observe import ACTION, in_words
from zeor.step.schedule import FIRST_READER, Action, Verb
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.show import table

MOST_NUMEL = 200_000_000
_STEPS, _SEQUENCES, _MOST_TOKENS = 3, 2, 64


class Run(NamedTuple):
    """How the model is sharded. `hierarchy`: ranks per node, or None. `offload`: the tier of master and moments."""

    stage: int
    prefetch: int
    hierarchy: int | None = None
    offload: str | None = None


def recorded(config: GPTConfig, ranks: int, run: Run) -> str:
    """The tables of rank 0: actions, and what was sent along each axis. ValueError where the model is too large to be
    trained beside a schedule."""
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    if numel > MOST_NUMEL:
        raise ValueError(
            f"--record trains the model on this host's CPU, and {numel:,} parameters are too many for that; choose a "
            f"size of at most {MOST_NUMEL:,}."
        )
    found: str = zeor.launch(_train, config, run, ranks=ranks)[0]
    return found


def _train(config: GPTConfig, run: Run) -> str:
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, **run._asdict(), device="cpu")
    engine = state_of(model).engine
    names = [unit.name for unit in engine.units]
    torch.manual_seed(engine.axes.everyone.rank)
    tokens = torch.randint(config.vocab, (_SEQUENCES, min(config.context, _MOST_TOKENS)))
    seconds: list[Any] = []
    for _ in range(_STEPS):
        seconds.append(engine.observer.traffic.seconds())
        with engine.observer.listening(torch.device("cpu")) as records:
            model(tokens).float().logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = engine.schedule.rows
    planned = [_named(action, names) for event, _, actions in rows if event != FIRST_READER for action in actions]
    begun = records[0].begin
    lines = []
    for wanted, record in zip_longest(planned, [each for each in records if each.kind == ACTION]):
        if record is None:
            lines.append([wanted, "-", "-", "-", ""])
            continue
        verb: Verb = record.verb  # type: ignore[assignment]  # actions are of the schedule's verbs
        done = _named(Action(verb, record.index, record.lane), names)
        at, took = ((each - first) / 1e6 for each, first in ((record.begin, begun), (record.end, record.begin)))
        shown = done if done == wanted else f"! {done}"
        lines.append([wanted or "-", shown, f"{at:.3f}", f"{took:.3f}", in_words(record.nbytes).strip()])
    told = str(table(["planned", "recorded", "ms", "took", "bytes"], lines))
    return f"{told}\n\n{_by_axis(zeor.traffic(model), seconds[-1])}"


def _by_axis(traffic: dict[str, Any], before: dict[str, Any]) -> str:
    """What the last step sent along each axis, and how long that took. `before`: seconds of the steps before it."""
    rows = []
    for axis, verbs in sorted(traffic["last_step"].items()):
        for verb, nbytes in sorted(verbs.items()):
            now, then = (each.get(axis, {}).get(verb, {}) for each in (traffic["seconds_by_axis"], before))
            times = [f"{1e3 * (now.get(k, 0.0) - then.get(k, 0.0)):.3f}" for k in ("under_way", "hidden", "exposed")]
            rows.append([axis, verb, in_words(nbytes).strip(), *times])
    return str(table(["axis", "verb", "sent", "ms", "hidden", "exposed"], rows))


def _named(action: Action, names: list[str]) -> str:
    """Units by name; the lane only where it is not the first."""
    lane = f", lane {action.lane}" if action.lane else ""
    return f"{action.verb}({names[action.unit]}{lane})"
