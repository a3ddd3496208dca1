"""Heads of a text model between projection and attention: normed, rotated, and written to a static cache.

`T` tokens, `H` heads of queries, `K` heads of keys, `D` head dim, `B` rows and `S` slots of the cache.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from hf_vit_accel.ops.embedding import rotated
from hf_vit_accel.ops.launch import kernel, next_power_of_2, tl

Cache: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys (B, K, S, D), values (B, K, S, D), and of every token its row (T) and its slot (T), int64."""
Norms: TypeAlias = tuple[Tensor, Tensor, float]
"""The weights (D) of the RMSNorms of queries and of keys, and epsilon."""
_BLOCK = 8
"""Heads of a program."""


def place_heads_reference(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    norms: Norms | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and write keys and values to their slots.

    Rounding is that of stock's norms: before the weight and after it. The rotation is rounded once.
    """
    if norms is not None:
        q_D, k_D, eps = norms
        query_THD, key_TKD = (
            weight_D * torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
            for x, weight_D in ((query_THD, q_D), (key_TKD, k_D))
        )
    query_THD, key_TKD = (rotated(x, cos_TD, sin_TD) for x in (query_THD, key_TKD))
    if cache is not None:
        keys_BKSD, values_BKSD, rows_T, slots_T = cache
        keys_BKSD[rows_T, :, slots_T] = key_TKD
        values_BKSD[rows_T, :, slots_T] = value_TKD
    return query_THD, key_TKD


@kernel
def _place_heads_kernel(
    query,
    key,
    value,
    cos,
    sin,
    q_weight,
    k_weight,
    out_query,
    out_key,
    keys,
    values,
    rows,
    slots,
    count,
    eps,
    slots_of_row,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    CACHED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program takes BLOCK of the tokens' heads, those of q first, then of k, then of v. An element is loaded with the
    # one that it is turned with, so that no thread needs what another one holds.
    index = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (index < count) & (d < DIM)
    half: tl.constexpr = DIM // 2
    other = tl.where(d < half, d + half, d - half)
    t = (index // (HEADS + 2 * KEY_HEADS)).to(tl.int64)
    head = index % (HEADS + 2 * KEY_HEADS)
    is_q = head < HEADS
    is_v = head >= HEADS + KEY_HEADS
    is_k = (is_q == 0) & (is_v == 0)
    q_cell = (t * HEADS + head) * DIM
    kv_head = tl.where(is_v, head - HEADS - KEY_HEADS, head - HEADS)
    kv_cell = (t * KEY_HEADS + kv_head) * DIM
    dtype: tl.constexpr = out_query.dtype.element_ty
    x = tl.load(query + q_cell + d, mask=inside & is_q, other=0.0)
    x += tl.load(key + kv_cell + d, mask=inside & is_k, other=0.0)
    y = tl.load(query + q_cell + other, mask=inside & is_q, other=0.0)
    y += tl.load(key + kv_cell + other, mask=inside & is_k, other=0.0)
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        w_x = tl.where(is_q, tl.load(q_weight + d, mask=d < DIM), tl.load(k_weight + d, mask=d < DIM))
        w_y = tl.where(is_q, tl.load(q_weight + other, mask=d < DIM), tl.load(k_weight + other, mask=d < DIM))
        x = (w_x.to(tl.float32) * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (w_y.to(tl.float32) * (y * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    c = tl.load(cos + t * DIM + d, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + t * DIM + d, mask=inside, other=0.0).to(tl.float32)
    out = (x * c + tl.where(d < half, -y, y) * s).to(dtype)
    tl.store(out_query + q_cell + d, out, mask=inside & is_q)
    tl.store(out_key + kv_cell + d, out, mask=inside & is_k)
    if CACHED:
        row = tl.load(rows + t, mask=index < count, other=0)
        slot = tl.load(slots + t, mask=index < count, other=0)
        cell = ((row * KEY_HEADS + kv_head) * slots_of_row + slot) * DIM + d
        tl.store(keys + cell, out, mask=inside & is_k)
        v = tl.load(value + kv_cell + d, mask=inside & is_v, other=0.0)
        tl.store(values + cell, v, mask=inside & is_v)


def place_heads(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    norms: Norms | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor]:
    """Run `place_heads_reference` as one kernel. All is of one dtype; cosines, sines and the cache are contiguous."""
    tokens, heads, dim = query_THD.shape
    key_heads = key_TKD.shape[1]
    count = tokens * (heads + 2 * key_heads)
    query_THD, key_TKD, value_TKD = query_THD.contiguous(), key_TKD.contiguous(), value_TKD.contiguous()
    out_query_THD = torch.empty_like(query_THD)
    out_key_TKD = torch.empty_like(key_TKD)
    q_D, k_D, eps = norms or (query_THD, query_THD, 0.0)
    # Without a cache, the kernel does not read the pointers that stand for it.
    keys, values, rows_T, slots_T = cache or (key_TKD, key_TKD, key_TKD, key_TKD)
    assert keys.is_contiguous() and values.is_contiguous()
    _place_heads_kernel[(-(-count // _BLOCK),)](
        query_THD,
        key_TKD,
        value_TKD,
        cos_TD,
        sin_TD,
        q_D.contiguous(),
        k_D.contiguous(),
        out_query_THD,
        out_key_TKD,
        keys,
        values,
        rows_T,
        slots_T,
        count,
        eps,
        keys.shape[2] if cache is not None else 0,
        HEADS=heads,
        KEY_HEADS=key_heads,
        DIM=dim,
        NORM=norms is not None,
        CACHED=cache is not None,
        BLOCK=_BLOCK,
        BLOCK_D=next_power_of_2(dim),
        num_warps=4,
    )
    return out_query_THD, out_key_TKD
