"""The gradients of residual addition and normalisation, in one pass over the rows.

`T` rows, `E` width, `P` partial sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.add_norm import add_norm_rows, pieces
from hf_vit_accel.ops.base import FunctionContext, Gradients
from hf_vit_accel.ops.launch import device_function, kernel, tl
from hf_vit_accel.ops.training.column_sum import add_up, runs

_PROGRAMS_PER_SM = 4  # each prefetches its next rows


@kernel
def _add_norm_backward_kernel(
    dsum,
    dout,
    total,
    weight,
    statistics,
    dx,
    partial,
    rows,
    length,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    RMS: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    # A program takes a run of rows, BLOCK_T at a time, so that their reductions share barriers. A row is read in two
    # pieces, like in `_add_norm_kernel`.
    e1 = tl.arange(0, MAIN)[None, :]
    e2 = (MAIN + tl.arange(0, TAIL))[None, :]
    w1 = tl.load(weight + e1).to(tl.float32)
    w2 = tl.load(weight + e2, mask=e2 < WIDTH, other=0.0).to(tl.float32)
    dw1 = tl.zeros((1, MAIN), tl.float32)
    dw2 = tl.zeros((1, TAIL), tl.float32)
    db1 = tl.zeros((1, MAIN), tl.float32)
    db2 = tl.zeros((1, TAIL), tl.float32)
    for start in tl.range(0, length, BLOCK_T, num_stages=STAGES):
        t = tl.program_id(0) * length + start + tl.arange(0, BLOCK_T)
        scale = tl.load(statistics + t, mask=t < rows, other=0.0)[:, None]
        row = t.to(tl.int64)[:, None] * WIDTH
        in1 = (t < rows)[:, None] & (e1 < WIDTH)
        in2 = (t < rows)[:, None] & (e2 < WIDTH)
        x1 = tl.load(total + row + e1, mask=in1, other=0.0).to(tl.float32)
        x2 = tl.load(total + row + e2, mask=in2, other=0.0).to(tl.float32)
        y1 = tl.load(dout + row + e1, mask=in1, other=0.0).to(tl.float32)
        y2 = tl.load(dout + row + e2, mask=in2, other=0.0).to(tl.float32)
        if NEED_X and HAS_DSUM:  # loaded early: these loads overlap with the reductions' barriers
            z1 = tl.load(dsum + row + e1, mask=in1, other=0.0)
            z2 = tl.load(dsum + row + e2, mask=in2, other=0.0)
        if not RMS:
            mean = tl.load(statistics + rows + t, mask=t < rows, other=0.0)[:, None]
            x1 -= mean
            x2 = tl.where(in2, x2 - mean, 0.0)
        x1 = x1 * scale
        x2 = x2 * scale
        if NEED_WEIGHT:
            dw1 += tl.sum(y1 * x1, 0)[None, :]
            dw2 += tl.sum(y2 * x2, 0)[None, :]
        if NEED_BIAS:
            db1 += tl.sum(y1, 0)[None, :]
            db2 += tl.sum(y2, 0)[None, :]
        if NEED_X:
            y1, y2 = _input_gradient(x1, x2, y1 * w1, y2 * w2, scale, WIDTH, RMS)
            if HAS_DSUM:
                y1 = y1 + z1.to(tl.float32)
                y2 = y2 + z2.to(tl.float32)
            tl.store(dx + row + e1, y1.to(dx.dtype.element_ty), mask=in1)
            tl.store(dx + row + e2, y2.to(dx.dtype.element_ty), mask=in2)
    run = tl.program_id(0) * WIDTH
    if NEED_WEIGHT:
        tl.store(partial + run + e1, dw1)
        tl.store(partial + run + e2, dw2, mask=e2 < WIDTH)
        run += tl.num_programs(0) * WIDTH
    if NEED_BIAS:
        tl.store(partial + run + e1, db1)
        tl.store(partial + run + e2, db2, mask=e2 < WIDTH)


@device_function
def _input_gradient(x1, x2, y1, y2, scale, WIDTH: tl.constexpr, RMS: tl.constexpr):
    """Return the gradient of the norm's input: from normalised rows x and gradients y of the weighted ones."""
    along = ((tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1)) / WIDTH)[:, None]
    y1 = y1 - x1 * along
    y2 = y2 - x2 * along
    if not RMS:
        # The mean of y - x * along is that of y, since the mean of x is zero.
        level = ((tl.sum(y1, 1) + tl.sum(y2, 1)) / WIDTH)[:, None]
        y1 = y1 - level
        y2 = y2 - level
    return y1 * scale, y2 * scale


class NormRecipe(NamedTuple):
    """The arguments of `add_norm_rows` that made normed rows from a sum.

    A product after a norm saves them for its gradient instead of the rows: the norm saves the sum anyway. At 16384 rows
    this saves 38 to 42 MB a norm and costs about 20 us (H200).
    """

    sum_TE: Tensor
    weight_E: Tensor
    bias_E: Tensor | None
    eps: float
    rms: bool
    dtype: torch.dtype | None = None

    def rows(self) -> Tensor:
        """Compute the normed rows again, (T, E), bit for bit."""
        return add_norm_rows(self.sum_TE, self.sum_TE, None, *self[1:])


class AddNormFunction(torch.autograd.Function):
    """Run `add_norm_reference` as one kernel, and its backward as one kernel and a small one for the parameters.

    x is contiguous. Without delta the sum is x itself. The sum and the rows' statistics are saved. x and delta share
    one gradient tensor where their dtypes are the same.
    """

    @staticmethod
    def forward(
        ctx: FunctionContext,
        x_TE: Tensor,
        delta_TE: Tensor | None,
        weight_E: Tensor,
        bias_E: Tensor | None,
        eps: float,
        rms: bool,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rms = rms
        ctx.delta_dtype = x_TE.dtype if delta_TE is None else delta_TE.dtype
        sum_TE = x_TE if delta_TE is None else torch.empty_like(x_TE)
        statistics_2T = torch.empty(1 if rms else 2, x_TE.shape[0], dtype=torch.float32, device=x_TE.device)
        out_TE = add_norm_rows(x_TE, sum_TE, delta_TE, weight_E, bias_E, eps, rms, dtype, statistics_2T)
        ctx.save_for_backward(sum_TE, weight_E, statistics_2T)
        if not any(ctx.needs_input_grad[:2]):  # only the norm's weights are trained: the sum does not depend on them
            ctx.mark_non_differentiable(sum_TE)
        return sum_TE, out_TE

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dsum_TE: Tensor | None, dout_TE: Tensor | None) -> Gradients:
        needs_x, needs_delta, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        if dout_TE is None:
            ddelta_TE = dsum_TE.to(ctx.delta_dtype) if needs_delta and dsum_TE is not None else None
            return dsum_TE if needs_x else None, ddelta_TE, None, None, None, None, None
        sum_TE, weight_E, statistics_2T = ctx.saved_tensors
        dout_TE = dout_TE.contiguous()
        rows, width = sum_TE.shape
        sizes = pieces(width)
        warps = max(1, sizes["MAIN"] // 1024)  # a wide row, such as a merger's, would spill registers
        length, count = runs(rows, 1, sum_TE.device, block_t=1, programs_per_sm=_PROGRAMS_PER_SM)
        dx_TE = torch.empty_like(sum_TE) if needs_x or needs_delta else None
        sets = needs_weight + needs_bias
        partial_NPE = torch.empty(sets, count, width, dtype=torch.float32, device=sum_TE.device)
        _add_norm_backward_kernel[(count,)](
            dout_TE if dsum_TE is None else dsum_TE.contiguous(),
            dout_TE,
            sum_TE,
            weight_E.contiguous(),
            statistics_2T,
            dout_TE if dx_TE is None else dx_TE,
            partial_NPE,
            rows,
            length,
            **sizes,
            BLOCK_T=1,
            STAGES=4 if warps == 1 else 2,
            RMS=ctx.rms,
            HAS_DSUM=dsum_TE is not None,
            NEED_X=dx_TE is not None,
            NEED_WEIGHT=needs_weight,
            NEED_BIAS=needs_bias,
            num_warps=warps,
        )
        sums = list(add_up(partial_NPE, weight_E.dtype)) if sets else []
        dbias_E = sums.pop() if needs_bias else None
        dweight_E = sums.pop() if needs_weight else None
        ddelta_TE = dx_TE.to(ctx.delta_dtype) if dx_TE is not None and needs_delta else None
        return dx_TE if needs_x else None, ddelta_TE, dweight_E, dbias_E, None, None, None
