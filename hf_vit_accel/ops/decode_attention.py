"""Attention of one new token a sample to the keys of a static cache, in chunks of keys that run side by side.

A library's kernel gives a sample and a key head one program, which reads all keys one after the other. With few samples
most of the GPU idles then.

A cache has the slots of every sample in a row of its own, (B, K, S, D), or all samples on one axis, (1, K, S, D).

`B` samples, `K` key heads, `G` query heads of one key head, `S` slots of the cache, `C` chunks, `D` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.ops.launch import kernel, next_power_of_2, tl, why_not_triton

_BLOCK = 64
"""Keys that a program loads at a time. Chunks are multiples of it."""
_SHORTEST = 128
"""Keys of the shortest chunk: with fewer, adding up the chunks costs more than it saves."""
_LONGEST = 1024
"""Keys of a chunk from which on it is halved though the GPU is full: rows may differ much in length."""
_ENOUGH = 7
"""Programs for each one that runs at once. With as many, and the longest row first, no row is halved for its length."""
_MOST_CHUNKS = 64
"""Chunks that one program adds up."""


def why_not_in_chunks(query_BKGD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask_B11S: Tensor) -> str | None:
    """Return why the kernels cannot attend to a static cache and its mask, which are contiguous; None if they can."""
    group, width = query_BKGD.shape[2:]
    slots = key_BKSD.shape[2]
    if width not in (32, 64, 128, 256) or group > 64 or slots % _BLOCK:
        return "the kernel has no such shape"
    if not key_BKSD.dtype == value_BKSD.dtype == mask_B11S.dtype == query_BKGD.dtype:
        return "the dtypes differ"
    return why_not_triton(query_BKGD.device, query_BKGD.dtype)


def of_samples(states_1KSD: Tensor, mask_111S: Tensor, ends_B2: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return what all samples have on one axis in rows of their own: states (B, K, longest, D) and mask."""
    begins_B1 = ends_B2[:, :1]
    slots_BS = begins_B1 + torch.arange(longest, device=ends_B2.device)
    is_own_BS = slots_BS < ends_B2[:, 1:]
    slots_BS = slots_BS.clamp_max(states_1KSD.shape[2] - 1)
    mask_BS = mask_111S[0, 0, 0, slots_BS].masked_fill(~is_own_BS, float("-inf"))
    return states_1KSD[0][:, slots_BS].transpose(0, 1), mask_BS[:, None, None]


def attend_reference(
    query_BKGD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask_B11S: Tensor,
    ends_B2: Tensor,
    order_B: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """Compute softmax(scale * q k^T + mask) v in fp32, (B, K, G, D).

    `ends_B2`, int32, are each sample's first slot that the mask does not hide, and the one after its last. A sample has
    at most `longest` slots. On one axis it begins at a multiple of 64, and blocks of 64 hold no other's slots.
    `order_B`, of integers, is the order in which kernels take samples: the longest first.
    """
    if len(key_BKSD) < len(query_BKGD):
        value_BKSD, _ = of_samples(value_BKSD, mask_B11S, ends_B2, longest)
        key_BKSD, mask_B11S = of_samples(key_BKSD, mask_B11S, ends_B2, longest)
    scores_BKGS = scale * (query_BKGD.float() @ key_BKSD.float().mT) + mask_B11S.float()
    return (scores_BKGS.softmax(-1) @ value_BKSD.float()).to(query_BKGD.dtype)


@kernel
def _attend_to_chunk_kernel(
    query,
    key,
    value,
    mask,
    ends,
    order,
    sums,
    maxima,
    totals,
    out,
    scale_log2,
    slots,
    chunk,
    chunks,
    ON_ONE_AXIS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # A program takes one chunk of one key head of one sample, and keeps the softmax of its keys unnormalised.
    # All chunks of the longest sample come first, so that short samples fill the end.
    number = tl.program_id(0) % chunks
    place = tl.program_id(0) // chunks
    sample = tl.load(order + place // KEY_HEADS).to(tl.int64)
    row = sample * KEY_HEADS + place % KEY_HEADS
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, DIM)
    inside = g < GROUP
    q = tl.load(query + (row * GROUP + g)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    result = tl.zeros([BLOCK_G, DIM], tl.float32)
    # Blocks outside the ends would add nothing, so they are not read.
    first = tl.load(ends + 2 * sample) // BLOCK_S * BLOCK_S
    last = tl.load(ends + 2 * sample + 1)
    begin = first + number * chunk
    if (begin >= last) & (number > 0):
        return
    end = tl.minimum(begin + chunk, last)
    states = row * slots
    mask += sample * slots
    if ON_ONE_AXIS:
        states = row % KEY_HEADS * slots
        mask -= sample * slots
    for start in tl.range(begin, end, BLOCK_S):
        cell = (states + start + s)[:, None] * DIM + d[None, :]
        bias = tl.load(mask + start + s).to(tl.float32) * 1.4426950408889634
        scores = tl.dot(q, tl.trans(tl.load(key + cell))) * scale_log2 + bias[None, :]
        former = maximum
        maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)  # so far all keys are masked
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(former - shift)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(value + cell)
        result = tl.dot(weights.to(v.dtype), v, acc=result * fade[:, None])
    if last - first <= chunk:  # there is no other chunk
        whole = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * GROUP + g)[:, None] * DIM + d[None, :], whole, mask=inside[:, None])
    else:
        part = (row * chunks + number) * GROUP + g
        tl.store(sums + part[:, None] * DIM + d[None, :], result, mask=inside[:, None])
        tl.store(maxima + part, maximum, mask=inside)
        tl.store(totals + part, total, mask=inside)


@kernel
def _add_chunks_kernel(
    ends,
    sums,
    maxima,
    totals,
    out,
    chunk,
    chunks,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
):
    # A program takes one query head: it gives the chunks' softmaxes one maximum, and normalises their sum.
    row = tl.program_id(0).to(tl.int64)
    sample = row // KEY_HEADS
    first = tl.load(ends + 2 * sample) // BLOCK_S * BLOCK_S
    keys = tl.load(ends + 2 * sample + 1) - first
    if keys <= chunk:  # the output is there
        return
    head = tl.program_id(1)
    c = tl.arange(0, MOST_CHUNKS)
    d = tl.arange(0, DIM)
    inside = c < tl.cdiv(keys, chunk)
    part = (row * chunks + c) * GROUP + head
    maximum = tl.load(maxima + part, mask=inside, other=float("-inf"))
    weights = tl.exp2(maximum - tl.max(maximum, axis=0))
    total = tl.sum(weights * tl.load(totals + part, mask=inside, other=0.0), axis=0)
    result = tl.load(sums + part[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    result = tl.sum(result * weights[:, None], axis=0) / total
    tl.store(out + (row * GROUP + head) * DIM + d, result.to(out.dtype.element_ty))


def chunk_of(rows: int, slots: int, programs: int) -> int:
    """Return how many keys a program reads at most, in blocks of 64: as few as fill the GPU with so many programs."""
    for_balance = min(-(-slots // _LONGEST), -(-_ENOUGH * programs // rows))
    chunks = min(max(programs // rows, for_balance), _MOST_CHUNKS)
    return max(-(-slots // (chunks * _BLOCK)) * _BLOCK, _SHORTEST)


def attend_in_chunks(
    query_BKGD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    mask_B11S: Tensor,
    ends_B2: Tensor,
    order_B: Tensor,
    scale: float,
    longest: int,
) -> Tensor:
    """Run `attend_reference` as kernels, where `why_not_in_chunks` returns None. A sample must see one key."""
    batch, key_heads, group, dim = query_BKGD.shape
    slots = key_BKSD.shape[2]
    rows = batch * key_heads
    chunk = chunk_of(rows, longest, 2 * machine.multiprocessors(query_BKGD.device))
    chunks = -(-longest // chunk)
    query_BKGD = query_BKGD.contiguous()
    sums_RCGD = query_BKGD.new_empty(rows, chunks, group, dim, dtype=torch.float32)
    maxima_RCG = query_BKGD.new_empty(rows, chunks, group, dtype=torch.float32)
    totals_RCG = torch.empty_like(maxima_RCG)
    out_BKGD = torch.empty_like(query_BKGD)
    tensors = query_BKGD, key_BKSD, value_BKSD, mask_B11S, ends_B2, order_B
    parts = sums_RCGD, maxima_RCG, totals_RCG
    shared = {"KEY_HEADS": key_heads, "GROUP": group, "DIM": dim, "BLOCK_S": _BLOCK, "num_warps": 4}
    constants = {"ON_ONE_AXIS": len(key_BKSD) < batch, "BLOCK_G": max(next_power_of_2(group), 16)}
    scale_log2 = scale * 1.4426950408889634
    sizes = scale_log2, slots, chunk, chunks
    _attend_to_chunk_kernel[(rows * chunks,)](*tensors, *parts, out_BKGD, *sizes, **constants, **shared)
    if chunks > 1:
        # As many chunks as can be: one kernel for all lengths.
        outputs = *parts, out_BKGD
        _add_chunks_kernel[(rows, group)](ends_B2, *outputs, chunk, chunks, MOST_CHUNKS=_MOST_CHUNKS, **shared)
    return out_BKGD
