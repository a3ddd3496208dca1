"""Take calls apart between frames, and share frames among ranks, from the grid alone.

`T` packed patch rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapreplace
from itertools import accumulate

import torch
from torch import Tensor

from hf_vit_accel.layout import Grid, rows_of

BALANCED_ROWS = 6000
"""Rows of a frame whose attention takes as long as everything else: 4,700 to 6,700 in all three families (H200, bf16,
times at 1,024 and 14,416 rows a frame)."""


@dataclass(frozen=True, order=True)
class Piece:
    """Consecutive frames of one image or video: its index in the grid, the first frame, their number and size."""

    image: int
    first: int
    frames: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        return self.frames * self.height * self.width


def units_of(grid: Grid) -> list[Piece]:
    """Return the frames of a call, one by one. No frame attends to another in a tower whose calls are cut."""
    return [Piece(image, frame, 1, h, w) for image, (t, h, w) in enumerate(grid) for frame in range(t)]


def joined(units: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join neighbouring frames of a video to one piece."""
    pieces: list[Piece] = []
    for unit in units:
        if pieces and (pieces[-1].image, pieces[-1].first + pieces[-1].frames) == (unit.image, unit.first):
            pieces[-1] = replace(pieces[-1], frames=pieces[-1].frames + unit.frames)
        else:
            pieces.append(unit)
    return tuple(pieces)


def grid_of(pieces: Sequence[Piece]) -> Grid:
    return tuple((piece.frames, piece.height, piece.width) for piece in pieces)


Split = tuple[tuple[Piece, ...], ...]
"""For every rank, the pieces that it encodes, in the order of the call."""


def cost(rows: int, full: float) -> float:
    """Return the cost of a frame, in rows of very short frames."""
    return rows * (1 + full * rows / BALANCED_ROWS)


@lru_cache(maxsize=128)
def split(grid: Grid, ranks: int, *, full: float) -> Split:
    """Assign frames to ranks, the costliest first, each to the rank with the least load (LPT, Graham 1969).

    Frames of equal cost are interchangeable, so each rank gets consecutive ones: few pieces, which share a layout.
    `full` is the part of layers that attend within whole frames.
    """
    units: dict[float, list[Piece]] = {}
    for unit in units_of(grid):
        units.setdefault(cost(unit.rows, full), []).append(unit)
    loads = [(0.0, rank) for rank in range(ranks)]  # a heap
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    for unit_cost in sorted(units, reverse=True):
        counts = [0] * ranks
        for _ in units[unit_cost]:
            load, rank = loads[0]
            heapreplace(loads, (load + unit_cost, rank))
            counts[rank] += 1
        first = 0
        for share, count in zip(shares, counts, strict=True):
            share += units[unit_cost][first : first + count]
            first += count
    return tuple(joined(sorted(share)) for share in shares)


@dataclass(frozen=True)
class Assignment:
    """Which rank encodes which pieces of a call, and where their rows are among those of the call."""

    grid: Grid
    shares: Split

    def grid_of(self, rank: int) -> Grid:
        return grid_of(self.shares[rank])

    @cached_property
    def total(self) -> int:
        """Return T, the patch rows of the call."""
        return rows_of(self.grid)

    @cached_property
    def rows(self) -> list[int]:
        """Return the patch rows of every rank's share."""
        return [rows_of(self.grid_of(rank)) for rank in range(len(self.shares))]

    @cached_property
    def runs(self) -> list[list[tuple[int, int]]]:
        """Return for every rank the first row of each piece in the call, and the row after its last."""
        starts = [0, *accumulate(t * h * w for t, h, w in self.grid)]
        runs = []
        for share in self.shares:
            runs_of_rank = []
            for piece in share:
                first_row = starts[piece.image] + piece.first * piece.height * piece.width
                runs_of_rank.append((first_row, first_row + piece.rows))
            runs.append(runs_of_rank)
        return runs

    def share_of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a rank's rows of a tensor that has rows, or merged tokens, of the whole call."""
        slices = [self._slice(run, tensor) for run in self.runs[rank]]
        if not slices:
            return tensor[:0]
        return tensor[slices[0]] if len(slices) == 1 else torch.cat([tensor[rows] for rows in slices])

    def put_together(self, by_rank: Sequence[Tensor], into: Tensor) -> None:
        """Copy each rank's rows to where the whole call has them: the inverse of `share_of`."""
        for tensor, runs in zip(by_rank, self.runs, strict=True):
            start = 0
            for run in runs:
                rows = self._slice(run, into)
                into[rows].copy_(tensor[start : start + rows.stop - rows.start])
                start += rows.stop - rows.start

    def _slice(self, run: tuple[int, int], tensor: Tensor) -> slice:
        """Return the slice of a tensor of T rows, or of fewer merged tokens, that belongs to a run of patch rows."""
        begin, end = run
        return slice(begin * len(tensor) // self.total, end * len(tensor) // self.total)
