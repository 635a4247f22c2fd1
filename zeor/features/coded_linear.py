"""The linear that multiplies by codes: torchao's Float8Linear, given weights that are cast already.

Imported only where somebody asks for fp8: it needs torchao, which is optional. torchao's own function takes a weight
that is cast; it is called with one here, and gradients are the parameter's, as if the cast were inside. What
autograd saves is the codes, as they lie in the lane, so that they can be freed and gathered again (step/saved.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

CODES, SCALE = "_zeor_codes", "_zeor_scale"  # of such a linear: its weight's


@torch._dynamo.allow_in_graph
class CodedMatmul(torch.autograd.Function):
    """input @ weight.t(), where `weight` says where the gradient goes, and codes and scale what it is."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, codes: Tensor, scale: Tensor, linear: Any) -> Tensor:
        ctx.save_for_backward(input, codes, scale)
        ctx.linear, ctx.dtype = linear, weight.dtype
        inner = SimpleNamespace(save_for_backward=lambda *tensors: None)
        cast = _transposed(codes, scale, weight.dtype, linear)
        found: Tensor = matmul_with_hp_or_float8_args.forward(inner, input, cast, *linear)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, codes, scale = ctx.saved_tensors
        cast, (mm_config, config) = _transposed(codes, scale, ctx.dtype, ctx.linear), ctx.linear
        inner = SimpleNamespace(saved_tensors=(input, cast), linear_mm_config=mm_config, config=config)
        of_input, of_transposed, *_ = matmul_with_hp_or_float8_args.backward(inner, grad)
        return of_input, of_transposed.t(), None, None, None


def _transposed(codes: Tensor, scale: Tensor, dtype: torch.dtype, linear: Any) -> Any:
    return Float8TrainingTensor(codes, scale, dtype, linear[0], GemmInputRole.WEIGHT).t()


class CodedLinear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    def forward(self, input: Tensor) -> Tensor:
        # As Float8Linear.forward, which asks this kind of autocast on every device.
        if torch.is_autocast_enabled():
            input = input.to(torch.get_autocast_gpu_dtype())
        codes, scale = getattr(self, CODES), getattr(self, SCALE)
        output: Tensor = CodedMatmul.apply(input, self.weight, codes, scale, (self.linear_mm_config, self.config))
        return output if self.bias is None else output + self.bias.to(output.dtype)
