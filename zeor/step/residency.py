"""Residency: which gathered units may be freed, and why the others stay. The one policy of the passes.

A unit stays
1. while its forward runs,
2. through the rest of a step's passes, where a pass enters it more than once,
3. from forward to backward, where backward begins with it,
4. until backward ends, where it is the root's,
5. while calls of it are open in backward (Note [When a unit's backward is over] in hooks.py),
6. until backward ends, where some backward needed it again after it was put away,
7. while it is held: a stage of a pipeline keeps all of its units from its first computation of a step to its last
   (features/pipeline.py). Where a pipeline gives units back after every action instead, rules 3 and 4 end with that.
As a unit's forward ends, rules 3 and 4 are the schedule's (schedule.py): it lists no free for such a unit. After an
exception, and after a step, no pass is under way and everything is freed without asking.
Whether a unit's bytes then go is another question: memory that somebody looks at is lent (memory/buffers.py).
"""

from __future__ import annotations

from zeor.step.unit import Unit

# When it is asked: as a unit's forward ends, as the model's does, as a unit's backward is over, as the model's is.
FORWARD_EXIT, FORWARD_END, BACKWARD_EXIT, BACKWARD_END = range(4)


class Residents:
    def __init__(self) -> None:
        self.open: list[Unit] = []  # units whose forward is running
        self.repeated: set[int] = set()  # units a pass enters more than once
        self.last: int | None = None  # the unit that the last forward left in place for backward to begin with
        self.again: set[int] = set()  # units that some backward needed again after it had put them away
        self.held = False  # rule 7: every unit stays
        self.by_action = False  # a pipeline gives back every unit after each of its actions

    @property
    def kept(self) -> tuple[int | None, ...]:
        """Units that are there, on every rank, as a backward begins: rules 3 and 4."""
        return () if self.by_action else (0, self.last)

    def may_free(self, unit: Unit, when: int) -> bool:
        if not unit.frees or self.held:
            return False
        if when == BACKWARD_END:
            return unit not in self.open  # this backward ran inside its forward (a force is the gradient of an energy)
        if unit.index in self.repeated:
            return False
        if when == FORWARD_EXIT:
            return True  # the schedule lists no free for a unit that stays
        if when == FORWARD_END:
            return unit.index not in (0, self.last)
        busy = unit.open_calls or unit.endless_calls or unit in self.open
        return not (busy or unit.is_root or unit.index in self.again)
