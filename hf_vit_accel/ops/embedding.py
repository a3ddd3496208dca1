"""What rows begin with: patches are embedded, positions are added to rows, and q and k are rotated by them.

The patch embedding is a convolution without overlap, run as one matrix product: the convolution of 16384 patches takes
3048 us, the product 84 (H200). The weight is used through a view. Learned positions are added without being
materialised.

`T` rows, `P` pixels of a patch (channels * temporal * patch * patch), `E` width, `N` rows of the table of positions,
`4` taps of the bilinear interpolation (any number is taken), `B` segments of `L` rows, `H` heads, `D` head dim. 3
stands for q, k, v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_vit_accel import machine, versions
from hf_vit_accel.families.base import Part, Parts
from hf_vit_accel.ops.base import Apply, Context, FunctionContext, Gradients, Operation
from hf_vit_accel.ops.launch import kernel, tl

READ_OF_CONVOLUTION = "stride", "kernel_size", "groups", "padding", "dilation"
"""Attributes of a convolution beside its weights; a Linear has none of them."""


def _reasons_against_embed(parts: Parts, context: Context) -> list[str]:
    if id(parts.patch_embed) in context.hooked_parts:
        return ["it has hooks"]
    conv = parts.projection
    kind = next((kind for kind in (nn.Linear, nn.Conv2d, nn.Conv3d) if type(conv) is kind), nn.Conv3d)
    reasons = context.reasons_replaced(conv, kind) or ([] if kind is nn.Linear else reasons_overlapping(conv))
    return reasons or ([] if parts.patch_embed is conv else context.reasons_replaced(parts.patch_embed))


def reasons_overlapping(conv: Part) -> list[str]:
    """Report why a convolution is no product: its stride is not its kernel."""
    is_product = conv.stride == conv.kernel_size and conv.groups == 1 and set(conv.dilation) == {1}
    if is_product and (conv.padding == "valid" or not any(conv.padding)):
        return []
    return ["patch_embed.proj is not a convolution whose stride is its kernel"]


def _fused_embed(parts: Parts, context: Context) -> Apply:
    convolution = parts.projection
    read_weights = context.reader((convolution, "weight"), (convolution, "bias"))
    dtype = context.dtype
    for name in READ_OF_CONVOLUTION:
        context.read(convolution, name)

    def embed(pixels_TP: Tensor) -> Tensor:
        weight, bias_E = read_weights()
        return F.linear(pixels_TP.to(dtype), weight.flatten(1), bias_E)

    return embed


def _plain_embed(parts: Parts, context: Context) -> Apply:
    module = context.called(parts.patch_embed)

    def embed(pixels_TP: Tensor) -> Tensor:
        if module is parts.projection:  # it takes patches in its own shape and dtype
            weight = module.weight
            pixels_TP = pixels_TP.to(weight.dtype).view(-1, *weight.shape[1:])
        # A copy, since kernels write to the residual stream in place and a module may keep its output.
        x_TE: Tensor = module(pixels_TP).flatten(1)
        return x_TE.clone(memory_format=torch.contiguous_format)

    return embed


PATCH_EMBED = Operation(
    name="patch_embed",
    summary="the convolution as one matrix product over the flattened weight",
    subjects=lambda parts: [parts],
    reasons_against=_reasons_against_embed,
    fused=_fused_embed,
    plain=_plain_embed,
    triton=False,
)


# --- learned positions

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


def _fused_positions(table: nn.Embedding, context: Context) -> Add:
    if context.reference:
        add: Callable[..., Tensor] = add_positions_reference
    else:
        add = AddPositions.apply if context.grad else add_positions_
    is_unrounded = versions.adds_unrounded(context.classes or ())

    def add_positions(x_TE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
        weight = table.weight
        return add(x_TE.to(weight.dtype) if is_unrounded else x_TE, weight, indices_T4, weights_T4)

    return add_positions


def _plain_positions(table: nn.Module, context: Context) -> Add:
    table = context.called(table)
    is_unrounded = versions.adds_unrounded(context.classes or ())

    def add(x_TE: Tensor, indices_T4: Tensor, weights_T4: Tensor) -> Tensor:
        taps_T4E: Tensor = table(indices_T4)
        dtype = taps_T4E.dtype if is_unrounded else x_TE.dtype
        return x_TE + (taps_T4E * weights_T4[:, :, None]).sum(1).to(dtype)

    return add


POSITIONS = Operation(
    name="positions",
    summary="interpolated position embeddings gathered, weighted and added in one kernel",
    subjects=lambda parts: [] if parts.table is None else [parts.table],
    reasons_against=lambda table, context: context.reasons_replaced(table, nn.Embedding),
    fused=_fused_positions,
    plain=_plain_positions,
    missing="the tower has no position table",
)


# --- rotary positions


def rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the pairs (d, d + D / 2) of every head, x * cos + rotate_half(x) * sin, in fp32, rounded once like stock."""
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    first, second = x_THD.to(wide).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_THD.to(wide) * cos_TD[:, None].to(wide) + turned * sin_TD[:, None].to(wide)).to(x_THD.dtype)


def rope_reference(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate q and k; a new (T, 3, H, D). Every eager call on a CPU runs it, so it enters no other function."""
    wide = torch.promote_types(qkv_T3HD.dtype, torch.float32)
    qk = qkv_T3HD[:, :2].to(wide)
    first, second = qk.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    qk = qk * cos_TD[:, None, None].to(wide) + turned * sin_TD[:, None, None].to(wide)
    return torch.cat((qk.to(qkv_T3HD.dtype), qkv_T3HD[:, 2:]), dim=1)


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


def rope_(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> Tensor:
    """Run `rope_reference` as one kernel, in place; the results are bit-equal, as products are not fused.

    `back` rotates the gradients of rotated q and k back.
    """
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
    """Rotate dq and dk back, and pack them with dv: (B, H, L, D) each, with any strides, to T = B L rows."""
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
        dqkv_T3HD = dout_T3HD.clone(memory_format=torch.contiguous_format)
        return rope_(dqkv_T3HD, *ctx.saved_tensors, back=True), None, None


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
    return context.reasons_replaced(parts.rotary)


def rotate(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Run `Rope` where a gradient flows, else `rope_`: nobody else holds the packed projection."""
    if torch.is_grad_enabled() and qkv_T3HD.requires_grad:
        return Rope.apply(qkv_T3HD, cos_TD, sin_TD)
    return rope_(qkv_T3HD, cos_TD, sin_TD)


ROPE = Operation(
    name="rope",
    summary="rotation of q and k in one kernel, in place on the packed projection",
    subjects=lambda parts: [parts],
    reasons_against=reasons_against_rotation,
    fused=lambda parts, context: rope_reference if context.reference else rotate,
    plain=lambda parts, context: rope_reference,
)
