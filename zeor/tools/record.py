"""`zeor schedule --record`: a few steps of the built-in model on CPU ranks, and what the last of them did on rank 0.

The first steps agree on the order of units; then each action that was recorded stands beside the one that the schedule
lists, with when it began, how long the host took for it and the bytes it concerns.
"""

from __future__ import annotations

from itertools import zip_longest

import torch

import zeor
from zeor.access.sharded import state_of
from zeor.comm.observe import ACTION, in_words
from zeor.step.schedule import FIRST_READER, Action, Verb
from zeor.tools.gpt import GPT, GPTConfig
from zeor.tools.show import table

MOST_NUMEL = 200_000_000
_STEPS, _SEQUENCES, _MOST_TOKENS = 3, 2, 64


def recorded(config: GPTConfig, ranks: int, stage: int, prefetch: int) -> str:
    """The table of rank 0. ValueError where the model is too large to be trained beside a schedule."""
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    if numel > MOST_NUMEL:
        raise ValueError(
            f"--record trains the model on this host's CPU, and {numel:,} parameters are too many for that; choose a "
            f"size of at most {MOST_NUMEL:,}."
        )
    found: str = zeor.launch(_train, config, stage, prefetch, ranks=ranks)[0]
    return found


def _train(config: GPTConfig, stage: int, prefetch: int) -> str:
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    zeor.shard(model, optimizer, stage=stage, prefetch=prefetch, device="cpu")
    engine = state_of(model).engine
    names = [unit.name for unit in engine.units]
    torch.manual_seed(engine.axes.everyone.rank)
    tokens = torch.randint(config.vocab, (_SEQUENCES, min(config.context, _MOST_TOKENS)))
    for _ in range(_STEPS):
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
    return str(table(["planned", "recorded", "ms", "took", "bytes"], lines))


def _named(action: Action, names: list[str]) -> str:
    """Units by name; the lane only where it is not the first."""
    lane = f", lane {action.lane}" if action.lane else ""
    return f"{action.verb}({names[action.unit]}{lane})"
