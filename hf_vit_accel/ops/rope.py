"""Rotary position embedding on the packed projection.

`T` rows, `H` heads, `D` head dim; 3 stands for q, k, v.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_vit_accel.families.base import Parts
from hf_vit_accel.ops.base import Context, Operation
from hf_vit_accel.ops.launch import jit

try:
    import triton.language as tl
except ImportError:  # pragma: no cover
    tl: Any = None  # type: ignore[no-redef]

__all__ = ["OPERATION", "reasons_against_rotation", "rope_", "rope_reference", "tables"]


def rope_reference(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotate q and k in fp32, rounded once, as stock does (x * cos + rotate_half(x) * sin); a new (T, 3, H, D).

    cos_TD, sin_TD: both halves of D filled alike. On the packed projection q, k and v stay views of one tensor.
    """
    cos, sin = cos_TD[:, None, None].float(), sin_TD[:, None, None].float()
    qk = qkv_T3HD[:, :2].float()
    half = qk.shape[-1] // 2
    turned = torch.cat((-qk[..., half:], qk[..., :half]), dim=-1)
    return torch.cat(((qk * cos + turned * sin).to(qkv_T3HD.dtype), qkv_T3HD[:, 2:]), dim=1)


@jit
def _rope_kernel(
    qkv,
    cos,
    sin,
    rows,
    row_stride,
    table_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # q and k of a row as one run of pairs (d, d + DIM / 2): half of 72 or 80 is no power of two, all of them together
    # fill every lane. A tile has at least as many pairs as threads, so that none is held twice.
    half: tl.constexpr = DIM // 2
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    pair = (tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P))[None, :]
    inside = (t < rows) & (pair < 2 * HEADS * half)
    d = pair % half
    table = t.to(tl.int64) * table_stride + d
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    first = qkv + t.to(tl.int64) * row_stride + (pair // half * DIM + d)
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x1 * c - x2 * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + half, (x2 * c + x1 * s).to(qkv.dtype.element_ty), mask=inside)


def rope_(qkv_T3HD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """`rope_reference` as one kernel, in place, and bit-equal to it (products are not fused)."""
    rows, _, heads, dim = qkv_T3HD.shape
    block_t, block_p = 8, 128
    _rope_kernel[(-(-rows // block_t), -(-heads * dim // block_p))](
        qkv_T3HD,
        cos_TD,
        sin_TD,
        rows,
        qkv_T3HD.stride(0),
        cos_TD.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_T=block_t,
        BLOCK_P=block_p,
        num_warps=4 if dim % 16 == 0 else 8,  # vectors of 8 where half a head holds whole ones, else of 4
        enable_fp_fusion=False,
    )
    return qkv_T3HD


def tables(rotary: Any, context: Context) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Rows and positions (T, 2) to cos and sin (T, D) by the tower's own module, whatever its frequencies."""
    rotary = context.called(rotary)
    if "x" in inspect.signature(type(rotary).forward).parameters:
        return rotary  # type: ignore[no-any-return]

    # Until transformers 5.17 the module returned the angles of one half, and the tower did the rest.
    def make(x_TE: torch.Tensor, positions_T2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half_TD = rotary(positions_T2)
        angles_TD = torch.cat((half_TD, half_TD), dim=-1)
        return angles_TD.cos(), angles_TD.sin()

    return make


def reasons_against_rotation(parts: Parts, context: Context) -> list[str]:
    """Why q and k cannot be rotated on the projection, in place: another module might keep its output."""
    for block in parts.blocks:
        if reasons := context.reasons_replaced(block.qkv, nn.Linear):
            return reasons
    return context.reasons_replaced(parts.rotary)


OPERATION = Operation(
    name="rope",
    summary="rotation of q and k in one kernel, in place on the packed projection",
    subjects=lambda parts: [parts],
    reasons_against=reasons_against_rotation,
    fused=lambda parts, context: rope_reference if context.reference else rope_,
    plain=lambda parts, context: rope_reference,
)
