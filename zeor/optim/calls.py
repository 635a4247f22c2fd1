"""One call of the optimizer's own code: what stands in its groups meanwhile, and what must not outlive it.

The groups hold the user's parameters. While the optimizer's own code runs they show what this rank steps on, or a part
of that, and nothing else. Knows neither units nor gradients' ways; the stepper says what a call is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from zeor.optim.parts import counters
from zeor.optim.parts.probe import Kind, raw_step
from zeor.optim.parts.segments import Segments

Given = Sequence[list[nn.Parameter]]  # by group


class Calls:
    def __init__(self, segments: Segments, kinds: Sequence[Kind], device: torch.device):
        self._optimizer, self._segments, self._device = segments.optimizer, segments, device
        self.kinds = kinds
        self.running = False  # the optimizer's own code, over what this rank steps on
        self._step = raw_step(self._optimizer)
        self._copies = type(self._optimizer).step.__module__.startswith("torch.optim.")

    @property
    def separable(self) -> bool:
        """Whether the optimizer may be called several times in one step, each time for some of its parameters."""
        return all(kind.separable for kind in self.kinds)

    @property
    def counts(self) -> bool:
        """Whether its step moves numbers of its groups: see counters.py."""
        return any(kind.counts for kind in self.kinds)

    def call(self, given: Given) -> None:
        """The optimizer's own step over these; their gradients are used up."""
        groups = self._optimizer.param_groups
        if self.separable:
            if any(given):
                with counters.held(groups) if self.counts else nullcontext(), self.in_groups(given):
                    self._optimizer.param_groups = [group for group in groups if group["params"]]
                    self._step(self._optimizer)
                    self._keep_no_gradients(given)
            return
        # An optimizer with counters in its groups must see them all, and each of them once.
        with self._toys() as toys, self.in_groups([mine or stand_in for mine, stand_in in zip(given, toys)]):
            self._step(self._optimizer)
            self._keep_no_gradients(given)

    def count(self) -> None:
        """All calls of a step are done: the groups' numbers move on, once."""
        if self.separable and self.counts:
            with self._toys() as toys, self.in_groups(toys):
                self._step(self._optimizer)

    @contextmanager
    def in_groups(self, given: Given) -> Iterator[None]:
        """Inside, the groups show these and nothing else, and the optimizer's methods are its own."""
        groups, before = self._optimizer.param_groups, [group["params"] for group in self._optimizer.param_groups]
        self.running = True
        try:
            for group, params in zip(groups, given):
                group["params"] = params
            yield
        finally:
            self.running = False
            self._optimizer.param_groups = groups
            for group, params in zip(groups, before):
                group["params"] = params
            for segment in (segment for params in given for segment in params):
                segment.grad = None

    def everything(self) -> Given:
        """All that this rank steps on."""
        held = ([self._segments.of(param) for param in group["params"]] for group in self._optimizer.param_groups)
        return [[part for part in parts if part is not None] for parts in held]

    def _keep_no_gradients(self, given: Iterable[list[nn.Parameter]]) -> None:
        """Some optimizers keep the gradient itself as state. Its memory is used again after the step, so state gets
        memory of its own; torch's optimizers are known to copy."""
        for param in (param for params in given for param in params if not self._copies):
            state, grad = self._optimizer.state.get(param), param.grad
            if not state or grad is None or grad.numel() == 0:
                continue
            lent = grad.untyped_storage().data_ptr()
            for name, value in state.items():
                if type(value) is Tensor and value.numel() and value.untyped_storage().data_ptr() == lent:
                    state[name] = value.clone()

    @contextmanager
    def _toys(self) -> Iterator[Given]:
        """By group, what stands in where this rank has nothing; nothing where the group has no numbers that move."""
        toys: list[list[nn.Parameter]] = []
        for kind, group, parts in zip(self.kinds, self._optimizer.param_groups, self.everything()):
            slots = [self._segments.slots[id(param)] for param in group["params"]]
            some = any(slot.lane.grads is not None and slot.lane.grads.has[slot.index] for slot in slots)
            like: Tensor = parts[0] if parts else torch.empty((), device=self._device)
            toys.append([counters.toy(like, some)] if kind.counts and not kind.coupled else [])
        try:
            yield toys
        finally:
            for toy in (toy for params in toys for toy in params):
                dict.pop(self._optimizer.state, toy, None)
