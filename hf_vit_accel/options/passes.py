"""Encode a batch in one pass, replayed from a CUDA graph or eagerly; or split a long one, to bound peak memory.

Every option wraps `OnePass`, and it knows none. Attention never crosses a frame, and nothing else crosses a merged
token. So a call is cut between frames, and every pass computes what one forward does, on fewer rows. A frame is never
cut.

`T` packed patch rows, `P` pixels of a patch, `E` width.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_vit_accel.engine.call import HIDDEN_STATES_OF_STEP, HOOKED, Batch, Encode, FastPlan
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.recorded import RecordedModules
from hf_vit_accel.engine.route import RouteKey, Routes
from hf_vit_accel.graphs.policy import Accepted, Decision
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import raise_if_any
from hf_vit_accel.options.split import Piece, grid_of, joined, units_of

AUTOMATIC_ON = ("cuda",)
"""The types of devices on which `cuda_graphs="auto"` captures."""

AUTO_ROWS = 36864
"""Rows of a pass under `max_rows="auto"` on CUDA, so that a forward takes at most 0.8 GB beyond weights and outputs.

A row takes 15 to 19 kB in bf16 while an MLP runs: docs/max-rows.md has the table.
"""

CUT_ON = ("cuda",)
"""The types of devices on which `max_rows="auto"` cuts."""
NO_LIMIT = sys.maxsize
"""Rows of a pass that is cut only after memory ran out."""


class OnePass:
    """Returns the outputs of a batch, and decides about it: which graph replays it, or by which route it is encoded."""

    def __init__(self, routes: Routes, inference: Runner | None, training: TrainingRunner | None) -> None:
        self._routes = routes
        self._inference = inference
        self._training = training

    def __call__(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of a batch, and note in its attempt how they were made."""
        plan = batch.plan
        spec = plan.spec
        is_strict = spec.settings.strict
        runner = self._training if spec.request.grad else self._inference
        is_automatic = spec.settings.graphs == "auto"
        if is_automatic and spec.request.device.type not in AUTOMATIC_ON:
            runner = None
        why_eager = "such calls are never replayed"
        route = None
        if runner is not None:
            ran = runner.run(batch)
            if not isinstance(ran, Decision):
                return ran
            why_eager = ran.reason
            if is_strict and not (is_automatic or isinstance(why_eager, Accepted)):
                raise_if_any([f"not replayed from a CUDA graph: {why_eager}"])
            if ran.routes and not is_strict:
                (route,) = ran.routes  # it fails again, and is disabled
        if route is None:
            device = spec.request.device
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            route = self._routes.cache.find(RouteKey(batch.grid, spec, stream)) or self._routes.get(batch.grid, spec)
        if is_strict:
            raise_if_any(route.unmet)
        outputs = encode(
            route.bound,
            batch.pixels_TP,
            plan.checkpoints,
            plan.called or plan.reading.sharded_layers,
            output_slices=batch.output_slices,
            hidden_states=plan.hidden_states,
        )
        batch.attempt.passes.append((route, f"eager: {why_eager}"))
        return outputs

    def drop_graphs(self) -> None:
        """Drop all CUDA graphs, and give their memory back."""
        for runner in (self._inference, self._training):
            if runner is not None:
                runner.drop_graphs()


@lru_cache(maxsize=128)
def cut(grid: Grid, max_rows: int) -> tuple[Grid, ...]:
    """Cut a call into as few passes as possible, in order. The longest is as short as it can be.

    All passes of one long video but the last are equal, so that they share routes. Only a frame of more rows is longer.
    """
    units = units_of(grid)
    most = min(max_rows, rows_of(grid))
    fewest = len(_filled(units, most))
    least = bisect_left(range(most), True, key=lambda rows: len(_filled(units, rows)) == fewest)
    return tuple(grid_of(joined(units_of_pass)) for units_of_pass in _filled(units, least))


def _filled(units: Sequence[Piece], max_rows: int) -> list[list[Piece]]:
    """Return the units of every pass, each filled before the next begins."""
    passes: list[list[Piece]] = []
    room = 0
    for unit in units:
        if unit.rows > room:
            passes.append([])
            room = max_rows
        passes[-1].append(unit)
        room -= unit.rows
    return passes


def reasons_not_cut(plan: FastPlan) -> list[str]:
    reading = plan.reading
    # Ranks with other images would have to make as many passes.
    reasons = ["FSDP2 gathers weights at each pass"] if reading.sharded_layers else []
    if plan.has_reentrant_checkpoints:
        reasons.append("reentrant checkpoints bring gradients to weights at each pass")
    if plan.is_hooked:
        reasons.append(HOOKED)
    reasons += reading.mixing
    if plan.hidden_states and plan.spec.request.grad:
        reasons.append(HIDDEN_STATES_OF_STEP)
    return [f"not cut by max_rows: {why}" for why in reasons]


class InPasses:
    """Encodes batches in passes of a largest number of rows, which is halved when memory runs out; counts them.

    Attributes:
        rows_after_oom: By whether gradients flow, the rows of a pass since memory ran out; empty before.
    """

    def __init__(self, encode: Encode, max_rows: int | Literal["auto"], drop_graphs: Callable[[], None]) -> None:
        self.max_rows = max_rows
        self.rows_after_oom: dict[bool, int] = {}
        self.calls = 0
        self.passes = 0
        self._encode = encode
        self._drop_graphs = drop_graphs

    def __call__(self, batch: Batch) -> list[Tensor]:
        """Return the outputs of a batch: encoded as it is, or in passes if it is long."""
        request = batch.plan.spec.request
        if self.max_rows == "auto" and request.device.type not in CUT_ON:
            return self._encode(batch)
        most_rows = NO_LIMIT if request.grad else AUTO_ROWS  # with gradients a pass runs forward twice
        if self.max_rows != "auto":
            most_rows = self.max_rows
        most_rows = self.rows_after_oom.get(request.grad, most_rows)
        is_cut = len(batch.pixels_TP) > most_rows
        if is_cut:
            reasons = reasons_not_cut(batch.plan)
            if isinstance(self.max_rows, int) and len(batch.pixels_TP) > self.max_rows:  # the user's bound
                batch.note(reasons)
            is_cut = not reasons
        try:
            return self._encode_passes(batch, most_rows) if is_cut else self._encode(batch)
        except torch.OutOfMemoryError:
            if batch.attempt.has_new_room() or not self._halve(batch, most_rows):
                raise
        return self._encode_passes(batch, self.rows_after_oom[request.grad])

    def _encode_passes(self, batch: Batch, most_rows: int) -> list[Tensor]:
        """Return the joined outputs of all passes. With gradients, each is encoded again in the backward."""
        grids = cut(batch.grid, most_rows)
        if len(grids) == 1:  # a frame is never cut
            return self._encode(batch)
        if batch.plan.spec.request.grad:
            reading = batch.plan.reading
            recorded = RecordedModules(reading.parts, has_adapters=reading.unpredictable is not None)
            by_pass = [_recomputed(self._encode, part, recorded) for part in _parts(batch, grids)]
            outputs = [torch.cat(outputs_of_passes) for outputs_of_passes in zip(*by_pass, strict=True)]
        else:
            outputs = self._in_place(batch, grids)
        self.calls += 1
        self.passes += len(grids)
        return outputs

    def _in_place(self, batch: Batch, grids: Sequence[Grid]) -> list[Tensor]:
        """Return the outputs of passes without gradients. Each writes to its slices, but the first: it shows shapes."""
        complete: list[Tensor] = []
        total = len(batch.pixels_TP)
        start = 0
        for part in _parts(batch, grids):
            end = start + len(part.pixels_TP)
            outputs = self._encode(replace(part, output_slices=_slices(complete, start, end, total)))
            if not complete:
                complete = [out.new_empty(len(out) * total // end, *out.shape[1:]) for out in outputs]
            for target, output in zip(_slices(complete, start, end, total), outputs, strict=True):
                if target.data_ptr() != output.data_ptr():
                    target.copy_(output)
            start = end
            del outputs, output  # before the next pass begins
        return complete

    def _halve(self, batch: Batch, most_rows: int) -> bool:
        """Halve the rows of a pass once, after its memory ran out; later calls keep to that. False if it cannot be."""
        plan = batch.plan
        grad = plan.spec.request.grad
        if grad in self.rows_after_oom or reasons_not_cut(plan):
            return False
        longest = max(cut(batch.grid, most_rows), key=rows_of)
        half = (rows_of(longest) if most_rows == NO_LIMIT else most_rows) // 2
        if len(cut(longest, half)) == 1:
            return False  # a frame that alone is too large
        self.rows_after_oom[grad] = half
        self._drop_graphs()
        return True

    def __str__(self) -> str:
        lines = [f"{self.calls} calls in {self.passes} passes"] if self.calls else []
        for grad, rows in self.rows_after_oom.items():
            lines.append(f"at most {rows} rows{' with gradients' if grad else ''} since memory ran out")
        return ", ".join(lines)


def _parts(batch: Batch, grids: Sequence[Grid]) -> Iterator[Batch]:
    start = 0
    for grid in grids:
        end = start + rows_of(grid)
        yield replace(batch, grid=grid, pixels_TP=batch.pixels_TP[start:end], is_part=True)
        start = end


def _slices(outputs: Sequence[Tensor], start: int, end: int, total: int) -> list[Tensor]:
    """Return the slices of a call's outputs, of rows or merged tokens, that belong to these of its patch rows."""
    return [output[start * len(output) // total : end * len(output) // total] for output in outputs]


def _recomputed(encode_part: Encode, part: Batch, recorded: RecordedModules) -> list[Tensor]:
    """Return the outputs of a pass with gradients, of which only the input is kept: it runs again in the backward."""

    def encode_pixels(pixels_TP: Tensor) -> list[Tensor]:
        return encode_part(replace(part, pixels_TP=pixels_TP))

    # The pixels are an argument: autograd raises if they are overwritten before it runs them again.
    return checkpoint(encode_pixels, part.pixels_TP, use_reentrant=False, context_fn=lambda: (nullcontext(), recorded))
