"""Norms of the residual stream, each with the addition before it.

`T` rows, `E` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.machine import KERNELS, guarded
from hf_vit_accel.ops.add_norm import add_norm_, add_norm_reference
from hf_vit_accel.ops.base import AddThen, Context, Operation
from hf_vit_accel.ops.training.nodes import NormWithBackward
from hf_vit_accel.ops.training.norm_backward import AddNormFunction


def reasons_against(norm: Part, context: Context) -> list[str]:
    """Report why a module is neither a LayerNorm over one dimension nor an RMSNorm like Qwen2.5-VL's."""
    if _is_rms(norm):
        return context.reasons_replaced(norm)
    reasons = context.reasons_replaced(norm, nn.LayerNorm)
    if reasons:
        return reasons
    if norm.weight is None or norm.bias is None or norm.weight.dim() != 1:
        return ["a LayerNorm without weight or bias, or over several dimensions"]
    return []


def fused(norm: Part, context: Context, *, in_rows_dtype: bool = True) -> AddThen:
    """Build the kernel that adds and normalises; without gradients it writes the sum to x.

    x may be of a wider dtype than the normed rows: under autocast, where the embedding has a norm.
    """
    rms = _is_rms(norm)
    dtype = context.rows_dtype
    if dtype is not None and not in_rows_dtype:  # autocast computes a LayerNorm in fp32, but on the CPU
        dtype = None if rms or context.device.type == "cpu" else torch.float32
    if rms:
        read_weights = context.reader((norm, "weight"), cast=False)
        no_bias = None  # the argument after the weight; an RMSNorm has no bias to read
        eps = context.read(norm, "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps")
        after_weights: tuple[object, ...] = (no_bias, eps, rms, dtype)
    else:
        read_weights = context.reader((norm, "weight"), (norm, "bias"), cast=False)
        after_weights = context.read(norm, "eps"), rms, dtype
    if context.grad and not context.reference:
        return NormWithBackward(function=AddNormFunction, weights=read_weights, settings=after_weights)
    run = add_norm_reference if context.reference else add_norm_
    return lambda x_TE, delta_TE: run(x_TE, delta_TE, *read_weights(), *after_weights)


def _is_rms(norm: nn.Module) -> bool:
    if getattr(norm, "bias", None) is not None:  # Liger gives LayerNorms a `variance_epsilon`, too
        return False
    if hasattr(norm, "variance_epsilon"):
        return True
    is_of_torch = hasattr(norm, "normalized_shape")  # torch's RMSNorm rounds otherwise
    return hasattr(norm, "eps") and not hasattr(norm, "bias") and not is_of_torch


def plain(norm: nn.Module, context: Context, *, in_rows_dtype: bool = True) -> AddThen:
    """Build an addition and a call of the module, whose dtype under autocast stays unless `in_rows_dtype`."""
    norm = context.called(norm)
    dtype = context.rows_dtype if in_rows_dtype else None

    def add_norm(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        normed_TE = norm(x_TE)
        return x_TE, normed_TE if dtype is None else normed_TE.to(dtype)

    return add_norm


def before_foreign(norm: Part, context: Context) -> AddThen:
    """Build a norm before `product.is_foreign`: under autocast its rows have the dtype that stock's norm gives them."""
    if "norms" in context.fused:
        return guarded(KERNELS, fused(norm, context, in_rows_dtype=False))
    return plain(norm, context, in_rows_dtype=False)


def _subjects(parts: Parts) -> list[nn.Module]:
    norms = [norm for block in parts.blocks for norm in (block.norm1, block.norm2)]
    return norms + [norm for norm in (parts.embed_norm, parts.final_norm) if norm is not None]


OPERATION = Operation(
    name="norms",
    summary="residual addition and normalisation in one kernel",
    subjects=_subjects,
    reasons_against=reasons_against,
    fused=fused,
    plain=plain,
)
