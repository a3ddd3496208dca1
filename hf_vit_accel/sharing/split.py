"""Which images and frames of a call each of several ranks encodes, decided from the grid alone, and where its rows lie.

`T` packed patch rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hf_vit_accel.layout import Grid, rows_of

EVEN = 6000
"""Rows of a frame whose attention takes as long as everything else. From the times of FACTS (H200, bf16) at 1,024 and
14,416 rows a frame it is 4,700 to 6,700, in all three families."""

_STEPS = 256


@dataclass(frozen=True, order=True)
class Piece:
    """Frames of an entry of a grid: which entry, its first frame, how many."""

    entry: int
    first: int
    frames: int


Split = tuple[tuple[Piece, ...], ...]
"""By rank, the pieces that it encodes, in the order of the call."""


def cost(rows: int, full: float) -> float:
    """What a frame takes, in rows of the shortest frames. full: share of the layers that attend per frame."""
    return rows * (1 + full * rows / EVEN)


@lru_cache(maxsize=128)
def split(grid: Grid, ranks: int, *, clips: bool, full: float) -> Split:
    """Frames (clips: entries) to ranks, so that the slowest takes nearly as little as can be.

    MULTIFIT (Coffman, Garey, Johnson 1978): under the lowest bound with which all find a place, each rank in its turn
    takes the costliest frames that still fit.

    Frames that cost the same are alike, so each rank gets consecutive ones: few pieces, which share a layout.
    """
    units: dict[float, list[Piece]] = {}
    for entry, (t, h, w) in enumerate(grid):
        frames = t if clips else 1
        alike = units.setdefault(cost(h * w * frames, full), [])
        alike += [Piece(entry, first, frames) for first in range(0, t, frames)]
    counts = {each: len(alike) for each, alike in units.items()}
    # Below the first bound there is nothing; at twice that, whatever fits nowhere would find all ranks above the mean.
    least = max(sum(each * count for each, count in counts.items()) / ranks, max(counts)) * (1 + 1e-9)
    bounds = [least * (1 + step / _STEPS) for step in range(_STEPS + 1)]
    at = bisect_left(range(_STEPS), True, key=lambda step: not _fit(counts, ranks, bounds[step])[1])
    shares = []
    for taken in _fit(counts, ranks, bounds[at])[0]:
        share = []
        for each, count in taken.items():
            share += units[each][:count]
            del units[each][:count]
        shares.append(_joined(sorted(share)))
    return tuple(shares)


def _fit(counts: Mapping[float, int], ranks: int, bound: float) -> tuple[list[dict[float, int]], dict[float, int]]:
    """By rank, how many it takes of each cost, always the highest that fits; and how many of each find no place."""
    left, costs, by_rank = dict(counts), sorted(counts), []
    for _ in range(ranks):
        room, taken = bound, dict[float, int]()
        while (index := bisect_right(costs, room) - 1) >= 0:
            each = costs[index]
            count = min(left[each], int(room / each))
            taken[each] = taken.get(each, 0) + count
            left[each], room = left[each] - count, room - count * each
            if not left[each]:
                del left[each], costs[index]
        by_rank.append(taken)
    return by_rank, left


def _joined(units: list[Piece]) -> tuple[Piece, ...]:
    """Neighbouring frames of an entry as one piece."""
    joined: list[Piece] = []
    for unit in units:
        if joined and (joined[-1].entry, joined[-1].first + joined[-1].frames) == (unit.entry, unit.first):
            joined[-1] = replace(joined[-1], frames=joined[-1].frames + unit.frames)
        else:
            joined.append(unit)
    return tuple(joined)


def loads(grid: Grid, shares: Split, *, clips: bool, full: float) -> list[float]:
    """The cost of each rank's pieces."""

    def of(piece: Piece) -> float:
        rows = grid[piece.entry][1] * grid[piece.entry][2]
        return cost(rows * piece.frames, full) if clips else piece.frames * cost(rows, full)

    return [sum(map(of, share)) for share in shares]


@dataclass(frozen=True)
class Places:
    """Where the rows of a split lie in a call of a grid."""

    grid: Grid
    shares: Split

    def grid_of(self, rank: int) -> Grid:
        """What a rank encodes."""
        return tuple((piece.frames, *self.grid[piece.entry][1:]) for piece in self.shares[rank])

    @cached_property
    def total(self) -> int:
        """T."""
        return rows_of(self.grid)

    @cached_property
    def rows(self) -> list[int]:
        """By rank."""
        return [rows_of(self.grid_of(rank)) for rank in range(len(self.shares))]

    @cached_property
    def runs(self) -> list[list[tuple[int, int]]]:
        """By rank: the first row of each piece in the call, and the row after its last."""
        starts = [0, *accumulate(t * h * w for t, h, w in self.grid)]
        frames = [h * w for _, h, w in self.grid]
        return [
            [
                (starts[p.entry] + p.first * frames[p.entry], starts[p.entry] + (p.first + p.frames) * frames[p.entry])
                for p in share
            ]
            for share in self.shares
        ]

    def taken(self, tensor: Tensor, rank: int) -> Tensor:
        """A rank's rows of a tensor that has rows, or merged tokens, of the whole call."""
        runs = [slice(*(row * len(tensor) // self.total for row in run)) for run in self.runs[rank]]
        if not runs:
            return tensor[:0]
        return tensor[runs[0]] if len(runs) == 1 else torch.cat([tensor[run] for run in runs])

    def put_together(self, by_rank: Sequence[Tensor], into: Tensor) -> None:
        """The inverse: each rank's rows to where they lie in those of the whole call."""
        for tensor, runs in zip(by_rank, self.runs, strict=True):
            at = 0
            for begin, end in runs:
                begin, end = begin * len(into) // self.total, end * len(into) // self.total
                into[begin:end].copy_(tensor[at : at + end - begin])
                at += end - begin
