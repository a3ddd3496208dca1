"""A linear layer to be trained: an input that can be made again is not kept, and the bias gradient has its own kernel.

`T` rows, `E` width of the input, `F` width of the output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.lora.adapter import product
from hf_vit_accel.ops.lora.modules import lora_of
from hf_vit_accel.ops.training.column_sum import column_sum
from hf_vit_accel.ops.training.norm_backward import Norm, keep, kept
from hf_vit_accel.ops.training.trained import Trained


def linear_reference(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, norm: Norm | None = None) -> Tensor:
    """x W^T + b, (T, F); autograd keeps x, whatever it was made of."""
    return F.linear(x_TE, weight_FE, bias_F)


class LinearFunction(torch.autograd.Function):
    """`linear_reference`, with `column_sum` for the bias gradient; all of one dtype.

    norm: what x was made of by a norm, saved in its place. Saved besides: the weight where x needs a gradient, and x
    only where the weight does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        weight_FE: Tensor,
        bias_F: Tensor | None,
        norm: Norm | None = None,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        tensors, ctx.settings = keep(x_TE, norm) if needs_weight else ((), None)
        ctx.save_for_backward(weight_FE if needs_x else None, *tensors)
        return F.linear(x_TE, weight_FE, bias_F)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dy_TF: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight_FE, *tensors = ctx.saved_tensors
        dy_TF = dy_TF.contiguous()
        return (
            dy_TF @ weight_FE if needs_x else None,
            dy_TF.t() @ kept(tensors, ctx.settings, dy_TF.shape[0]) if needs_weight else None,
            column_sum(dy_TF) if needs_bias else None,
            None,
        )


def build(module: Any, context: Context) -> Apply:
    """A projection: where it is trained by kernels a function, else the module itself; with adapters, see `adapter`."""
    if context.reasons_replaced(module, nn.Linear):
        lora = lora_of(module, context)
        return context.called(module) if lora is None else product([lora], context)
    if not context.trains_by_kernels:
        return module.forward  # not `__call__`: hooks go the stock way
    weights = context.reader((module, "weight"), (module, "bias"))
    return Trained(function=LinearFunction, weights=weights, takes_norm=True)
