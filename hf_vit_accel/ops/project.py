"""Rows to packed queries, keys and values: one product instead of up to three Linears, then norms and repeated heads.

`T` rows, `E` width, `F` width of queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block
from hf_vit_accel.ops import linear
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.heads import ShapeHeads, shape_heads_reference, sizes_of
from hf_vit_accel.ops.lora.modules import Lora, lora_of
from hf_vit_accel.ops.product import product, product_backward, product_forward, product_reference
from hf_vit_accel.ops.training.context import FunctionContext, Gradients, InnerContext
from hf_vit_accel.ops.training.nodes import OpWithBackward


def build(block: Block, context: Context, shape: Apply | None) -> Apply:
    """Build the projection of rows (T, E) to packed queries, keys and values.

    Three Linears run as one product, unless one of them was replaced. Their weights are joined at every call: weights
    are smaller than the results, and one product is faster than three.

    Args:
        shape: norms of heads and repeated heads, applied to the product's result; None without.
    """
    loras: list[Lora] = []
    for module in block.qkv:
        lora = lora_of(module, context)
        if lora is not None:
            loras.append(lora)
    if len(loras) < len(block.qkv):
        project = _called([linear.build(module, context) for module in block.qkv], context)
    else:
        project = product(loras, context)
    if shape is None:
        return project
    if not isinstance(project, OpWithBackward) or "heads" not in context.fused:
        return lambda x_TE: shape(project(x_TE))
    read_norms = context.reader(*((norm, "weight") for norm in block.head_norms), cast=False)

    def weights() -> list[Any]:
        flat = project.weights()
        return [len(flat), *flat, *read_norms()]

    settings = *project.settings, sizes_of(block, context)
    return OpWithBackward(function=ProjectFunction, weights=weights, settings=settings, takes_norm=True)


def _called(projections: Sequence[Apply], context: Context) -> Apply:
    """Build a projection some modules of which are called: in memory of its own, since a module may keep its output.

    Attention casts to the dtype of autocast.
    """
    dtype = context.rows_dtype

    def product(x_TE: Tensor) -> Tensor:
        results = []
        for projection in projections:
            is_called = dtype is None or isinstance(projection, nn.Module)
            results.append(projection(x_TE if is_called else x_TE.to(dtype)))
        qkv_TF = results[0] if len(results) == 1 else torch.cat(results, dim=-1)
        return qkv_TF.to(dtype or qkv_TF.dtype, copy=len(results) == 1)

    return product


def project_reference(x_TE: Tensor, *arguments: Any) -> Tensor:
    """Compute `product_reference`, (T, F), then `shape_heads_reference`.

    Args:
        arguments: the length of `LoraInputs.flat`, that list, the weights of the heads' norms; `JoinedLinears`,
            `Sizes`; a `NormRecipe` or None.
    """
    count, *weights, linears, sizes, recipe = arguments
    qkv_TF = product_reference(x_TE, *weights[:count], linears, recipe)
    return shape_heads_reference(qkv_TF, *sizes, *weights[count:])


class ProjectFunction(torch.autograd.Function):
    """Run `project_reference` as one node of autograd's graph, by kernels."""

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, *arguments: Any) -> Tensor:
        count, *weights, linears, sizes, recipe = arguments
        needs_x, _, *needs = ctx.needs_input_grad
        ctx.product = InnerContext((needs_x, *needs[:count]))
        qkv_TF = product_forward(ctx.product, x_TE, weights[:count], linears, recipe)
        ctx.heads = InnerContext((any(ctx.product.needs_input_grad), False, False, False, *needs[count : len(weights)]))
        out_TF = ShapeHeads.forward(ctx.heads, qkv_TF, *sizes, *weights[count:])
        of_product = ctx.product.release()
        ctx.saved_of_product = len(of_product)
        ctx.save_for_backward(*of_product, *ctx.heads.release())
        return out_TF

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_TF: Tensor) -> Gradients:
        saved = ctx.saved_tensors  # read once: checkpoints unpack a tensor once
        ctx.product.saved_tensors = saved[: ctx.saved_of_product]
        ctx.heads.saved_tensors = saved[ctx.saved_of_product :]
        gradients: Any = ShapeHeads.backward(ctx.heads, dout_TF)
        dqkv_TF, _, _, _, *dnorms = gradients
        dx_TE, dweights = product_backward(ctx.product, dqkv_TF)
        ctx.product.release()
        ctx.heads.release()
        return dx_TE, None, *dweights, *dnorms, None, None, None
