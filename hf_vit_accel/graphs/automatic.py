"""Decides what `cuda_graphs="auto"` replays: sizes that come again, as long as captures pay and memory is free.

All decisions follow from the calls so far, so the same program makes the same decisions on the same machine. Only
the free memory of the device counts beside them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.layout import Grid, rows_of

CONFIG = GraphConfig(max_graphs=64, max_bytes=1 << 30)
"""The bounds of graphs that nobody asked for."""

MOST_ROWS = 8192
"""Patch rows of the largest call that is replayed. From there on a replay saves 3% at most (docs/cuda-graphs.md)."""
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
"""Replays that pay for a capture. A capture takes 25 to 75 ms, a replay saves 4 to 9 ms (H100, docs/cuda-graphs.md)."""
_CALLS_PER_CAPTURE = 256
"""Calls of any kind that allow one more. Without them a tower whose graphs were dropped unpaid would stay eager."""
_SHARE = 8
"""The graphs of one kind may hold an eighth of the memory that is free."""
_BYTES_PER_VALUE = 33
"""Bytes of the activations of a training step for each row, layer and column of the residual stream (H100)."""
_REMEMBERED = 4096


@dataclass(frozen=True)
class GraphUse:
    """How a call uses CUDA graphs.

    Attributes:
        eager_reason: Why the call runs eagerly; None for a call that may be replayed.
        exactly: Whether its exact shape is replayed, or shapes padded to budgets. None leaves it to the runner.
    """

    eager_reason: str | None = None
    exactly: bool | None = None


CHOSEN_BY_RUNNER = GraphUse()


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


class AutoGraphs:
    """Chooses the calls that are replayed, for the graphs of one kind of one tower."""

    def __init__(self) -> None:
        self._calls = 0
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._chosen: OrderedDict[Hashable, None] = OrderedDict()  # the latest last

    def forget_choices(self) -> None:
        """Choose anew, since all graphs were dropped. The counts of calls stay."""
        self._chosen.clear()

    def forget_oldest_choice(self) -> None:
        """Choose the kind of call anew that was not made for longest, since the oldest graph was dropped."""
        if self._chosen:
            self._chosen.popitem(last=False)

    def choose(
        self,
        grid: Grid,
        budgets_of_call: Hashable,
        store: Store,
        free_bytes: Callable[[], int],
        is_padding_slower: Callable[[], bool],
    ) -> GraphUse:
        """Count an inference call, and decide how it uses graphs.

        Args:
            grid: The grid of the call.
            budgets_of_call: The budgets that its images are packed into; None if they fit none, or padding costs more
                than a replay saves.
            store: The graphs so far.
            free_bytes: Returns the free memory of the device.
            is_padding_slower: Whether graphs of budgets need a slower backend than an eager call would use.
        """
        rows = rows_of(grid)
        self._calls += 1
        if rows > MOST_ROWS:
            return GraphUse(f"calls of more than {MOST_ROWS} patches keep the GPU busy without a graph")
        exact_key: Hashable = ("exact", grid)
        exact_calls = self._count(exact_key)
        padded_key: Hashable = ("budgets", budgets_of_call)
        padded_calls = 0 if budgets_of_call is None else self._count(padded_key)
        if padded_key not in self._chosen and padded_calls >= _PADDED_CALLS and rows > _PADDED_ROWS:
            padded_calls = 0 if is_padding_slower() else padded_calls
        is_exact = exact_key in self._chosen
        if not is_exact and exact_calls >= _EXACT_CALLS:
            is_common = exact_calls >= _COMMON_CALLS or exact_calls * _COMMON_SHARE >= self._calls
            is_exact = is_common or padded_calls < _PADDED_CALLS
        if not is_exact and padded_calls < _PADDED_CALLS:
            return GraphUse("a size is captured when it comes again")
        key = exact_key if is_exact else padded_key
        if key not in self._chosen:
            most_bytes = min(free_bytes() // _SHARE, CONFIG.max_bytes)
            reason = self._reason_against_capture(store, most_bytes)
            if reason is not None and is_exact and padded_key in self._chosen:
                return GraphUse(exactly=False)
            if reason is not None:
                return GraphUse(reason)
            self._chosen[key] = None
        self._chosen.move_to_end(key)
        return GraphUse(exactly=is_exact)

    def choose_for_step(
        self, grid: Grid, values_per_row: int, gradient_bytes: int, store: Store, free_bytes: Callable[[], int]
    ) -> GraphUse:
        """Count a training call, and decide whether its step is replayed.

        Args:
            grid: The grid of the call.
            values_per_row: Layers times width of the residual stream.
            gradient_bytes: Memory of all gradients.
            store: The graphs so far.
            free_bytes: Returns the free memory of the device.
        """
        self._calls += 1
        if rows_of(grid) > 4 * CONFIG.max_tokens:
            return GraphUse(f"steps of more than {4 * CONFIG.max_tokens} patches keep the GPU busy without a graph")
        if self._count(grid) < _EXACT_CALLS:
            return GraphUse("with gradients, a layout is captured when it comes often")
        if grid not in self._chosen:
            activation_bytes = rows_of(grid) * values_per_row * _BYTES_PER_VALUE
            needed_bytes = activation_bytes + gradient_bytes // 4
            most_bytes = min(free_bytes() // _SHARE, CONFIG.max_training_bytes)
            reason = self._reason_against_capture(store, most_bytes, needed_bytes)
            if reason is not None:
                return GraphUse(reason)
            self._chosen[grid] = None
        self._chosen.move_to_end(grid)
        return GraphUse(exactly=True)

    def _reason_against_capture(self, store: Store, most_bytes: int, needed_bytes: int = 0) -> str | None:
        """Return why no other graph is captured now, or None.

        Args:
            store: The graphs so far.
            most_bytes: Memory that all graphs may hold.
            needed_bytes: Memory that the new graph needs at least. All graphs share it: one of them runs at a time.
        """
        paid = store.replays // _REPLAYS_PER_CAPTURE + self._calls // _CALLS_PER_CAPTURE
        if store.captures > _FREE_CAPTURES + paid:
            return "another graph is captured when replays have paid for those before"
        if max(store.nbytes, needed_bytes) >= most_bytes:
            return "too little memory of the device is free for another graph"
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return "no graph is captured under a profiler"
        return None

    def _count(self, key: Hashable) -> int:
        """Count and return the calls of a key, this one included."""
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return count


class DroppedWhenMemoryRunsOut(Protocol):
    """A store whose graphs go when any allocation on their GPU fails, also one of the user's program."""

    device: torch.device | None
    """The device of the graphs; None before the first call."""

    def give_up(self, why: str) -> None:
        """Drop all graphs and capture no other."""


_stores: weakref.WeakSet[DroppedWhenMemoryRunsOut] = weakref.WeakSet()
_is_observing = False
_captures = threading.local()


@contextmanager
def capture_of_ours() -> Iterator[None]:
    """Keep all graphs if memory runs out within a capture of ours, in this thread.

    A capture cannot free cached memory. The recorder frees it and tries again, and whoever captures counts a failure.
    """
    _captures.is_under_way = True
    try:
        yield
    finally:
        _captures.is_under_way = False


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
    if getattr(_captures, "is_under_way", False):
        return
    for store in list(_stores):
        is_elsewhere = store.device is not None and store.device.index not in (None, device)
        if is_elsewhere:
            continue
        store.give_up("device memory ran out after graphs were captured")
