"""The kernel of a SwiGLU's gradients, which also writes its result again, and its padded weights.

`T` rows, `E` width, `F` width of the MLP, `G` that width rounded up to a multiple of 8, `P` partial sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel.ops.activation import cut_off, pad_swiglu
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.column_sum import BLOCK_F, BLOCK_T, runs, store_sum
from hf_vit_accel.ops.training.gelu_backward import PROGRAMS_PER_SM, STAGES


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
    needs_bias: bool = False,
) -> Tensor:
    """Write the gradients of gate and up, and the SwiGLU's result over `dh_TG`.

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
