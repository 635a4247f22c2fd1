"""`chunked_cross_entropy`: the loss of a large vocabulary without ever holding all logits.

Rows go through the head a chunk at a time. For a plain linear head one autograd function forms the gradients of hidden
states and weights in forward, while a chunk's logits are there, so nothing is computed twice; any other head is
run chunk by chunk under a checkpoint, and its logits are computed again in backward.

Note [Inside the head's call]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A sharded head has its parameters only inside its module's call. So the loss is computed there: for one call the
head's `forward` is replaced by one that returns the loss, and the head is called. To the engine that is a
call of the unit like any other, whose output happens to be a number: it gathers, listens and reduces as always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeor.memory.param import Away, Whole

_CHUNK_NUMEL = 1 << 26  # logits at a time, unless told: 256 MiB of fp32


class _Rule(NamedTuple):
    """How rows become a loss."""

    chunk: int | None
    ignore_index: int
    reduction: str
    smoothing: float


def chunked_cross_entropy(  # noqa: PLR0913 (public: the arguments of F.cross_entropy)
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy(head(hidden).float(), targets)`, of which only `chunk` rows of logits exist at a time:

        class Model(nn.Module):
            def forward(self, tokens, targets):
                return zeor.chunked_cross_entropy(self.body(tokens), self.head, targets)

    hidden   (..., width): what the head is given. targets: (...) classes.
    head     the module that makes logits, sharded or not; or its weight (classes, width), with `bias`. Where the head
             shares its weight with the embedding, or is too small to be a unit, it must be called inside the model's
             forward (as above) or a method named in zeor.shard(methods=); a unit of its own may be called anywhere.
    chunk    rows at a time; None: as many as make 256 MiB of logits.
    ignore_index, label_smoothing: as in torch. reduction: "mean", "sum" (for zeor.mean_loss) or "none".

    A linear head with "mean" or "sum" costs no more arithmetic than plain PyTorch; from forward to backward it keeps
    the gradients of hidden and of the weight (summed in fp32) instead of logits. Other heads, and
    "none", keep the hidden states alone and run the head a second time in backward. Softmax is always fp32 or wider.
    """
    rule = _Rule(chunk, ignore_index, reduction, label_smoothing)
    _check(hidden, targets, rule)
    if isinstance(head, nn.Module):
        if bias is not None:
            raise ValueError("zeor.chunked_cross_entropy takes bias= beside a weight only; a module brings its own.")
        return _inside(head, hidden, targets, rule)
    weight, bias = (_full(head), None if bias is None else _full(bias))
    return _reshaped(_loss_of_linear, hidden, targets, rule, weight, bias)


def _check(hidden: Tensor, targets: Tensor, rule: _Rule) -> None:
    if hidden.shape[:-1] != targets.shape or hidden.dim() < 1:
        raise ValueError(
            f"zeor.chunked_cross_entropy takes one target for each row of hidden: hidden is {tuple(hidden.shape)}, "
            f"targets are {tuple(targets.shape)}."
        )
    if targets.is_floating_point():
        raise ValueError(f"zeor.chunked_cross_entropy takes classes as targets, not {targets.dtype}.")
    if rule.reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={rule.reduction!r} is not known; use 'mean', 'sum' or 'none'.")
    if not 0.0 <= rule.smoothing <= 1.0:
        raise ValueError(f"label_smoothing={rule.smoothing!r}; give a number from 0 to 1.")
    if rule.chunk is not None and (not isinstance(rule.chunk, int) or rule.chunk < 1):
        raise ValueError(f"chunk={rule.chunk!r}; give how many rows of logits to make at a time, at least 1.")


def _full(value: Tensor) -> Tensor:
    """A parameter that was read outside its module may be away: with its bytes here, where a pass is under way."""
    return value._zeor_slot.read() if isinstance(value, Away) else value


def _inside(head: nn.Module, hidden: Tensor, targets: Tensor, rule: _Rule) -> Tensor:
    """See Note [Inside the head's call]."""
    own = vars(head).get("forward")
    forward = head.forward

    @torch._dynamo.disable
    def loss(hidden: Tensor) -> Tensor:
        _put_back(head, own)  # the head may be run inside
        if isinstance(head, nn.Linear) and _is_plain(head):
            weight, bias = _full(head.weight), None if head.bias is None else _full(head.bias)
            return _reshaped(_loss_of_linear, hidden, targets, rule, weight, bias)
        return _reshaped(_loss_of_any, hidden, targets, rule, forward)

    vars(head)["forward"] = loss
    try:
        total: Tensor = head(hidden)
        return total
    finally:
        _put_back(head, own)


def _put_back(head: nn.Module, own: Any) -> None:
    vars(head).pop("forward", None)
    if own is not None:
        vars(head)["forward"] = own


def _is_plain(head: nn.Linear) -> bool:
    """Nothing but a product with plain tensors: not quantised, parametrized, or with a forward of its own."""
    if (
        type(head).forward is not nn.Linear.forward
        or "forward" in vars(head)
        or next(head.children(), None) is not None
    ):
        return False
    return all(type(param) in (nn.Parameter, Whole, Away) for param in head._parameters.values() if param is not None)


def _reshaped(compute: Callable[..., Tensor], hidden: Tensor, targets: Tensor, rule: _Rule, *how: Any) -> Tensor:
    loss: Tensor = compute(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), rule, *how)
    return loss.view(targets.shape) if rule.reduction == "none" else loss


def _rows(rule: _Rule, classes: int) -> int:
    return rule.chunk or max(1, _CHUNK_NUMEL // classes)


# ---- any head: checkpoints


def _loss_of_any(hidden: Tensor, targets: Tensor, rule: _Rule, head: Callable[[Tensor], Tensor]) -> Tensor:
    if rule.chunk is None:
        with torch.no_grad():
            classes = head(hidden[:1]).shape[-1] if len(hidden) else 1
        rule = rule._replace(chunk=_rows(rule, classes))
    assert rule.chunk is not None
    how = "none" if rule.reduction == "none" else "sum"
    entropy = functools.partial(
        F.cross_entropy, ignore_index=rule.ignore_index, reduction=how, label_smoothing=rule.smoothing
    )

    def run(rows: Tensor, classes: Tensor) -> Tensor:
        logits = head(rows)
        return entropy(logits.to(_at_least_fp32(logits)), classes)

    parts = [
        checkpoint(run, rows, classes, use_reentrant=False)
        for rows, classes in zip(hidden.split(rule.chunk), targets.split(rule.chunk))
    ]
    if rule.reduction == "none":
        return torch.cat(parts)
    total: Tensor = functools.reduce(torch.add, parts)
    return total / _count(targets, rule).to(total.dtype) if rule.reduction == "mean" else total


def _count(targets: Tensor, rule: _Rule) -> Tensor:
    return (targets != rule.ignore_index).sum()


# ---- a linear head: gradients formed in forward


def _loss_of_linear(hidden: Tensor, targets: Tensor, rule: _Rule, weight: Tensor, bias: Tensor | None) -> Tensor:
    if rule.reduction == "none":  # each row's gradient has a factor that only backward knows
        rule = rule._replace(chunk=_rows(rule, len(weight)))
        return _loss_of_any(hidden, targets, rule, lambda rows: F.linear(rows, weight, bias))
    total: Tensor = _LinearLoss.apply(hidden, weight, bias, targets, rule)
    return total


class _LinearLoss(torch.autograd.Function):
    """The sum or mean of all rows' losses; see the top of this file."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rule: _Rule) -> Tensor:
        count = _count(targets, rule)
        wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        scale = 1.0 / count.to(wide) if rule.reduction == "mean" else torch.ones((), dtype=wide, device=hidden.device)
        # fp16 would lose gradients that are divided by many rows before a loss scale multiplies them.
        ctx.late = torch.float16 in (hidden.dtype, weight.dtype)
        sums = _Sums(hidden, weight, bias, ctx.needs_input_grad)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        step = _rows(rule, len(weight))
        for begin in range(0, len(hidden), step):
            rows, classes = hidden[begin : begin + step], targets[begin : begin + step]
            logits = F.linear(rows, weight, bias)
            loss, grad = _chunk_loss(logits.to(wide), classes, rule, sums.wanted)
            total += loss
            if grad is not None:
                ignored = (classes == rule.ignore_index).unsqueeze(1)
                grad = (grad if ctx.late else grad.mul_(scale)).masked_fill_(ignored, 0.0)
                sums.add(begin, rows, grad.to(logits.dtype))
        ctx.save_for_backward(scale, *sums.grads())
        return total * scale

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError(
                "zeor.chunked_cross_entropy of a linear head forms its gradients in forward and cannot be "
                "differentiated twice; take reduction='none' and sum it, or F.cross_entropy."
            )
        scale, *grads = ctx.saved_tensors
        factor = upstream[0] * scale if ctx.late else upstream[0]
        # Not in place: with retain_graph they are asked for again.
        given = [None if grad is None else (grad * factor.to(_at_least_fp32(grad))).to(grad.dtype) for grad in grads]
        return (*given, None, None)


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunk_loss(logits: Tensor, classes: Tensor, rule: _Rule, wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of a chunk, and its gradient by the logits in the logits' own memory (`logits` are ours)."""
    numel, smoothing = logits.shape[-1], rule.smoothing
    counts = classes != rule.ignore_index
    index = torch.where(counts, classes, 0).unsqueeze(1)
    norm = torch.logsumexp(logits, dim=1, keepdim=True)
    losses = norm - logits.gather(1, index)
    if smoothing:
        losses = (1.0 - smoothing) * losses + smoothing * (norm - logits.mean(dim=1, keepdim=True))
    loss = torch.where(counts.unsqueeze(1), losses, 0.0).sum()
    if not wanted:
        return loss, None
    grad = logits.sub_(norm).exp_()
    if smoothing:
        grad.sub_(smoothing / numel)
    grad.scatter_(1, index, grad.gather(1, index) - (1.0 - smoothing))  # one class a row: no sums, no atomics
    return loss, grad


class _Sums:
    """Gradients of hidden states, weight and bias, as chunks add to them."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]):
        self._weight, self._bias = weight, bias
        self.wanted = any(needs[:3])
        self._hidden = torch.empty_like(hidden) if needs[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=_at_least_fp32(weight)) if needs[1] else None
        self._of_bias = torch.zeros_like(bias, dtype=_at_least_fp32(bias)) if bias is not None and needs[2] else None

    def add(self, begin: int, rows: Tensor, grad: Tensor) -> None:
        if self._hidden is not None:
            self._hidden[begin : begin + len(rows)] = grad @ self._weight
        if self._of_weight is not None:
            if grad.dtype == self._of_weight.dtype == rows.dtype:
                self._of_weight.addmm_(grad.t(), rows)
            else:
                self._of_weight.add_(grad.t() @ rows)
        if self._of_bias is not None:
            self._of_bias.add_(grad.sum(dim=0, dtype=self._of_bias.dtype))

    def grads(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        of_bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        return self._hidden, None if self._of_weight is None else self._of_weight.to(self._weight.dtype), of_bias
