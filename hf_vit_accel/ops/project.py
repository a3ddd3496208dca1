"""Rows to packed queries, keys and values: one product instead of up to three Linears, then norms and repeated heads.

`T` rows, `E` width, `F` width of queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_vit_accel.families.base import Block, Part
from hf_vit_accel.ops.base import Apply, Context
from hf_vit_accel.ops.lora.modules import Lora, lora_of
from hf_vit_accel.ops.product import product
from hf_vit_accel.ops.training.nodes import OpWithBackward, ProductThen


def is_foreign(module: Part, context: Context) -> bool:
    """Return whether a module has weights that no plain Linear holds: autocast may not decide the dtypes inside."""
    inner_modules = [inner for inner in module.modules() if inner._parameters]
    return any(context.reasons_replaced(inner, nn.Linear) for inner in inner_modules)


def build_linear(module: Part, context: Context) -> Apply:
    """Build a projection: a product, or the module itself where it is none."""
    lora = lora_of(module, context)
    return context.called(module) if lora is None else product([lora], context)


def build(block: Block, context: Context, shape: Apply | None) -> Apply:
    """Build the projection of rows (T, E) to packed queries, keys and values; `shape` is applied to the result.

    Three Linears run as one product, unless one of them was replaced. Their weights are joined at every call: weights
    are smaller than the results, and one product is faster than three.
    """
    loras: list[Lora] = []
    for module in block.qkv:
        lora = lora_of(module, context)
        if lora is not None:
            loras.append(lora)
    if len(loras) < len(block.qkv):
        project = _called([build_linear(module, context) for module in block.qkv], context)
    else:
        project = product(loras, context)
    if shape is None:
        return project
    if isinstance(project, OpWithBackward):
        return ProductThen(product=project, then=shape)
    return lambda x_TE: shape(project(x_TE))


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
