"""A layer's MLP to be trained: what its products made is kept, what its activation made is made again.

A second product's input costs as much memory as the first one's result, and a fraction of a product's time: it is made
again by the same kernel that needs its factors anyhow, for the gradient.
`T` rows, `E` width, `F` width of the MLP, `P` partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import ACTIVATIONS, quick_gelu_to
from hf_vit_accel.ops.launch import jit, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, add_up, column_sum, runs, store_sum
from hf_vit_accel.ops.training.norm_backward import Norm, keep, kept

EACH_SM, STAGES = 16, 3  # of the activations' gradients: programs of a multiprocessor, tiles on their way


def gelu_mlp_reference(
    x_TE: Tensor,
    weight1_FE: Tensor,
    bias1_F: Tensor | None,
    weight2_EF: Tensor,
    bias2_E: Tensor | None,
    kind: str,
    norm: Norm | None = None,
) -> Tensor:
    """act(x W1^T + b1) W2^T + b2, (T, E); autograd keeps x, whatever it was made of."""
    z_TF = F.linear(x_TE, weight1_FE, bias1_F)
    return F.linear(ACTIVATIONS[kind](z_TF), weight2_EF, bias2_E)


def gelu(z_TF: Tensor, kind: str) -> Tensor:
    """What stock makes of the rounded result of the first product."""
    return quick_gelu_to(z_TF, torch.empty_like(z_TF)) if kind == "quick_gelu" else ACTIVATIONS[kind](z_TF)


@jit
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
    NEED_Z: tl.constexpr,
    NEED_H: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dz may be dh. Where NEED_Z is false, dh is not read.
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = z.dtype.element_ty
    total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for at in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + at + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * WIDTH + f
        x = tl.load(z + cell, mask=inside, other=0.0).to(tl.float32)
        # h is x * gate, its derivative gate + x * slope.
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
            # quick_gelu's gate is rounded before the product, as forward.
            factor = gate.to(dtype).to(tl.float32) if KIND == "quick_gelu" else gate
            tl.store(h + cell, (x * factor).to(dtype), mask=inside)
        if NEED_Z:
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
    needs_z: bool = True,
    needs_h: bool = False,
    needs_bias: bool = False,
) -> Tensor:
    """Write to dz, which may be dh, the gradient of what is activated, and to h what its activation made.

    Each where it is needed. Returns partial sums of dz, (1, P, F): none if they are not.
    """
    (rows, width), columns = z_TF.shape, -(-z_TF.shape[1] // BLOCK_F)
    length, count = runs(rows, columns, z_TF.device, each_sm=EACH_SM)
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
        NEED_Z=needs_z,
        NEED_H=needs_h,
        NEED_BIAS=needs_bias,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        STAGES=STAGES,
        num_warps=8,
    )
    return partial_1PF


class GeluMlp(torch.autograd.Function):
    """`gelu_mlp_reference` that saves x and the first product's result; all of one dtype.

    norm: what x was made of by a norm, saved in its place. What only a frozen weight's gradient would need is neither
    saved nor made.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        weight1_FE: Tensor,
        bias1_F: Tensor | None,
        weight2_EF: Tensor,
        bias2_E: Tensor | None,
        kind: str,
        norm: Norm | None = None,
    ) -> Tensor:
        needs_x, needs_weight1, needs_bias1, needs_weight2 = ctx.needs_input_grad[:4]
        ctx.kind = kind
        ctx.needs_z = needs_x or needs_weight1 or needs_bias1
        z_TF = F.linear(x_TE, weight1_FE, bias1_F)
        h_TF = gelu(z_TF, kind)
        tensors, ctx.settings = keep(x_TE, norm) if needs_weight1 else ((), None)
        ctx.save_for_backward(
            z_TF if ctx.needs_z or needs_weight2 else None,
            weight1_FE if needs_x else None,
            weight2_EF if ctx.needs_z else None,
            *tensors,
        )
        return F.linear(h_TF, weight2_EF, bias2_E)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: Any, dy_TE: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        z_TF, weight1_FE, weight2_EF, *tensors = ctx.saved_tensors
        dy_TE = dy_TE.contiguous()
        dx_TE = dweight1_FE = dbias1_F = dweight2_EF = dz_TF = None
        if ctx.needs_z or needs_weight2:
            dz_TF = dy_TE @ weight2_EF if ctx.needs_z else z_TF
            h_TF = torch.empty_like(z_TF) if needs_weight2 else z_TF
            needs: Any = dict(needs_z=ctx.needs_z, needs_h=needs_weight2, needs_bias=needs_bias1)
            partial_1PF = gelu_gradient(z_TF, dz_TF, dz_TF, h_TF, ctx.kind, **needs)
            dweight2_EF = dy_TE.t() @ h_TF if needs_weight2 else None
            del h_TF
            dbias1_F = add_up(partial_1PF, z_TF.dtype)[0] if needs_bias1 else None
        if needs_weight1:
            dweight1_FE = dz_TF.t() @ kept(tensors, ctx.settings, dy_TE.shape[0])  # type: ignore[union-attr]
        if needs_x:
            dx_TE = dz_TF @ weight1_FE
        dbias2_E = column_sum(dy_TE) if needs_bias2 else None
        return dx_TE, dweight1_FE, dbias1_F, dweight2_EF, dbias2_E, None, None
