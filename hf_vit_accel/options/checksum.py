"""Sum up the bits of images and weights to find candidates, and compare images bit for bit to decide.

A checksum adds up 32-bit words, in any order. `_mix` turns a word and its position into 64 bits by steps that can be
undone. So one changed word always changes the checksum, and other changes go unseen with a probability near 2**-64.

`T` packed patch rows, `W` 32-bit words of a row, `N` images and videos, `C` chunks of weights, `I` any words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_vit_accel.ops.launch import device_function, kernel_without_specialization, tl

CHUNK = 16384
"""Words of one chunk of weights, which one program adds up. Every weight starts with a chunk of its own."""

_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, below 2**63
_LOW = 0xFFFFFFFF
_PROGRAM = 16 * 1024  # words that a program should have at least
_ROWS = 4096  # rows that the reference mixes together


def words_of(rows_TP: Tensor) -> Tensor:
    """Return the bits of rows as 32-bit words (T, W), zeros at the end of odd rows; a view where that is possible."""
    rows_TP = rows_TP.detach().contiguous()
    odd_width = rows_TP.shape[1] * rows_TP.itemsize % 4
    if odd_width or rows_TP.data_ptr() % 4 or rows_TP.storage_offset() * rows_TP.itemsize % 4:
        bytes_TB = rows_TP.view(torch.uint8)
        rows_TP = F.pad(bytes_TB, (0, -bytes_TB.shape[1] % 4)).clone()
    return rows_TP.view(torch.int32)


def _mix(words_I: Tensor, positions_I: Tensor) -> Tensor:
    """Mix words with their positions: twice multiply by an odd number and fold the upper half into the lower one."""
    mixed_I = (words_I.long() & _LOW) | (positions_I << 32)
    for factor in _FACTORS:
        mixed_I = mixed_I * factor
        mixed_I = mixed_I ^ ((mixed_I >> 32) & _LOW)
    return mixed_I


def equal_pairs(pairs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Return for every pair of word tensors of one size whether all words are equal. One host sync."""
    equal: list[bool] = torch.stack([(first == second).all() for first, second in pairs]).tolist()
    return equal


# --- references in plain torch ----------------------------------------------------------------------------------------


def sum_images_reference(words_TW: Tensor, grid_N3: Tensor, out: Tensor) -> None:
    """Write the grid row and the checksum of every image to `out[1:]`, as rows of four. No host sync."""
    rows, width = words_TW.shape
    count_N = grid_N3.prod(1).clamp(0, rows)
    end_N = count_N.cumsum(0)
    column_W = torch.arange(width, device=words_TW.device)
    sum_N = torch.zeros_like(end_N)
    for row_T in torch.arange(rows, device=words_TW.device).split(_ROWS):
        image_T = torch.searchsorted(end_N, row_T, right=True).clamp(max=len(grid_N3) - 1)
        row_of_image_T = row_T - (end_N - count_N)[image_T]
        mixed_TW = _mix(words_TW[row_T], row_of_image_T[:, None] * width + column_W)
        sum_N.index_add_(0, image_T, mixed_TW.sum(1))
    out[1:] = torch.cat([grid_N3, sum_N[:, None]], 1).flatten()


def sum_weights_reference(tensors: list[Tensor], table_2C: Tensor, out: Tensor) -> None:
    """Add the checksum of contiguous tensors to `out[0]`. The kernel reads the table of addresses instead."""
    position_I = torch.arange(CHUNK, device=out.device)
    for tensor in tensors:
        if not tensor.numel():
            continue
        for words_I in words_of(tensor.reshape(1, -1))[0].split(CHUNK):
            out[0] += _mix(words_I, position_I[: len(words_I)]).sum()
            position_I = position_I + CHUNK


# --- kernels ----------------------------------------------------------------------------------------------------------


@device_function
def _sum_words(words, count, position, start, step):
    """Return the sum of mixed words: blocks of 1024, from `start` on, every `step` words."""
    BLOCK: tl.constexpr = 1024
    sums = tl.zeros((BLOCK,), tl.int64)
    for first in range(start, count, step):
        index = first + tl.arange(0, BLOCK)
        inside = index < count
        word = tl.load(words + index, mask=inside, other=0).to(tl.uint32, bitcast=True)
        mixed = (word.to(tl.int64) | ((position + index).to(tl.int64) << 32)) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * 0x3F58476D1CE4E5B9
        mixed = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)
        sums += tl.where(inside, mixed, 0)
    return tl.sum(sums, 0)


@kernel_without_specialization
def _images_kernel(words, grid, out, rows, width):
    """Add up the words of one image. Programs along the second axis of the launch take blocks in turns.

    `width` is the words of a row. `out` holds the checksum of the weights, then frames, height, width and checksum of
    every image.
    """
    image = tl.program_id(0)
    begin = tl.zeros((), tl.int64)
    for start in range(0, image, 256):  # images before this one
        index = start + tl.arange(0, 256)
        before = index < image
        frames = tl.load(grid + 3 * index, mask=before, other=0)
        size = frames * tl.load(grid + 3 * index + 1, mask=before, other=0)
        size *= tl.load(grid + 3 * index + 2, mask=before, other=0)
        begin += tl.sum(tl.minimum(tl.maximum(size, 0), rows), 0)
    frames = tl.load(grid + 3 * image)
    height = tl.load(grid + 3 * image + 1)
    columns = tl.load(grid + 3 * image + 2)
    begin = tl.minimum(begin, rows)  # the host refuses a grid that does not fit only after this kernel
    end = tl.minimum(begin + tl.minimum(tl.maximum(frames * height * columns, 0), rows), rows)
    stripe = tl.program_id(1).to(tl.int64)
    sums = _sum_words(words + begin * width, (end - begin) * width, 0, stripe * 1024, tl.num_programs(1) * 1024)
    tl.atomic_add(out + 4 * image + 4, sums, sem="relaxed")
    if stripe == 0:
        tl.store(out + 4 * image + 1, frames)
        tl.store(out + 4 * image + 2, height)
        tl.store(out + 4 * image + 3, columns)


@kernel_without_specialization
def _weights_kernel(table, out, chunks):
    """Add up one chunk of 16384 words, by its address and count."""
    chunk = tl.program_id(0)
    words = tl.load(table + chunk).to(tl.pointer_type(tl.int32))
    sums = _sum_words(words, tl.load(table + chunks + chunk).to(tl.int32), chunk * 16384, 0, 1024)
    tl.atomic_add(out, sums, sem="relaxed")


def sum_images(words_TW: Tensor, grid_N3: Tensor, out: Tensor) -> None:
    """Run `sum_images_reference` as one kernel."""
    rows, width = words_TW.shape
    images = len(grid_N3)
    # Items differ in size: the largest needs more programs than an average one.
    stripes = min(4 * -(-rows * width // (_PROGRAM * images)), 1024)
    _images_kernel[(images, stripes)](words_TW, grid_N3, out, rows, width, num_warps=4)


def sum_weights(tensors: list[Tensor], table_2C: Tensor, out: Tensor) -> None:
    """Run `sum_weights_reference` as one kernel, over the table of addresses and counts."""
    chunks = table_2C.shape[1]
    _weights_kernel[(chunks,)](table_2C, out, chunks, num_warps=4)
