"""Rotary position embedding on the packed projection.

`T` rows, `B` segments of `L` rows, `H` heads, `D` head dim; 3 stands for q, k, v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_vit_accel import machine, versions
from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.base import Context, Operation
from hf_vit_accel.ops.launch import kernel, tl
from hf_vit_accel.ops.training.context import FunctionContext, Gradients


def rope_reference(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate q and k in fp32, x * cos + rotate_half(x) * sin, rounded once like stock; a new (T, 3, H, D)."""
    dim = qkv_T3HD.shape[-1]
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    cos = cos_TD[:, None, None].to(wide)
    sin = sin_TD[:, None, None].to(wide)
    qk = qkv_T3HD[:, :2].to(wide)
    turned = torch.cat((-qk[..., dim // 2 :], qk[..., : dim // 2]), dim=-1)
    return torch.cat(((qk * cos + turned * sin).to(qkv_T3HD.dtype), qkv_T3HD[:, 2:]), dim=1)


@kernel
def _rope_kernel(
    qkv,
    cos,
    sin,
    rows,
    row_stride,
    table_stride,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    # BACK rotates by the negative angles.
    # q and k of a row are one run of pairs (d, d + DIM / 2). Half of 72 or 80 is no power of two; all heads together
    # fill every lane. A tile has at least as many pairs as threads: otherwise two threads would hold the same pair.
    half: tl.constexpr = DIM // 2
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    pair = (tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P))[None, :]
    inside = (t < rows) & (pair < 2 * HEADS * half)
    d = pair % half
    table = t.to(tl.int64) * table_stride + d
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    first = qkv + t.to(tl.int64) * row_stride + (pair // half * DIM + d)
    x1 = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (x1 * c - x2 * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + half, (x2 * c + x1 * s).to(qkv.dtype.element_ty), mask=inside)


def rope_(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Run `rope_reference` as one kernel, in place; the results are bit-equal, as products are not fused."""
    return _rotate_in_place(qkv_T3HD, cos_TD, sin_TD, back=False)


def _rotate_in_place(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool) -> Tensor:
    rows, _, heads, dim = qkv_T3HD.shape
    block_t = 8
    block_p = 128
    _rope_kernel[(-(-rows // block_t), -(-heads * dim // block_p))](
        qkv_T3HD,
        cos_TD,
        sin_TD,
        rows,
        qkv_T3HD.stride(0),
        cos_TD.stride(0),
        BACK=back,
        HEADS=heads,
        DIM=dim,
        BLOCK_T=block_t,
        BLOCK_P=block_p,
        num_warps=4 if dim % 16 == 0 else 8,  # vectors of 8 where they divide half a head, else of 4
        enable_fp_fusion=False,
    )
    return qkv_T3HD


def rope_back_(dqkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the gradients of rotated q and k back in place."""
    return _rotate_in_place(dqkv_T3HD, cos_TD, sin_TD, back=True)


@kernel
def _rope_gather_kernel(
    dq,
    dk,
    dv,
    cos,
    sin,
    out,
    rows,
    length,
    stride_b,
    stride_h,
    stride_l,
    table_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    half: tl.constexpr = DIM // 2
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    pair = (tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P))[None, :]
    inside = (t < rows) & (pair < HEADS * half)
    d = pair % half
    head = pair // half
    table = t.to(tl.int64) * table_stride + d
    c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
    source = (t // length).to(tl.int64) * stride_b + (t % length).to(tl.int64) * stride_l + head * stride_h + d
    target = out + t.to(tl.int64) * (3 * HEADS * DIM) + head * DIM + d
    dtype: tl.constexpr = out.dtype.element_ty
    q1 = tl.load(dq + source, mask=inside, other=0.0).to(tl.float32)
    q2 = tl.load(dq + source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (q1 * c + q2 * s).to(dtype), mask=inside)
    tl.store(target + half, (q2 * c - q1 * s).to(dtype), mask=inside)
    k1 = tl.load(dk + source, mask=inside, other=0.0).to(tl.float32)
    k2 = tl.load(dk + source + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + HEADS * DIM, (k1 * c + k2 * s).to(dtype), mask=inside)
    tl.store(target + HEADS * DIM + half, (k2 * c - k1 * s).to(dtype), mask=inside)
    tl.store(target + 2 * HEADS * DIM, tl.load(dv + source, mask=inside, other=0.0), mask=inside)
    tl.store(target + 2 * HEADS * DIM + half, tl.load(dv + source + half, mask=inside, other=0.0), mask=inside)


def rope_gather_back(parts_BHLD: tuple[Tensor, ...], cos_TD: Tensor, sin_TD: Tensor, out_T3HD: Tensor) -> Tensor:
    """Rotate the gradients of rotated q and k back, and pack them with v's: T rows of B segments, L rows each.

    Args:
        parts_BHLD: dq, dk and dv, (B, H, L, D), with any strides.
    """
    if len({part.stride() for part in parts_BHLD}) > 1 or parts_BHLD[0].stride(3) != 1:
        parts_BHLD = tuple(part.contiguous() for part in parts_BHLD)
    batch, heads, length, dim = parts_BHLD[0].shape
    stride_b, stride_h, stride_l, _ = parts_BHLD[0].stride()
    assert out_T3HD.is_contiguous() and cos_TD.stride() == sin_TD.stride() and cos_TD.stride(1) == 1
    rows = batch * length
    block_t = 4
    block_p = 512
    _rope_gather_kernel[(-(-rows // block_t), -(-heads * dim // 2 // block_p))](
        *parts_BHLD,
        cos_TD,
        sin_TD,
        out_T3HD,
        rows,
        length,
        stride_b,
        stride_h,
        stride_l,
        cos_TD.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_T=block_t,
        BLOCK_P=block_p,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out_T3HD


class Rope(torch.autograd.Function):
    """Run `rope_reference` by kernels in both directions; only the tables are saved.

    Both run on copies: in place on a view of a product, autograd would copy the gradient three times (`CopySlices`),
    and an incoming gradient may belong to others, too.
    """

    @staticmethod
    def forward(ctx: FunctionContext, qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return rope_(qkv_T3HD.clone(memory_format=torch.contiguous_format), cos_TD, sin_TD)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_T3HD: Tensor) -> Gradients:
        return rope_back_(dout_T3HD.clone(memory_format=torch.contiguous_format), *ctx.saved_tensors), None, None


def tables(rotary: Part, context: Context) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Build a function of rows and positions (T, 2) to cos and sin (T, D), by the tower's own module."""
    rotary = context.called(rotary)
    # A replacement by another module may not tell its arguments: the class of the proven tower does.
    kinds = versions.rotaries_in(context.classes or ()) or [type(rotary)]
    if versions.takes_rows(kinds):
        return rotary
    angles: Callable[[Tensor], Tensor] = rotary
    if versions.takes_length(kinds):
        angles = versions.angles_by_length(rotary, is_stock=not context.reasons_replaced(rotary))

    def make(x_TE: Tensor, positions_T2: Tensor) -> tuple[Tensor, Tensor]:
        half_TD = angles(positions_T2)
        angles_TD = torch.cat((half_TD, half_TD), dim=-1)
        return angles_TD.cos(), angles_TD.sin()

    return make


def reasons_against_rotation(parts: Parts, context: Context) -> list[str]:
    """Report why q and k cannot be rotated by kernels."""
    return context.reasons_replaced(parts.rotary)


def rotate(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Run `Rope` where a gradient flows, else `rope_`: nobody else holds the packed projection."""
    if torch.is_grad_enabled() and qkv_T3HD.requires_grad:
        return Rope.apply(qkv_T3HD, cos_TD, sin_TD)
    return rope_(qkv_T3HD, cos_TD, sin_TD)


OPERATION = Operation(
    name="rope",
    summary="rotation of q and k in one kernel, in place on the packed projection",
    subjects=lambda parts: [parts],
    reasons_against=reasons_against_rotation,
    fused=lambda parts, context: rope_reference if context.reference else rotate,
    plain=lambda parts, context: rope_reference,
)
