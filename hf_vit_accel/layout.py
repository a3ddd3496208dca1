"""Compute the sequence metadata of a call from `grid_thw`, once, on the host, with numpy.

`T` packed patch rows, `M` merged tokens (T / merge**2), `S` segments, `F` frames, `K` taps of an interpolation. A
segment is a run of rows that attend to each other: one frame, or in window layers one window of a frame.

The arrays equal those of `transformers.vision_utils`, and the tests compare them: `get_vision_cu_seqlens`,
`get_vision_position_ids`, `get_vision_window_index` and `get_vision_interpolation_indices_and_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Grid = tuple[tuple[int, int, int], ...]
"""One (frames, height, width) for every image or video of a call; height and width in patches."""

Array = np.ndarray[Any, Any]


def rows_of(grid: Grid) -> int:
    """Return the number of patch rows T of a grid."""
    return sum(t * h * w for t, h, w in grid)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The part of a tower's config that decides its sequence metadata.

    Args:
        merge: Patches per merged token, along one side.
        window: Merged tokens per attention window, along one side; None without windows.
        table: Entries of the square table of learned positions, along one side; None without such a table.
        taps: Table entries that are blended along one side: 2 (bilinear) or 4 (bicubic).
        align_corners: Whether the corners of the table lie on the corner patches of a frame.
        clips: Whether all frames of a grid entry attend to each other. (Options cut no call of such a tower.)
        class_tokens: Rows in front of every segment that are no patches.
        quarters: Whether a merger between two layers makes one row of every four. Later layers attend to those.
    """

    merge: int
    window: int | None = None
    table: int | None = None
    taps: Literal[2, 4] = 2
    align_corners: bool = True
    clips: bool = False
    class_tokens: int = 0
    quarters: bool = False


@dataclass(frozen=True)
class Segments:
    """Consecutive runs of rows that attend within themselves.

    Args:
        lengths_S: Rows of every segment, int32. Zeros stand at the end only: a CUDA graph may have more segments
            than the layout that it replays.
        fixed_max_seqlen: The `max_seqlen` that a CUDA graph was captured with; None for the true maximum.
        spare: Padding rows at the end, which belong to no image.
    """

    lengths_S: Array
    fixed_max_seqlen: int | None = None
    spare: int = 0

    @cached_property
    def cu_seqlens_S1(self) -> Array:
        """The row at which every segment starts, and the end of the last one: int32 prefix sums."""
        return np.concatenate([[0], np.cumsum(self.lengths_S, dtype=np.int64)]).astype(np.int32)

    @cached_property
    def max_seqlen(self) -> int:
        """Rows of the longest segment, or the maximum that a CUDA graph declares."""
        return self.fixed_max_seqlen or int(self.lengths_S.max())

    @property
    def count(self) -> int:
        """The number of segments S."""
        return len(self.lengths_S)

    @property
    def rows(self) -> int:
        """The number of rows T."""
        return int(self.cu_seqlens_S1[-1])


@dataclass(frozen=True, kw_only=True)
class VisionMetadata:
    """The sequence metadata of one call, on the host.

    Arrays have the names of stock towers, and `inverse_index`.

    Args:
        window: The segments of window layers; None for towers without windows.
        of_rows: `position_ids` (T, 2), int32, the (row, column) of every patch in its frame, in packing order (merge
            blocks). With a position table also `interp_indices` (T, K), int32, its entries that are blended, K = 4 for
            every patch or 16 if bicubic, and `interp_weights` (T, K), float32.
        of_tokens: With windows, `window_index` (M), int64, the permutation of merged tokens that makes every window
            consecutive, and `inverse_index` (M), its inverse.
    """

    grid: Grid
    rows: int
    merged: int
    full: Segments
    window: Segments | None = None
    of_rows: Mapping[str, Array]
    of_tokens: Mapping[str, Array]

    def segments(self) -> dict[Literal["full", "window"], Segments]:
        """Return the segments of every kind of layer."""
        return {"full": self.full} if self.window is None else {"full": self.full, "window": self.window}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that the device needs, by name."""
        offsets = {"cu_seqlens": self.full.cu_seqlens_S1}
        if self.window is not None:
            offsets["cu_window_seqlens"] = self.window.cu_seqlens_S1
        return {**offsets, **self.of_rows, **self.of_tokens}


def build(grid: Grid, geometry: Geometry) -> VisionMetadata:
    """Compute the sequence metadata of a grid whose heights and widths are multiples of `geometry.merge`.

    Frames of equal size share their arrays, which are computed once per distinct (height, width).
    """
    merge = geometry.merge
    t_F, h_F, w_F = np.array(grid, dtype=np.int64).T
    frames = [(h, w) for t, h, w in grid for _ in range(t)]
    lengths_S = t_F * h_F * w_F if geometry.clips else np.repeat(h_F * w_F, t_F)
    full = Segments((lengths_S + geometry.class_tokens).astype(np.int32))

    positions = {size: _block_positions(*size, merge) for size in set(frames)}
    of_rows = {"position_ids": np.concatenate([positions[size] for size in frames])}
    if geometry.table is not None:
        taps = {size: _interpolation(positions[size], *size, geometry) for size in set(frames)}
        of_rows["interp_indices"] = np.concatenate([taps[size][0] for size in frames])
        of_rows["interp_weights"] = np.concatenate([taps[size][1] for size in frames])

    window = None
    of_tokens: dict[str, Array] = {}
    if geometry.window is not None:
        window, window_index_M = _window_layout(frames, merge, geometry.window)
        inverse_index_M = np.empty_like(window_index_M)
        inverse_index_M[window_index_M] = np.arange(len(window_index_M))
        of_tokens = {"window_index": window_index_M, "inverse_index": inverse_index_M}

    return VisionMetadata(
        grid=grid,
        rows=rows_of(grid),
        merged=rows_of(grid) // merge**2,
        full=full,
        window=window,
        of_rows=MappingProxyType(of_rows),
        of_tokens=MappingProxyType(of_tokens),
    )


def _block_positions(h: int, w: int, merge: int) -> Array:
    """Return the (row, column) of one frame's patches: merge block after merge block, row-major within a block."""
    rows, columns = np.divmod(np.arange(h * w, dtype=np.int32), np.int32(w))
    positions = np.stack([rows, columns], axis=-1)
    blocks = positions.reshape(h // merge, merge, w // merge, merge, 2).swapaxes(1, 2)
    return np.ascontiguousarray(blocks.reshape(h * w, 2))


def _window_layout(frames: list[tuple[int, int]], merge: int, side: int) -> tuple[Segments, Array]:
    """Return the windows of all frames as segments of patch rows, and the merged tokens in window order."""
    windows_by_size = {(h, w): _windows(h // merge, w // merge, side) for h, w in set(frames)}
    index = []
    merged_per_window = []
    start = 0
    for size in frames:
        tokens, lengths = windows_by_size[size]
        index.append(tokens + start)
        merged_per_window.append(lengths)
        start += len(tokens)
    lengths_S = np.concatenate(merged_per_window).astype(np.int32) * np.int32(merge**2)
    return Segments(lengths_S), np.concatenate(index)


def _windows(h: int, w: int, side: int) -> tuple[Array, Array]:
    """Return the h x w merged tokens of a frame in the order of its windows, int64, and the tokens per window."""
    row, column = np.divmod(np.arange(h * w, dtype=np.int64), w)
    window = row // side * -(-w // side) + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


def _interpolation(positions_T2: Array, h: int, w: int, geometry: Geometry) -> tuple[Array, Array]:
    """Return the table entries (T, K) that are blended for the patches of one frame, and their weights (T, K).

    K is 4, or 16 if bicubic (Keys' kernel with a = -0.75). Entries beyond the table's border repeat the border. All
    is float32 in the order of operations of transformers, so the weights equal its weights bit for bit.
    """
    assert geometry.table is not None
    side = geometry.table
    count = geometry.taps
    offsets = np.arange(count, dtype=np.int32) - (count // 2 - 1)
    taps = []
    weights = []
    for axis, size in enumerate((h, w)):
        source = positions_T2[:, axis].astype(np.float32)
        if geometry.align_corners:
            source = source * np.float32(side - 1) / np.float32(max(size - 1, 1))
        else:
            source = (source + np.float32(0.5)) * np.float32(side) / np.float32(size) - np.float32(0.5)
        floor = np.floor(source)
        taps.append(np.clip(floor.astype(np.int32)[:, None] + offsets, 0, side - 1))
        distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
        weights.append(_weights(distance, cubic=count == 4))
    indices_TK = (taps[0][:, :, None] * np.int32(side) + taps[1][:, None, :]).reshape(-1, count**2)
    weights_TK = (weights[0][:, :, None] * weights[1][:, None, :]).reshape(-1, count**2)
    return indices_TK, weights_TK


def _weights(distance: Array, *, cubic: bool) -> Array:
    """Return the weights of table entries at these distances from a patch, along one side."""
    if not cubic:
        return np.maximum(np.float32(1) - distance, np.float32(0))
    a = np.float32(-0.75)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far)


_ALIGN = 16
"""Bytes: every packed array starts at a multiple of it."""


def pack(arrays: Mapping[str, Array]) -> Array:
    """Pack arrays of any dtypes and shapes into one uint8 array, in their order.

    Every array starts at a multiple of 16 bytes, so that kernels may load vectors from it.
    """
    starts, total = _starts(arrays)
    packed = np.empty(total, dtype=np.uint8)
    for array, start in zip(arrays.values(), starts, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return views into packed bytes on any device, by name."""
    starts, _ = _starts(arrays)
    tensors = {}
    for (name, array), start in zip(arrays.items(), starts, strict=True):
        dtype = torch.from_numpy(array[:0].copy()).dtype
        tensors[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
    return tensors


def _starts(arrays: Mapping[str, Array]) -> tuple[list[int], int]:
    """Return the byte at which every array starts, and the number of bytes of all."""
    starts = []
    total = 0
    for array in arrays.values():
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    return starts, total


def send(packed: Array, device: torch.device) -> Tensor:
    """Copy packed bytes (uint8) to a device, in one copy.

    A copy to CUDA starts from pinned memory on the current stream, and the host does not wait for it.
    """
    host = torch.from_numpy(packed)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def to_device(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Send all arrays in one packed copy. Every returned tensor is a view into one buffer on the device."""
    # Later calls reuse these tensors. Inference tensors could not be saved for a backward, and torch.compile would
    # compile again for them.
    with torch.inference_mode(False):
        return unpack(send(pack(arrays), device), arrays)


def settle(device: torch.device) -> None:
    """Wait until the work queued on the current stream is done, because other streams do not wait for it."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
