"""Norms of heads, and heads of keys and values repeated for groups of queries: between projection and rotation.

`T` rows, `H` heads of queries, `K` of keys and of values, `N` = H + 2 K, `D` head dim, `F` = N D, `P` partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.families.base import Block
from hf_vit_accel.ops import norm as norms
from hf_vit_accel.ops.add_norm import add_norm_reference
from hf_vit_accel.ops.base import Apply, Context, FunctionContext, Gradients, Operation
from hf_vit_accel.ops.launch import kernel, next_power_of_2, tl


def shape_heads_reference(qkv_TF: Tensor, heads: int, key_heads: int, eps: float, *weights_D: Tensor) -> Tensor:
    """Normalise heads of q and k by RMSNorm, rounded like stock; repeat heads of k and v: (T, N D) to (T, 3 H D)."""

    def norm_by(weight_D: Tensor) -> Apply:
        return lambda x: add_norm_reference(x, None, weight_D, None, eps, True)[1]

    return _shaped(qkv_TF, heads, key_heads, [norm_by(weight_D) for weight_D in weights_D])


def _shaped(qkv_TF: Tensor, heads: int, key_heads: int, head_norms: Sequence[Apply]) -> Tensor:
    sizes = heads, key_heads, key_heads
    parts = list(qkv_TF.unflatten(-1, (sum(sizes), -1)).split(sizes, dim=1))
    for index, norm in enumerate(head_norms):
        parts[index] = norm(parts[index]).to(qkv_TF.dtype)
    return torch.cat([part.repeat_interleave(heads // part.shape[1], dim=1) for part in parts], dim=1).flatten(1)


@kernel
def _shape_heads_kernel(
    qkv,
    q_weight,
    k_weight,
    out,
    count,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VISITED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A tile is BLOCK heads. Every row has VISITED heads: those of q and k, and those of v where v is copied too.
    index = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (index < count) & (d < DIM)
    t = (index // VISITED).to(tl.int64)
    head = index % VISITED
    kind = head // HEADS
    source = tl.where(kind == 0, head, HEADS + (kind - 1) * KEY_HEADS + head % HEADS // (HEADS // KEY_HEADS))
    x = tl.load(qkv + (t * (HEADS + 2 * KEY_HEADS) + source) * DIM + d, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    if NORM:
        q = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        k = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        x = tl.where(kind == 2, x, tl.where(kind == 0, q, k) * (x * scale).to(dtype).to(tl.float32))
    if VISITED < 3 * HEADS:  # in place: no thread may load what another one stored
        tl.debug_barrier()
    tl.store(out + (t * 3 * HEADS + head) * DIM + d, x.to(dtype), mask=inside)


def shape_heads_(qkv_TF: Tensor, heads: int, key_heads: int, eps: float, *weights_D: Tensor) -> Tensor:
    """Run `shape_heads_reference` as one kernel, in place where no head is repeated."""
    in_place = heads == key_heads and qkv_TF.is_contiguous()
    return _launch(qkv_TF, heads, key_heads, weights_D, eps, in_place=in_place)


_BLOCK = 16


def _launch(
    qkv_TF: Tensor, heads: int, key_heads: int, weights_D: tuple[Tensor, ...], eps: float, *, in_place: bool
) -> Tensor:
    qkv_TF = qkv_TF.contiguous()
    rows = len(qkv_TF)
    dim = qkv_TF.shape[1] // (heads + 2 * key_heads)
    visited = (2 if in_place else 3) * heads
    out = qkv_TF if in_place else qkv_TF.new_empty(rows, 3 * heads * dim)
    q_D, k_D = (weight_D.contiguous() for weight_D in weights_D or (qkv_TF, qkv_TF))
    _shape_heads_kernel[(-(-rows * visited // _BLOCK),)](
        qkv_TF,
        q_D,
        k_D,
        out,
        rows * visited,
        eps,
        HEADS=heads,
        KEY_HEADS=key_heads,
        DIM=dim,
        VISITED=visited,
        NORM=bool(weights_D),
        BLOCK=_BLOCK,
        BLOCK_D=next_power_of_2(dim),
        num_warps=4,
    )
    return out


@kernel
def _shape_heads_backward_kernel(
    qkv,
    q_weight,
    k_weight,
    dout,
    dqkv,
    partial,
    head_count,
    heads_per_program,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A tile is BLOCK heads as they were before any was repeated. Each adds up the gradients of its repetitions.
    # partial (P, 2, D) receives, for every program, its part of the gradients of q's weight and of k's.
    groups: tl.constexpr = HEADS // KEY_HEADS
    heads_per_row: tl.constexpr = HEADS + 2 * KEY_HEADS
    d = tl.arange(0, BLOCK_D)[None, :]
    dq_weight = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dk_weight = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    dtype: tl.constexpr = dqkv.dtype.element_ty
    q = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    k = tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    for first in tl.range(0, heads_per_program, BLOCK):
        index = (tl.program_id(0) * heads_per_program + first + tl.arange(0, BLOCK))[:, None]
        inside = (index < head_count) & (d < DIM)
        t = (index // heads_per_row).to(tl.int64)
        head = index % heads_per_row
        is_q = head < HEADS
        is_v = head >= HEADS + KEY_HEADS
        source = tl.where(is_q, head, HEADS + (head - HEADS) * groups)  # the first repetition of the head in dout
        dy = tl.load(dout + (t * 3 * HEADS + source) * DIM + d, mask=inside, other=0.0).to(tl.float32)
        for repetition in tl.static_range(1, groups):
            repeated = dout + (t * 3 * HEADS + source + repetition) * DIM + d
            dy += tl.load(repeated, mask=inside & (head >= HEADS), other=0.0).to(tl.float32)
        cell = (t * heads_per_row + head) * DIM + d
        dx = dy
        if NORM:
            x = tl.load(qkv + cell, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
            normed = x * scale
            dq_weight += tl.where(is_q, dy * normed, 0.0)
            dk_weight += tl.where(is_q | is_v, 0.0, dy * normed)
            dn = dy * tl.where(is_q, q, k)
            dx = scale * (dn - normed * (tl.sum(dn * normed, axis=1, keep_dims=True) / DIM))
            dx = tl.where(is_v, dy, dx)
        tl.store(dqkv + cell, dx.to(dtype), mask=inside)
    if NORM:
        row = partial + tl.program_id(0) * 2 * DIM
        e = tl.arange(0, BLOCK_D)
        tl.store(row + e, tl.sum(dq_weight, axis=0), mask=e < DIM)
        tl.store(row + DIM + e, tl.sum(dk_weight, axis=0), mask=e < DIM)


_PROGRAMS = 512


class ShapeHeads(torch.autograd.Function):
    """Run `shape_heads_reference` as one kernel in each direction, out of place; the norms' input is saved."""

    @staticmethod
    def forward(
        ctx: FunctionContext, qkv_TF: Tensor, heads: int, key_heads: int, eps: float, *weights_D: Tensor
    ) -> Tensor:
        ctx.save_for_backward(qkv_TF if weights_D else None, *weights_D)
        ctx.settings = heads, key_heads, eps, qkv_TF.shape[1] // (heads + 2 * key_heads)
        return _launch(qkv_TF, heads, key_heads, weights_D, eps, in_place=False)

    @staticmethod
    @machine.once_differentiable
    def backward(ctx: FunctionContext, dout_TF: Tensor) -> Gradients:
        qkv_TF, *weights_D = ctx.saved_tensors
        heads, key_heads, eps, dim = ctx.settings
        dout_TF = dout_TF.contiguous()
        heads_per_row = heads + 2 * key_heads
        dqkv_TF = dout_TF.new_empty(len(dout_TF), heads_per_row * dim)
        head_count = len(dout_TF) * heads_per_row
        programs = min(-(-head_count // _BLOCK), _PROGRAMS)
        heads_per_program = -(-head_count // (programs * _BLOCK)) * _BLOCK
        partial_P2D = torch.empty(programs, 2, dim, dtype=torch.float32, device=dout_TF.device)
        q_D, k_D = (weight_D.contiguous() for weight_D in weights_D or (dout_TF, dout_TF))
        _shape_heads_backward_kernel[(programs,)](
            dout_TF if qkv_TF is None else qkv_TF.contiguous(),
            q_D,
            k_D,
            dout_TF,
            dqkv_TF,
            partial_P2D,
            head_count,
            heads_per_program,
            eps,
            HEADS=heads,
            KEY_HEADS=key_heads,
            DIM=dim,
            NORM=bool(weights_D),
            BLOCK=_BLOCK,
            BLOCK_D=next_power_of_2(dim),
            num_warps=4,
        )
        dweights = []
        if weights_D:
            for dweight_D, weight_D in zip(partial_P2D.sum(0), weights_D, strict=True):
                dweights.append(dweight_D.to(weight_D.dtype))
        return dqkv_TF, None, None, None, *dweights


def _sizes(block: Block, context: Context) -> tuple[int, int, float]:
    """Read the heads of queries, the heads of keys, and the epsilon of their norms (0 for none)."""
    heads = context.read(block.attention, "num_heads")
    groups = context.read(block.attention, "num_key_value_groups", 1)
    return heads, heads // groups, context.read(block.head_norms[0], "variance_epsilon") if block.head_norms else 0.0


def _reasons_against(block: Block, context: Context) -> list[str]:
    for norm in block.head_norms:
        reasons = norms.reasons_against(norm, context)
        if reasons:
            return reasons
    eps = {context.read(norm, "variance_epsilon") for norm in block.head_norms} - {None}
    return ["the norms of q and k are no RMSNorms of one epsilon"] if block.head_norms and len(eps) != 1 else []


def _fused(block: Block, context: Context) -> Apply:
    heads, key_heads, eps = _sizes(block, context)
    kernel: Callable[..., Tensor] = ShapeHeads.apply if context.grad else shape_heads_
    function = shape_heads_reference if context.reference else kernel

    def shape(qkv_TF: Tensor) -> Tensor:
        return function(qkv_TF, heads, key_heads, eps, *(norm.weight for norm in block.head_norms))

    return shape


def _plain(block: Block, context: Context) -> Apply:
    head_norms = [context.called(norm) for norm in block.head_norms]
    heads, key_heads, _ = _sizes(block, context)
    return lambda qkv_TF: _shaped(qkv_TF, heads, key_heads, head_norms)


OPERATION = Operation(
    name="heads",
    summary="q and k normalised head by head, heads of k and v repeated for those of q, in one kernel",
    subjects=lambda parts: [block for block in parts.blocks if block.shapes_heads],
    reasons_against=_reasons_against,
    fused=_fused,
    plain=_plain,
    missing="heads of q and k are neither normalised nor repeated",
)
