"""How ranks succeed or fail together: each does its part, tells the others how it went, and all raise if one failed.

So no rank waits for another that has given up. Knows nothing of what is done: `kind` is the error that a rank raises
for what went wrong elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zeor.comm.agree import exchange
from zeor.comm.mesh import Mesh


def raise_first(texts: Sequence[str], kind: type[Exception]) -> None:
    """Raise what went wrong on the first rank that has a text. `texts`: one per rank, "" where all went well."""
    for rank, text in enumerate(texts):
        if text:
            raise kind(text if all(texts) else f"On rank {rank}: {text}")


def together(mesh: Mesh, do: Callable[[], Any], label: str, kind: type[Exception]) -> Any:
    """Every rank does it. Where it raises a `kind` on any rank, all ranks raise the first such error."""
    result, problem = None, ""
    try:
        result = do()
    except kind as error:
        problem = str(error)
    raise_first(exchange(mesh, problem, label), kind)
    return result


def everywhere(mesh: Mesh, do: Callable[[], Any], label: str, kind: type[Exception]) -> Any:
    """Every rank does it. A rank that fails raises its own error, and the others a `kind` that says what it was."""
    result, failed, problem = None, None, ""
    try:
        result = do()
    except Exception as error:  # whatever it is (a user's object may raise anything), the other ranks must hear it
        failed = error
        problem = str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"
    everyone = exchange(mesh, problem, label)
    if failed is not None:
        raise failed
    raise_first(everyone, kind)
    return result
