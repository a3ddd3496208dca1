"""Decides what `cuda_graphs="auto"` replays: sizes that come again, as long as captures pay and memory is free.

All decisions follow from the calls so far, so the same program makes the same decisions on the same machine. Only
the free memory of the device counts beside them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.recorder import free_bytes
from hf_vit_accel.layout import Grid, rows_of

CONFIG = GraphConfig(max_graphs=64, max_bytes=1 << 30)
"""The bounds of graphs that nobody asked for."""

MOST_ROWS = 16384
"""Patch rows of the largest call that is replayed.

From 8,192 on a replay saves up to 4% on a fast host (docs/benchmarks.md), and more where the host is slow. Graphs of
still larger calls would hold more memory than `CONFIG` allows.
"""
_PADDED_ROWS = 2400
"""Patch rows up to which a padded replay pays, even with a slower backend than an eager call would use."""
_PADDED_CALLS = 2
_EXACT_CALLS = 3
"""A budget is captured at the second call that fits it, an exact shape at its third."""
_COMMON_SHARE = 4
_COMMON_CALLS = 32
"""Beside a graph of its budget, an exact shape is captured if a quarter of all calls have it, or so many calls."""
_FREE_CAPTURES = 4
_REPLAYS_PER_CAPTURE = 8
"""Replays that pay for a capture. A capture takes 25 to 75 ms, a replay saves 4 to 9 ms (H100, 98f4b93)."""
_FREE_IDENTITIES = 4
"""Times that all may be captured anew, as when weights are replaced, before replays have to pay for it."""
_CALLS_PER_CAPTURE = 256
"""Calls of any kind that allow one more. Without them a tower whose graphs were dropped unpaid would stay eager."""
_SHARE = 8
"""The graphs of one kind may hold an eighth of the memory that is free."""
_REMEMBERED = 4096

NO_ROOM = "graphs hold as much memory as they may"
"""Why a call is not captured until the graphs of other calls are dropped."""


@dataclass(frozen=True)
class GraphUse:
    """How a call uses CUDA graphs.

    Attributes:
        eager_reason: Why the call runs eagerly; None for a call that may be replayed.
        exact: The grid of the call, whose exact shape is replayed; None for shapes padded to budgets.
    """

    eager_reason: str | None = None
    exact: Grid | None = None


class Store(Protocol):
    """The counts and the memory of the graphs of one kind."""

    @property
    def captures(self) -> int:
        """Graphs that were captured."""

    @property
    def replays(self) -> int:
        """Graph launches."""

    @property
    def nbytes(self) -> int:
        """Device memory of the graphs."""

    @property
    def max_bytes(self) -> int:
        """Device memory above which no graph is captured."""

    @property
    def needed_bytes(self) -> int:
        """Estimated device memory of a graph of the last call. All graphs share it, since one runs at a time."""

    @property
    def will_make_room(self) -> bool:
        """Whether all graphs are dropped before the call is replayed."""

    @property
    def device(self) -> torch.device | None:
        """The device of the last call; None before the first."""

    @property
    def why_no_capture(self) -> str | None:
        """Why no other capture is tried now, or None."""

    def why_not_exact(self, grid: Grid) -> str | None:
        """Return why the next call has no graph of its own shape, or None."""


class AutoGraphs:
    """Chooses the calls that are replayed, for the graphs of one kind of one tower.

    A call is chosen before it is planned, by its size. Whether it finds its graphs is known only after that. So a
    capture is allowed or refused twice: for a size that was never replayed before the call is planned, and for every
    graph when it is missing.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        """Exact grids and budgets that were captured, or were about to be."""
        self._free_captures = _FREE_CAPTURES
        self._identities = 0

    def choose(
        self,
        grid: Grid,
        budgets_of_call: tuple[int, ...] | None,
        store: Store,
        is_padding_worse: Callable[[bool], bool],
    ) -> GraphUse:
        """Count an inference call, and decide how it uses graphs.

        Args:
            budgets_of_call: The budgets that its images are packed into; None if they fit none, or padding costs more
                than a replay saves.
            is_padding_worse: Whether no backend can replay graphs of budgets. For a large call (its argument), also
                whether they need a slower one than an eager call would use.
        """
        self._calls += 1
        exact_calls = self._count(("exact", grid))
        why_not_exact = store.why_not_exact(grid)
        if grid in self._known and why_not_exact is None:
            return GraphUse(exact=grid)
        rows = rows_of(grid)
        if rows > MOST_ROWS:
            return GraphUse(f"calls of more than {MOST_ROWS} patches keep the GPU busy without a graph")
        padded_calls = 0 if budgets_of_call is None else self._count(("budgets", budgets_of_call))
        is_padding_known = budgets_of_call is not None and self._known.keys() >= set(budgets_of_call)
        can_pad = is_padding_known or padded_calls >= _PADDED_CALLS
        if can_pad and not is_padding_known:
            can_pad = not is_padding_worse(rows > _PADDED_ROWS)
        is_common = exact_calls >= _COMMON_CALLS or exact_calls * _COMMON_SHARE >= self._calls
        is_exact = exact_calls >= _EXACT_CALLS and (is_common or not can_pad) and why_not_exact is None
        if not is_exact and not can_pad:
            return GraphUse(why_not_exact or "a size is captured when it comes again")
        if not is_exact and is_padding_known:
            return GraphUse()
        reason = self.reason_against_capture(store)
        if reason is not None:
            return GraphUse() if is_padding_known else GraphUse(reason)
        self._know((grid,) if is_exact else budgets_of_call or ())
        return GraphUse(exact=grid if is_exact else None)

    def expect(self, grid: Grid) -> None:
        """Note a call of `warmup` whose exact shape is captured: calls of its grid are replayed from then on."""
        self._know((grid,))

    def expect_budgets(
        self, grid: Grid, budgets_of_call: tuple[int, ...], is_padding_worse: Callable[[bool], bool]
    ) -> GraphUse:
        """Note a call of `warmup` whose budgets are captured, unless calls of its size run faster eagerly.

        Args:
            is_padding_worse: See `choose`.
        """
        if is_padding_worse(rows_of(grid) > _PADDED_ROWS):
            return GraphUse("no backend replays many layouts as fast as an eager call of this size runs")
        self._know(budgets_of_call)
        return GraphUse()

    def add_free_captures(self, count: int) -> None:
        """Count captures that the user asked for: replays need not pay for them."""
        self._free_captures += count

    def forget(self, grid: Grid | None) -> None:
        """Choose anew for an exact grid whose graph was dropped; None for a graph of a budget."""
        self._known.pop(grid, None)

    def choose_for_step(self, grid: Grid, store: Store) -> GraphUse:
        """Count a training call, and decide whether its step is replayed."""
        self._calls += 1
        if rows_of(grid) > 4 * CONFIG.max_tokens:
            return GraphUse(f"steps of more than {4 * CONFIG.max_tokens} patches keep the GPU busy without a graph")
        if self._count(grid) < _EXACT_CALLS:
            return GraphUse("with gradients, a layout is captured when it comes often")
        if grid not in self._known:
            reason = self.reason_against_capture(store)
            if reason is not None:
                return GraphUse(reason)
            self._know((grid,))
        return GraphUse(exact=grid)

    def reason_against_capture(self, store: Store) -> str | None:
        """Return why no other graph is captured for the last call, or None."""
        if store.why_no_capture is not None:
            return store.why_no_capture
        paid = store.replays // _REPLAYS_PER_CAPTURE + self._calls // _CALLS_PER_CAPTURE
        if store.captures > self._free_captures + paid:
            return "another graph is captured when replays have paid for those before"
        if _is_profiling():
            return "no graph is captured under a profiler"
        most_bytes = self.most_bytes(store)
        if store.needed_bytes >= most_bytes:
            return "too little memory of the device is free for another graph"
        is_full = store.nbytes >= most_bytes and not store.will_make_room
        return NO_ROOM if is_full else None

    def most_bytes(self, store: Store) -> int:
        """Return the device memory that all graphs may hold now."""
        assert store.device is not None
        return min(free_bytes(store.device) // _SHARE, store.max_bytes)

    def count_identity(self, captures: int) -> None:
        """Count that all is captured anew. The first few times, replays need not pay for the graphs before."""
        self._identities += 1
        if self._identities <= _FREE_IDENTITIES:
            self._free_captures = captures + _FREE_CAPTURES

    def _know(self, keys: Sequence[Hashable]) -> None:
        """Note grids or budgets whose calls are planned for a replay."""
        for key in keys:
            self._known[key] = None
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _count(self, key: Hashable) -> int:
        """Count and return the calls of a key, this one included."""
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return count


def _is_profiling() -> bool:
    """Return whether a profiler of torch runs in this thread or in another."""
    in_this_thread: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return in_this_thread or getattr(torch.autograd.profiler, "_is_profiler_enabled", False)


class DroppedWhenMemoryRunsOut(Protocol):
    """A store whose graphs go when any allocation on their GPU fails, also one of the user's program."""

    device: torch.device | None
    """The device of the graphs; None before the first call."""

    @property
    def has_given_up(self) -> bool:
        """Whether memory ran out, so that no call uses graphs any more."""

    def give_up(self, why: str) -> None:
        """Drop all graphs and capture no other."""


_stores: weakref.WeakSet[DroppedWhenMemoryRunsOut] = weakref.WeakSet()
_is_observing = False
_capturing_threads: set[int] = set()
stores_given_up = 0
"""Stores whose graphs went since memory ran out. A call that ran out of memory may find theirs when it tries again."""


@contextmanager
def capture_of_ours() -> Iterator[None]:
    """Keep all graphs if memory runs out within a capture of ours.

    A capture cannot free cached memory. The recorder frees it and tries again, and whoever captures counts a failure.
    """
    thread = threading.get_ident()
    is_outermost = thread not in _capturing_threads
    _capturing_threads.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            _capturing_threads.discard(thread)


def _is_within_capture() -> bool:
    """Return whether this thread captures, or computes gradients while one does: autograd has threads of its own."""
    computes_gradients = torch._C._current_graph_task_id() != -1
    return threading.get_ident() in _capturing_threads or (computes_gradients and bool(_capturing_threads))


def drop_when_memory_runs_out(store: DroppedWhenMemoryRunsOut) -> None:
    """Register a store whose graphs go as soon as an allocation on their GPU fails. Trying again finds their memory.

    torch calls observers of failed allocations before it raises. Without such observers (their function is not
    public) the graphs stay. A CUDA build of torch without a GPU, where tests stand in for one, cannot attach any.
    """
    global _is_observing
    _stores.add(store)
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _is_observing and attach is not None and torch.cuda.is_available():
        attach(_give_up_graphs)
        _is_observing = True


def _give_up_graphs(device: int, requested: int, allocated: int, free: int) -> None:
    """Drop the graphs of a device; torch calls this with the failed allocation, in its thread."""
    if _is_within_capture():
        return
    global stores_given_up
    for store in list(_stores):
        is_elsewhere = store.device is not None and store.device.index not in (None, device)
        if is_elsewhere:
            continue
        if not store.has_given_up:
            stores_given_up += 1
        with suppress(RuntimeError):  # CUDA refuses to wait for replays within a capture: the next call drops them
            store.give_up("device memory ran out after graphs were captured")
