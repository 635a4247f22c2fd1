"""Operations that a GPU computes in one kernel and the meta device would take apart, as the GPU does them.

Attention without a mask is flash attention, which keeps its result and one number per row, never a matrix of tokens by
tokens; with a mask, or in fp32, it is the memory-efficient kernel. A root-mean-square norm keeps its input and one
number per row; dropout a mask of bytes. Only shapes are computed here: nothing has values on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_ASKS_ALL = "_zeor_asks_all"


class AsOnDevice(TorchFunctionMode):
    """Where a model asks whether all of something holds, and goes by the answer, it does: such checks look for what is
    unusual (transformers asks for packed sequences so). Any other look at values fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced, kwargs = _REPLACED.get(func), kwargs or {}
        if func is Tensor.__bool__ and hasattr(args[0], _ASKS_ALL):
            return True
        if replaced is not None and _first(args, kwargs).is_meta:
            found = replaced(*args, **kwargs)
            if found is not None:
                return found
        result = func(*args, **kwargs)
        if func in (Tensor.all, torch.all) and result.is_meta:
            setattr(result, _ASKS_ALL, True)
        return result


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args[:1], *kwargs.values()) if isinstance(value, Tensor))


def _attention(  # noqa: PLR0913 (the arguments of F.scaled_dot_product_attention)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """None: neither kernel takes it, and a GPU computes the matrices too."""
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32):
        return None
    width = query.shape[-1]
    if attn_mask is None and query.dtype in _HALF and width <= 256 and value.shape[-1] == width:
        lack = -width % 8
        given = [functional.pad(each, (0, lack)) if lack else each for each in (query, key, value)]
        out: Tensor = aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width] if lack else out
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    out = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
    )[0]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: torch.Size) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)))
        return torch.empty_like(x, dtype=x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    rows = input.shape[: input.dim() - len(normalized_shape)]
    out: Tensor = _RMSNorm.apply(input, weight, rows)
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    if inplace or not training or p == 0.0:
        return None
    return torch.native_dropout(input, p, training)[0]


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    functional.dropout: _dropout,
}


def inner_nbytes(func: Any, args: tuple[Any, ...]) -> int:
    """What a GPU's kernel takes for itself while it runs, and the meta device does not show."""
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        grad, query, key = args[:3]
        wide = 4 * query.numel()  # the query's gradient is summed in fp32; and one number for each row
        groups = 2 * (query.numel() - key.numel()) if key.numel() < query.numel() else 0
        rows = 4 * query.shape[0] * query.shape[1] * (-(-query.shape[2] // 128) * 128)
        return int(wide + rows + groups * grad.itemsize)
    if func is aten._scaled_dot_product_efficient_attention_backward.default:
        return 4 * sum(int(each.numel()) for each in args[1:4])
    if func is aten.embedding_dense_backward.default:
        return 64 * int(args[1].numel())  # indices are sorted
    return 0
