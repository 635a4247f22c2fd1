"""WHO UPDATES: stock optimizers over segments, the one-pass kernels, and the drop-ins `zeor.optim.*`.

`zeor.optim.NAME` is torch.optim.NAME, sharded, for every optimizer class torch has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zeor.plan import nearest


def _known() -> list[str]:
    found = (name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type))
    return [name for name in found if issubclass(getattr(torch.optim, name), Optimizer) and name != "Optimizer"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name not in _known():
        raise AttributeError(f"torch.optim has no optimizer {name!r}{nearest(name, _known())}, so zeor.optim has none.")
    from zeor.optim.drop_in import drop_in

    return drop_in(getattr(torch.optim, name))


def __dir__() -> list[str]:
    return _known()
