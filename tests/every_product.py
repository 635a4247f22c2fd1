"""Products of small models count as worth keeping: a decorator, also for what runs on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeor.features import products


@contextmanager
def every_product() -> Iterator[None]:
    products.LEAST_INNER, before = 1, products.LEAST_INNER
    try:
        yield
    finally:
        products.LEAST_INNER = before
