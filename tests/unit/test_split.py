"""Test how a call's frames are split among ranks: all frames once, balanced loads, rows in order."""

from __future__ import annotations

import random

import pytest
from support.grids import drawn, frames_of

from hf_vit_accel.layout import rows_of
from hf_vit_accel.options.split import Assignment, Split, cost, split

Entry = tuple[int, int, int]
Grid = tuple[Entry, ...]


def costs_of_frames(grid: Grid) -> list[float]:
    return [cost(rows_of((frame,)), 0.5) for frame in frames_of(grid)]


def frames_in(shares: Split) -> list[tuple[int, int]]:
    """Return the entry and the number of every frame, in the order of the call."""
    pieces = sorted(piece for share in shares for piece in share)
    return [(piece.image, piece.first + n) for piece in pieces for n in range(piece.frames)]


def test_a_split_holds_every_frame_once_and_is_balanced() -> None:
    generator = random.Random(0)
    for _ in range(1000):
        grid = tuple(drawn(generator) * generator.randint(1, 4))
        ranks = generator.randint(1, 9)
        shares = split(grid, ranks, full=0.5)
        assert frames_in(shares) == [(entry, n) for entry, (frames, _, _) in enumerate(grid) for n in range(frames)]
        for share in shares:
            assert list(share) == sorted(share)
        costs = costs_of_frames(grid)
        assignment = Assignment(grid, shares)
        loads_by_rank = [sum(costs_of_frames(assignment.grid_of(rank))) for rank in range(ranks)]
        assert sum(loads_by_rank) == pytest.approx(sum(costs))
        # The bound of a schedule that gives each unit to the rank with the smallest load (Graham).
        assert max(loads_by_rank) <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-6
