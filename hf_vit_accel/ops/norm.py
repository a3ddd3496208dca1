"""Residual addition and normalisation in one pass over the rows, and their gradients in another.

`T` rows, `E` width, `P` partial sums.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.base import AddNorm, Context, Operation
from hf_vit_accel.ops.launch import jit, next_power_of_2, tl


def add_norm_reference(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x + delta and norm(x + delta), both (T, E): LayerNorm, or RMSNorm as Qwen2.5-VL's; nothing is done in place.

    The sum is rounded to x's dtype before it is normalised. RMSNorm rounds the normalised row to x's dtype before the
    weight, LayerNorm only its result; statistics are fp32. So stock's modules round. dtype: of the result, None for
    x's; under autocast the product that takes it rounds to that.
    """
    sum_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if rms:
        wide_TE = sum_TE.to(torch.promote_types(sum_TE.dtype, torch.float32))
        wide_TE = wide_TE * torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
        normed_TE = weight_E * wide_TE.to(sum_TE.dtype)
    else:
        normed_TE = F.layer_norm(sum_TE, sum_TE.shape[1:], weight_E, bias_E, eps)
    return sum_TE, normed_TE.to(dtype or x_TE.dtype)


def add_norm_reference_(x_TE: Tensor, delta_TE: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    """`add_norm_reference`, which adds delta to x in place. settings: its other arguments."""
    if delta_TE is not None:
        x_TE += delta_TE
    return add_norm_reference(x_TE, None, *settings)


@jit
def _add_norm_kernel(
    x,
    delta,
    weight,
    bias,
    total,
    out,
    statistics,
    eps,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    RMS: tl.constexpr,
    SAVE: tl.constexpr,
):
    # total, which may be x, receives x + delta.
    # A row in two pieces, the largest power of two and the rest: 1152 and 1280 leave no lane idle.
    row = tl.program_id(0).to(tl.int64) * WIDTH
    e1, e2 = tl.arange(0, MAIN), MAIN + tl.arange(0, TAIL)
    in2 = e2 < WIDTH
    x1 = tl.load(x + row + e1).to(tl.float32)
    x2 = tl.load(x + row + e2, mask=in2, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if HAS_DELTA:
        s1 = (x1 + tl.load(delta + row + e1).to(tl.float32)).to(dtype)
        s2 = (x2 + tl.load(delta + row + e2, mask=in2, other=0.0).to(tl.float32)).to(dtype)
        # A piece of fewer elements than threads is held by several warps: none may load what another has stored.
        tl.debug_barrier()
        tl.store(total + row + e1, s1)
        tl.store(total + row + e2, s2, mask=in2)
        x1, x2 = s1.to(tl.float32), s2.to(tl.float32)
    w1 = tl.load(weight + e1).to(tl.float32)
    w2 = tl.load(weight + e2, mask=in2, other=0.0).to(tl.float32)
    if RMS:
        scale = tl.rsqrt((tl.sum(x1 * x1) + tl.sum(x2 * x2)) / WIDTH + eps)
        y1 = w1 * (x1 * scale).to(dtype).to(tl.float32)
        y2 = w2 * (x2 * scale).to(dtype).to(tl.float32)
    else:
        mean = (tl.sum(x1) + tl.sum(x2)) / WIDTH
        x1 -= mean
        x2 = tl.where(in2, x2 - mean, 0.0)
        scale = tl.rsqrt((tl.sum(x1 * x1) + tl.sum(x2 * x2)) / WIDTH + eps)
        if SAVE:
            tl.store(statistics + tl.num_programs(0) + tl.program_id(0), mean)
        y1 = x1 * scale * w1 + tl.load(bias + e1).to(tl.float32)
        y2 = x2 * scale * w2 + tl.load(bias + e2, mask=in2, other=0.0).to(tl.float32)
    if SAVE:
        tl.store(statistics + tl.program_id(0), scale)
    tl.store(out + row + e1, y1.to(out.dtype.element_ty))
    tl.store(out + row + e2, y2.to(out.dtype.element_ty), mask=in2)


def add_norm_(x_TE: Tensor, delta_TE: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    """`add_norm_reference_` as one kernel: x and delta are read once, x and the result written once."""
    assert x_TE.is_contiguous()
    return x_TE, add_norm_rows(x_TE, x_TE, delta_TE, *settings)


def add_norm_rows(
    x_TE: Tensor,
    sum_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype | None = None,
    statistics_2T: Tensor | None = None,
) -> Tensor:
    """The normed rows. sum_TE receives x + delta; statistics_2T, if any, one over the deviation, then the mean.

    dtype: of the rows, None for x's.
    """
    rows, width = x_TE.shape
    assert rms or bias_E is not None
    delta_TE, weight_E = None if delta_TE is None else delta_TE.contiguous(), weight_E.contiguous()
    bias_E = None if bias_E is None else bias_E.contiguous()
    out_TE = torch.empty_like(x_TE, dtype=dtype)
    _add_norm_kernel[(rows,)](
        x_TE,
        x_TE if delta_TE is None else delta_TE,
        weight_E,
        weight_E if bias_E is None else bias_E,
        sum_TE,
        out_TE,
        x_TE if statistics_2T is None else statistics_2T,
        eps,
        **pieces(width),
        HAS_DELTA=delta_TE is not None,
        RMS=rms,
        SAVE=statistics_2T is not None,
        num_warps=2 if width < 2048 else 4,  # a LayerNorm of 16384 rows of 1152: 21 us, 25 with four (H200)
    )
    return out_TE


@lru_cache(maxsize=256)
def pieces(width: int) -> dict[str, int]:
    """A row in two: the largest power of two below its width, and the rest."""
    main = next_power_of_2(width + 1) // 2
    return {"WIDTH": width, "MAIN": main, "TAIL": next_power_of_2(max(width - main, 1))}


def reasons_against(norm: Any, context: Context) -> list[str]:
    """Why a module is neither a LayerNorm over one dimension nor an RMSNorm as Qwen2.5-VL's."""
    if _is_rms(norm):
        return context.reasons_replaced(norm)
    if reasons := context.reasons_replaced(norm, nn.LayerNorm):
        return reasons
    if norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1:
        return ["a LayerNorm without weight or bias, or over several dimensions"]
    return []


def fused(norm: Any, context: Context) -> AddNorm:
    """(x, delta) to (x + delta, the norm of it); by the kernel x is written in place.

    x may be wider than the rows that the norm makes: under autocast, where the embedding has a norm.
    """
    rms, eps = _is_rms(norm), context.read(norm, "variance_epsilon" if _is_rms(norm) else "eps")
    weights = context.reader(*[(norm, "weight"), (norm, "bias")][: 2 - rms], cast=False)
    settings = *(None,) * rms, eps, rms, context.rows_dtype
    if context.grad and not context.reference:
        from hf_vit_accel.ops.training.norm_backward import AddNormFunction
        from hf_vit_accel.ops.training.trained import TrainedNorm

        return TrainedNorm(function=AddNormFunction, weights=weights, settings=settings)
    run = add_norm_reference if context.reference else add_norm_
    return lambda x_TE, delta_TE: run(x_TE, delta_TE, *weights(), *settings)


def _is_rms(norm: Any) -> bool:
    return hasattr(norm, "variance_epsilon")


def plain(norm: nn.Module, context: Context, *, rows: bool = True) -> AddNorm:
    """The same by the module itself. rows: in the dtype of rows, not in what autocast makes of it."""
    norm, dtype = context.called(norm), context.rows_dtype if rows else None

    def add_norm(x_TE: Tensor, delta_TE: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TE = x_TE if delta_TE is None else x_TE + delta_TE
        normed_TE = norm(x_TE)
        return x_TE, normed_TE if dtype is None else normed_TE.to(dtype)

    return add_norm


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
