"""Rows to packed queries, keys and values: one product instead of up to three Linears, then norms and repeated heads.

`T` rows, `E` width, `F` width of queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block
from hf_vit_accel.ops import linear
from hf_vit_accel.ops.base import Apply, Context, biases_or_zeros
from hf_vit_accel.ops.heads import ShapeHeads, shape_heads_reference, sizes_of
from hf_vit_accel.ops.linear import LinearFunction
from hf_vit_accel.ops.training.context import FunctionContext, Gradients, InnerContext
from hf_vit_accel.ops.training.nodes import OpWithBackward


def build(block: Block, context: Context, shape: Apply | None) -> Apply:
    """Build the projection of rows (T, E) to packed queries, keys and values.

    Three Linears run as one product, unless one of them was replaced. Their weights are joined at every call: weights
    are smaller than the results, and one product is faster than three.

    Args:
        shape: norms of heads and repeated heads, applied to the product's result; None without.
    """
    modules = block.qkv
    weights = context.reader(*((module, name) for name in ("weight", "bias") for module in modules))
    is_replaced = any(context.reasons_replaced(module, nn.Linear) for module in modules)
    is_one_node = len(modules) > 1 if shape is None else "heads" in context.fused  # a single Linear is a node by itself
    if context.trains_by_kernels and not is_replaced and is_one_node:
        norm_weights = context.reader(*((norm, "weight") for norm in block.head_norms), cast=False)
        settings = len(modules), None if shape is None else sizes_of(block, context)
        return OpWithBackward(
            function=ProjectFunction,
            weights=lambda: weights() + norm_weights(),
            settings=settings,
            takes_norm=True,
        )
    projections = [linear.build(module, context) for module in modules]
    if any(isinstance(projection, nn.Module) for projection in projections):
        product: Apply = _called(projections, context)
    elif len(modules) == 1:
        product = projections[0]
    elif is_replaced:

        def product(x_TE: Tensor) -> Tensor:
            return torch.cat([projection(x_TE) for projection in projections], dim=-1)

    else:

        def product(x_TE: Tensor) -> Tensor:
            return F.linear(x_TE, *_joined(weights(), len(modules)))

    return product if shape is None else lambda x_TE: shape(product(x_TE))


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


def _joined(weights: list[Any], products: int) -> tuple[Tensor, Tensor | None]:
    """Join the weights of products, followed by their biases, into one weight (F, E) and one bias (F)."""
    if products == 1:
        return weights[0], weights[1]
    biases = biases_or_zeros(weights[:products], weights[products : 2 * products])
    return torch.cat(weights[:products]), None if biases is None else torch.cat(biases)


def project_reference(x_TE: Tensor, *arguments: Any) -> Tensor:
    """Compute `linear_reference` of all products joined, (T, F), then `shape_heads_reference`, if there are sizes.

    Args:
        arguments: weights of the products, their biases, weights of the heads' norms; the number of products; `Sizes`
            or None; a `NormRecipe` or None.
    """
    *weights, products, sizes, recipe = arguments
    qkv_TF = linear.linear_reference(x_TE, *_joined(weights, products), recipe)
    if sizes is None:
        return qkv_TF
    return shape_heads_reference(qkv_TF, *sizes, *weights[2 * products :])


class ProjectFunction(torch.autograd.Function):
    """Run `project_reference` as one node of autograd's graph, by kernels.

    The products' own weights are saved, and joined again in the backward.
    """

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, *arguments: Any) -> Tensor:
        *weights, products, sizes, recipe = arguments
        needs_x, *needs = ctx.needs_input_grad[: 1 + len(weights)]
        needs_weights = needs[:products]
        needs_biases = needs[products : 2 * products]
        norm_weights = weights[2 * products :]

        ctx.linear = InnerContext((needs_x, any(needs_weights), any(needs_biases), False))
        out_TF = LinearFunction.forward(ctx.linear, x_TE, *_joined(weights, products), recipe)
        _, *input_tensors = ctx.linear.release()  # without the joined weight

        head_tensors: tuple[Any, ...] = ()
        if sizes is not None:
            needs_qkv = any(ctx.linear.needs_input_grad)
            ctx.heads = InnerContext((needs_qkv, False, False, False, *needs[2 * products :]))
            out_TF = ShapeHeads.forward(ctx.heads, out_TF, *sizes, *norm_weights)
            head_tensors = ctx.heads.release()

        ctx.products = products
        ctx.has_heads = sizes is not None
        ctx.widths = [len(weight) for weight in weights[:products]]
        ctx.input_count = len(input_tensors)
        own_weights = weights[:products] if needs_x else [None] * products
        ctx.save_for_backward(*own_weights, *input_tensors, *head_tensors)
        return out_TF

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_TF: Tensor) -> Gradients:
        saved = ctx.saved_tensors
        first_input = ctx.products
        first_of_heads = first_input + ctx.input_count
        dnorms: Sequence[Tensor | None] = ()
        if ctx.has_heads:
            dout_TF, dnorms = _heads_backward(ctx.heads, dout_TF, saved[first_of_heads:])
        own_weights = saved[:first_input]
        input_tensors = saved[first_input:first_of_heads]
        dx_TE, dweight_FE, dbias_F = _linear_backward(ctx.linear, dout_TF, own_weights, input_tensors)
        gradients = [*_split(dweight_FE, ctx.widths), *_split(dbias_F, ctx.widths), *dnorms]
        for index, needs_gradient in enumerate(ctx.needs_input_grad[1 : 1 + len(gradients)]):
            if not needs_gradient:
                gradients[index] = None
        return dx_TE, *gradients, None, None, None


def _heads_backward(
    context: InnerContext, dout_TF: Tensor, saved: tuple[Any, ...]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the gradient of the product's result, and those of the norms' weights."""
    context.saved_tensors = saved
    gradients: Any = ShapeHeads.backward(context, dout_TF)
    context.release()
    dqkv_TF, _, _, _, *dnorms = gradients
    return dqkv_TF, dnorms


def _linear_backward(
    context: InnerContext, dqkv_TF: Tensor, own_weights: tuple[Any, ...], input_tensors: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, of the joined weight and of the joined bias."""
    needs_x = context.needs_input_grad[0]
    weight_FE = torch.cat(own_weights) if needs_x and len(own_weights) > 1 else own_weights[0]
    context.saved_tensors = weight_FE, *input_tensors
    gradients: Any = LinearFunction.backward(context, dqkv_TF)
    context.release()
    dx_TE, dweight_FE, dbias_F, _ = gradients
    return dx_TE, dweight_FE, dbias_F


def _split(gradient: Tensor | None, widths: list[int]) -> Sequence[Tensor | None]:
    """Split the gradient of a joined weight or bias among the products."""
    return [None] * len(widths) if gradient is None else gradient.split(widths)
