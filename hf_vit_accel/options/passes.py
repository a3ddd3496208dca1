"""Split long inputs into passes to bound peak memory.

Attention never crosses a frame (in a geometry of clips: a video), and nothing else crosses a merged token.
So a call is cut between frames, and every pass computes what one forward does, on fewer rows. A frame is never cut.

`T` packed patch rows, `P` pixels of a patch, `E` width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.engine.encoder import Checkpoint
from hf_vit_accel.engine.facts import TowerFacts
from hf_vit_accel.engine.recorded import RecordedModules
from hf_vit_accel.engine.route import Spec
from hf_vit_accel.layout import Grid, rows_of

AUTO_ROWS = 36864
"""Rows of a pass under `max_rows="auto"` on CUDA, so that a forward takes at most 0.8 GB beyond weights and outputs.

A row takes 15 to 19 kB in bf16 while an MLP runs: docs/max-rows.md has the table.
"""

NO_LIMIT = sys.maxsize
"""Rows of a pass that is cut only after memory ran out."""


class _Unit(NamedTuple):
    """Frames that stay together: one frame, or all frames of a video."""

    image: int
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
        max_rows: rows of a pass; only a frame that has more is a longer pass.
    """
    units: list[_Unit] = []
    for image, (t, h, w) in enumerate(grid):
        units += [_Unit(image, t, h, w)] if clips else [_Unit(image, 1, h, w)] * t
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
    """Join the frames of every image again."""
    images: dict[int, tuple[int, int, int]] = {}
    for unit in units:
        frames = images[unit.image][0] if unit.image in images else 0
        images[unit.image] = (frames + unit.frames, unit.height, unit.width)
    return tuple(images.values())


def reasons_not_cut(facts: TowerFacts, checkpoints: Sequence[Checkpoint | None]) -> list[str]:
    """Return why no call of a tower may be cut."""
    # Ranks with other images would have to make as many passes.
    reasons = ["FSDP2 gathers weights at each pass"] if facts.sharded_layers else []
    if any(layer is not None and layer.is_reentrant for layer in checkpoints):
        reasons.append("reentrant checkpoints bring gradients to weights at each pass")
    return [f"not cut by max_rows: {why}" for why in (*reasons, *facts.mixing)]


class PassLimit:
    """The limit for the rows of a pass of one tower, which is halved when memory runs out; and counts of its passes.

    Attributes:
        max_rows: the setting of the user.
        rows_after_oom: by whether gradients flow, the rows of a pass since memory ran out; empty before.
        calls: how many calls were cut.
        passes: how many passes they had.
    """

    def __init__(self, max_rows: int | Literal["auto"] | None) -> None:
        self.max_rows = max_rows
        self.rows_after_oom: dict[bool, int] = {}
        self.calls = 0
        self.passes = 0

    def rows(self, device: torch.device, *, grad: bool, never_cut: bool) -> int | None:
        """Return the rows of a pass at most: `NO_LIMIT` if only memory that runs out cuts a call; None to never cut.

        With gradients a pass runs forward twice, so "auto" waits until memory runs out.

        Args:
            device: where the call runs.
            never_cut: whether no call may be cut, see `reasons_not_cut`.
        """
        if self.max_rows is None or never_cut or (self.max_rows == "auto" and device.type != "cuda"):
            return None
        automatic = NO_LIMIT if grad else AUTO_ROWS
        return self.rows_after_oom.get(grad, automatic if self.max_rows == "auto" else self.max_rows)

    def halve(self, grid: Grid, spec: Spec) -> bool:
        """Halve the rows of a pass once, after its memory ran out; later calls keep to that.

        Returns:
            False if passes were halved before, may not be cut, or cannot be cut further.
        """
        grad = spec.request.grad
        if spec.max_rows is None or grad in self.rows_after_oom:
            return False
        half = (rows_of(grid) if spec.max_rows == NO_LIMIT else spec.max_rows) // 2
        if len(cut(grid, half, clips=spec.geometry.clips)) == 1:
            return False  # a frame that alone is too large
        self.rows_after_oom[grad] = half
        return True

    def __str__(self) -> str:
        lines = [f"{self.calls} calls in {self.passes} passes"] if self.calls else []
        for grad, rows in self.rows_after_oom.items():
            lines.append(f"at most {rows} rows{' with gradients' if grad else ''} since memory ran out")
        return ", ".join(lines)


class RecomputedPasses:
    """Passes with gradients: nothing of a pass is kept but its input, from which it runs again in the backward pass.

    Args:
        facts: Of the tower.
        spec: Of the routes of the call.
    """

    def __init__(self, facts: TowerFacts, spec: Spec) -> None:
        assert spec.ops is not None
        parts = facts.parts
        self._embed = spec.ops.embed
        self._embedding = [module for module in (parts.patch_embed, parts.embed_norm) if module is not None]
        self._recorded = RecordedModules(parts, has_adapters=facts.unpredictable is not None)

    def run(self, encode_pass: Callable[..., list[Tensor]], pixels_TP: Tensor) -> list[Tensor]:
        """Return the outputs of a pass.

        Args:
            encode_pass: Called with rows and `is_embedded`, see `engine.encoder.encode`. It returns the outputs.
        """
        rows_TE = self._embedded(pixels_TP)
        is_embedded = rows_TE is not None
        rows = rows_TE if is_embedded else pixels_TP
        contexts = self._recorded.contexts
        return checkpoint(encode_pass, rows, is_embedded=is_embedded, use_reentrant=False, context_fn=contexts)

    def _embedded(self, pixels_TP: Tensor) -> Tensor | None:
        """Return the embedded rows (T, E) where no gradient reaches them; None where one does.

        A frozen embedding of stock does not keep the pixels, so a program may overwrite them before the backward pass.
        That pass then begins at the embedded rows.
        """
        parameters = (parameter for module in self._embedding for parameter in module.parameters())
        if pixels_TP.requires_grad or any(parameter.requires_grad for parameter in parameters):
            return None
        rows_TE = self._embed(pixels_TP)
        return None if rows_TE.requires_grad else rows_TE
