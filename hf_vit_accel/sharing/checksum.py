"""Fingerprints of 128 bits: of each image or video among packed patches, and of all that lies in a tower's memory.

`T` packed patch rows, `P` pixels of a patch, `W` 32-bit words of a row or a chunk, `N` items, `C` chunks of words, each
of `S` strands, `L` lanes of the hash.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.launch import jit, tl

_LANES, _STRANDS, _VECTOR = 4, 32, 4
_STEP = 2 * _STRANDS * _VECTOR
"""Words that a warp takes at a time: each of its threads loads four neighbours for its strand, and four more."""
_ITEM_STEPS, _STEPS = 16, 64
ITEM_CHUNK, CHUNK = _STEP * _ITEM_STEPS, _STEP * _STEPS
"""Words that a warp hashes, of an item and of memory."""
_TAIL = _STEPS * _LANES * _VECTOR  # pairs of 32-bit keys, of a strand's words; then come 64-bit ones


def draw_keys(device: torch.device) -> Tensor:
    """Random 64-bit numbers: keys of a strand's words, of what they and its place make in each lane, and of Philox."""
    numbers = np.frombuffer(bytearray(os.urandom(8 * (_TAIL + 4 * _LANES + 1))), dtype=np.int64)
    with torch.inference_mode(False):
        return torch.from_numpy(numbers).to(device)


class Desk:
    """What fingerprints on one device are made with: keys, drawn once, and zeros to add up in.

    Both are there for every stream: the host waits for what it sends.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys = draw_keys(device)
        self._zeros: deque[Tensor] = deque()

    def zeros(self, count: int) -> Tensor:
        """So many zeros of 64 bits, that nobody else has: those of many calls are made at once."""
        device = self.keys.device
        if count > _PIECE:
            return torch.zeros(count, dtype=torch.int64, device=device)
        try:
            return self._zeros.popleft()[:count]
        except IndexError:
            with torch.inference_mode(False):
                self._zeros.extend(torch.zeros(256, _PIECE, dtype=torch.int64, device="cpu").to(device).unbind())
            return self.zeros(count)


_PIECE = 2 + 5 * 32
"""What calls of up to 32 items need."""


def hash_chunks_reference(blocks: Sequence[Tensor], place_C: Tensor, keys: Tensor) -> Tensor:
    """128 bits (C, 2) of chunks and their places; what an item's chunks add up to, wrapping, tells it.

    blocks: the chunks, some (any number, W) at a time.

    A chunk is 32 strands of pairs of words. In each of four lanes, the words of a pair are added to random 32-bit keys,
    and their products are added up to 64 bits: NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: fast and secure
    message authentication", 1999). Where two strands differ in one word, the key of its partner makes their sums equal
    by one of its 2**32 values at most, whatever the other keys are. The sum and the strand's place become 32 bits by
    multilinear hashing, whose upper half is kept (Lemire and Kaser, "Strongly universal string hashing is fast", 2014):
    again different ones agree with 2**-32. So strands of one place agree in all four lanes with a probability of at
    most (2 * 2**-32)**4 = 2**-124, strands of different places with 2**-128. Philox-4x32-10 (Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3", 2011) makes 128 bits of the four numbers, that are added up in any order.

    So two items that differ in d strands get one fingerprint with a probability of about (d**2 + 8 * d) * 2**-127:
    below 2**-88 for videos of 100,000 patches in bf16, and below 2**-49 that any two of a million such items do. This
    rests on the keys, drawn by each process from the system's source of randomness and unknown to whoever makes the
    pixels, and on sums of Philox's numbers being as evenly spread as they are known to be.
    """
    sums_LCS = torch.cat([_lanes_reference(chunks_CW, keys) for chunks_CW in blocks], 1)
    place_CS = place_C[:, None] * _STRANDS + torch.arange(_STRANDS, device=place_C.device)
    fours = []
    for sums, (low, high, at, more) in zip(sums_LCS, keys[_TAIL:-1].view(_LANES, 4), strict=True):
        fours.append((sums & _LOW) * low + (sums >> 32 & _LOW) * high + place_CS * at + more >> 32 & _LOW)
    c0, c1, c2, c3 = fours
    k0, k1 = keys[-1] & _LOW, keys[-1] >> 32 & _LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b >> 32 & _LOW ^ c1 ^ k0, b & _LOW, a >> 32 & _LOW ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return torch.stack([c0 | c1 << 32, c2 | c3 << 32], 2).sum(1)


def _lanes_reference(chunks_CW: Tensor, keys: Tensor) -> Tensor:
    """Sums of products (L, C, strands)."""
    steps = chunks_CW.shape[1] // _STEP
    pairs = keys[:_TAIL].view(torch.int32).view(_STEPS, 2, _LANES, _VECTOR)[:steps].repeat(1, 1, 1, _STRANDS)
    halves, sums = chunks_CW.view(-1, steps, 2, _STRANDS * _VECTOR), []
    for lane in range(_LANES):
        x, y = (halves + pairs[:, :, lane]).long().bitwise_and_(_LOW).unbind(2)
        sums.append((x * y).sum(1).view(-1, _STRANDS, _VECTOR).sum(2))
    return torch.stack(sums)


_LOW = 0xFFFFFFFF


@jit
def _hash_chunk(address, count, place, keys, STEPS: tl.constexpr, UNROLL: tl.constexpr, TAIL: tl.constexpr):
    """`hash_chunks_reference` of so many words from an address on; others are zeros. By one warp."""
    count = tl.minimum(tl.maximum(count, 0), STEPS * 256).to(tl.int32)
    if (address % 16 == 0) & (count % 4 == 0):
        a0, a1, a2, a3 = _lanes(address, count, keys, STEPS, UNROLL, 4)
    else:
        a0, a1, a2, a3 = _lanes(address, count, keys, STEPS, 1, 1)
    strand = place * 32 + tl.arange(0, 32)
    tail = keys + TAIL
    c0, c1 = _upper(a0, strand, tail), _upper(a1, strand, tail + 4)
    c2, c3 = _upper(a2, strand, tail + 8), _upper(a3, strand, tail + 12)
    c0, c1, c2, c3 = tl.philox(tl.load(tail + 16), c0, c1, c2, c3)
    low, high = c0.to(tl.int64) | (c1.to(tl.int64) << 32), c2.to(tl.int64) | (c3.to(tl.int64) << 32)
    return tl.sum(low, 0), tl.sum(high, 0)


@jit
def _lanes(address, count, keys, STEPS: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr):
    """Sums of products in four lanes; of words that lie, and end, at a multiple of so many of them."""
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 4 * ALIGNED)
    column = tl.broadcast_to(tl.arange(0, 4)[None, :], (32, 4))
    w = tl.arange(0, 32)[:, None] * 4 + column
    count = count // ALIGNED * ALIGNED
    # Every thread loads the same: no exchange, and one access.
    pairs = tl.multiple_of(keys.to(tl.pointer_type(tl.uint32)), 16) + column
    a0 = tl.zeros((32, 4), tl.uint64)
    a1, a2, a3 = a0, a0, a0
    for step in tl.range(0, STEPS, UNROLL):
        for more in tl.static_range(UNROLL):
            at = (step + more) * 256 + w
            x = tl.load(words + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
            y = tl.load(words + at + 128, mask=at + 128 < count, other=0).to(tl.uint32, bitcast=True)
            key = pairs + (step + more) * 32
            a0 += (x + tl.load(key)).to(tl.uint64) * (y + tl.load(key + 16)).to(tl.uint64)
            a1 += (x + tl.load(key + 4)).to(tl.uint64) * (y + tl.load(key + 20)).to(tl.uint64)
            a2 += (x + tl.load(key + 8)).to(tl.uint64) * (y + tl.load(key + 24)).to(tl.uint64)
            a3 += (x + tl.load(key + 12)).to(tl.uint64) * (y + tl.load(key + 28)).to(tl.uint64)
    return a0, a1, a2, a3


@jit
def _upper(sums, strand, keys):
    total = tl.sum(sums, 1).to(tl.int64)
    total = (total & 0xFFFFFFFF) * tl.load(keys) + ((total >> 32) & 0xFFFFFFFF) * tl.load(keys + 1)
    return ((total + strand * tl.load(keys + 2) + tl.load(keys + 3)) >> 32).to(tl.int32)


@partial(jit, do_not_specialize=range(7))
def _items_kernel(address: tl.int64, grid, keys, out, rows, items, width):
    """A program hashes one chunk, of an item that it finds by adding up the chunks of all."""
    CHUNK: tl.constexpr = 16 * 256
    at = tl.program_id(0)
    item, chunk, begin, done = 0, at, 0, 0
    for start in tl.range(0, items, 64):
        n = start + tl.arange(0, 64)
        inside = n < items
        frames = tl.load(grid + 3 * n, mask=inside, other=0)
        height = tl.load(grid + 3 * n + 1, mask=inside, other=0)
        columns = tl.load(grid + 3 * n + 2, mask=inside, other=0)
        if at == 0:
            tl.store(out + 5 * n + 2, frames, mask=inside)
            tl.store(out + 5 * n + 3, height, mask=inside)
            tl.store(out + 5 * n + 4, columns, mask=inside)
        # A grid that does not fit is refused once it was read: until then nothing but the rows may be touched.
        count = tl.minimum(tl.maximum(frames * height * columns, 0), rows).to(tl.int32)
        chunks = tl.cdiv(count.to(tl.int64) * width, CHUNK).to(tl.int32)
        past = inside & (done + tl.cumsum(chunks, 0) <= at)
        item += tl.sum(past.to(tl.int32), 0)
        chunk -= tl.sum(tl.where(past, chunks, 0), 0)
        begin += tl.sum(tl.where(past, count, 0), 0)
        done += tl.sum(chunks, 0)
    if (item < items) & (begin >= 0) & (chunk >= 0):
        size = tl.load(grid + 3 * item) * tl.load(grid + 3 * item + 1) * tl.load(grid + 3 * item + 2)
        offset = tl.cast(begin, tl.int64) * width + tl.cast(chunk, tl.int64) * CHUNK
        end = tl.minimum(begin + tl.minimum(tl.maximum(size, 0), rows), rows)
        left = tl.cast(end, tl.int64) * width - offset
        low, high = _hash_chunk(address + 4 * offset, left, chunk, keys, 16, 4, 1024)
        tl.atomic_add(out + 5 * item + 5, low, sem="relaxed")
        tl.atomic_add(out + 5 * item + 6, high, sem="relaxed")


@partial(jit, do_not_specialize=range(4))
def _memory_kernel(addresses, counts, keys, out):
    at = tl.program_id(0)
    low, high = _hash_chunk(tl.load(addresses + at), tl.load(counts + at), at, keys, 64, 2, 1024)
    tl.atomic_add(out, low, sem="relaxed")
    tl.atomic_add(out + 1, high, sem="relaxed")


def hash_items_reference(pixels_TP: Tensor, grid_N3: Tensor, keys: Tensor, out: Tensor) -> None:
    """Writes (frames, height, width, and 128 bits) of each item of a grid to what starts with zeros: two, then (N, 5).

    An item's rows are one run of words, cut into chunks of which the last is filled up with zeros.
    """
    words_TW, device = words_of(pixels_TP), pixels_TP.device
    rows, words = words_TW.shape
    out_N5 = out[2 : 2 + 5 * len(grid_N3)].view(-1, 5)
    count_N = grid_N3.prod(1).clamp(0, rows)
    chunks_N = (count_N * words + ITEM_CHUNK - 1) // ITEM_CHUNK
    ends_N, upto_N = count_N.cumsum(0), chunks_N.cumsum(0)
    row_T = torch.arange(rows, device=device)
    item_T = torch.searchsorted(ends_N, row_T, right=True).clamp(max=len(grid_N3) - 1)
    to_T = (upto_N - chunks_N)[item_T] * ITEM_CHUNK + (row_T - (ends_N - count_N)[item_T]) * words
    chunks_CW = words_TW.new_zeros(-(-rows * words // ITEM_CHUNK) + len(grid_N3), ITEM_CHUNK)
    chunks_CW.view(-1)[to_T[:, None] + torch.arange(words, device=device)] = words_TW
    at_C = torch.arange(len(chunks_CW), device=device)
    item_C = torch.searchsorted(upto_N, at_C, right=True)
    place_C = at_C - F.pad(upto_N, (1, 0))[item_C]
    sums_N2 = out_N5.new_zeros(len(grid_N3) + 1, 2)
    sums_N2.index_add_(0, item_C, hash_chunks_reference(chunks_CW.split(32), place_C, keys))
    out_N5.copy_(torch.cat([grid_N3, sums_N2[:-1]], 1))


def hash_items(pixels_TP: Tensor, grid_N3: Tensor, keys: Tensor, out: Tensor) -> None:
    """`hash_items_reference` as one kernel."""
    if not _in_words(pixels_TP):
        pixels_TP = words_of(pixels_TP)
    (rows, width), items = pixels_TP.shape, grid_N3.shape[0]
    width = width * pixels_TP.itemsize // 4
    programs = -(-rows * width // ITEM_CHUNK) + items  # at most one chunk of an item is not full
    _items_kernel[(programs,)](pixels_TP.data_ptr(), grid_N3, keys, out, rows, items, width, num_warps=1)


def words_of(pixels_TP: Tensor) -> Tensor:
    """The bits of rows as 32-bit words (T, W), the last one filled up with zeros; a view where that is possible."""
    pixels_TP = pixels_TP.detach().contiguous()
    if not _in_words(pixels_TP):
        bytes_TB = pixels_TP.view(torch.uint8)
        pixels_TP = F.pad(bytes_TB, (0, -bytes_TB.shape[1] % 4)).clone()
    return pixels_TP.view(torch.int32)


def _in_words(pixels_TP: Tensor) -> bool:
    whole = pixels_TP.is_contiguous() and not pixels_TP.shape[1] * pixels_TP.itemsize % 4
    return whole and not pixels_TP.data_ptr() % 4


def hash_memory_reference(tensors: list[Tensor], tables: Mapping[str, Tensor], keys: Tensor, out: Tensor) -> None:
    """Adds the 128 bits of all that contiguous tensors hold to the first two of what is given.

    tables: where chunks begin in memory, "addresses", and how many words each has, "counts".
    """
    words = [tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors if tensor.numel()]
    blocks = [(F.pad(each, (0, -len(each) % CHUNK)) if len(each) % CHUNK else each).view(-1, CHUNK) for each in words]
    place_C = torch.arange(sum(map(len, blocks)), device=out.device)
    out[:2] += hash_chunks_reference([some for each in blocks for some in each.split(8)], place_C, keys).sum(0)


def hash_memory(tensors: list[Tensor], tables: Mapping[str, Tensor], keys: Tensor, out: Tensor) -> None:
    """`hash_memory_reference` as one kernel."""
    addresses_C = tables["addresses"]
    _memory_kernel[(len(addresses_C),)](addresses_C, tables["counts"], keys, out, num_warps=1)
