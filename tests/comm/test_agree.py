"""Ranks that succeed or fail together: whichever of them fails, none goes on alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from zeor.comm.agree import everywhere, raise_first, together
from zeor.comm.axes import control_axis


class Refusal(ValueError):
    pass


def outcomes(error: Any, bad: int) -> list[str]:
    """What each way gives on this rank, where rank `bad` raises `error`."""
    axis, found = control_axis(None), []

    def do() -> int:
        if dist.get_rank() == bad:
            raise error
        return 7

    for way in (together, everywhere):
        try:
            found.append(str(way(axis, do, "a test", Refusal)))
        except Exception as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    return found


def test_all_ranks_raise_what_one_found(ranks) -> None:
    theirs = "Refusal: On rank 1: no"
    assert ranks(outcomes, 2, Refusal("no"), 1) == [[theirs, theirs], [theirs, "Refusal: no"]]
    assert ranks(outcomes, 2, Refusal("no"), 9) == [["7", "7"]] * 2


def test_an_error_of_another_kind_is_named(ranks) -> None:
    def only_everywhere(bad: int) -> str:
        axis = control_axis(None)
        try:
            return str(everywhere(axis, lambda: 1 // (dist.get_rank() - bad), "a test", Refusal))
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"

    first, second = ranks(only_everywhere, 2, 0)
    assert first.startswith("ZeroDivisionError: ") and second.startswith("Refusal: On rank 0: ZeroDivisionError: ")


def test_a_problem_of_all_ranks_names_none() -> None:
    raise_first(["", ""], Refusal)
    for texts, words in ((["a", "b"], "a"), (["", "b"], "On rank 1: b")):
        with pytest.raises(Refusal, match=f"^{words}$"):
            raise_first(texts, Refusal)
