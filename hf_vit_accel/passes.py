"""Calls of many rows, encoded in passes: the memory that they take is a pass's, however long a video is.

Attention never crosses a frame (in a geometry of clips: an entry of the grid), and nothing else crosses a merged token.
So a call is cut between frames, and each pass computes what one forward does, on fewer rows. A frame is never cut.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import chain
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.metadata import Grid
from hf_vit_accel.route import Spec

__all__ = ["FREE", "NEVER", "Passes", "Serve", "cut", "rows_of"]

Serve = Callable[[Grid, torch.Tensor], list[torch.Tensor]]
"""(grid, pixels (T, P)) of whole images and videos, or of some of their frames, to the outputs of a tower."""

FREE = 28672
"""Rows of a pass under `max_rows="auto"` on CUDA: at most 0.8 GB beyond weights and outputs in every family.

H200, 147,456 rows, Qwen3-VL-8B / Qwen2.5-VL-7B: one pass 2.4 / 2.7 GB; passes of 32,768 rows 0.87 / 0.75 GB and 3 / 2%
more time, of 65,536 1.47 / 1.26 GB and 0.5 / 1.4% more.
"""

NEVER = sys.maxsize


def rows_of(grid: Grid) -> int:
    """T."""
    return sum(t * h * w for t, h, w in grid)


@lru_cache(maxsize=128)
def cut(grid: Grid, most: int, *, clips: bool) -> tuple[Grid, ...]:
    """A call as few passes of at most `most` rows each (more only where a frame has), in order and nearly equal.

    clips: all frames of an entry stay together. Passes of one long video are of two lengths at most, so that they share
    routes and CUDA graphs.
    """
    passes = _fill(grid, most, clips)
    # The lowest bound that needs no more passes makes the longest of them as short as can be.
    bounds = range(-(-rows_of(grid) // len(passes)), most)
    at = bisect_left(bounds, True, key=lambda bound: len(_fill(grid, bound, clips)) <= len(passes))
    return tuple(passes if at == len(bounds) else _fill(grid, bounds[at], clips))


def _fill(grid: Grid, most: int, clips: bool) -> list[Grid]:
    """Each pass takes what still fits into it, and one frame or clip at least."""
    passes: list[Grid] = []
    current: list[tuple[int, int, int]] = []
    room = most
    for t, h, w in grid:
        together = t if clips else 1
        each, left = together * h * w, t // together
        while left:
            taken = min(left, room // each)
            if not taken and current:
                passes.append(tuple(current))
                current, room = [], most
                continue
            taken = max(taken, 1)
            current.append((taken * together, h, w))
            room, left = max(room - taken * each, 0), left - taken
    return [*passes, tuple(current)]


class Passes:
    """How the calls of one tower are cut, and what was learnt of its memory.

    max_rows: what the user asked for. fewer: rows of a pass since memory ran out, of calls with gradients and without.
    calls, count: calls that were cut, and their passes.
    """

    def __init__(self, max_rows: int | Literal["auto"] | None) -> None:
        self.max_rows = max_rows
        self.fewer: dict[bool, int] = {}
        self.calls = self.count = 0

    def most(self, device: torch.device, *, grad: bool, sharded: bool) -> int | None:
        """Rows from which on a call is cut, NEVER where memory must run out first; None: not even then.

        With gradients a pass runs forward twice, so "auto" waits for that. sharded: FSDP2 brings weights at each pass,
        and all ranks, each with pictures of its own, would have to make as many.
        """
        if self.max_rows is None or sharded or (self.max_rows == "auto" and device.type != "cuda"):
            return None
        asked = self.max_rows if self.max_rows != "auto" else NEVER if grad else FREE
        return self.fewer.get(grad, asked)

    def halve(self, grid: Grid, spec: Spec) -> bool:
        """Whether a pass whose memory ran out is to be tried in shorter ones; later calls keep to those. Only once."""
        grad, clips = spec.request.grad, spec.geometry.clips
        if spec.max_rows is None or grad in self.fewer:
            return False
        fewer = (rows_of(grid) if spec.max_rows == NEVER else spec.max_rows) // 2
        if len(cut(grid, fewer, clips=clips)) == 1:
            return False  # a frame that alone is too large
        self.fewer[grad] = fewer
        return True

    def serve(self, serve: Serve, spec: Spec, grid: Grid, pixels_TP: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of a call, pass after pass. With gradients, each pass runs again in the backward pass."""
        grad, clips = spec.request.grad, spec.geometry.clips
        most = self.fewer.get(grad, spec.max_rows)
        todo = (grid,) if most is None or len(pixels_TP) <= most else cut(grid, most, clips=clips)
        total, start, count = len(pixels_TP), 0, 0
        outputs: list[torch.Tensor] = []
        by_pass: list[list[torch.Tensor]] = []
        while todo:
            rows, found = rows_of(todo[0]), None
            run = partial(checkpoint, serve, use_reentrant=False) if grad and rows < total else serve
            try:
                found = run(todo[0], pixels_TP[start : start + rows])
            except torch.OutOfMemoryError:
                if not self.halve(todo[0], spec):
                    raise
            if found is None:  # and nothing holds what the failed pass had made
                todo = cut(tuple(chain.from_iterable(todo)), self.fewer[grad], clips=clips)
                continue
            if rows == total:
                return found
            if grad:
                by_pass.append(found)
            else:
                outputs = outputs or [each.new_empty(len(each) * total // rows, *each.shape[1:]) for each in found]
                for output, each in zip(outputs, found, strict=True):
                    at = start * len(output) // total
                    output[at : at + len(each)].copy_(each)
            todo, start, count = todo[1:], start + rows, count + 1
            del found  # before the next pass begins
        self.calls, self.count = self.calls + 1, self.count + count
        return [torch.cat(each) for each in zip(*by_pass, strict=True)] if grad else outputs

    def __str__(self) -> str:
        told = [f"{self.calls} calls in {self.count} passes"] if self.calls else []
        told += [
            f"at most {rows} rows{' with gradients' if grad else ''} since memory ran out"
            for grad, rows in self.fewer.items()
        ]
        return ", ".join(told)
