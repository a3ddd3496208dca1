"""Rows in e4m3 with a scale each: the kernels that write them, and the product of two such matrices.

Scales are powers of two, as everywhere (`e4m3`), so no call depends on another and nothing is ever cut off. Whatever
writes rows quantises them: the norm, the activation; what attention and the modules in between wrote, and weights, by a
kernel of its own. On an H200 bf16 products of a layer of Qwen3-VL at 16384 rows take 685 us, these 425.

`T` rows, `E` width, `F` width of the MLP, `G` that rounded up to `MULTIPLE`, `N` columns of a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.activation import ACTIVATIONS, cut_off, swiglu_reference
from hf_vit_accel.ops.fp8.e4m3 import E4M3, fit_one, largest, powers, rounded
from hf_vit_accel.ops.launch import jit, next_power_of_2, tl
from hf_vit_accel.ops.norm import add_norm_reference_, add_norm_rows, pieces

MULTIPLE = 16
"""What the widths of both matrices must be multiples of."""
_TILE = 4096  # numbers of a program that quantises rows


class Quantized(NamedTuple):
    """Rows in e4m3 (T, E), and what each is to be multiplied by, fp32 (T, 1)."""

    values_TE: Tensor
    scales_T1: Tensor


def aligned(width: int) -> int:
    """A width rounded up to what a product takes."""
    return -(-width // MULTIPLE) * MULTIPLE


def empty(like: Tensor, rows: int, width: int) -> Quantized:
    """Rows to be written, where a tensor is."""
    return Quantized(like.new_empty(rows, width, dtype=E4M3), like.new_empty(rows, 1, dtype=torch.float32))


def product(x: Quantized, weight: Quantized, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b, (T, N), summed in fp32 and rounded once, by the library; on a GPU dtype is bf16."""
    return torch._scaled_mm(
        x.values_TE,
        weight.values_TE.t(),
        scale_a=x.scales_T1,
        scale_b=weight.scales_T1.t(),
        bias=bias_N,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def quantize_rows_reference(x_TE: Tensor, out: Quantized | None = None) -> Quantized:
    """Rows to e4m3, (T, `aligned(E)`), zeros beyond E. What is not finite becomes NaN and is no maximum.

    out: to write to, with as many rows at least, which are left as they are.
    """
    (rows, width), wide_TE = x_TE.shape, x_TE.float()
    finite = wide_TE.isfinite()
    fits_T1 = powers(torch.where(finite, wide_TE.abs(), 0.0).amax(-1, keepdim=True))
    values_TE = torch.where(finite, wide_TE * fits_T1, float("nan"))
    made = Quantized(F.pad(values_TE, (0, aligned(width) - width)).to(E4M3), 1 / fits_T1)
    for target, source in zip(out or (), made, strict=False):
        target[:rows] = source
    return made


def quantize_rows(x_TE: Tensor, out: Quantized | None = None) -> Quantized:
    """`quantize_rows_reference` by the kernel of `activate`."""
    x_TE = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
    return activate(x_TE, (None,), x_TE.shape[1], "none", out=out)


def add_norm_e4m3_reference_(x_TE: Tensor, delta_TE: Tensor | None, *settings: Any) -> tuple[Tensor, Quantized]:
    """`add_norm_reference_` with normed rows in e4m3, from x's dtype; E as is."""
    sum_TE, normed_TE = add_norm_reference_(x_TE, delta_TE, *settings[:4])
    return sum_TE, quantize_rows_reference(normed_TE)


def add_norm_e4m3_(x_TE: Tensor, delta_TE: Tensor | None, *settings: Any) -> tuple[Tensor, Quantized]:
    """`add_norm_e4m3_reference_` as one kernel, that of `add_norm_`."""
    assert x_TE.is_contiguous()
    scales_T1 = x_TE.new_empty(len(x_TE), 1, dtype=torch.float32)
    weight_E, bias_E, eps, rms = settings[:4]
    made_TE = add_norm_rows(x_TE, x_TE, delta_TE, weight_E, bias_E, eps, rms, scales_T1=scales_T1)
    return x_TE, Quantized(made_TE, scales_T1)


def activate_reference(
    z_TN: Tensor, biases_F: tuple[Tensor | None, ...], width: int, kind: str, limit: float | None = None
) -> Quantized:
    """The activation of z + b as rows in e4m3, (T, G), zeros beyond F = width; rounded once. kind: of `ACTIVATIONS`.

    z: (T, G), or two of that side by side, gate's and up's, where there are two biases; what stands beyond F in any is
    not read. biases: all of them, or none. limit: see `swiglu_reference`.
    """
    parts = z_TN.float().chunk(len(biases_F), dim=-1)
    first, *second = (
        part[:, :width] if bias_F is None else part[:, :width] + bias_F.float()
        for part, bias_F in zip(parts, biases_F, strict=True)
    )
    made = swiglu_reference(first, second[0], limit=limit) if second else ACTIVATIONS[kind](first)
    return quantize_rows_reference(made)


@jit
def _activated(z, up, bias, up_bias, f, inside, limit, KIND: tl.constexpr, LIMITED: tl.constexpr, BIASED: tl.constexpr):
    x = tl.load(z + f, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias + f, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        y = tl.load(up + f, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            y += tl.load(up_bias + f, mask=inside, other=0.0).to(tl.float32)
        if LIMITED:
            x, y = cut_off(x, y, limit)
        x = x / (1.0 + tl.exp(-x)) * y
    elif KIND == "gelu":
        x = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, without tanh's cancellation.
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "quick_gelu":
        x = x / (1.0 + tl.exp(-1.702 * x))
    return x


@jit
def _activate_kernel(
    z,
    bias,
    up_bias,
    out,
    scales,
    rows,
    row_stride,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    BIASED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # A program holds whole rows in registers, which their scales need: z is read once. Rows are in two pieces, as of
    # the norm; short ones share the barriers of their reductions (without biases, which have no rows).
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, inside = t[:, None].to(tl.int64), t[:, None] < rows
    f1, f2 = tl.arange(0, MAIN)[None, :], MAIN + tl.arange(0, TAIL)[None, :]
    z += row * row_stride
    y1 = _activated(z, z + PADDED, bias, up_bias, f1, inside, limit, KIND, LIMITED, BIASED)
    y2 = _activated(z, z + PADDED, bias, up_bias, f2, inside & (f2 < WIDTH), limit, KIND, LIMITED, BIASED)
    fits = fit_one(tl.maximum(largest(y1, 1), largest(y2, 1)))
    tl.store(scales + t, 1.0 / fits, mask=t < rows)
    tl.store(out + row * PADDED + f1, rounded(y1, fits[:, None]), mask=inside)
    tl.store(out + row * PADDED + f2, rounded(y2, fits[:, None]), mask=inside & (f2 < PADDED))


def activate(
    z_TN: Tensor,
    biases_F: tuple[Tensor | None, ...],
    width: int,
    kind: str,
    limit: float | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """`activate_reference` as one kernel."""
    some = [bias_F.contiguous() for bias_F in biases_F if bias_F is not None]
    assert z_TN.stride(1) == 1 and (kind == "silu") == (len(biases_F) == 2) and len(some) in (0, len(biases_F))
    assert z_TN.shape[1] == (width if kind == "none" else aligned(width) * len(biases_F))
    rows, padded, shape = len(z_TN), aligned(width), pieces(width)
    out = out or empty(z_TN, rows, padded)
    block_t = max(1, min(16, _TILE // next_power_of_2(width))) if kind == "none" else 1
    _activate_kernel[(-(-rows // block_t),)](
        z_TN,
        some[0] if some else z_TN,
        some[-1] if some else z_TN,
        *out,
        rows,
        z_TN.stride(0),
        limit or 0.0,
        KIND=kind,
        LIMITED=limit is not None,
        BIASED=bool(some),
        **shape | {"TAIL": next_power_of_2(max(padded - shape["MAIN"], 1))},
        PADDED=padded,
        BLOCK_T=block_t,
        num_warps=8 if kind == "silu" and width > 2048 else 4,
    )
    return out
