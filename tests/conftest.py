"""What every test may use: the `ranks` fixture, and the markers that need hardware or rights to run.

`ranks(fn, world, *args, timeout=120, **kwargs)` runs fn on `world` Gloo ranks (1 to 4) and returns their
results by rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.selection import leave_to_test_all

# As the ranks of the pool: what runs beside it would otherwise wait for cores by turning in circles.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """Run a function on ranks of the pool. Session scope: the pool is shared, and hypothesis needs it so."""
    pool = Pool()
    yield pool.run
    pool.close()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_test_all(items)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "no GPU here"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        missing["netns"] = "needs root and the `ip` command"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Files with long tests come first: in the end no worker runs one of them while the others have nothing to do.
    long_files = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long_files)
