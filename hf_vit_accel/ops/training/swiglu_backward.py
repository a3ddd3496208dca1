"""A SwiGLU MLP, trained; `gelu_backward` says what is saved and what is computed again.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8, `P` partial sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.activation import cut_off, pad_swiglu, swiglu, swiglu_reference
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, add_up, column_sum, runs, store_sum
from hf_vit_accel.ops.training.context import FunctionContext, Gradients
from hf_vit_accel.ops.training.gelu_backward import PROGRAMS_PER_SM, STAGES
from hf_vit_accel.ops.training.norm_recipe import NormRecipe, load_input, save_input


def swiglu_mlp_reference(
    x_TE: Tensor,
    gate_FE: Tensor,
    up_FE: Tensor,
    gate_F: Tensor | None,
    up_F: Tensor | None,
    down_EF: Tensor,
    down_E: Tensor | None,
    limit: float | None = None,
    recipe: NormRecipe | None = None,
) -> Tensor:
    """Compute (silu(x G^T + g) * (x U^T + u)) D^T + d, (T, E); autograd saves x, whatever the recipe.

    Args:
        limit: see `swiglu_reference`.
    """
    h_TF = swiglu_reference(F.linear(x_TE, gate_FE, gate_F), F.linear(x_TE, up_FE, up_F), limit=limit)
    return F.linear(h_TF, down_EF, down_E)


@kernel
def _swiglu_backward_kernel(
    both,
    dh,
    dboth,
    partial,
    rows,
    length,
    limit,
    LIMITED: tl.constexpr,
    WIDTH: tl.constexpr,
    NEED_BOTH: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    # both: gate and up, side by side, (T, 2 WIDTH); dboth: their gradients. dh is overwritten by h.
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = both.dtype.element_ty
    total_gate = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    total_up = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for start in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + start + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * (2 * WIDTH) + f
        x = tl.load(both + cell, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(both + cell + WIDTH, mask=inside, other=0.0).to(tl.float32)
        if LIMITED:
            x_flows = x <= limit
            y_flows = (y <= limit) & (y >= -limit)
            x, y = cut_off(x, y, limit)
        gate = 1.0 / (1.0 + tl.exp(-x))
        h = dh + t.to(tl.int64) * WIDTH + f
        if NEED_BOTH:
            dz = tl.load(h, mask=inside, other=0.0).to(tl.float32)
            dx = dz * y * (gate + x * gate * (1.0 - gate))
            dy = dz * (x * gate)
            if LIMITED:
                dx = tl.where(x_flows, dx, 0.0)
                dy = tl.where(y_flows, dy, 0.0)
            tl.store(dboth + cell, dx.to(dtype), mask=inside)
            tl.store(dboth + cell + WIDTH, dy.to(dtype), mask=inside)
            if NEED_BIAS:
                total_gate += dx
                total_up += dy
        tl.store(h, ((x * gate).to(dtype).to(tl.float32) * y).to(dtype), mask=inside)
    if NEED_BIAS:
        store_sum(partial, total_gate, f, tl.program_id(1), WIDTH)
        store_sum(partial, total_up, f, tl.num_programs(1) + tl.program_id(1), WIDTH)


def swiglu_gradient_(
    both_TG: Tensor,
    dh_TG: Tensor,
    dboth_TG: Tensor,
    limit: float | None,
    *,
    needs_dboth: bool = True,
    needs_bias: bool = False,
) -> Tensor:
    """Write the gradients of gate and up where they are needed, and the SwiGLU's result over `dh_TG`.

    Args:
        both_TG: gate and up, side by side, (T, 2 G).
        dh_TG: gradient of the SwiGLU's result, (T, G); overwritten by that result.
        dboth_TG: receives the gradients of gate and up, (T, 2 G).

    Returns:
        Partial sums of dboth, (2, P, G); empty without needs_bias.
    """
    rows, padded = dh_TG.shape
    columns = -(-padded // BLOCK_F)
    length, count = runs(rows, columns, both_TG.device, programs_per_sm=PROGRAMS_PER_SM)
    partial_2PG = torch.empty(2, count * needs_bias, padded, dtype=torch.float32, device=both_TG.device)
    _swiglu_backward_kernel[(columns, count)](
        both_TG,
        dh_TG,
        dboth_TG,
        partial_2PG,
        rows,
        length,
        limit or 0.0,
        LIMITED=limit is not None,
        WIDTH=padded,
        NEED_BOTH=needs_dboth,
        NEED_BIAS=needs_bias,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        STAGES=STAGES,
        num_warps=4,
    )
    return partial_2PG


def pad_swiglu_weights(
    gate_FE: Tensor, up_FE: Tensor, biases: tuple[Tensor | None, Tensor | None] | None, down_EF: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run `pad_swiglu` with biases that may be missing; one missing bias counts as zeros.

    Returns:
        Weight of gate and up, (2 G, E); their bias, (2 G), or None without any; down's weight, (E, G).
    """
    width = gate_FE.shape[0]
    if biases is None or all(bias_F is None for bias_F in biases):
        unused_F = gate_FE.flatten()[:width]  # the kernel always copies biases
        weight, _, down_EG = pad_swiglu(gate_FE, up_FE, unused_F, unused_F, down_EF)
        return weight, None, down_EG
    gate_F, up_F = (gate_FE.new_zeros(width) if bias_F is None else bias_F for bias_F in biases)
    return pad_swiglu(gate_FE, up_FE, gate_F, up_F, down_EF)


class SwigluMlp(torch.autograd.Function):
    """Run `swiglu_mlp_reference`, saving x (or its recipe) and the first two products' results; all of one dtype.

    The widths of all products are multiples of 8, in both directions: cuBLAS takes three times as long for others.
    Weights are padded in every call (26 MB at 1280 x 3420, about 25 us on an H200) and not kept.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        x_TE: Tensor,
        gate_FE: Tensor,
        up_FE: Tensor,
        gate_F: Tensor | None,
        up_F: Tensor | None,
        down_EF: Tensor,
        down_E: Tensor | None,
        limit: float | None = None,
        recipe: NormRecipe | None = None,
    ) -> Tensor:
        _, needs_gate, needs_up, _, _, needs_down, *_ = ctx.needs_input_grad
        ctx.needs_dboth = any(ctx.needs_input_grad[:5])
        ctx.limit = limit
        weight, bias, down_EG = pad_swiglu_weights(gate_FE, up_FE, (gate_F, up_F), down_EF)
        both_TG = F.linear(x_TE, weight, bias)
        h_TG = swiglu(*both_TG.chunk(2, dim=-1), limit=limit)
        del weight
        input_tensors, ctx.input_settings = save_input(x_TE, recipe) if needs_gate or needs_up else ((), None)
        products = (both_TG, gate_FE, up_FE, down_EF) if ctx.needs_dboth or needs_down else (None,) * 4
        ctx.save_for_backward(*products, *input_tensors)
        return F.linear(h_TG, down_EG, down_E)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dy_TE: Tensor) -> Gradients:
        needs_x, needs_gate, needs_up, needs_gate_bias, needs_up_bias, needs_down, needs_down_bias, *_ = (
            ctx.needs_input_grad
        )
        both_TG, gate_FE, up_FE, down_EF, *input_tensors = ctx.saved_tensors
        dy_TE = dy_TE.contiguous()
        dx_TE = dgate_FE = dup_FE = dgate_F = dup_F = ddown_EF = ddown_E = None
        if needs_down_bias:
            ddown_E = column_sum(dy_TE)
        if not (ctx.needs_dboth or needs_down):
            return dx_TE, dgate_FE, dup_FE, dgate_F, dup_F, ddown_EF, ddown_E, None, None
        rows = both_TG.shape[0]
        width = gate_FE.shape[0]
        padded = both_TG.shape[1] // 2
        needs_bias = needs_gate_bias or needs_up_bias
        weight, _, down_EG = pad_swiglu_weights(gate_FE, up_FE, None, down_EF)
        h_TG = dy_TE @ down_EG if ctx.needs_dboth else both_TG.new_empty(rows, padded)  # holds the gradient of h first
        dboth_TG = torch.empty_like(both_TG) if ctx.needs_dboth else both_TG
        partial_2PG = swiglu_gradient_(
            both_TG, h_TG, dboth_TG, ctx.limit, needs_dboth=ctx.needs_dboth, needs_bias=needs_bias
        )
        del down_EG
        if needs_down:
            ddown_EF = (dy_TE.t() @ h_TG)[:, :width].contiguous()
        del h_TG
        if needs_bias:
            dgate_F, dup_F = add_up(partial_2PG, both_TG.dtype, width)
        if needs_gate or needs_up:
            # One product for both; for one of them where the other is frozen.
            first = 0 if needs_gate else padded
            last = 2 * padded if needs_up else padded
            dweight = dboth_TG[:, first:last].t() @ load_input(input_tensors, ctx.input_settings, rows)
            if needs_gate:
                dgate_FE = dweight[:width]
            if needs_up:
                dup_FE = dweight[-padded:][:width]
        if needs_x:
            dx_TE = dboth_TG @ weight
        return (
            dx_TE,
            dgate_FE,
            dup_FE,
            dgate_F if needs_gate_bias else None,
            dup_F if needs_up_bias else None,
            ddown_EF,
            ddown_E,
            None,
            None,
        )
