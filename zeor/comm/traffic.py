"""What the comm layer counts: collectives and the bytes this rank sends, by verb.

The numbers are those of the algorithm each verb uses at its theoretical minimum: what a rank must
put on the wire for a gather or a reduce of n bytes is n * (world - 1) / world.

What is sent in a step is decided elsewhere: which roles travel by the stage's column (memory/roles.py), when by the
schedule (step/schedule.py, `zeor schedule` prints it), in which order by step/order.py and step/reduces.py.
"""

from __future__ import annotations

from collections import Counter


class Traffic:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_nbytes: Counter[str] = Counter()

    def count(self, verb: str, nbytes: int) -> None:
        self.calls[verb] += 1
        self.sent_nbytes[verb] += nbytes

    def reset(self) -> None:
        self.calls.clear()
        self.sent_nbytes.clear()

    def summary(self) -> dict[str, object]:
        return {
            "bytes_sent": sum(self.sent_nbytes.values()),
            "collectives": sum(self.calls.values()),
            "calls": dict(self.calls),
            "bytes_by_verb": dict(self.sent_nbytes),
        }
