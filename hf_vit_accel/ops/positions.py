"""Interpolated position embeddings, added without being materialised.

`T` rows, `E` width, `N` rows of the table, `4` taps of the bilinear interpolation (any number is taken).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hf_vit_accel import machine, versions
from hf_vit_accel.ops.base import Context, Operation
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.context import FunctionContext, Gradients

_BLOCK = 256


def add_positions_reference(x_TE: Tensor, table_NE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
    """Add the weighted sum of four table rows, made in fp32 and rounded to x's dtype, to x; (T, E)."""
    return x_TE + (table_NE[indices_T4] * weights_T4[:, :, None]).sum(1).to(x_TE.dtype)


@kernel
def _add_positions_kernel(
    x, table, indices, weights, out, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        source = tl.load(indices + row * TAPS + tap).to(tl.int64)
        weight = tl.load(weights + row * TAPS + tap)
        total += tl.load(table + source * WIDTH + e, mask=inside, other=0.0).to(tl.float32) * weight
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * WIDTH + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + e, (value + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)


def add_positions_(x_TE: Tensor, table_NE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
    """Run `add_positions_reference` as one kernel, in place; nothing of size (T, 4, E) is written."""
    assert x_TE.is_contiguous()
    return _add(x_TE, table_NE, indices_T4, weights_T4, x_TE)


def _add(x_TE: Tensor, table_NE: Tensor, indices_T4: Tensor, weights_T4: Tensor, out_TE: Tensor) -> Tensor:
    rows, width = x_TE.shape
    assert indices_T4.is_contiguous() and weights_T4.is_contiguous()
    _add_positions_kernel[(rows, -(-width // _BLOCK))](
        x_TE,
        table_NE.contiguous(),
        indices_T4,
        weights_T4,
        out_TE,
        WIDTH=width,
        TAPS=indices_T4.shape[1],
        BLOCK=_BLOCK,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out_TE


def _table_gradient(dout_TE: Tensor, indices_T4: Tensor, weights_T4: Tensor, table_rows: int) -> Tensor:
    """Compute the gradient of the table, (N, E), in fp32."""
    dout_TE = dout_TE.float()
    dtable_NE = dout_TE.new_zeros(table_rows, dout_TE.shape[1])
    for indices_T, weights_T in zip(indices_T4.unbind(1), weights_T4.unbind(1), strict=True):
        dtable_NE.index_add_(0, indices_T, dout_TE * weights_T[:, None].float())
    return dtable_NE


class AddPositions(torch.autograd.Function):
    """Run `add_positions_reference` as one kernel, saving indices and weights; the table's gradient adds in fp32."""

    @staticmethod
    def forward(ctx: FunctionContext, x_TE: Tensor, table_NE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
        ctx.save_for_backward(indices_T4, weights_T4)
        ctx.table = table_NE.shape[0], table_NE.dtype
        x_TE = x_TE.contiguous()
        return _add(x_TE, table_NE, indices_T4, weights_T4, torch.empty_like(x_TE))

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_TE: Tensor) -> Gradients:
        needs_x, needs_table, _, _ = ctx.needs_input_grad
        table_rows, dtype = ctx.table
        indices_T4, weights_T4 = ctx.saved_tensors
        dtable_NE = _table_gradient(dout_TE, indices_T4, weights_T4, table_rows).to(dtype) if needs_table else None
        return dout_TE if needs_x else None, dtable_NE, None, None


Add = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fused(table: nn.Embedding, context: Context) -> Add:
    if context.reference:
        add: Callable[..., Tensor] = add_positions_reference
    else:
        add = AddPositions.apply if context.grad else add_positions_
    kinds = context.classes or ()
    if not versions.adds_unrounded(kinds):
        return lambda x_TE, indices_T4, weights_T4: add(x_TE, table.weight, indices_T4, weights_T4)

    def add_unrounded(x_TE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
        return add(x_TE.to(table.weight.dtype), table.weight, indices_T4, weights_T4)

    return add_unrounded


def _plain(table: nn.Module, context: Context) -> Add:
    table = context.called(table)
    is_unrounded = versions.adds_unrounded(context.classes or ())

    def add(x_TE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
        taps_T4E: Tensor = table(indices_T4)
        dtype = taps_T4E.dtype if is_unrounded else x_TE.dtype
        return x_TE + (taps_T4E * weights_T4[:, :, None]).sum(1).to(dtype)

    return add


OPERATION = Operation(
    name="positions",
    summary="interpolated position embeddings gathered, weighted and added in one kernel",
    subjects=lambda parts: [] if parts.table is None else [parts.table],
    reasons_against=lambda table, context: context.reasons_replaced(table, nn.Embedding),
    fused=_fused,
    plain=_plain,
    missing="the tower has no position table",
)
