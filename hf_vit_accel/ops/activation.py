"""The activations of MLPs beside their products, and the aligned weights that the products need.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.launch import jit, tl

_BLOCK, _COPY = 1024, 2048


def linear_gelu_tanh(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """gelu(x W^T + b) in its tanh form, (T, F), as an epilogue of the product (cuBLASLt).

    At 16384 rows of Qwen3-VL on an H200: 257 us against 313. `_addmm_activation` is private to torch but has been
    there, with these arguments, since 1.12. On CPU, where it takes the erf form of GELU, in two steps.
    """
    if not x_TE.is_cuda:
        return F.gelu(F.linear(x_TE, weight_FE, bias_F), approximate="tanh")
    return torch._addmm_activation(bias_F, x_TE, weight_FE.t(), use_gelu=True)


def quick_gelu_reference(x_TF: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), rounded after each of the three operations as stock does."""
    return x_TF * torch.sigmoid(1.702 * x_TF)


ACTIVATIONS: Mapping[str, Callable[[Any], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu_reference,
    "silu": F.silu,
}
"""What kinds of activations are; in a SwiGLU, silu is that of the gate."""


@jit
def _quick_gelu_kernel(x, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scaled = (value * 1.702).to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
    tl.store(out + at, (value * gate).to(dtype), mask=inside)


def quick_gelu_(x_TF: Tensor) -> Tensor:
    """`quick_gelu_reference` as one kernel, in place."""
    return quick_gelu_to(x_TF, x_TF)


def quick_gelu_to(x_TF: Tensor, out_TF: Tensor) -> Tensor:
    """The same, written to out_TF."""
    assert x_TF.is_contiguous()
    _quick_gelu_kernel[(-(-x_TF.numel() // 4096),)](x_TF, out_TF, x_TF.numel(), BLOCK=4096, num_warps=8)
    return out_TF


def swiglu_reference(gate_TF: Tensor, up_TF: Tensor, *, limit: float | None = None) -> Tensor:
    """silu(gate) * up, rounded after silu and after the product as stock does; (T, F).

    limit: gate is cut off above it, up beyond it on either side.
    """
    if limit is not None:
        gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(min=-limit, max=limit)
    return F.silu(gate_TF) * up_TF


@jit
def cut_off(gate, up, limit):
    """The factors of a SwiGLU with a limit; what is no number stays none."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@jit
def _swiglu_kernel(
    gate, up, out, gate_stride, up_stride, limit, LIMITED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < WIDTH
    x = tl.load(gate + row * gate_stride + f, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + f, mask=inside, other=0.0).to(tl.float32)
    if LIMITED:
        x, y = cut_off(x, y, limit)
    dtype: tl.constexpr = out.dtype.element_ty
    silu = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + f, (silu * y).to(dtype), mask=inside)


def swiglu(gate_TF: Tensor, up_TF: Tensor, *, limit: float | None = None) -> Tensor:
    """`swiglu_reference` as one kernel; gate and up may be halves of one product."""
    rows, width = gate_TF.shape
    assert gate_TF.stride(1) == up_TF.stride(1) == 1
    out_TF = gate_TF.new_empty(rows, width)
    grid = rows, -(-width // _BLOCK)
    _swiglu_kernel[grid](
        gate_TF,
        up_TF,
        out_TF,
        gate_TF.stride(0),
        up_TF.stride(0),
        limit or 0.0,
        LIMITED=limit is not None,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out_TF


def pad_swiglu_reference(
    gate_FE: Tensor, up_FE: Tensor, gate_F: Tensor, up_F: Tensor, down_EF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and biases of a SwiGLU MLP with F padded by zeros to `G`, a multiple of 8: (2G, E), (2G,), (E, G)."""
    spare = -gate_FE.shape[0] % 8
    weight = torch.cat([F.pad(weight_FE, (0, 0, 0, spare)) for weight_FE in (gate_FE, up_FE)])
    return weight, torch.cat([F.pad(bias_F, (0, spare)) for bias_F in (gate_F, up_F)]), F.pad(down_EF, (0, spare))


@jit
def _pad_swiglu_kernel(
    gate,
    up,
    gate_bias,
    up_bias,
    down,
    out_weight,
    out_bias,
    out_down,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # PIECES programs write the weight of both, the others that of the last product: runs of memory, not rows of it.
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    if program < PIECES:
        at = program * BLOCK + lane
        row, e = at // INNER, at % INNER
        source, is_gate = _origin(row, PADDED)
        real, cell = source < WIDTH, source * INNER + e
        x = tl.load(gate + cell, mask=real & is_gate, other=0.0)
        y = tl.load(up + cell, mask=real & (is_gate == 0), other=0.0)
        tl.store(out_weight + at, tl.where(is_gate, x, y), mask=row < 2 * PADDED)
        if program * BLOCK < 2 * PADDED:
            source, is_gate = _origin(at, PADDED)
            x = tl.load(gate_bias + source, mask=(source < WIDTH) & is_gate, other=0.0)
            y = tl.load(up_bias + source, mask=(source < WIDTH) & (is_gate == 0), other=0.0)
            tl.store(out_bias + at, tl.where(is_gate, x, y), mask=at < 2 * PADDED)
    else:
        at = (program - PIECES) * BLOCK + lane
        row, f = at // PADDED, at % PADDED
        x = tl.load(down + row * WIDTH + f, mask=(f < WIDTH) & (row < OUTER), other=0.0)
        tl.store(out_down + at, x, mask=row < OUTER)


@jit
def _origin(row, PADDED: tl.constexpr):
    """Which row of gate's or up's weight a row of both is, and whether it is gate's; beyond both, none."""
    is_gate = row < PADDED
    return tl.where(is_gate, row, row - PADDED), is_gate


def pad_swiglu(
    gate_FE: Tensor, up_FE: Tensor, gate_F: Tensor, up_F: Tensor, down_EF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`pad_swiglu_reference` as one kernel; a weight of the last product that needs no padding is taken as it is."""
    given = gate_FE, up_FE, gate_F, up_F, down_EF = [x.contiguous() for x in (gate_FE, up_FE, gate_F, up_F, down_EF)]
    (width, inner), outer = gate_FE.shape, down_EF.shape[0]
    padded = -(-width // 8) * 8
    weight, bias = gate_FE.new_empty(2 * padded, inner), gate_FE.new_empty(2 * padded)
    down = down_EF if padded == width else gate_FE.new_empty(outer, padded)
    assert weight.numel() < 2**31
    pieces, more = -(-weight.numel() // _COPY), 0 if down is down_EF else -(-down.numel() // _COPY)
    shape = dict(INNER=inner, OUTER=outer, WIDTH=width, PADDED=padded)
    _pad_swiglu_kernel[(pieces + more,)](*given, weight, bias, down, **shape, PIECES=pieces, BLOCK=_COPY, num_warps=4)
    return weight, bias, down
