"""The kernel of the gradients of GELUs and of a SwiGLU, which also writes the activation again.

`T` rows, `F` width of the MLP, `P` partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel.ops.activation import cut_off
from hf_vit_accel.ops.launch import device_function, kernel, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, runs, store_sum


@kernel
def _activation_backward_kernel(
    z,
    dh,
    dz,
    h,
    partial,
    rows,
    length,
    limit,
    KIND: tl.constexpr,
    LIMITED: tl.constexpr,
    WIDTH: tl.constexpr,
    NEED_H: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    # For "silu", z and dz hold gate and up side by side, (T, 2 WIDTH). dh may also be dz of a GELU, or h of "silu".
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = z.dtype.element_ty
    is_swiglu: tl.constexpr = KIND == "silu"
    z_width: tl.constexpr = 2 * WIDTH if is_swiglu else WIDTH
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up_total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for start in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + start + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * WIDTH + f
        z_cell = t.to(tl.int64) * z_width + f
        x = tl.load(z + z_cell, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dh + cell, mask=inside, other=0.0).to(tl.float32)
        if is_swiglu:
            up = tl.load(z + z_cell + WIDTH, mask=inside, other=0.0).to(tl.float32)
            if LIMITED:
                x_flows = x <= limit
                up_flows = (up <= limit) & (up >= -limit)
                x, up = cut_off(x, up, limit)
        gate, slope = _gate_and_slope(x, KIND)
        if is_swiglu:
            dup = gradient * (x * gate)
            gradient = gradient * up
            if LIMITED:
                gradient = tl.where(x_flows, gradient, 0.0)
                dup = tl.where(up_flows, dup, 0.0)
            tl.store(dz + z_cell + WIDTH, dup.to(dtype), mask=inside)
            if NEED_BIAS:
                up_total += dup
        if NEED_H:
            if is_swiglu:
                result = (x * gate).to(dtype).to(tl.float32) * up
            elif KIND == "quick_gelu":  # it rounds its gate before the product; so does its forward
                result = x * gate.to(dtype).to(tl.float32)
            else:
                result = x * gate
            tl.store(h + cell, result.to(dtype), mask=inside)
        dx = gradient * (gate + x * slope)
        tl.store(dz + z_cell, dx.to(dtype), mask=inside)
        if NEED_BIAS:
            total += dx
    if NEED_BIAS:
        store_sum(partial, total, f, tl.program_id(1), WIDTH)
        if is_swiglu:
            store_sum(partial, up_total, f, tl.num_programs(1) + tl.program_id(1), WIDTH)


@device_function
def _gate_and_slope(x, KIND: tl.constexpr):
    """Return gate and slope of an activation x * gate, whose derivative is gate + x * slope."""
    if KIND == "gelu":
        gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u, without tanh's cancellation.
        gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "quick_gelu":
        gate = 1.0 / (1.0 + tl.exp(-1.702 * x))
        slope = gate * (1.0 - gate) * 1.702
    else:
        gate = 1.0 / (1.0 + tl.exp(-x))
        slope = gate * (1.0 - gate)
    return gate, slope


def activation_gradient_(
    z: Tensor, dh_TF: Tensor, kind: str, limit: float | None, *, needs_h: bool = False, needs_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of an activation's input; `dh_TF` is overwritten.

    Returns that gradient and, if they are needed, the activation again, and partial sums of the gradient: (1, P, F), or
    (2, P, F) for "silu".
    """
    rows, width = dh_TF.shape
    is_swiglu = kind == "silu"
    dz = torch.empty_like(z) if is_swiglu else dh_TF
    h_TF = dh_TF if is_swiglu or not needs_h else torch.empty_like(z)
    columns = -(-width // BLOCK_F)
    length, count = runs(rows, columns, z.device, programs_per_sm=16)
    size = 2 if is_swiglu else 1, count if needs_bias else 0, width
    partial = torch.empty(size, dtype=torch.float32, device=z.device)
    _activation_backward_kernel[(columns, count)](
        z,
        dh_TF,
        dz,
        h_TF,
        partial,
        rows,
        length,
        limit or 0.0,
        KIND=kind,
        LIMITED=limit is not None,
        WIDTH=width,
        NEED_H=needs_h,
        NEED_BIAS=needs_bias,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        STAGES=3,
        num_warps=4 if is_swiglu else 8,
    )
    return dz, h_TF, partial
