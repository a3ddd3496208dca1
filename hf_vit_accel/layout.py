"""`grid_thw` to everything about the sequence that a tower needs, computed once on the host with numpy.

`T` packed patch rows, `M` merged tokens (T / merge**2), `S` segments, `F` frames. A segment is what attends to itself:
one frame, or, in window layers, one window of one frame. The arrays equal those of `transformers.vision_utils`
(`get_vision_cu_seqlens`, `get_vision_position_ids`, `get_vision_window_index`,
`get_vision_interpolation_indices_and_weights`); the tests hold each to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Grid = tuple[tuple[int, int, int], ...]
Array = np.ndarray[Any, Any]


def rows_of(grid: Grid) -> int:
    """T."""
    return sum(t * h * w for t, h, w in grid)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What of a tower's config decides its sequence metadata.

    merge: patches per merged token, along one side. window: merged tokens per attention window along one side, or None.
    table: side of the square learned position table that is interpolated to each frame, or None; taps: rows of it that
    are blended along one side, 2 (bilinear) or 4 (bicubic); align_corners: whether its corners are the frame's. clips:
    whether all frames of an entry attend to each other.
    """

    merge: int
    window: int | None = None
    table: int | None = None
    taps: Literal[2, 4] = 2
    align_corners: bool = True
    clips: bool = False


@dataclass(frozen=True)
class Segments:
    """Consecutive runs of rows that attend within themselves.

    lengths_S: int32 rows of each, positive; zero only at the end, where a CUDA graph has more segments than the layout.
    fixed_max_seqlen: what to report as `max_seqlen` for CUDA graphs; None for the true maximum. spare: padding rows.
    """

    lengths_S: Array
    fixed_max_seqlen: int | None = None
    spare: int = 0

    @cached_property
    def cu_seqlens_S1(self) -> Array:
        """int32 prefix sums with the leading zero."""
        return np.concatenate([[0], np.cumsum(self.lengths_S, dtype=np.int64)]).astype(np.int32)

    @cached_property
    def max_seqlen(self) -> int:
        """Rows of the longest segment, or what is declared for it."""
        return self.fixed_max_seqlen or int(self.lengths_S.max())

    @property
    def count(self) -> int:
        """S."""
        return len(self.lengths_S)

    @property
    def rows(self) -> int:
        """T."""
        return int(self.cu_seqlens_S1[-1])


@dataclass(frozen=True, kw_only=True)
class VisionMetadata:
    """Everything about one call's sequence, on the host.

    full: one segment per frame, or per clip. position_ids_T2: (row, column) of every patch, int32, in the order in
    which patches are packed (merge blocks). For towers with windows, window: the windows' segments, window_index_M: the
    permutation of merged tokens that makes every window consecutive, inverse_index_M: its inverse (int64). For towers
    with a position table, interp_indices_T4 (int32) and interp_weights_T4 (float32): the table rows that are blended, 4
    or, if bicubic, 16.
    """

    grid: Grid
    rows: int
    merged: int
    full: Segments
    position_ids_T2: Array
    window: Segments | None = None
    window_index_M: Array | None = None
    inverse_index_M: Array | None = None
    interp_indices_T4: Array | None = None
    interp_weights_T4: Array | None = None

    def segments(self) -> dict[Literal["full", "window"], Segments]:
        """The segments by kind of layer."""
        return {"full": self.full} if self.window is None else {"full": self.full, "window": self.window}

    def arrays(self) -> dict[str, Array]:
        """The arrays that the device needs, by the names that stock towers give them (plus `inverse_index`)."""
        named: dict[str, Array | None] = {
            "cu_seqlens": self.full.cu_seqlens_S1,
            "position_ids": self.position_ids_T2,
            "window_index": self.window_index_M,
            "inverse_index": self.inverse_index_M,
            "cu_window_seqlens": self.window.cu_seqlens_S1 if self.window else None,
            "interp_indices": self.interp_indices_T4,
            "interp_weights": self.interp_weights_T4,
        }
        return {name: array for name, array in named.items() if array is not None}


def build(grid: Grid, geometry: Geometry) -> VisionMetadata:
    """Compute all arrays for a checked grid. Work per distinct (h, w) is done once and repeated over frames."""
    merge = geometry.merge
    t_F, h_F, w_F = np.array(grid, dtype=np.int64).T
    frames = [(h, w) for t, h, w in grid for _ in range(t)]
    lengths_S = t_F * h_F * w_F if geometry.clips else np.repeat(h_F * w_F, t_F)
    full = Segments(lengths_S.astype(np.int32))

    positions = {size: _block_positions(*size, merge) for size in set(frames)}
    position_ids_T2 = np.concatenate([positions[size] for size in frames])

    window = window_index_M = inverse_index_M = None
    if geometry.window is not None:
        windows = {(h, w): _windows(h // merge, w // merge, geometry.window) for h, w in set(frames)}
        merged_F = np.repeat(h_F * w_F, t_F) // merge**2
        starts_F = np.concatenate([[0], np.cumsum(merged_F, dtype=np.int64)[:-1]])
        window_index_M = np.concatenate([windows[size][0] + s for size, s in zip(frames, starts_F, strict=True)])
        inverse_index_M = np.empty_like(window_index_M)
        inverse_index_M[window_index_M] = np.arange(len(window_index_M))
        window = Segments(np.concatenate([windows[size][1] for size in frames]).astype(np.int32) * np.int32(merge**2))

    interp_indices_T4 = interp_weights_T4 = None
    if geometry.table is not None:
        taps = {size: _interpolation(positions[size], *size, geometry) for size in set(frames)}
        interp_indices_T4 = np.concatenate([taps[size][0] for size in frames])
        interp_weights_T4 = np.concatenate([taps[size][1] for size in frames])

    return VisionMetadata(
        grid=grid,
        rows=full.rows,
        merged=full.rows // merge**2,
        full=full,
        position_ids_T2=position_ids_T2,
        window=window,
        window_index_M=window_index_M,
        inverse_index_M=inverse_index_M,
        interp_indices_T4=interp_indices_T4,
        interp_weights_T4=interp_weights_T4,
    )


def _block_positions(h: int, w: int, merge: int) -> Array:
    """(row, column) of one frame's patches, merge block after merge block, row-major within a block."""
    rows, cols = np.divmod(np.arange(h * w, dtype=np.int32), np.int32(w))
    both = np.stack([rows, cols], axis=-1)
    blocks = both.reshape(h // merge, merge, w // merge, merge, 2).swapaxes(1, 2)
    return np.ascontiguousarray(blocks.reshape(h * w, 2))


def _windows(h: int, w: int, side: int) -> tuple[Array, Array]:
    """One frame of h x w merged tokens cut into windows: token indices window by window, and tokens per window."""
    row, col = np.divmod(np.arange(h * w, dtype=np.int64), w)
    window = row // side * -(-w // side) + col // side
    return np.argsort(window, kind="stable"), np.bincount(window)


def _interpolation(positions_T2: Array, h: int, w: int, geometry: Geometry) -> tuple[Array, Array]:
    """Taps of one frame into the square table, its borders repeated: flat indices (T, 4 or 16), and their weights.

    Bicubic is Keys' kernel with a = -0.75. float32, in transformers' order of operations: the weights are bit-equal.
    """
    side, count = geometry.table or 1, geometry.taps
    offsets = np.arange(count, dtype=np.int32) - (count // 2 - 1)
    taps, weights = [], []
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
    if not cubic:
        return np.maximum(np.float32(1) - distance, np.float32(0))
    a = np.float32(-0.75)
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, far)


_ALIGN = 16


def pack(arrays: Mapping[str, Array]) -> Array:
    """All arrays in one run of bytes, each from a multiple of 16 on, in their order."""
    starts, total = _starts(arrays)
    packed = np.empty(total, dtype=np.uint8)
    for array, start in zip(arrays.values(), starts, strict=True):
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: Tensor, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Views into packed bytes, wherever those are; the arrays give names, dtypes and shapes."""
    return {
        name: packed[start : start + array.nbytes].view(torch.from_numpy(array[:0].copy()).dtype).view(array.shape)
        for (name, array), start in zip(arrays.items(), _starts(arrays)[0], strict=True)
    }


def _starts(arrays: Mapping[str, Array]) -> tuple[list[int], int]:
    starts, total = [], 0
    for array in arrays.values():
        starts.append(total)
        total += -(-array.nbytes // _ALIGN) * _ALIGN
    return starts, total


def send(packed: Array, device: torch.device) -> Tensor:
    """Packed bytes on a device. To CUDA they go from pinned memory, on the current stream, without waiting."""
    host = torch.from_numpy(packed)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def to_device(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """Send all arrays in one packed copy; each result is a view into one buffer on the device."""
    # Kept for later calls, which may record gradients through what is indexed; and compilers would start anew for each.
    with torch.inference_mode(False):
        return unpack(send(pack(arrays), device), arrays)


def settle(device: torch.device) -> None:
    """Let the host wait until what was queued on the current stream is there for all others, which do not wait."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
