"""Attention within short windows, rotation included, from the packed projection.

`T` rows, `S` windows, `L` rows of a window, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.base import Context, FunctionContext, Gradients, Operation
from hf_vit_accel.ops.embedding import reasons_against_rotation, rope_reference
from hf_vit_accel.ops.launch import kernel, next_power_of_2, tl
from hf_vit_accel.ops.training.nodes import OpWithBackward

LONGEST = 64
"""Rows of the longest window that the kernels take: one program holds a complete window."""


def attention_reference(qkv_T3HD: Tensor, lengths_S: Sequence[int], scale: float) -> Tensor:
    """Compute softmax(scale * q k^T) v within every segment, (T, H, D), in the dtype of `qkv_T3HD`."""
    outputs = []
    for segment_L3HD in qkv_T3HD.split(list(lengths_S)):
        q_HLD, k_HLD, v_HLD = segment_L3HD.permute(1, 2, 0, 3)
        outputs.append(((scale * (q_HLD @ k_HLD.mT)).softmax(-1) @ v_HLD).transpose(0, 1))
    return torch.cat(outputs)


def window_attention_reference(
    qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor, cu_seqlens_S1: Tensor, scale: float
) -> Tensor:
    """Rotate q and k, then compute softmax(scale * q k^T) v within every window, (T, H, D); not in place."""
    wide_T3HD = rope_reference(qkv_T3HD, cos_TD, sin_TD).to(torch.promote_types(qkv_T3HD.dtype, torch.float32))
    return attention_reference(wide_T3HD, cu_seqlens_S1.diff().tolist(), scale).to(qkv_T3HD.dtype)


@kernel
def _window_attention_kernel(
    qkv,
    cos,
    sin,
    offsets,
    out,
    scale_log2,
    table_stride,
    HEADS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The head dim is split in its two rotary halves: each is loaded once, rotated in registers, then multiplied.
    half: tl.constexpr = DIM // 2
    start = tl.load(offsets + tl.program_id(0)).to(tl.int64)
    length = (tl.load(offsets + tl.program_id(0) + 1) - start).to(tl.int32)
    if length == 0:
        return
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (t < length)[:, None] & (d < half)[None, :]
    row = start + t
    c = tl.load(cos + row[:, None] * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row[:, None] * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    for index in tl.range(HEADS_PER_PROGRAM, num_stages=2):  # the next head is loaded while this one is computed
        head = (tl.program_id(1) * HEADS_PER_PROGRAM + index) * DIM
        q = qkv + row[:, None] * (3 * HEADS * DIM) + head + d[None, :]
        k = q + HEADS * DIM
        v = q + 2 * HEADS * DIM
        q1 = tl.load(q, mask=inside, other=0.0).to(tl.float32)
        q2 = tl.load(q + half, mask=inside, other=0.0).to(tl.float32)
        k1 = tl.load(k, mask=inside, other=0.0).to(tl.float32)
        k2 = tl.load(k + half, mask=inside, other=0.0).to(tl.float32)
        v1 = tl.load(v, mask=inside, other=0.0)
        v2 = tl.load(v + half, mask=inside, other=0.0)
        scores = tl.dot((q1 * c - q2 * s).to(dtype), tl.trans((k1 * c - k2 * s).to(dtype)))
        scores = tl.dot((q2 * c + q1 * s).to(dtype), tl.trans((k2 * c + k1 * s).to(dtype)), acc=scores)
        scores = tl.where((t < length)[None, :], scores * scale_log2, float("-inf"))
        weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
        total = tl.sum(weights, axis=1)[:, None]
        weights = weights.to(dtype)
        o = out + row[:, None] * (HEADS * DIM) + head + d[None, :]
        tl.store(o, (tl.dot(weights, v1) / total).to(dtype), mask=inside)
        tl.store(o + half, (tl.dot(weights, v2) / total).to(dtype), mask=inside)


@lru_cache(maxsize=256)
def heads_per_program(windows: int, heads: int, slots: int) -> int:
    """Choose how many heads one program takes, one after the other, with cos and sin in registers.

    More heads are better while the programs fill all slots: cos and sin are loaded once, and the next head is loaded
    during this one (256 windows of 64 rows, 16 heads of 80: 86 us with 2 heads, 78 with 16; H200). A program itself
    costs about a third of one head's time.
    """

    def cost(count: int) -> tuple[int, int]:
        rounds = -(-windows * heads // count // slots)
        return rounds * (3 * count + 1), -count

    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return min(divisors, key=cost)


def window_attention(qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor, cu_seqlens_S1: Tensor, scale: float) -> Tensor:
    """Run `window_attention_reference` as one kernel over contiguous windows of at most `LONGEST` rows, some empty."""
    rows, _, heads, dim = qkv_T3HD.shape
    assert qkv_T3HD.is_contiguous()
    out_THD = qkv_T3HD.new_empty(rows, heads, dim)
    windows = cu_seqlens_S1.shape[0] - 1
    # In a CUDA graph most windows may be empty, so the number of full ones is estimated from the rows.
    full_windows = min(windows, -(-rows // LONGEST))
    heads_of_one_program = heads_per_program(full_windows, heads, 2 * machine.multiprocessors(qkv_T3HD.device))
    _window_attention_kernel[(windows, heads // heads_of_one_program)](
        qkv_T3HD,
        cos_TD,
        sin_TD,
        cu_seqlens_S1,
        out_THD,
        scale * 1.4426950408889634,
        cos_TD.stride(0),
        HEADS=heads,
        HEADS_PER_PROGRAM=heads_of_one_program,
        DIM=dim,
        BLOCK_T=LONGEST,
        BLOCK_D=max(next_power_of_2(dim // 2), 16),
        num_warps=4,
    )
    return out_THD


@kernel
def _window_attention_backward_kernel(
    qkv,
    cos,
    sin,
    offsets,
    dout,
    dqkv,
    scale,
    table_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program takes one window of one head, in halves like the forward kernel. Gradients are rotated back in registers
    # and written once.
    half: tl.constexpr = DIM // 2
    start = tl.load(offsets + tl.program_id(0)).to(tl.int64)
    length = (tl.load(offsets + tl.program_id(0) + 1) - start).to(tl.int32)
    if length == 0:
        return
    t = tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = (t < length)[:, None] & (d < half)[None, :]
    row = (start + t)[:, None]
    dtype: tl.constexpr = qkv.dtype.element_ty
    cell = row * (3 * HEADS * DIM) + tl.program_id(1) * DIM + d[None, :]
    q = qkv + cell
    k = qkv + cell + HEADS * DIM
    v = qkv + cell + 2 * HEADS * DIM
    c = tl.load(cos + row * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(q, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(q + half, mask=inside, other=0.0).to(tl.float32)
    q1 = (x1 * c - x2 * s).to(dtype)
    q2 = (x2 * c + x1 * s).to(dtype)
    x1 = tl.load(k, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(k + half, mask=inside, other=0.0).to(tl.float32)
    k1 = (x1 * c - x2 * s).to(dtype)
    k2 = (x2 * c + x1 * s).to(dtype)

    scores = tl.dot(q2, tl.trans(k2), acc=tl.dot(q1, tl.trans(k1))) * scale
    scores = tl.where((t < length)[None, :], scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weights = weights / tl.sum(weights, axis=1)[:, None]

    o = dout + row * (HEADS * DIM) + tl.program_id(1) * DIM + d[None, :]
    o1 = tl.load(o, mask=inside, other=0.0)
    o2 = tl.load(o + half, mask=inside, other=0.0)
    dv = dqkv + cell + 2 * HEADS * DIM
    turned = tl.trans(weights.to(dtype))
    tl.store(dv, tl.dot(turned, o1).to(dtype), mask=inside)
    tl.store(dv + half, tl.dot(turned, o2).to(dtype), mask=inside)

    v1 = tl.load(v, mask=inside, other=0.0)
    v2 = tl.load(v + half, mask=inside, other=0.0)
    dweights = tl.dot(o2, tl.trans(v2), acc=tl.dot(o1, tl.trans(v1)))
    dscores = weights * (dweights - tl.sum(weights * dweights, axis=1)[:, None])
    dscores = (dscores * scale).to(dtype)
    # Loaded again: keeping the tables until here would need too many registers.
    c = tl.load(cos + row * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + row * table_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y1 = tl.dot(dscores, k1)
    y2 = tl.dot(dscores, k2)
    tl.store(dqkv + cell, (y1 * c + y2 * s).to(dtype), mask=inside)
    tl.store(dqkv + cell + half, (y2 * c - y1 * s).to(dtype), mask=inside)
    turned = tl.trans(dscores)
    y1 = tl.dot(turned, q1)
    y2 = tl.dot(turned, q2)
    dk = dqkv + cell + HEADS * DIM
    tl.store(dk, (y1 * c + y2 * s).to(dtype), mask=inside)
    tl.store(dk + half, (y2 * c - y1 * s).to(dtype), mask=inside)


class WindowAttention(torch.autograd.Function):
    """Run `window_attention`, and its backward as one kernel, which computes the softmax again."""

    @staticmethod
    def forward(
        ctx: FunctionContext, qkv_T3HD: Tensor, cos_TD: Tensor, sin_TD: Tensor, cu_seqlens_S1: Tensor, scale: float
    ) -> Tensor:
        qkv_T3HD = qkv_T3HD.contiguous()
        ctx.save_for_backward(qkv_T3HD, cos_TD, sin_TD, cu_seqlens_S1)
        ctx.scale = scale
        return window_attention(qkv_T3HD, cos_TD, sin_TD, cu_seqlens_S1, scale)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_THD: Tensor) -> Gradients:
        qkv_T3HD, cos_TD, sin_TD, cu_seqlens_S1 = ctx.saved_tensors
        _, _, heads, dim = qkv_T3HD.shape
        dqkv_T3HD = torch.empty_like(qkv_T3HD)
        windows = cu_seqlens_S1.shape[0] - 1
        _window_attention_backward_kernel[(windows, heads)](
            qkv_T3HD,
            cos_TD,
            sin_TD,
            cu_seqlens_S1,
            dout_THD.contiguous(),
            dqkv_T3HD,
            ctx.scale,
            cos_TD.stride(0),
            HEADS=heads,
            DIM=dim,
            BLOCK_T=LONGEST,
            BLOCK_D=max(next_power_of_2(dim // 2), 16),
            num_warps=4,
        )
        return dqkv_T3HD, None, None, None, None


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendWindows = Callable[[Tensor, float], Attend]
"""(offsets of windows, scale) to the attention of a layer."""


def _build(context: Context) -> AttendWindows:
    function = window_attention_reference if context.reference else window_attention

    def bind(cu_seqlens_S1: Tensor, scale: float) -> Attend:
        if context.trains_by_kernels:
            return OpWithBackward(function=WindowAttention, settings=(cu_seqlens_S1, scale))
        return machine.guarded(machine.KERNELS, partial(function, cu_seqlens_S1=cu_seqlens_S1, scale=scale))

    return bind


OPERATION = Operation(
    name="window_attention",
    summary="short windows attended by one kernel, rotation included",
    subjects=lambda parts: [] if parts.full_layers is None else [parts],
    reasons_against=reasons_against_rotation,
    fused=lambda parts, context: _build(context),
    plain=lambda parts, context: None,
    guards=True,
    missing="the tower has no windows",
)
