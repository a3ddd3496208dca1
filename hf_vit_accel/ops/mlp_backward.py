"""A layer's MLP to be trained: what its products made is kept, what its activation made is made again.

A second product's input costs as much memory as the first one's result, and a fraction of a product's time: it is made
again by the same kernel that needs its factors anyhow, for the gradient.
`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8, `P` partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hf_vit_accel.ops.activation import cut_off, pad_swiglu, quick_gelu, quick_gelu_reference, swiglu, swiglu_reference
from hf_vit_accel.ops.column_sum import BLOCK_F, BLOCK_T, add_up, column_sum, runs, store_sum
from hf_vit_accel.ops.launch import jit
from hf_vit_accel.ops.norm_backward import Norm, keep, kept

try:
    import triton.language as tl
except ImportError:  # pragma: no cover
    tl: Any = None  # type: ignore[no-redef]

__all__ = ["KINDS", "GeluMlp", "SwigluMlp", "gelu_mlp", "gelu_mlp_reference", "swiglu_mlp", "swiglu_mlp_reference"]

_EACH_SM, _STAGES = 16, 3  # of the activations' gradients: programs of a multiprocessor, tiles on their way
KINDS = ("gelu", "gelu_tanh", "quick_gelu")
"""Activations of `gelu_mlp`: the first, in the error function's form, is that of the mergers."""


def gelu_mlp_reference(
    x_TE: torch.Tensor,
    weight1_FE: torch.Tensor,
    bias1_F: torch.Tensor | None,
    weight2_EF: torch.Tensor,
    bias2_E: torch.Tensor | None,
    kind: str,
    norm: Norm | None = None,
) -> torch.Tensor:
    """act(x W1^T + b1) W2^T + b2, (T, E); autograd keeps x, whatever it was made of."""
    z_TF = F.linear(x_TE, weight1_FE, bias1_F)
    if kind == "quick_gelu":
        return F.linear(quick_gelu_reference(z_TF), weight2_EF, bias2_E)
    return F.linear(F.gelu(z_TF, approximate="tanh" if kind == "gelu_tanh" else "none"), weight2_EF, bias2_E)


def swiglu_mlp_reference(
    x_TE: torch.Tensor,
    gate_FE: torch.Tensor,
    up_FE: torch.Tensor,
    gate_F: torch.Tensor | None,
    up_F: torch.Tensor | None,
    down_EF: torch.Tensor,
    down_E: torch.Tensor | None,
    limit: float | None = None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """(silu(x G^T + g) * (x U^T + u)) D^T + d, (T, E); autograd keeps x, whatever it was made of. limit: see swiglu."""
    h_TF = swiglu_reference(F.linear(x_TE, gate_FE, gate_F), F.linear(x_TE, up_FE, up_F), limit=limit)
    return F.linear(h_TF, down_EF, down_E)


def _activate(z_TF: torch.Tensor, kind: str) -> torch.Tensor:
    """What stock makes of the rounded result of the first product."""
    if kind == "quick_gelu":
        return quick_gelu(z_TF)
    return F.gelu(z_TF, approximate="tanh" if kind == "gelu_tanh" else "none")


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


class GeluMlp(torch.autograd.Function):
    """`gelu_mlp` as autograd runs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: torch.Tensor,
        weight1_FE: torch.Tensor,
        bias1_F: torch.Tensor | None,
        weight2_EF: torch.Tensor,
        bias2_E: torch.Tensor | None,
        kind: str,
        norm: Norm | None,
    ) -> torch.Tensor:
        needs_x, needs_weight1, needs_bias1, needs_weight2 = ctx.needs_input_grad[:4]
        ctx.kind = kind
        ctx.needs_z = needs_x or needs_weight1 or needs_bias1
        z_TF = F.linear(x_TE, weight1_FE, bias1_F)
        tensors, ctx.settings = keep(x_TE, norm) if needs_weight1 else ((), None)
        ctx.save_for_backward(
            z_TF if ctx.needs_z or needs_weight2 else None,
            weight1_FE if needs_x else None,
            weight2_EF if ctx.needs_z else None,
            *tensors,
        )
        return F.linear(_activate(z_TF, kind), weight2_EF, bias2_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        z_TF, weight1_FE, weight2_EF, *tensors = ctx.saved_tensors
        dy_TE = dy_TE.contiguous()
        dx_TE = dweight1_FE = dbias1_F = dweight2_EF = dz_TF = None
        if ctx.needs_z or needs_weight2:
            (rows, width), columns = z_TF.shape, -(-z_TF.shape[1] // BLOCK_F)
            dz_TF = dy_TE @ weight2_EF if ctx.needs_z else z_TF
            h_TF = torch.empty_like(z_TF) if needs_weight2 else z_TF
            length, count = runs(rows, columns, z_TF.device, each_sm=_EACH_SM)
            partial_1PF = torch.empty(1, count if needs_bias1 else 0, width, dtype=torch.float32, device=z_TF.device)
            _gelu_backward_kernel[(columns, count)](
                z_TF,
                dz_TF,
                dz_TF,
                h_TF,
                partial_1PF,
                rows,
                length,
                WIDTH=width,
                KIND=ctx.kind,
                NEED_Z=ctx.needs_z,
                NEED_H=needs_weight2,
                NEED_BIAS=needs_bias1,
                BLOCK_T=BLOCK_T,
                BLOCK_F=BLOCK_F,
                STAGES=_STAGES,
                num_warps=8,
            )
            dweight2_EF = dy_TE.t() @ h_TF if needs_weight2 else None
            del h_TF
            dbias1_F = add_up(partial_1PF, z_TF.dtype)[0] if needs_bias1 else None
        if needs_weight1:
            dweight1_FE = dz_TF.t() @ kept(tensors, ctx.settings, len(dy_TE))  # type: ignore[union-attr]
        if needs_x:
            dx_TE = dz_TF @ weight1_FE
        return dx_TE, dweight1_FE, dbias1_F, dweight2_EF, column_sum(dy_TE) if needs_bias2 else None, None, None


def gelu_mlp(
    x_TE: torch.Tensor,
    weight1_FE: torch.Tensor,
    bias1_F: torch.Tensor | None,
    weight2_EF: torch.Tensor,
    bias2_E: torch.Tensor | None,
    kind: str,
    norm: Norm | None = None,
) -> torch.Tensor:
    """`gelu_mlp_reference` that saves x and the first product's result; all of one dtype.

    norm: what x was made of by `add_norm`, saved in its place. What only a frozen weight's gradient would need is
    neither saved nor made.
    """
    out_TE: torch.Tensor = GeluMlp.apply(x_TE, weight1_FE, bias1_F, weight2_EF, bias2_E, kind, norm)
    return out_TE


@jit
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
    # both: gate and up, side by side, (T, 2 WIDTH), as their gradients. dh is overwritten by h.
    f = (tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    dtype: tl.constexpr = both.dtype.element_ty
    total_gate = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    total_up = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for at in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = (tl.program_id(1) * length + at + tl.arange(0, BLOCK_T))[:, None]
        inside = (t < rows) & (f < WIDTH)
        cell = t.to(tl.int64) * (2 * WIDTH) + f
        x = tl.load(both + cell, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(both + cell + WIDTH, mask=inside, other=0.0).to(tl.float32)
        if LIMITED:
            x_flows, y_flows = x <= limit, (y <= limit) & (y >= -limit)
            x, y = cut_off(x, y, limit)
        gate = 1.0 / (1.0 + tl.exp(-x))
        h = dh + t.to(tl.int64) * WIDTH + f
        if NEED_BOTH:
            dz = tl.load(h, mask=inside, other=0.0).to(tl.float32)
            dx, dy = dz * y * (gate + x * gate * (1.0 - gate)), dz * (x * gate)
            if LIMITED:
                dx, dy = tl.where(x_flows, dx, 0.0), tl.where(y_flows, dy, 0.0)
            tl.store(dboth + cell, dx.to(dtype), mask=inside)
            tl.store(dboth + cell + WIDTH, dy.to(dtype), mask=inside)
            if NEED_BIAS:
                total_gate += dx
                total_up += dy
        tl.store(h, ((x * gate).to(dtype).to(tl.float32) * y).to(dtype), mask=inside)
    if NEED_BIAS:
        store_sum(partial, total_gate, f, tl.program_id(1), WIDTH)
        store_sum(partial, total_up, f, tl.num_programs(1) + tl.program_id(1), WIDTH)


def _aligned(
    gate_FE: torch.Tensor,
    up_FE: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    down_EF: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`pad_swiglu`, but a down-projection whose width is a multiple of 8 is taken as it is.

    Of biases, what is missing is zeros; for none at all none is returned.
    """
    width = len(gate_FE)
    if biases is None or all(bias_F is None for bias_F in biases):
        if width % 8 == 0:
            return torch.cat((gate_FE, up_FE)), None, down_EF
        some_F = gate_FE.flatten()[:width]  # the kernel wants to copy some
        weight, _, down_EG = pad_swiglu(gate_FE, up_FE, some_F, some_F, down_EF)
        return weight, None, down_EG
    gate_F, up_F = (gate_FE.new_zeros(width) if bias_F is None else bias_F for bias_F in biases)
    if width % 8 == 0:
        return torch.cat((gate_FE, up_FE)), torch.cat((gate_F, up_F)), down_EF
    return pad_swiglu(gate_FE, up_FE, gate_F, up_F, down_EF)


class SwigluMlp(torch.autograd.Function):
    """`swiglu_mlp` as autograd runs it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: torch.Tensor,
        gate_FE: torch.Tensor,
        up_FE: torch.Tensor,
        gate_F: torch.Tensor | None,
        up_F: torch.Tensor | None,
        down_EF: torch.Tensor,
        down_E: torch.Tensor | None,
        limit: float | None,
        norm: Norm | None,
    ) -> torch.Tensor:
        _, needs_gate, needs_up, _, _, needs_down, *_ = ctx.needs_input_grad
        ctx.needs_both, ctx.limit = any(ctx.needs_input_grad[:5]), limit
        weight, bias, down_EG = _aligned(gate_FE, up_FE, (gate_F, up_F), down_EF)
        both_TG = F.linear(x_TE, weight, bias)
        del weight
        tensors, ctx.settings = keep(x_TE, norm) if needs_gate or needs_up else ((), None)
        saved = (both_TG, gate_FE, up_FE, down_EF) if ctx.needs_both or needs_down else (None,) * 4
        ctx.save_for_backward(*saved, *tensors)
        return F.linear(swiglu(*both_TG.chunk(2, dim=-1), limit=limit), down_EG, down_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_x, needs_gate, needs_up, needs_gate_bias, needs_up_bias, needs_down, needs_down_bias, *_ = (
            ctx.needs_input_grad
        )
        both_TG, gate_FE, up_FE, down_EF, *tensors = ctx.saved_tensors
        dy_TE = dy_TE.contiguous()
        gradients: list[torch.Tensor | None] = [None] * 9
        gradients[6] = column_sum(dy_TE) if needs_down_bias else None
        if not (ctx.needs_both or needs_down):
            return tuple(gradients)
        width, padded, rows = len(gate_FE), both_TG.shape[1] // 2, len(both_TG)
        weight, _, down_EG = _aligned(gate_FE, up_FE, None, down_EF)
        h_TG = dy_TE @ down_EG if ctx.needs_both else both_TG.new_empty(rows, padded)
        del down_EG
        dboth_TG = torch.empty_like(both_TG) if ctx.needs_both else both_TG
        columns = -(-padded // BLOCK_F)
        length, count = runs(rows, columns, both_TG.device, each_sm=_EACH_SM)
        needs_bias = needs_gate_bias or needs_up_bias
        partial_2PG = torch.empty(2, count * needs_bias, padded, dtype=torch.float32, device=both_TG.device)
        _swiglu_backward_kernel[(columns, count)](
            both_TG,
            h_TG,
            dboth_TG,
            partial_2PG,
            rows,
            length,
            ctx.limit or 0.0,
            LIMITED=ctx.limit is not None,
            WIDTH=padded,
            NEED_BOTH=ctx.needs_both,
            NEED_BIAS=needs_bias,
            BLOCK_T=BLOCK_T,
            BLOCK_F=BLOCK_F,
            STAGES=_STAGES,
            num_warps=4,
        )
        if needs_down:
            gradients[5] = (dy_TE.t() @ h_TG)[:, :width].contiguous()
        del h_TG
        if needs_bias:
            dgate_F, dup_F = add_up(partial_2PG, both_TG.dtype, width)
            gradients[3], gradients[4] = dgate_F if needs_gate_bias else None, dup_F if needs_up_bias else None
        if needs_gate or needs_up:
            # Of one only, where the other is frozen.
            first, last = 0 if needs_gate else padded, 2 * padded if needs_up else padded
            dweight = dboth_TG[:, first:last].t() @ kept(tensors, ctx.settings, rows)
            gradients[1] = dweight[:width] if needs_gate else None
            gradients[2] = dweight[-padded:][:width] if needs_up else None
        if needs_x:
            gradients[0] = dboth_TG @ weight
        return tuple(gradients)


def swiglu_mlp(
    x_TE: torch.Tensor,
    gate_FE: torch.Tensor,
    up_FE: torch.Tensor,
    gate_F: torch.Tensor | None,
    up_F: torch.Tensor | None,
    down_EF: torch.Tensor,
    down_E: torch.Tensor | None,
    limit: float | None = None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """`swiglu_mlp_reference` that saves x and the results of its first two products; all of one dtype.

    All products have widths that are multiples of 8, forward and backward: cuBLAS takes three times as long for others.
    Weights are padded for each call (26 MB at 1280 x 3420, about 25 us on an H200), and nothing of that is kept.
    norm: what x was made of by `add_norm`, saved in its place.
    """
    out_TE: torch.Tensor = SwigluMlp.apply(x_TE, gate_FE, up_FE, gate_F, up_F, down_EF, down_E, limit, norm)
    return out_TE
