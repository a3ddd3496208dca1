"""Split long inputs into passes to bound peak memory.

Attention never crosses a frame (in a geometry of clips: an entry of the grid), and nothing else crosses a merged token.
So a call is cut between frames, and every pass computes what one forward does, on fewer rows. A frame is never cut.

`T` packed patch rows, `P` pixels of a patch, `E` width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.engine.encoder import Checkpoint
from hf_vit_accel.engine.recorded import Recorded
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.families.base import Parts
from hf_vit_accel.layout import Grid, rows_of

Serve = Callable[..., list[Tensor]]
"""(grid, pixels (T, P)) of whole images and videos, or of some of their frames, to the outputs of a tower.

A pass also says where the outputs will lie, and whether it hands over embedded rows (T, E) instead of pixels.
"""

FREE = 36864
"""Rows of a pass under `max_rows="auto"` on CUDA, so that a forward takes at most 0.8 GB beyond weights and outputs.

A row takes 15 to 19 kB in bf16 while an MLP runs: docs/max-rows.md has the table.
"""

NEVER = sys.maxsize


class _Unit(NamedTuple):
    """Frames that stay together: one frame, or all frames of an entry."""

    entry: int
    frames: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        """Packed patch rows of the frames."""
        return self.frames * self.height * self.width


@lru_cache(maxsize=128)
def cut(grid: Grid, max_rows: int, *, clips: bool) -> tuple[Grid, ...]:
    """Cut a call into as few passes as possible, in order and nearly equal.

    Passes of one long video differ by a frame at most, so that they share routes.

    Args:
        grid: the images and videos of the call.
        max_rows: rows of a pass; only a frame that has more is a longer pass.
        clips: whether all frames of an entry stay together.
    """
    units: list[_Unit] = []
    for entry, (t, h, w) in enumerate(grid):
        units += [_Unit(entry, t, h, w)] if clips else [_Unit(entry, 1, h, w)] * t
    fewest = _fewest_passes(units, max_rows)
    remaining_rows = rows_of(grid)
    passes: list[Grid] = []
    begin = 0
    for remaining_passes in range(fewest[0], 0, -1):
        target = -(-remaining_rows // remaining_passes)
        rows = units[begin].rows
        end = begin + 1
        while end < len(units):
            must_take = fewest[end] >= remaining_passes  # the later passes could not hold it
            may_take = rows < target and rows + units[end].rows <= max_rows
            if not (must_take or may_take):
                break
            rows += units[end].rows
            end += 1
        passes.append(_grid_of(units[begin:end]))
        remaining_rows -= rows
        begin = end
    return tuple(passes)


def _fewest_passes(units: Sequence[_Unit], max_rows: int) -> list[int]:
    """Return, for every unit, how many passes it and all later ones need; 0 behind the last."""
    fewest = [0] * (len(units) + 1)
    end = len(units)
    rows = 0  # of the units from the current one up to `end`, which fill one pass
    for begin in reversed(range(len(units))):
        rows += units[begin].rows
        while rows > max_rows and end > begin + 1:
            end -= 1
            rows -= units[end].rows
        fewest[begin] = 1 + fewest[end]
    return fewest


def _grid_of(units: Sequence[_Unit]) -> Grid:
    """Join the frames of every entry again."""
    entries: dict[int, tuple[int, int, int]] = {}
    for unit in units:
        frames = entries[unit.entry][0] if unit.entry in entries else 0
        entries[unit.entry] = (frames + unit.frames, unit.height, unit.width)
    return tuple(entries.values())


def reasons_whole(snapshot: Any, checkpoints: Sequence[Checkpoint | None]) -> list[str]:
    """Say why no call of a tower may be cut.

    Args:
        snapshot: the reading of the tower.
        checkpoints: those of its layers, in a call with gradients.
    """
    # Ranks with other pictures would have to make as many passes.
    reasons = ["FSDP2 brings weights at each pass"] if snapshot.sharded else []
    if any(layer is not None and layer.reentrant for layer in checkpoints):
        reasons.append("reentrant checkpoints bring gradients to weights at each pass")
    return [f"not cut by max_rows: {why}" for why in (*reasons, *snapshot.mixing)]


class Passes:
    """Cut the calls of one tower, and remember what its memory could not hold.

    Attributes:
        max_rows: the setting of the user.
        fewer: rows of a pass since memory ran out, of calls with gradients and without.
        calls: how many calls were cut.
        count: how many passes they had.
    """

    def __init__(self, max_rows: int | Literal["auto"] | None) -> None:
        self.max_rows = max_rows
        self.fewer: dict[bool, int] = {}
        self.calls = 0
        self.count = 0

    def most(self, device: torch.device, *, grad: bool, whole: bool) -> int | None:
        """Return the rows of a pass: NEVER to cut only when memory runs out, None not even then.

        With gradients a pass runs forward twice, so "auto" waits until memory runs out.

        Args:
            device: where the call runs.
            grad: whether gradients flow.
            whole: whether no call may be cut, see `reasons_whole`.
        """
        if self.max_rows is None or whole or (self.max_rows == "auto" and device.type != "cuda"):
            return None
        automatic = NEVER if grad else FREE
        return self.fewer.get(grad, automatic if self.max_rows == "auto" else self.max_rows)

    def halve(self, grid: Grid, spec: Spec) -> bool:
        """Halve the rows of a pass once, after its memory ran out; later calls keep to that.

        Returns:
            False if passes were halved before, may not be cut, or cannot be cut further.
        """
        grad = spec.request.grad
        if spec.max_rows is None or grad in self.fewer:
            return False
        fewer = (rows_of(grid) if spec.max_rows == NEVER else spec.max_rows) // 2
        if len(cut(grid, fewer, clips=spec.geometry.clips)) == 1:
            return False  # a frame that alone is too large
        self.fewer[grad] = fewer
        return True

    def serve(self, serve: Serve, spec: Spec, snapshot: Any, grid: Grid, pixels_TP: Tensor) -> list[Tensor]:
        """Return the outputs of a call, encoded pass after pass.

        With gradients, every pass runs again in the backward pass.

        Args:
            serve: encodes a pass.
            spec: what decides the routes of the call.
            snapshot: the reading of the tower.
            grid: the images and videos of the call.
            pixels_TP: their pixels.

        Raises:
            torch.OutOfMemoryError: memory ran out, also in shorter passes.
        """
        grad = spec.request.grad
        clips = spec.geometry.clips
        total = len(pixels_TP)
        max_rows = self.fewer.get(grad, spec.max_rows)
        pending = (grid,) if max_rows is None or total <= max_rows else cut(grid, max_rows, clips=clips)
        passes = _TrainedPasses(serve, spec, snapshot) if grad else _PlacedPasses(serve, total)
        start = 0
        count = 0
        while pending:
            rows = rows_of(pending[0])
            ran_out = False
            try:
                if rows == total:
                    return serve(grid, pixels_TP)
                passes.run(pending[0], pixels_TP[start : start + rows], start)
            except torch.OutOfMemoryError:
                if not self.halve(pending[0], spec):
                    raise
                ran_out = True
            if ran_out:  # only here is the error gone, which held all that the failed pass had made
                remaining = tuple(entry for part in pending for entry in part)
                pending = cut(remaining, self.fewer[grad], clips=clips)
            else:
                pending = pending[1:]
                start += rows
                count += 1
        self.calls += 1
        self.count += count
        return passes.joined()

    def __str__(self) -> str:
        lines = [f"{self.calls} calls in {self.count} passes"] if self.calls else []
        for grad, rows in self.fewer.items():
            lines.append(f"at most {rows} rows{' with gradients' if grad else ''} since memory ran out")
        return ", ".join(lines)


class _PlacedPasses:
    """Passes without gradients, which write into the outputs of the call.

    Args:
        serve: encodes a pass.
        total: rows of the call.
    """

    def __init__(self, serve: Serve, total: int) -> None:
        self._serve = serve
        self._total = total
        self._outputs: list[Tensor] = []

    def run(self, grid: Grid, pixels_TP: Tensor, start: int) -> None:
        """Encode a pass whose first row is `start`."""
        rows = len(pixels_TP)
        places = self._places(start, rows)
        outputs = self._serve(grid, pixels_TP, places)
        if not self._outputs:
            for output in outputs:
                self._outputs.append(output.new_empty(len(output) * self._total // rows, *output.shape[1:]))
            places = self._places(start, rows)
        for output, place in zip(outputs, places, strict=True):
            if output is not place:
                place.copy_(output)

    def _places(self, start: int, rows: int) -> list[Tensor]:
        """Return the rows of the outputs that a pass makes; none before the first pass has shown their shapes."""
        places = []
        for output in self._outputs:
            begin = start * len(output) // self._total
            places.append(output[begin : begin + rows * len(output) // self._total])
        return places

    def joined(self) -> list[Tensor]:
        """Return the outputs of the call."""
        return self._outputs


class _TrainedPasses:
    """Passes with gradients: nothing of a pass is kept but its input, from which it runs again.

    Args:
        serve: encodes a pass.
        spec: what decides the routes of the call.
        snapshot: the reading of the tower.
    """

    def __init__(self, serve: Serve, spec: Spec, snapshot: Any) -> None:
        assert spec.ops is not None
        parts: Parts = snapshot.parts
        self._serve = serve
        self._embed = spec.ops.embed
        self._embedding = [module for module in (parts.patch_embed, parts.embed_norm) if module is not None]
        self._parts = parts
        self._has_adapters = bool(snapshot.foreign)
        self._recorded: Recorded | None = None
        self._by_pass: list[list[Tensor]] = []

    def run(self, grid: Grid, pixels_TP: Tensor, start: int) -> None:
        """Encode a pass; `start` says nothing here, since outputs are joined at the end."""
        if self._recorded is None:
            self._recorded = Recorded(self._parts, has_adapters=self._has_adapters)
        rows = self._embedded(pixels_TP)
        is_embedded = rows is not None
        self._by_pass.append(
            checkpoint(
                self._serve,
                grid,
                rows if is_embedded else pixels_TP,
                (),
                is_embedded,
                use_reentrant=False,
                context_fn=self._recorded.contexts,
            )
        )

    def _embedded(self, pixels_TP: Tensor) -> Tensor | None:
        """Return the embedded rows (T, E) where no gradient reaches them; None where one does.

        Stock does not keep the pixels there, so a program may write to them before the backward pass.
        """
        parameters = (parameter for module in self._embedding for parameter in module.parameters())
        if pixels_TP.requires_grad or any(parameter.requires_grad for parameter in parameters):
            return None
        rows_TE = self._embed(pixels_TP)
        return None if rows_TE.requires_grad else rows_TE

    def joined(self) -> list[Tensor]:
        """Return the outputs of the call."""
        return [torch.cat(outputs) for outputs in zip(*self._by_pass, strict=True)]
