"""The kernel that adds to the residual stream and normalises it, in one pass over the rows.

`T` rows, `E` width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.launch import kernel, next_power_of_2, tl


def add_norm_reference(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x + delta and norm(x + delta), both (T, E); nothing is written in place.

    The norm is a LayerNorm, or an RMSNorm like Qwen2.5-VL's. Rounding is that of stock's modules: the sum is rounded
    to x's dtype before the norm. RMSNorm rounds the normalised row before it multiplies by the weight. LayerNorm
    rounds its result only. Statistics are fp32.

    Args:
        dtype: dtype of the normed rows; None for stock's, which is that of x or, of an RMSNorm, of x and its weight.
    """
    sum_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if rms:
        wide_TE = sum_TE.to(torch.promote_types(sum_TE.dtype, torch.float32))
        wide_TE = wide_TE * torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
        normed_TE = weight_E * wide_TE.to(sum_TE.dtype)
        return sum_TE, normed_TE if dtype is None else normed_TE.to(dtype)
    normed_TE = F.layer_norm(sum_TE, sum_TE.shape[1:], weight_E, bias_E, eps)
    return sum_TE, normed_TE.to(dtype or x_TE.dtype)


@kernel
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
    # A row is read in two pieces, its largest power of two and the remainder: no lane idles at 1152 or 1280.
    row = tl.program_id(0).to(tl.int64) * WIDTH
    e1 = tl.arange(0, MAIN)
    e2 = MAIN + tl.arange(0, TAIL)
    in2 = e2 < WIDTH
    x1 = tl.load(x + row + e1).to(tl.float32)
    x2 = tl.load(x + row + e2, mask=in2, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    if HAS_DELTA:
        s1 = (x1 + tl.load(delta + row + e1).to(tl.float32)).to(dtype)
        s2 = (x2 + tl.load(delta + row + e2, mask=in2, other=0.0).to(tl.float32)).to(dtype)
        # Several warps hold a piece with fewer elements than threads: no warp may load what another one stored.
        tl.debug_barrier()
        tl.store(total + row + e1, s1)
        tl.store(total + row + e2, s2, mask=in2)
        x1 = s1.to(tl.float32)
        x2 = s2.to(tl.float32)
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
    """Run `add_norm_reference` as one kernel that writes the sum to x: x and delta are read once."""
    x_TE = widened(x_TE, delta_TE)
    assert x_TE.is_contiguous()
    return x_TE, add_norm_rows(x_TE, x_TE, delta_TE, *settings)


def widened(x_TE: Tensor, delta_TE: Tensor | None) -> Tensor:
    """Return x in the dtype of x + delta: a module that is called may return wider rows than it takes."""
    if delta_TE is None or delta_TE.dtype == x_TE.dtype:
        return x_TE
    return x_TE.to(torch.promote_types(x_TE.dtype, delta_TE.dtype))


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
    """Launch the kernel and return the normed rows, (T, E).

    `sum_TE`, which may be x, receives x + delta. `statistics_2T` receives 1 / standard deviation of every row, then its
    mean; of an RMSNorm it is (1, T), for 1 / root mean square.
    """
    rows, width = x_TE.shape
    assert rms or bias_E is not None
    weight_E = weight_E.contiguous()
    if delta_TE is not None:
        delta_TE = delta_TE.contiguous()
    if bias_E is not None:
        bias_E = bias_E.contiguous()
    if dtype is None and rms and weight_E.dtype != x_TE.dtype:
        dtype = torch.promote_types(x_TE.dtype, weight_E.dtype)
    out_TE = torch.empty_like(x_TE, dtype=dtype)
    # The kernel does not read the pointers that stand for a missing delta, bias or statistics.
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
        num_warps=2 if width < 2048 else 4,  # a LayerNorm of 16384 rows of 1152: 21 us, 25 with four warps (H200)
    )
    return out_TE


@lru_cache(maxsize=256)
def pieces(width: int) -> dict[str, int]:
    """Split a row into its largest power of two and the remainder, as constants of the kernels."""
    main = next_power_of_2(width + 1) // 2
    return {"WIDTH": width, "MAIN": main, "TAIL": next_power_of_2(max(width - main, 1))}
