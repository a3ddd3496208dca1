"""Interpolated position embeddings, added without being materialised.

`T` rows, `E` width, `N` rows of the table, 4 taps of the bilinear interpolation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_vit_accel.ops.base import Context, Operation
from hf_vit_accel.ops.launch import jit

try:
    import triton.language as tl
except ImportError:  # pragma: no cover
    tl: Any = None  # type: ignore[no-redef]

__all__ = ["OPERATION", "add_positions_", "add_positions_reference_"]


def add_positions_reference_(
    x_TE: torch.Tensor, table_NE: torch.Tensor, indices_T4: torch.Tensor, weights_T4: torch.Tensor
) -> torch.Tensor:
    """x += the weighted sum of four table rows, summed in fp32 and rounded to x's dtype before it is added."""
    x_TE += (table_NE[indices_T4] * weights_T4[:, :, None]).sum(1).to(x_TE.dtype)
    return x_TE


@jit
def _add_positions_kernel(x, table, indices, weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(4):
        source = tl.load(indices + row * 4 + tap).to(tl.int64)
        weight = tl.load(weights + row * 4 + tap)
        total += tl.load(table + source * WIDTH + e, mask=inside, other=0.0).to(tl.float32) * weight
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * WIDTH + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * WIDTH + e, (value + total.to(dtype).to(tl.float32)).to(dtype), mask=inside)


def add_positions_(
    x_TE: torch.Tensor, table_NE: torch.Tensor, indices_T4: torch.Tensor, weights_T4: torch.Tensor
) -> torch.Tensor:
    """`add_positions_reference_` as one kernel: nothing of size (T, 4, E) is written."""
    rows, width = x_TE.shape
    assert x_TE.is_contiguous() and indices_T4.is_contiguous() and weights_T4.is_contiguous()
    table_NE = table_NE.contiguous()
    block = 256
    _add_positions_kernel[(rows, -(-width // block))](
        x_TE, table_NE, indices_T4, weights_T4, WIDTH=width, BLOCK=block, num_warps=1, enable_fp_fusion=False
    )
    return x_TE


AddPositions = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _fused(table: nn.Embedding, context: Context) -> AddPositions:
    if context.reference:
        return _plain(table, context)
    return lambda x_TE, indices_T4, weights_T4: add_positions_(x_TE, table.weight, indices_T4, weights_T4)


def _plain(table: nn.Module, context: Context) -> AddPositions:
    table = context.called(table)

    def add(x_TE: torch.Tensor, indices_T4: torch.Tensor, weights_T4: torch.Tensor) -> torch.Tensor:
        taps_T4E: torch.Tensor = table(indices_T4) * weights_T4[:, :, None]
        return x_TE + taps_T4E.sum(1).to(x_TE.dtype)

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
