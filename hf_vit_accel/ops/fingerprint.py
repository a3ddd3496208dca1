"""Fingerprints of 128 bits: of each image or video among packed patches, and of all that lies in a tower's memory.

`T` packed patch rows, `P` pixels of a patch, `N` items, `R` rows of `W` 32-bit words, `L` lanes of the hash.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_vit_accel.ops.launch import jit

try:
    import triton.language as tl
except ImportError:  # pragma: no cover
    tl: Any = None  # type: ignore[no-redef]

__all__ = [
    "CHUNK",
    "draw_keys",
    "hash_items",
    "hash_items_reference",
    "hash_memory",
    "hash_memory_reference",
    "words_of",
]

CHUNK = 1024
"""Words of memory that are hashed as one row."""
_LANES = 4
_BLOCKS = dict(BLOCK_R=8, BLOCK_W=128, num_warps=4)


def draw_keys(words: int, device: torch.device) -> torch.Tensor:
    """(L, W + 3) random 64-bit numbers: keys of a row's words, of its place, of nothing; and, in lane 0, of Philox."""
    numbers = np.frombuffer(bytearray(os.urandom(8 * _LANES * (words + 3))), dtype=np.int64)
    with torch.inference_mode(False):
        return torch.from_numpy(numbers).view(_LANES, words + 3).to(device)


def hash_rows_reference(blocks: Sequence[torch.Tensor], place_R: torch.Tensor, keys_LK: torch.Tensor) -> torch.Tensor:
    """128 bits (R, 2) of each row of 32-bit words and its place; what an item's rows add up to, wrapping, tells it.

    blocks: the rows, some (any number, W) at a time.

    Four numbers of 32 bits are made of a row and its place by multilinear hashing (Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014): words times random 64-bit keys, added up, the upper half kept. That two
    different ones agree in all four has a probability of 2**-128, whatever they are. Philox-4x32-10 (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011) makes 128 bits of the four, that are added up in any order.

    So two items that differ in d rows get one fingerprint with a probability of about 2 * d**2 / 2**128: below 2**-92
    for videos of 100,000 patches, and below 2**-52 that any two of a million such items do. This rests on the keys,
    drawn by each process from the system's source of randomness and unknown to whoever makes the pixels, and on sums of
    Philox's numbers being as evenly spread as they are known to be.
    """
    fours = []
    for key_K in keys_LK:
        sums = [(words.long().bitwise_and_(_LOW) * key_K[:-3]).sum(1) for words in blocks]
        fours.append((torch.cat(sums) + place_R * key_K[-3] + key_K[-2] >> 32) & _LOW)
    c0, c1, c2, c3 = fours
    k0, k1 = keys_LK[0, -1] & _LOW, keys_LK[0, -1] >> 32 & _LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b >> 32 & _LOW ^ c1 ^ k0, b & _LOW, a >> 32 & _LOW ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.stack([c0 | c1 << 32, c2 | c3 << 32], 1)


_LOW = 0xFFFFFFFF


@jit
def _hash_rows(rows, count, place, keys, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    """`hash_rows_reference` of rows that begin at pointers and have so many words."""
    a0 = tl.zeros((BLOCK_R, BLOCK_W), tl.int64)
    a1, a2, a3 = a0, a0, a0
    STRIDE: tl.constexpr = WORDS + 3
    for start in tl.range(0, WORDS, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        x = tl.load(rows[:, None] + w[None, :], mask=w[None, :] < count[:, None], other=0)
        x = x.to(tl.uint32, bitcast=True).to(tl.int64)
        known = w < WORDS
        a0 += x * tl.load(keys + w, mask=known, other=0)[None, :]
        a1 += x * tl.load(keys + STRIDE + w, mask=known, other=0)[None, :]
        a2 += x * tl.load(keys + 2 * STRIDE + w, mask=known, other=0)[None, :]
        a3 += x * tl.load(keys + 3 * STRIDE + w, mask=known, other=0)[None, :]
    c0 = _upper(a0, place, keys + WORDS)
    c1 = _upper(a1, place, keys + STRIDE + WORDS)
    c2 = _upper(a2, place, keys + 2 * STRIDE + WORDS)
    c3 = _upper(a3, place, keys + 3 * STRIDE + WORDS)
    c0, c1, c2, c3 = tl.philox(tl.load(keys + WORDS + 2), c0, c1, c2, c3)
    return c0.to(tl.int64) | (c1.to(tl.int64) << 32), c2.to(tl.int64) | (c3.to(tl.int64) << 32)


@jit
def _upper(sums, place, keys):
    total = tl.sum(sums, 1) + place * tl.load(keys) + tl.load(keys + 1)
    return (total >> 32).to(tl.int32)


@jit
def _items_kernel(
    words,
    grid,
    keys,
    out,
    rows,
    items,
    WORDS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    item = tl.zeros((BLOCK_R,), tl.int64)
    begin, end = tl.zeros((BLOCK_R,), tl.int64), tl.zeros((1,), tl.int64)
    for start in tl.range(0, items, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < items
        frames = tl.load(grid + 3 * n, mask=inside, other=0)
        height = tl.load(grid + 3 * n + 1, mask=inside, other=0)
        width = tl.load(grid + 3 * n + 2, mask=inside, other=0)
        first = inside & (tl.program_id(0) == 0)
        tl.store(out + 5 * n, frames, mask=first)
        tl.store(out + 5 * n + 1, height, mask=first)
        tl.store(out + 5 * n + 2, width, mask=first)
        count = frames * height * width
        past = inside[None, :] & ((end + tl.cumsum(count, 0))[None, :] <= r[:, None])
        item += tl.sum(past.to(tl.int64), 1)
        begin += tl.sum(tl.where(past, count[None, :], 0), 1)
        end += tl.sum(count, 0)
    valid = (r < rows) & (item < items)  # a grid that does not fit is refused once it was read
    count = tl.where(valid, WORDS, 0)
    low, high = _hash_rows(words + r * WORDS, count, r - begin, keys, WORDS, BLOCK_R, BLOCK_W)
    one = tl.min(item, 0)  # most rows of a program are of one item, and are added up before they meet others
    same = valid & (item == one)
    tl.atomic_add(out + 5 * one + 3, tl.sum(tl.where(same, low, 0), 0), mask=one < items, sem="relaxed")
    tl.atomic_add(out + 5 * one + 4, tl.sum(tl.where(same, high, 0), 0), mask=one < items, sem="relaxed")
    tl.atomic_add(out + 5 * item + 3, low, mask=valid & (item != one), sem="relaxed")
    tl.atomic_add(out + 5 * item + 4, high, mask=valid & (item != one), sem="relaxed")


@jit
def _memory_kernel(
    addresses, counts, keys, out, rows, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = r < rows
    begin = tl.load(addresses + r, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + r, mask=inside, other=0)
    low, high = _hash_rows(begin, count, r, keys, WORDS, BLOCK_R, BLOCK_W)
    tl.atomic_add(out, tl.sum(tl.where(inside, low, 0), 0), sem="relaxed")
    tl.atomic_add(out + 1, tl.sum(tl.where(inside, high, 0), 0), sem="relaxed")


def hash_items_reference(
    words_TW: torch.Tensor, grid_N3: torch.Tensor, keys_LK: torch.Tensor, out: torch.Tensor
) -> None:
    """Writes (frames, height, width, and 128 bits) of each item of a grid to what starts with zeros (N, 5), flat."""
    out_N5 = out[: 5 * len(grid_N3)].view(-1, 5)
    ends_N = grid_N3.prod(1).cumsum(0)
    row_T = torch.arange(len(words_TW), device=words_TW.device)
    item_T = torch.searchsorted(ends_N, row_T, right=True)
    begin_N = torch.cat([ends_N.new_zeros(1), ends_N])
    sums_N2 = out_N5.new_zeros(len(grid_N3) + 1, 2)
    sums_N2.index_add_(0, item_T, hash_rows_reference(words_TW.split(1 << 10), row_T - begin_N[item_T], keys_LK))
    out_N5.copy_(torch.cat([grid_N3, sums_N2[:-1]], 1))


def hash_items(words_TW: torch.Tensor, grid_N3: torch.Tensor, keys_LK: torch.Tensor, out: torch.Tensor) -> None:
    """`hash_items_reference` as one kernel."""
    rows, words = words_TW.shape
    blocks = -(-rows // _BLOCKS["BLOCK_R"])
    _items_kernel[(blocks,)](words_TW, grid_N3, keys_LK, out, rows, len(grid_N3), WORDS=words, BLOCK_N=64, **_BLOCKS)


def words_of(pixels_TP: torch.Tensor) -> torch.Tensor:
    """The bits of rows as 32-bit words (T, W), the last one filled up with zeros; a view where that is possible."""
    bytes_TB = pixels_TP.detach().contiguous().view(torch.uint8)
    if bytes_TB.shape[1] % 4 or bytes_TB.data_ptr() % 4:
        bytes_TB = F.pad(bytes_TB, (0, -bytes_TB.shape[1] % 4)).clone()
    return bytes_TB.view(torch.int32)


def hash_memory_reference(
    tensors: list[torch.Tensor], tables: Mapping[str, torch.Tensor], keys_LK: torch.Tensor, out: torch.Tensor
) -> None:
    """Adds the 128 bits of all that contiguous tensors hold to (2,).

    tables: where rows of `CHUNK` words begin in memory, "addresses", and how many words each has, "counts".
    """
    words = [tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors if tensor.numel()]
    blocks = [(F.pad(each, (0, -len(each) % CHUNK)) if len(each) % CHUNK else each).view(-1, CHUNK) for each in words]
    place_R = torch.arange(sum(map(len, blocks)), device=out.device)
    out += hash_rows_reference(blocks, place_R, keys_LK).sum(0)


def hash_memory(
    tensors: list[torch.Tensor], tables: Mapping[str, torch.Tensor], keys_LK: torch.Tensor, out: torch.Tensor
) -> None:
    """`hash_memory_reference` as one kernel."""
    addresses_R, counts_R = tables["addresses"], tables["counts"]
    blocks = -(-len(addresses_R) // _BLOCKS["BLOCK_R"])
    _memory_kernel[(blocks,)](addresses_R, counts_R, keys_LK, out, len(addresses_R), WORDS=CHUNK, **_BLOCKS)
