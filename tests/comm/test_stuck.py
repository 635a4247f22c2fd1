"""Questions to the store: one thread answers them, and it ends with its process group."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from zeor.comm import stuck


def answering() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeor-store"]


@pytest.fixture
def no_group():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_new_process_group_ends_the_thread_of_the_last(no_group):
    for number in range(3):
        last = answering()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stuck.asker().ask(lambda store, number=number: store.set("key", str(number)))
        assert stuck.asker().ask(lambda store: store.get("key")) == str(number).encode()
        dist.destroy_process_group()
        for thread in last:
            thread.join(10)
        assert len(answering()) == 1 and answering() != last
