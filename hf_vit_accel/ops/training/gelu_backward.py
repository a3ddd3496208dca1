"""The kernel of the gradients of GELUs, which also writes the activation again.

`T` rows, `F` width of the MLP, `P` partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel.ops.activation import ACTIVATIONS, quick_gelu_to
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, runs, store_sum

PROGRAMS_PER_SM = 16
"""Programs of a multiprocessor in kernels of activations' gradients."""
STAGES = 3
"""Tiles that such a kernel loads ahead."""


def gelu(z_TF: Tensor, kind: str) -> Tensor:
    """Compute the activation like stock, from the rounded result of the first product."""
    return quick_gelu_to(z_TF, torch.empty_like(z_TF)) if kind == "quick_gelu" else ACTIVATIONS[kind](z_TF)


@kernel
def _gelu_backward_kernel(
    z,
    dh,
    dz,
    h,
    partial,
    rows,
    length,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    NEED_H: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dz may be dh.
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = z.dtype.element_ty
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for start in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + start + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * WIDTH + f
        x = tl.load(z + cell, mask=inside, other=0.0).to(tl.float32)
        # h is x * gate; its derivative is gate + x * slope.
        if KIND == "gelu":
            gate = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
            slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        elif KIND == "gelu_tanh":
            # (1 + tanh(u)) / 2 is the sigmoid of 2 u, without tanh's cancellation.
            gate = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
            slope = gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        else:
            gate = 1.0 / (1.0 + tl.exp(-1.702 * x))
            slope = gate * (1.0 - gate) * 1.702
        if NEED_H:
            # quick_gelu rounds its gate before the product; so does its forward.
            factor = gate.to(dtype).to(tl.float32) if KIND == "quick_gelu" else gate
            tl.store(h + cell, (x * factor).to(dtype), mask=inside)
        dx = tl.load(dh + cell, mask=inside, other=0.0).to(tl.float32) * (gate + x * slope)
        tl.store(dz + cell, dx.to(dtype), mask=inside)
        if NEED_BIAS:
            total += dx
    if NEED_BIAS:
        store_sum(partial, total, f, tl.program_id(1), WIDTH)


def gelu_gradient(
    z_TF: Tensor,
    dh_TF: Tensor,
    dz_TF: Tensor,
    h_TF: Tensor,
    kind: str,
    *,
    needs_h: bool = False,
    needs_bias: bool = False,
) -> Tensor:
    """Write the gradient of the activation's input and, if it is needed, the activation again.

    Args:
        dz_TF: receives the gradient of z; may be dh_TF.
        h_TF: receives the activation if `needs_h`, else stays.

    Returns:
        Partial sums of dz, (1, P, F); empty without needs_bias.
    """
    rows, width = z_TF.shape
    columns = -(-width // BLOCK_F)
    length, count = runs(rows, columns, z_TF.device, programs_per_sm=PROGRAMS_PER_SM)
    partial_1PF = torch.empty(1, count if needs_bias else 0, width, dtype=torch.float32, device=z_TF.device)
    _gelu_backward_kernel[(columns, count)](
        z_TF,
        dh_TF,
        dz_TF,
        h_TF,
        partial_1PF,
        rows,
        length,
        WIDTH=width,
        KIND=kind,
        NEED_H=needs_h,
        NEED_BIAS=needs_bias,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        STAGES=STAGES,
        num_warps=8,
    )
    return partial_1PF
