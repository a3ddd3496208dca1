"""The MLP of a layer, trained: the first product's result is saved, the activation is computed again.

The activation's result would need as much memory as the first product's. The kernel of the activation's gradient
computes the same factors, so it writes the activation, too. `T` rows, `E` width, `F` width of the MLP, `P` partial
sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import ACTIVATIONS, quick_gelu_to
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, add_up, column_sum, runs, store_sum
from hf_vit_accel.ops.training.context import FunctionContext, Gradients
from hf_vit_accel.ops.training.norm_recipe import NormRecipe, load_input, save_input

PROGRAMS_PER_SM = 16
"""Programs of a multiprocessor in kernels of activations' gradients."""
STAGES = 3
"""Tiles that such a kernel loads ahead."""


def gelu_mlp_reference(
    x_TE: Tensor,
    weight1_FE: Tensor,
    bias1_F: Tensor | None,
    weight2_EF: Tensor,
    bias2_E: Tensor | None,
    kind: str,
    recipe: NormRecipe | None = None,
) -> Tensor:
    """Compute act(x W1^T + b1) W2^T + b2, (T, E). `recipe` is ignored: it is there because `GeluMlp` takes it."""
    z_TF = F.linear(x_TE, weight1_FE, bias1_F)
    return F.linear(ACTIVATIONS[kind](z_TF), weight2_EF, bias2_E)


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
    """Write the gradient of the activation's input, and the activation again, as far as needed.

    Args:
        dz_TF: receives the gradient of z if `needs_z`, else stays; may be dh_TF.
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
    """Run `gelu_mlp_reference`, saving x (or its recipe) and the first product's result; all tensors have one dtype.

    What only the gradient of a frozen weight would need is neither saved nor computed.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        x_TE: Tensor,
        weight1_FE: Tensor,
        bias1_F: Tensor | None,
        weight2_EF: Tensor,
        bias2_E: Tensor | None,
        kind: str,
        recipe: NormRecipe | None = None,
    ) -> Tensor:
        needs_x, needs_weight1, needs_bias1, needs_weight2 = ctx.needs_input_grad[:4]
        ctx.kind = kind
        ctx.needs_z = needs_x or needs_weight1 or needs_bias1
        z_TF = F.linear(x_TE, weight1_FE, bias1_F)
        h_TF = gelu(z_TF, kind)
        input_tensors, ctx.input_settings = save_input(x_TE, recipe) if needs_weight1 else ((), None)
        ctx.save_for_backward(
            z_TF if ctx.needs_z or needs_weight2 else None,
            weight1_FE if needs_x else None,
            weight2_EF if ctx.needs_z else None,
            *input_tensors,
        )
        return F.linear(h_TF, weight2_EF, bias2_E)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TE: Tensor) -> Gradients:
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        z_TF, weight1_FE, weight2_EF, *input_tensors = ctx.saved_tensors
        dy_TE = dy_TE.contiguous()
        dx_TE = dweight1_FE = dbias1_F = dweight2_EF = dz_TF = None
        if ctx.needs_z or needs_weight2:
            dz_TF = dy_TE @ weight2_EF if ctx.needs_z else z_TF  # holds the gradient of h first
            h_TF = torch.empty_like(z_TF) if needs_weight2 else z_TF
            partial_1PF = gelu_gradient(
                z_TF,
                dz_TF,
                dz_TF,
                h_TF,
                ctx.kind,
                needs_z=ctx.needs_z,
                needs_h=needs_weight2,
                needs_bias=needs_bias1,
            )
            if needs_weight2:
                dweight2_EF = dy_TE.t() @ h_TF
            del h_TF
            if needs_bias1:
                dbias1_F = add_up(partial_1PF, z_TF.dtype)[0]
        if needs_weight1:
            assert dz_TF is not None
            dweight1_FE = dz_TF.t() @ load_input(input_tensors, ctx.input_settings, dy_TE.shape[0])
        if needs_x:
            dx_TE = dz_TF @ weight1_FE
        dbias2_E = column_sum(dy_TE) if needs_bias2 else None
        return dx_TE, dweight1_FE, dbias1_F, dweight2_EF, dbias2_E, None, None
