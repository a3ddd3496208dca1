"""Stores the graphs of one tower: when they are stale, how many stay, what is counted."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.automatic import NO_ROOM, AutoGraphs, capture_of_ours, drop_when_memory_runs_out
from hf_vit_accel.graphs.identity import Identity, what_differs
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.status import GraphStatus
from hf_vit_accel.graphs.waits import CaptureWaits
from hf_vit_accel.layout import Grid
from hf_vit_accel.machine import Fault

_MOST_REASONS = 64
"""Reasons that are counted one by one: an error's text may name numbers, which differ from call to call."""
_FAILURES = 3
"""Captures that fail in a row before no other is tried."""
_REFUSED = 32
"""Signatures whose capture failed before no other is tried."""
_CHANGES = 4
"""Times that graphs go stale at call after call before calls run eagerly."""
REMEMBERED = 4096
"""Grids whose calls are counted."""
_IDENTITIES = 4
"""Identities whose graphs are kept beside each other: what a trainer switches at every step."""
_PATIENCE = 16
"""Calls that find no room for a graph before all graphs are dropped; doubled each time."""
_NEVER = sys.maxsize
"""The number of a call that never comes."""

_RAN_OUT = "memory ran out in a capture, another one is tried after more calls"
_CHANGED = "weights, modules or what gradients are given for changed at call after call"


@dataclass(frozen=True)
class Eager:
    """Why a call runs without graphs.

    Attributes:
        why: The reason, as `status` prints it.
        allowed_under_strict: Whether `strict` accepts it: an eager call is as fast, or graphs were not asked for.
        part_failed: Whether a backend or a kernel failed in the capture. If it fails eagerly, too, it is disabled.
    """

    why: str
    allowed_under_strict: bool = False
    part_failed: bool = False


EXACT_ONLY = "the backend replays exact shapes only, from the time that they came often"
"""Why a call is neither padded nor captured, if a backend was named whose graphs serve one layout."""


class CaptureError(RuntimeError):
    """A graph could not be captured.

    Args:
        why: The reason.
        allowed_under_strict: Whether the capture was not tried, for lack of room.
        not_before: The number of the call that may try again.
    """

    def __init__(self, why: str, *, allowed_under_strict: bool = False, not_before: int = 0) -> None:
        super().__init__(why)
        self.allowed_under_strict = allowed_under_strict
        self.not_before = not_before


class StoredGraph(Protocol):
    """A captured graph, as `status` reports it.

    Attributes:
        label: What the graph replays.
        grid: The one grid that it replays; None for the graph of a budget.
        nbytes: Device memory that it took.
        replays: How often it was launched.
        captured_at: The number of calls when it was captured, that call included.
    """

    label: str
    grid: Grid | None
    nbytes: int
    replays: int
    captured_at: int


G = TypeVar("G", bound=StoredGraph)


def _ordinal(number: int) -> str:
    """Return a number as a word of order: 1st, 2nd, 3rd, 4th, 11th."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"


class GraphStore(ABC, Generic[G]):
    """The graphs of one kind of one tower. They share one memory pool.

    Those of several identities are kept beside each other while there is room. All go stale if weights move.

    Args:
        config: The bounds.
        max_bytes: Device memory above which no graph is captured.
        auto: Chooses the calls that are replayed; None where the user asked for graphs.
    """

    def __init__(self, config: GraphConfig, max_bytes: int, auto: AutoGraphs | None = None) -> None:
        self.config = config
        self.auto = auto
        self.device: torch.device | None = None  # that of the last call
        self.max_bytes = max_bytes
        self.needed_bytes = 0
        self.is_warming_up = False
        self.replays = 0
        self.captures = 0
        self._lock = RLock()
        self._calls = 0
        self.way_of_pass = ""  # how the last replay of any thread is reported
        self.last_way: str | None = None  # how the last call is reported
        self._given_up: str | None = None
        self._changes = 0
        self._eager: Counter[str] = Counter()
        self._stale: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

        self._identities: list[Identity] = []  # the current one last
        self.off: str | None = None  # why no other capture is tried
        self._failures = 0
        self._calls_without_room = 0
        self._patience = _PATIENCE
        self._waits = CaptureWaits()
        self._refused: dict[Hashable, str] = {}
        self._not_exact: dict[Grid, tuple[str, int]] = {}  # grids of calls without exact graphs: why, up to which call

        self.nbytes = 0
        self._recorder: Any = None  # a CudaRecorder from the first call on
        self._graphs: OrderedDict[tuple[int, Hashable], G] = OrderedDict()  # by id of the identity, and signature
        self._seen: OrderedDict[Grid, int] = OrderedDict()
        self._retired: list[G] = []  # dropped graphs whose last replay may still run

    def _reset(self) -> None:
        """Forget all graphs, and every capture that failed."""
        self._identities = []
        self._forget_failures()
        self._drop()

    def _forget_failures(self) -> None:
        """Forget every capture that failed, or found no room."""
        self.off = None
        self._failures = 0
        self._calls_without_room = 0
        self._patience = _PATIENCE
        self._refused = {}
        self._waits = CaptureWaits()
        self._not_exact = {}

    def _forget_waits(self) -> None:
        """Forget all captures that ran out of memory."""
        self._waits = CaptureWaits()
        self._not_exact = {grid: (why, end) for grid, (why, end) in self._not_exact.items() if end == _NEVER}

    def _drop(self) -> None:
        """Drop all graphs and static buffers."""
        self.nbytes = 0
        self._recorder = None
        self._graphs = OrderedDict()
        self._seen = OrderedDict()
        self._retired = []

    def drop_graphs(self) -> None:
        """Give back every graph and buffer, once no replay runs, and forget failed captures."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.settle()
            self._reset()

    @abstractmethod
    def static_buffers(self) -> list[Tensor]:
        """List the tensors that the next call writes before a graph reads them."""

    @property
    def was_called(self) -> bool:
        """Whether any call was replayed, or counted as eager."""
        return self._calls > 0 or self.last_way is not None

    def status(self) -> GraphStatus:
        """Return the counters so far."""
        with self._lock:
            return GraphStatus(
                graphs=tuple((graph.label, graph.nbytes, graph.replays) for graph in self._graphs.values()),
                replays=self.replays,
                captures=self.captures,
                eager=dict(self._eager),
                stale=dict(self._stale),
                kept=dict(self._kept),
                nbytes=self.nbytes,
                off=self._given_up or self.off,
                last=self.last_way,
            )

    def eager(self, why: str, *, allowed_under_strict: bool = False) -> Eager:
        """Count why a pass runs without graphs, and return it. `strict` accepts that where graphs are automatic."""
        with self._lock:
            is_counted = why in self._eager or len(self._eager) < _MOST_REASONS
            self._eager[why if is_counted else "other reasons"] += 1
        return Eager(why, allowed_under_strict or self.auto is not None)

    def eager_after(self, error: CaptureError) -> Eager:
        """Count a call whose graph was not captured; return why."""
        eager = self.eager(str(error), allowed_under_strict=error.allowed_under_strict)
        return replace(eager, part_failed=isinstance(error.__cause__, Fault))

    def count_eager(self, why: str) -> Eager:
        """Count a call that does not come to `run`; return why it runs eagerly."""
        self._calls += 1
        return self.eager(why, allowed_under_strict=why in (EXACT_ONLY, NO_ROOM))

    @property
    def has_given_up(self) -> bool:
        """Whether memory ran out, so that no call uses graphs any more."""
        return self._given_up is not None

    def _why_never(self) -> str | None:
        """Return why no call uses graphs any more, or None. Drop graphs that another thread could not drop."""
        if self._given_up is not None and self._recorder is not None:
            self.drop_graphs()
        return self._given_up or (None if self._graphs else self.off)

    def _count_replay(self, graph: G) -> None:
        """Count the launch of a graph for a call."""
        self.replays += 1
        graph.replays += 1
        self.way_of_pass = f"replayed (captured at the {_ordinal(graph.captured_at)} call)"

    def give_up(self, why: str) -> None:
        """Drop all graphs and capture no other: a program needs their memory.

        If another thread is inside a call, the graphs go at the next call.
        """
        self._given_up = why
        if self._lock.acquire(blocking=False):
            try:
                self.drop_graphs()
            finally:
                self._lock.release()

    def _begin(self, identity: Identity, device: torch.device) -> Eager | None:
        """Count a call, and drop stale graphs. Return why the call runs eagerly, or None if it may be replayed."""
        self._calls += 1
        self.device = device
        if self._given_up is not None:  # since the call was planned
            return self.eager(self._given_up)
        if not self._identities or self._identities[-1] != identity:
            self._change_identity(identity)
        else:
            self._changes = max(self._changes - 1, 0)
        if self._recorder is None:
            self._recorder = CudaRecorder(device)
        if self._changes > _CHANGES:
            return self.eager(_CHANGED, allowed_under_strict=True)
        why = self._recorder.against()
        return None if why is None else self.eager(why)

    def _change_identity(self, identity: Identity) -> None:
        """Find an earlier identity again, or begin to capture under another one. Drop the graphs that are stale."""
        if identity in self._identities:
            self._identities.append(self._identities.pop(self._identities.index(identity)))
            return
        if self._identities:
            former = self._identities[-1]
            if self.auto is not None:
                self.auto.count_identity(self.captures)
            is_stale = identity.memory != former.memory or not self._has_room()
            counts = self._stale if is_stale else self._kept
            counts[what_differs(former, identity)] += 1
            if is_stale:
                self.drop_graphs()
            self._forget_failures()
        self._count_change(1)
        self._identities.append(identity)
        if len(self._identities) > _IDENTITIES:
            self._drop_identity(self._identities.pop(0))

    def _has_room(self) -> bool:
        """Return whether graphs of another identity may be captured beside those that are stored."""
        most_bytes = self.max_bytes if self.auto is None else self.auto.most_bytes(self)
        return max(self.nbytes, self.needed_bytes) < most_bytes

    def _drop_identity(self, identity: Identity) -> None:
        """Drop the graphs of one identity. Their memory stays with the pool, for later captures."""
        self._recorder.settle()
        for key in [key for key in self._graphs if key[0] == id(identity)]:
            self._forget_grid(self._graphs.pop(key).grid)

    def _forget_grid(self, grid: Grid | None) -> None:
        """Let automatic graphs choose anew for a grid, unless a graph of another identity replays it."""
        if self.auto is not None and all(graph.grid != grid for graph in self._graphs.values()):
            self.auto.forget(grid)

    def _count_change(self, weight: int) -> None:
        """Count a change. Every call without a change takes one off again."""
        self._changes = min(self._changes + weight, 2 * _CHANGES)

    def _count_calls(self, grid: Grid) -> int:
        """Count and return the calls of a grid, this one included."""
        count = self._seen.pop(grid, 0) + 1
        self._seen[grid] = count
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return count

    def _find_or_capture(self, signature: Hashable, capture: Callable[[CudaRecorder], G]) -> G:
        """Return the graph of a signature, captured if none is stored. Raises `CaptureError`."""
        key = (id(self._identities[-1]), signature)
        graph = self._graphs.get(key)
        if graph is None:
            self._check_capture(key)
            graph = self._capture_once(key, capture)
            self.captures += 1
            graph.captured_at = self._calls
            self._failures = 0
            self._waits.note_success(key)
            self._graphs[key] = graph
            self.nbytes += graph.nbytes
            if len(self._graphs) > self.config.max_graphs:
                self._retire_least_used()
        self._graphs.move_to_end(key)
        return graph

    def _check_capture(self, key: Hashable) -> None:
        """Raise `CaptureError` where a capture failed before, or has no room."""
        why = self.off or self._refused.get(key)
        if why:
            raise CaptureError(why, not_before=_NEVER if key in self._refused else 0)
        end_of_wait = 0 if self.is_warming_up else self._waits.end_of(key)
        if self._calls < end_of_wait:
            raise CaptureError(_RAN_OUT, not_before=end_of_wait)
        if self.auto is not None and not self.is_warming_up:
            why = self.auto.reason_against_capture(self)  # NO_ROOM only for a capture that replays have paid for
        elif self.nbytes > self.max_bytes:
            why = NO_ROOM
        if why is not None:
            self._count_refusal(why)
            raise CaptureError(why, allowed_under_strict=why == NO_ROOM)

    @property
    def will_make_room(self) -> bool:
        """Whether so many calls found no room that the next call of `run` drops all graphs."""
        return self._calls_without_room >= self._patience

    @property
    def why_no_capture(self) -> str | None:
        """Why the next call captures nothing: captures failed, or memory ran out in one. None if it may."""
        return self.off or (_RAN_OUT if self._is_waiting(self._calls + 1) else None)

    def _is_waiting(self, call: int) -> bool:
        """Return whether a call captures nothing, since memory ran out in a capture shortly before."""
        return call < self._waits.end_of_all and not self.is_warming_up

    def why_not_exact(self, grid: Grid) -> str | None:
        """Return why the next call has no graph of its own shape: its capture failed or waits. None if it may."""
        why, end = self._not_exact.get(grid, (None, 0))
        return why if self._calls + 1 < end else None

    def _count_refusal(self, why: str | None) -> None:
        """Count a call that runs eagerly since graphs of other calls hold the memory (see `_make_room`)."""
        if why == NO_ROOM:
            self._calls_without_room += 1

    def _capture_once(self, key: Hashable, capture: Callable[[CudaRecorder], G]) -> G:
        """Capture a graph. Remember a failure, and raise it as `CaptureError`."""
        recorder = self._recorder
        if self.auto is not None:
            drop_when_memory_runs_out(self)
        try:
            recorder.wait()
            with (
                capture_of_ours(),
                torch.inference_mode(False),
            ):  # buffers of inference mode cannot be written outside of it
                return capture(recorder)
        except Exception as error:
            why = f"capture failed: {type(error).__name__}: {error}".split("\n")[0]
            if isinstance(error, torch.OutOfMemoryError):  # other programs may give memory back
                end_of_wait = self._waits.begin(key, self._calls, for_all=not self.is_warming_up)
                raise CaptureError(why, not_before=end_of_wait) from error
            self._failures += 1
            self._refused[key] = why
            if self._failures >= _FAILURES or len(self._refused) >= _REFUSED:
                self.off = f"{len(self._refused)} captures failed, the last: {why}"
            raise CaptureError(why, not_before=_NEVER) from error
        finally:
            recorder.done()

    def _retire_least_used(self) -> None:
        """Drop the least recently used graph, once its last replay is over."""
        if self._retired:
            self._recorder.settle()
            self._retired.clear()
        _, oldest = self._graphs.popitem(last=False)
        self._retired.append(oldest)
        self._forget_grid(oldest.grid)

    def _make_room(self, device: torch.device) -> None:
        """Drop all graphs, if they hold too much memory and many calls found no room.

        All go at once, since graphs share one pool: dropping one would give nothing back.
        It must run before a call chooses its graphs, so that no dropped graph is replayed.
        The patience doubles each time, so that captures never outweigh replays.
        """
        if not self.will_make_room or self._is_waiting(self._calls):
            return
        self._calls_without_room = 0
        self._patience *= 2
        if self.auto is not None:  # replays cannot pay for the graphs that take the place of these
            self.auto.add_free_captures(len(self._graphs))
        self._recorder.settle()
        self._drop()
        torch.cuda.empty_cache()  # the allocator would keep their pool until memory runs out
        self._recorder = CudaRecorder(device)
