"""What a rank does that all ranks must do together, by name, and which `join` blocks are open.

Inside `zeor.join` a rank says before each of these what it is about to do; see join.py. The engine and its parts
name their events here and know nothing else of joining.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeor.runtime.join import Join

TRAIN, EVAL, ENTRY = "train", "eval", "entry"
BACKWARD, BACKWARD_KEPT, AGREEMENT = "backward", "backward_kept", "agreement"
NORM, STEP, GRADS, FULL, TOTAL, OTHER = "norm", "step", "grads", "full", "total", "other"

# How each is called in a sentence.
SAID = {
    TRAIN: "a forward with gradients",
    EVAL: "a forward without gradients",
    ENTRY: "a method that zeor.shard was given",
    BACKWARD: "a backward",
    BACKWARD_KEPT: "a backward inside zeor.no_sync",
    AGREEMENT: "an agreement of a backward",
    NORM: "the norms of the gradients",
    STEP: "a step of an optimizer",
    GRADS: "the gathering of a gradient",
    FULL: "zeor.full_params",
    TOTAL: "zeor.total",
    OTHER: "something that all ranks must take part in",
}
EVENTS = tuple(SAID)
# These say all by their name; of the others, ranks that only follow must know more.
NEEDS_NO_DETAIL = (TRAIN, EVAL, AGREEMENT)

open_joins: list[Join] = []
