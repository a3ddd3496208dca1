"""A trained linear layer: it saves how a norm made its input, and its bias gradient is a kernel.

`T` rows, `E` width of the input, `F` width of the output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Part
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.lora.adapter import product
from hf_vit_accel.ops.lora.modules import lora_of
from hf_vit_accel.ops.training.column_sum import column_sum
from hf_vit_accel.ops.training.context import FunctionContext, Gradients
from hf_vit_accel.ops.training.nodes import OpWithBackward
from hf_vit_accel.ops.training.norm_recipe import NormRecipe, load_input, save_input


def linear_reference(
    x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, recipe: NormRecipe | None = None
) -> Tensor:
    """Compute x W^T + b, (T, F). `recipe` is ignored: it is there because `LinearFunction` takes it."""
    return F.linear(x_TE, weight_FE, bias_F)


class LinearFunction(torch.autograd.Function):
    """Run `linear_reference`, with `column_sum` for the bias gradient; all tensors have one dtype.

    The weight is saved only where x needs a gradient, x (or its recipe) only where the weight does.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        x_TE: Tensor,
        weight_FE: Tensor,
        bias_F: Tensor | None,
        recipe: NormRecipe | None = None,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        input_tensors, ctx.input_settings = save_input(x_TE, recipe) if needs_weight else ((), None)
        ctx.save_for_backward(weight_FE if needs_x else None, *input_tensors)
        return F.linear(x_TE, weight_FE, bias_F)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TF: Tensor) -> Gradients:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight_FE, *input_tensors = ctx.saved_tensors
        dy_TF = dy_TF.contiguous()
        dx_TE = dweight_FE = dbias_F = None
        if needs_x:
            dx_TE = dy_TF @ weight_FE
        if needs_weight:
            dweight_FE = dy_TF.t() @ load_input(input_tensors, ctx.input_settings, dy_TF.shape[0])
        if needs_bias:
            dbias_F = column_sum(dy_TF)
        return dx_TE, dweight_FE, dbias_F, None


def is_foreign(module: Part, context: Context) -> bool:
    """Return whether a module has weights that no plain Linear holds: autocast may not decide the dtypes inside."""
    inner_modules = [inner for inner in module.modules() if inner._parameters]
    return any(context.reasons_replaced(inner, nn.Linear) for inner in inner_modules)


def build(module: Part, context: Context) -> Apply:
    """Build a projection: the module itself, a trained function, or a product with LoRA adapters."""
    if context.reasons_replaced(module, nn.Linear):
        lora = lora_of(module, context)
        return context.called(module) if lora is None else product([lora], context)
    if not context.trains_by_kernels:
        return module.forward  # not `__call__`: a module with hooks never comes here
    weights = context.reader((module, "weight"), (module, "bias"))
    return OpWithBackward(function=LinearFunction, weights=weights, takes_norm=True)
