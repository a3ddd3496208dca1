"""Decides what CUDA graphs are captured: by the calls so far, the captures that failed, and what replays have paid.

All decisions follow from the calls so far, so the same program makes the same decisions on the same machine. Only the
free memory of the device counts beside them. Passes are numbered from 1; here each is a call.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from hf_vit_accel.backends.base import Replay
from hf_vit_accel.engine.route import Route
from hf_vit_accel.graphs.budgets import Bin

Key = tuple[int, Hashable]
"""The key of a graph: the id of the identity that it was captured under, and its signature."""
NEVER = sys.maxsize
"""The number of a call that never comes."""


class Accepted(str):
    """Why a pass runs eagerly, where `strict` accepts that: it is as fast, or graphs of it come later."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a pass is captured, and what captures cost.

    Attributes:
        exact_calls: Calls of a shape before it is captured as it is; `NEVER` for never.
        padded_calls: Calls of a budget before it is captured; `NEVER` in training, which pads nothing.
        common_calls: Calls of a shape that padding serves, before it is captured as it is,
        common_share: unless one in so many calls has it.
        most_rows: Patch rows of the largest pass that is captured.
        padded_rows: Patch rows up to which a padded replay pays, even with a slower backend than an eager call.
        asked_for: Whether the user asked for graphs. Else replays have to pay for captures, none runs under a profiler,
            and graphs hold a share of the memory that is free.
    """

    exact_calls: int
    padded_calls: int = NEVER
    common_calls: int = 0
    common_share: int = 1
    most_rows: int = NEVER
    padded_rows: int = NEVER
    most_graphs: int
    most_bytes: int
    asked_for: bool = True


AUTOMATIC = Thresholds(
    exact_calls=3,
    padded_calls=2,
    common_calls=32,
    common_share=4,
    most_rows=16384,
    padded_rows=2400,
    most_graphs=64,
    most_bytes=1 << 30,
    asked_for=False,
)
"""Inference with `cuda_graphs="auto"`.

From 8,192 rows on a replay saves up to 4% on a fast host (docs/benchmarks.md), and more where the host is slow. Graphs
of more than 16,384 would hold more memory than is allowed.
"""
AUTOMATIC_STEPS = Thresholds(exact_calls=3, most_rows=5120, most_graphs=64, most_bytes=8 << 30, asked_for=False)
"""Training with `cuda_graphs="auto"`."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How a pass runs.

    Attributes:
        reason: Why by none. `strict` raises it if the user asked for graphs, unless it is `Accepted`.
        routes: The route of each graph's images. Without graphs, the one whose backend or kernel failed in a capture.
            If it fails eagerly, too, it is disabled.
        keys: The key of each graph. Those that are missing are captured first.
        is_final: Whether the pass is replayed alike as long as no graph is captured or dropped.
    """

    replay: Replay = "never"
    reason: str = ""
    bins: tuple[Bin, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: tuple[Key, ...] = ()
    makes_room: bool = False
    is_final: bool = False


NO_ROOM = Accepted("graphs hold as much memory as they may")
"""Why a call is not captured until the graphs of other calls are dropped."""
CHANGED = Accepted("weights, modules or what gradients are given for changed at call after call")

_FAILURES = 3
"""Captures that fail in a row before no other is tried."""
_CHANGES = 4
"""Times that graphs go stale at call after call before calls run eagerly."""
_FREE_CAPTURES = 5
_CAPTURE = 256
"""The price of a capture, in calls: without them a tower whose graphs were dropped unpaid would stay eager."""
_REPLAYS_PER_CAPTURE = 8
"""Eight replays pay for a capture, which takes 25 to 75 ms. A replay saves 4 to 9 ms (H100, 98f4b93)."""
CREDIT_OF_REPLAY = _CAPTURE // _REPLAYS_PER_CAPTURE
REMEMBERED = 4096
"""Shapes and budgets whose passes are counted."""


@dataclass
class Policy:
    """The history of one kind of passes of one tower, and what it allows.

    Attributes:
        counts: Passes of each shape and budget; the least recent ones are forgotten.
        refusals: Keys whose capture failed, with the reason.
        credit: What calls and replays have paid for captures that come.
        off: Why no capture is tried any more; None while captures are tried.
        failures: Captures that failed in a row.
    """

    thresholds: Thresholds
    calls: int = 0
    counts: dict[Hashable, int] = field(default_factory=dict)
    refusals: dict[Hashable, str] = field(default_factory=dict)
    credit: int = _FREE_CAPTURES * _CAPTURE
    off: str | None = None
    failures: int = 0
    changes: int = 0
    without_room: int = 0

    def count(self, keys: Iterable[Hashable]) -> None:
        """Count a pass, by its shape and its budgets."""
        self.calls += 1
        self.credit += 1
        for key in keys:
            self.counts[key] = self.counts.pop(key, 0) + 1
        while len(self.counts) > REMEMBERED:
            self.counts.pop(next(iter(self.counts)))

    def count_change(self, weight: int = 1) -> None:
        """Count that graphs went stale."""
        self.changes = min(self.changes + weight, 2 * _CHANGES)

    @property
    def changes_too_often(self) -> bool:
        """Whether graphs went stale at call after call."""
        return self.changes > _CHANGES

    def came_often(self, grid: Hashable, *, is_padded: bool) -> bool:
        """Return whether a shape came so often that it is captured as it is, though padding may serve it."""
        count = self.counts.get(grid, 0)
        limits = self.thresholds
        is_common = count >= limits.common_calls or count * limits.common_share >= self.calls
        return count >= limits.exact_calls and (is_common or not is_padded)

    def why_refused(self, keys: Iterable[Hashable]) -> str | None:
        """Return why captures of these keys are not tried, since they or others failed; None if they may be."""
        if self.off is not None:
            return self.off
        return next((self.refusals[key] for key in keys if key in self.refusals), None)

    def why_unpaid(self, captures: int) -> str | None:
        """Return why so many captures, which nobody asked for, are not tried now; None if they may be."""
        if self.credit < captures * _CAPTURE:
            return "another graph is captured when replays have paid for those before"
        return "no graph is captured under a profiler" if _is_profiling() else None

    def note_capture(self, *, is_free: bool) -> None:
        """Note that a graph was captured."""
        self.failures = 0
        self.credit -= 0 if is_free else _CAPTURE

    def note_failure(self, key: Hashable, why: str) -> None:
        """Note that a capture failed: its key is not tried again."""
        self.credit -= _CAPTURE
        self.failures += 1
        self.refusals[key] = why
        if self.failures >= _FAILURES:
            self.off = f"{self.failures} captures failed in a row, the last: {why}"

    def forget_failures(self) -> None:
        """Let every capture be tried that failed, or found no room."""
        self.refusals = {}
        self.off = None
        self.failures = 0
        self.without_room = 0

    def will_make_room(self, held: int) -> bool:
        """Return whether so many calls found no room as would have paid for all graphs that are dropped for them."""
        return self.without_room >= held * _REPLAYS_PER_CAPTURE


def _is_profiling() -> bool:
    """Return whether a profiler of torch runs in this thread or in another."""
    in_this_thread: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return in_this_thread or torch.autograd.profiler._is_profiler_enabled
