"""Rows to packed queries, keys and values: one product, whatever it is made of, and what is done to its heads.

`T` rows, `E` width, `F` width of queries, keys and values together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block
from hf_vit_accel.ops import linear
from hf_vit_accel.ops.base import Apply, Context, filled
from hf_vit_accel.ops.heads import ShapeHeads, shape_heads_reference, sizes_of
from hf_vit_accel.ops.linear import LinearFunction
from hf_vit_accel.ops.training.trained import Frame, Trained


def build(block: Block, context: Context, shape: Apply | None) -> Apply:
    """Rows (T, E) to packed queries, keys and values: one product, also where there are three Linears, then `shape`.

    The weights are put together at each call: they are fewer than the rows' results, and one product is the faster.
    """
    modules = block.qkv
    weights = context.reader(*((module, name) for name in ("weight", "bias") for module in modules))
    replaced = any(context.reasons_replaced(module, nn.Linear) for module in modules)
    if context.trains_by_kernels and not replaced and (len(modules) > 1 if shape is None else "heads" in context.fused):
        of_norms = context.reader(*((norm, "weight") for norm in block.head_norms), cast=False)
        every: Any = lambda: weights() + of_norms()  # noqa: E731
        settings = len(modules), None if shape is None else sizes_of(block, context)
        return Trained(function=ProjectFunction, weights=every, settings=settings, takes_norm=True)
    if len(modules) == 1:
        product: Apply = linear.build(modules[0], context)
    elif replaced:
        called = [linear.build(module, context) for module in modules]
        product = lambda x_TE: torch.cat([module(x_TE) for module in called], dim=-1)  # noqa: E731
    else:
        product = lambda x_TE: F.linear(x_TE, *_joined(weights(), len(modules)))  # noqa: E731
    return product if shape is None else lambda x_TE: shape(product(x_TE))


def _joined(weights: list[Any], products: int) -> tuple[Tensor, Tensor | None]:
    """Weight (F, E) and bias (F) of one product that does the work of some; the biases follow the weights."""
    each, biases = weights[:products], weights[products : 2 * products]
    if products == 1:
        return each[0], biases[0]
    some = filled(each, biases)
    return torch.cat(each), None if some is None else torch.cat(some)


def project_reference(x_TE: Tensor, *rest: Any) -> Tensor:
    """`linear_reference` of all products at once, (T, F), then `shape_heads_reference` where there are sizes for it.

    rest: weights of the products, their biases, weights of heads' norms; how many products, `Sizes` or None; `Norm`.
    """
    *weights, products, sizes, norm = rest
    qkv_TF = linear.linear_reference(x_TE, *_joined(weights, products), norm)
    if sizes is None:
        return qkv_TF
    return shape_heads_reference(qkv_TF, *sizes, *weights[2 * products :])


class ProjectFunction(torch.autograd.Function):
    """`project_reference` as one node of autograd's graph, by kernels.

    Weights that were put together are so again for the gradient, and not kept.
    """

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, *rest: Any) -> Tensor:
        *weights, ctx.products, ctx.sizes, norm = rest
        needs_x, *needs = ctx.needs_input_grad[: 1 + len(weights)]
        first, last = ctx.products, 2 * ctx.products
        ctx.product = Frame((needs_x, any(needs[:first]), any(needs[first:last]), False))
        out_TF = LinearFunction.forward(ctx.product, x_TE, *_joined(weights, first), norm)
        _, *kept = ctx.product.saved_tensors
        ctx.lengths, shaped = list(map(len, weights[:first])), ()
        if ctx.sizes is not None:
            ctx.shape = Frame((any(ctx.product.needs_input_grad), False, False, False, *needs[last:]))
            out_TF = ShapeHeads.forward(ctx.shape, out_TF, *ctx.sizes, *weights[last:])
            shaped, ctx.shape.saved_tensors = ctx.shape.saved_tensors, ()
        ctx.product.saved_tensors, ctx.kept = (), len(kept)
        ctx.save_for_backward(*(weights[:first] if needs_x else [None] * first), *kept, *shaped)
        return out_TF

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dout_TF: Tensor) -> tuple[Tensor | None, ...]:
        products, saved, needs = ctx.products, ctx.saved_tensors, ctx.needs_input_grad
        at = products + ctx.kept
        dnorms: list[Tensor | None] = []
        if ctx.sizes is not None:
            ctx.shape.saved_tensors = saved[at:]
            dout_TF, _, _, _, *dnorms = ShapeHeads.backward(ctx.shape, dout_TF)  # type: ignore[assignment]
            ctx.shape.saved_tensors = ()
        weight_FE = torch.cat(saved[:products]) if needs[0] and products > 1 else saved[0]
        ctx.product.saved_tensors = weight_FE, *saved[products:at]
        dx_TE, *joined, _ = LinearFunction.backward(ctx.product, dout_TF)
        ctx.product.saved_tensors = ()
        each = [part for d in joined for part in ([None] * products if d is None else d.split(ctx.lengths))]
        wanted = (part if need else None for part, need in zip([*each, *dnorms], needs[1:], strict=False))
        return dx_TE, *wanted, None, None, None
