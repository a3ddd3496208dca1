"""Attention of one new token a sample to the keys of a static cache, in chunks of keys that run side by side.

A library's kernel gives a sample and a key head one program, which reads all keys one after the other. With few samples
most of the GPU idles then.

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


def attend_reference(
    query_BKGD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask_B11S: Tensor, ends_B2: Tensor, scale: float
) -> Tensor:
    """Compute softmax(scale * q k^T + mask) v in fp32, (B, K, G, D).

    `ends_B2`, int32, are each sample's first slot that the mask does not hide, and the one after its last.
    """
    scores_BKGS = scale * (query_BKGD.float() @ key_BKSD.float().mT) + mask_B11S.float()
    return (scores_BKGS.softmax(-1) @ value_BKSD.float()).to(query_BKGD.dtype)


@kernel
def _attend_to_chunk_kernel(
    query,
    key,
    value,
    mask,
    ends,
    sums,
    maxima,
    totals,
    out,
    scale_log2,
    slots,
    chunk,
    IS_WHOLE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    # A program takes one chunk of one key head of one sample, and keeps the softmax of its keys unnormalised.
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, DIM)
    inside = g < GROUP
    q = tl.load(query + (row * GROUP + g)[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    result = tl.zeros([BLOCK_G, DIM], tl.float32)
    # Blocks outside the ends would add nothing, so they are not read.
    sample = row // KEY_HEADS
    begin = tl.program_id(1) * chunk
    end = tl.minimum(tl.minimum(begin + chunk, slots), tl.load(ends + 2 * sample + 1))
    begin = tl.maximum(begin, tl.load(ends + 2 * sample) // BLOCK_S * BLOCK_S)
    for start in tl.range(begin, end, BLOCK_S):
        cell = (row * slots + start + s)[:, None] * DIM + d[None, :]
        bias = tl.load(mask + sample * slots + start + s).to(tl.float32) * 1.4426950408889634
        scores = tl.dot(q, tl.trans(tl.load(key + cell))) * scale_log2 + bias[None, :]
        former = maximum
        maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)  # so far all keys are masked
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(former - shift)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(value + cell)
        result = tl.dot(weights.to(v.dtype), v, acc=result * fade[:, None])
    if IS_WHOLE:  # there is one chunk
        whole = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + (row * GROUP + g)[:, None] * DIM + d[None, :], whole, mask=inside[:, None])
        return
    part = (row * tl.num_programs(1) + tl.program_id(1)) * GROUP + g
    tl.store(sums + part[:, None] * DIM + d[None, :], result, mask=inside[:, None])
    tl.store(maxima + part, maximum, mask=inside)
    tl.store(totals + part, total, mask=inside)


@kernel
def _add_chunks_kernel(
    sums, maxima, totals, out, chunks, GROUP: tl.constexpr, DIM: tl.constexpr, MOST_CHUNKS: tl.constexpr
):
    # A program takes one query head: it gives the chunks' softmaxes one maximum, and normalises their sum.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, MOST_CHUNKS)
    d = tl.arange(0, DIM)
    inside = c < chunks
    part = (row * chunks + c) * GROUP + head
    maximum = tl.load(maxima + part, mask=inside, other=float("-inf"))
    weights = tl.exp2(maximum - tl.max(maximum, axis=0))
    total = tl.sum(weights * tl.load(totals + part, mask=inside, other=0.0), axis=0)
    result = tl.load(sums + part[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0)
    result = tl.sum(result * weights[:, None], axis=0) / total
    tl.store(out + (row * GROUP + head) * DIM + d, result.to(out.dtype.element_ty))


def chunk_of(rows: int, slots: int, programs: int) -> int:
    """Return how many keys one of the programs reads at most: as few as fill the GPU, in blocks of 64."""
    chunks = min(max(programs // rows, -(-slots // _LONGEST)), _MOST_CHUNKS)
    return max(-(-slots // (chunks * _BLOCK)) * _BLOCK, _SHORTEST)


def attend_in_chunks(
    query_BKGD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask_B11S: Tensor, ends_B2: Tensor, scale: float
) -> Tensor:
    """Run `attend_reference` as kernels, where `why_not_in_chunks` returns None. A sample must see one key."""
    batch, key_heads, group, dim = query_BKGD.shape
    slots = key_BKSD.shape[2]
    rows = batch * key_heads
    chunk = chunk_of(rows, slots, 2 * machine.multiprocessors(query_BKGD.device))
    chunks = -(-slots // chunk)
    query_BKGD = query_BKGD.contiguous()
    sums_RCGD = query_BKGD.new_empty(rows, chunks, group, dim, dtype=torch.float32)
    maxima_RCG = query_BKGD.new_empty(rows, chunks, group, dtype=torch.float32)
    totals_RCG = torch.empty_like(maxima_RCG)
    out_BKGD = torch.empty_like(query_BKGD)
    tensors = query_BKGD, key_BKSD, value_BKSD, mask_B11S, ends_B2
    parts = sums_RCGD, maxima_RCG, totals_RCG
    shared = {"GROUP": group, "DIM": dim, "num_warps": 4}
    block = max(next_power_of_2(group), 16)
    scale_log2 = scale * 1.4426950408889634
    sizes = scale_log2, slots, chunk
    constants = shared | {"IS_WHOLE": chunks == 1, "KEY_HEADS": key_heads, "BLOCK_G": block, "BLOCK_S": _BLOCK}
    _attend_to_chunk_kernel[(rows, chunks)](*tensors, *parts, out_BKGD, *sizes, **constants)
    if chunks == 1:
        return out_BKGD
    # As many chunks as can be: one kernel for all lengths.
    _add_chunks_kernel[(rows, group)](*parts, out_BKGD, chunks, MOST_CHUNKS=_MOST_CHUNKS, **shared)
    return out_BKGD
