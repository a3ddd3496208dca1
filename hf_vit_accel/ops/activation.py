"""Activations of MLPs as kernels of their own, and weights padded to the widths at which products are fast.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.base import biases_or_zeros
from hf_vit_accel.ops.launch import device_function, kernel, tl

_BLOCK = 1024
_COPY = 2048


def linear_gelu_tanh(x_TE: Tensor, weight_FE: Tensor, bias_F: Tensor) -> Tensor:
    """Compute gelu(x W^T + b) in its tanh form, (T, F), by a product that applies the activation itself (cuBLASLt).

    At 16384 rows of Qwen3-VL: 257 us against 313 in two steps (H200). `_addmm_activation` is private to torch, but has
    had these arguments since 1.12. On the CPU it uses the erf form of GELU, so two steps run there.
    """
    if not x_TE.is_cuda:
        return F.gelu(F.linear(x_TE, weight_FE, bias_F), approximate="tanh")
    return torch._addmm_activation(bias_F, x_TE, weight_FE.t(), use_gelu=True)


def quick_gelu_reference(x_TF: Tensor) -> Tensor:
    """Compute x * sigmoid(1.702 x), rounded like stock after each of the three operations."""
    return x_TF * torch.sigmoid(1.702 * x_TF)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu_reference,
    "silu": F.silu,
}
"""Activations by name; silu is the gate's in a SwiGLU."""


@kernel
def _quick_gelu_kernel(x, out, total, BLOCK: tl.constexpr):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < total
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    scaled = (value * 1.702).to(dtype).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-scaled))).to(dtype).to(tl.float32)
    tl.store(out + cell, (value * gate).to(dtype), mask=inside)


def quick_gelu_(x_TF: Tensor) -> Tensor:
    """Run `quick_gelu_reference` as one kernel, in place."""
    return quick_gelu_to(x_TF, x_TF)


def quick_gelu_to(x_TF: Tensor, out_TF: Tensor) -> Tensor:
    """Run `quick_gelu_reference` as one kernel and write the result to `out_TF`."""
    assert x_TF.is_contiguous()
    _quick_gelu_kernel[(-(-x_TF.numel() // 4096),)](x_TF, out_TF, x_TF.numel(), BLOCK=4096, num_warps=8)
    return out_TF


def swiglu_reference(gate_TF: Tensor, up_TF: Tensor, *, limit: float | None = None) -> Tensor:
    """Compute silu(gate) * up, (T, F), rounded like stock after silu and after the product; limits cut off both."""
    if limit is not None:
        gate_TF = gate_TF.clamp(max=limit)
        up_TF = up_TF.clamp(min=-limit, max=limit)
    return F.silu(gate_TF) * up_TF


@device_function
def cut_off(gate, up, limit):
    """Cut off gate and up of a SwiGLU at its limit; NaN stays NaN."""
    return tl.where(gate > limit, limit, gate), tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@kernel
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
    """Run `swiglu_reference` as one kernel; gate and up may be halves of one product."""
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
    gate_FE: Tensor, up_FE: Tensor, gate_F: Tensor | None, up_F: Tensor | None, down_EF: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Pad the weights of a SwiGLU MLP with zeros from F to G: gate and up (2 G, E), their bias (2 G), down (E, G)."""
    padding = -gate_FE.shape[0] % 8
    weight = torch.cat([F.pad(weight_FE, (0, 0, 0, padding)) for weight_FE in (gate_FE, up_FE)])
    biases = biases_or_zeros((gate_FE, up_FE), (gate_F, up_F))
    bias = None if biases is None else torch.cat([F.pad(bias_F, (0, padding)) for bias_F in biases])
    return weight, bias, F.pad(down_EF, (0, padding))


@kernel
def _pad_swiglu_kernel(
    gate,
    up,
    gate_bias,
    up_bias,
    down,
    out_weight,
    out_bias,
    out_down,
    BIASED: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # PIECES programs write the joined weight, the others down's. Each program writes a run of memory, not rows.
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < PIECES:
        cell = program * BLOCK + lane
        row = cell // INNER
        source, is_gate = _origin(row, PADDED)
        is_real = source < WIDTH
        source_cell = source * INNER + cell % INNER
        x = tl.load(gate + source_cell, mask=is_real & is_gate, other=0.0)
        y = tl.load(up + source_cell, mask=is_real & (is_gate == 0), other=0.0)
        tl.store(out_weight + cell, tl.where(is_gate, x, y), mask=row < 2 * PADDED)
        if BIASED and program * BLOCK < 2 * PADDED:
            source, is_gate = _origin(cell, PADDED)
            x = tl.load(gate_bias + source, mask=(source < WIDTH) & is_gate, other=0.0)
            y = tl.load(up_bias + source, mask=(source < WIDTH) & (is_gate == 0), other=0.0)
            tl.store(out_bias + cell, tl.where(is_gate, x, y), mask=cell < 2 * PADDED)
    else:
        cell = (program - PIECES) * BLOCK + lane
        row = cell // PADDED
        f = cell % PADDED
        x = tl.load(down + row * WIDTH + f, mask=(f < WIDTH) & (row < OUTER), other=0.0)
        tl.store(out_down + cell, x, mask=row < OUTER)


@device_function
def _origin(row, PADDED: tl.constexpr):
    """Return which row of gate or up a row of the joined weight is, and whether it is gate's."""
    is_gate = row < PADDED
    return tl.where(is_gate, row, row - PADDED), is_gate


def pad_swiglu(
    gate_FE: Tensor, up_FE: Tensor, gate_F: Tensor | None, up_F: Tensor | None, down_EF: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run `pad_swiglu_reference` as one kernel; down's weight is returned as it is if it needs no padding."""
    biases = biases_or_zeros((gate_FE, up_FE), (gate_F, up_F))
    stand_ins = [gate_FE, gate_FE]  # not read without biases
    sources = [tensor.contiguous() for tensor in (gate_FE, up_FE, *(biases or stand_ins), down_EF)]
    width, inner = gate_FE.shape
    outer = down_EF.shape[0]
    padded = -(-width // 8) * 8
    weight = gate_FE.new_empty(2 * padded, inner)
    bias = None if biases is None else gate_FE.new_empty(2 * padded)
    down = sources[-1] if padded == width else gate_FE.new_empty(outer, padded)
    assert weight.numel() < 2**31
    pieces = -(-weight.numel() // _COPY)
    down_pieces = 0 if padded == width else -(-down.numel() // _COPY)
    _pad_swiglu_kernel[(pieces + down_pieces,)](
        *sources,
        weight,
        weight if bias is None else bias,
        down,
        BIASED=bias is not None,
        INNER=inner,
        OUTER=outer,
        WIDTH=width,
        PADDED=padded,
        PIECES=pieces,
        BLOCK=_COPY,
        num_warps=4,
    )
    return weight, bias, down
