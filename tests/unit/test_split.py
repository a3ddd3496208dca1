"""Test how a call's frames are split among ranks: all frames once, balanced loads, rows in order."""

from __future__ import annotations

import random

import pytest
import torch
from support.grids import drawn, frames_of

from hf_vit_accel.layout import rows_of
from hf_vit_accel.options.split import Assignment, Piece, Split, cost, split

Entry = tuple[int, int, int]
Grid = tuple[Entry, ...]


def costs_of_units(grid: Grid, clips: bool) -> list[float]:
    """Return the cost of every frame, or of every video if videos stay together."""
    return [cost(rows_of((unit,)), 0.5) for unit in frames_of(grid, clips=clips)]


def frames_in(shares: Split) -> list[tuple[int, int]]:
    """Return the entry and the number of every frame, in the order of the call."""
    pieces = sorted(piece for share in shares for piece in share)
    return [(piece.image, piece.first + n) for piece in pieces for n in range(piece.frames)]


@pytest.mark.parametrize("clips", [False, True])
def test_a_split_holds_every_frame_once_and_is_balanced(clips: bool) -> None:
    generator = random.Random(0)
    for _ in range(1000):
        grid = tuple(drawn(generator) * generator.randint(1, 4))
        ranks = generator.randint(1, 9)
        shares = split(grid, ranks, clips=clips, full=0.5)
        assert frames_in(shares) == [(entry, n) for entry, (frames, _, _) in enumerate(grid) for n in range(frames)]
        for share in shares:
            assert list(share) == sorted(share)
            assert not clips or all(piece.frames == grid[piece.image][0] for piece in share)
        costs = costs_of_units(grid, clips)
        assignment = Assignment(grid, shares)
        loads_by_rank = [sum(costs_of_units(assignment.grid_of(rank), clips)) for rank in range(ranks)]
        assert sum(loads_by_rank) == pytest.approx(sum(costs))
        # The bound of a schedule that gives each unit to the rank with the smallest load (Graham).
        assert max(loads_by_rank) <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks) + 1e-6


def test_rows_are_taken_and_put_back_in_order() -> None:
    generator = random.Random(1)
    for _ in range(200):
        grid = tuple(drawn(generator))
        ranks = generator.randint(1, 5)
        assignment = Assignment(grid, split(grid, ranks, clips=False, full=1.0))
        assert assignment.rows == [rows_of(assignment.grid_of(rank)) for rank in range(ranks)]
        for ratio in (1, 4):  # patch rows, and merged tokens
            rows = torch.arange(rows_of(grid) // ratio)[:, None]
            by_rank = [assignment.share_of(rows, rank) for rank in range(ranks)]
            assert [len(rows_of_rank) * ratio for rows_of_rank in by_rank] == assignment.rows
            together = torch.full_like(rows, -1)
            assignment.put_together(by_rank, together)
            assert torch.equal(together, rows)


def test_equal_frames_are_split_into_consecutive_runs() -> None:
    video = split(((64, 36, 64),), 2, clips=False, full=1.0)
    assert video == ((Piece(0, 0, 32, 36, 64),), (Piece(0, 32, 32, 36, 64),))
    images = split(((1, 32, 32),) * 16, 4, clips=False, full=1.0)
    entries = [[piece.image for piece in share] for share in images]
    assert entries == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
