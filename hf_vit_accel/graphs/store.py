"""What every runner of CUDA graphs does alike: when its graphs are stale, which of them stay, what is counted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs.recorder import CudaRecorder

_FAILURES, _REFUSED, _CHANGES, REMEMBERED, _WAITED = 3, 32, 4, 4096, 16
"""Limits: failed captures in a row; signatures whose capture failed; replaced weights before calls run eagerly;
signatures that are counted; calls that run eagerly because graphs hold too much, before all of those go."""

_CHANGED = "weights, modules or what gradients are given for changed at call after call"


@dataclass(frozen=True)
class Eager:
    """A call that runs without graphs, and why. by_choice: it could be replayed, but that would not pay."""

    why: str
    by_choice: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphStatus:
    """What a tower's graphs did. budgets: merged tokens; none for graphs of forward and backward.

    graphs: (what it serves, bytes that it added, replays) of each one held. replays: graph launches. captures: graphs
    made. eager: reason -> calls that ran without. padding: rows replayed per row asked for. nbytes: device memory that
    graphs took, those that went included: what they leave is for later graphs alone. off: why none are tried any more.
    """

    budgets: tuple[int, ...] = ()
    graphs: tuple[tuple[str, int, int], ...] = ()
    replays: int = 0
    captures: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)
    padding: float = 1.0
    nbytes: int = 0
    off: str | None = None

    def __str__(self) -> str:
        name = "graphs" if self.budgets else "training"  # of forward and backward
        told = f"{len(self.graphs)} held ({self.nbytes / 2**20:.0f} MiB), {self.captures} captured"
        told += f", {self.replays} replays"
        if self.budgets:
            told += f", {self.padding:.2f} rows replayed per row, budgets up to {self.budgets[-1]} tokens"
        lines = [f"  {name:<11}{told}", *([f"  {name} off {self.off}"] if self.off else [])]
        return "\n".join(lines + [f"  eager      {count} x {why}" for why, count in self.eager.items()])


class CaptureError(RuntimeError):
    """A capture that failed, now or before, or was not tried: by_choice."""

    by_choice = False


class GraphStore:
    """The graphs of one kind of one tower: they are stale together, and share one memory pool.

    Of each: label, what it serves; nbytes, device memory that it took; replays.
    """

    def __init__(self, config: GraphConfig, max_bytes: int) -> None:
        self.config, self._max_bytes = config, max_bytes
        self._lock = RLock()
        self._replays = self._captures = self._changes = 0
        self._eager: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._identity: object = None
        self._off: str | None = None
        self._failures, self._waiting, self._patience = 0, 0, _WAITED
        self._refused: dict[Hashable, str] = {}
        self._drop()

    def _drop(self) -> None:
        self._recorder: Any = None  # from the first call on, a CudaRecorder
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._retired: list[Any] = []  # a replay may still be running: they go once it is known to be over
        self._nbytes = 0

    def close(self) -> None:
        """Give back every graph and buffer."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.settle()
            self._reset()

    @property
    def used(self) -> bool:
        """Whether any call was to be replayed."""
        return bool(self._replays or self._eager)

    def status(self) -> GraphStatus:
        """What happened so far."""
        with self._lock:
            return GraphStatus(
                graphs=tuple((graph.label, graph.nbytes, graph.replays) for graph in self._graphs.values()),
                replays=self._replays,
                captures=self._captures,
                eager=dict(self._eager),
                nbytes=self._nbytes,
                off=self._off,
            )

    def eager(self, why: str, *, by_choice: bool = False) -> Eager:
        """Count a call that runs without graphs."""
        with self._lock:
            self._eager[why] += 1
        return Eager(why, by_choice)

    def _begin(self, identity: object, device: torch.device) -> Eager | None:
        """Drop what another identity made stale; why a call runs eagerly, if it does."""
        if identity == self._identity:
            self._changes = max(self._changes - 1, 0)
        else:
            self.close()
            self._identity, self._device = identity, device
            self._count_change(1)
        self._recorder = self._recorder or CudaRecorder(device)
        if self._changes > _CHANGES:
            return self.eager(_CHANGED, by_choice=True)
        why = self._recorder.against()
        return None if why is None else self.eager(why)

    def _count_change(self, weight: int) -> None:
        self._changes = min(self._changes + weight, 2 * _CHANGES)  # after as many quiet calls all is forgotten

    def _came(self, signature: Hashable) -> int:
        """How often calls of a signature came, this one included."""
        count = self._seen[signature] = self._seen.pop(signature, 0) + 1
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return count

    def _held(self, signature: Hashable, capture: Callable[[CudaRecorder], Any]) -> Any:
        """The graph of a signature, captured if it is not there. Raises CaptureError."""
        graph, recorder = self._graphs.get(signature), self._recorder
        if graph is None:
            if why := self._off or self._refused.get(signature):
                raise CaptureError(why)
            if self._nbytes > self._max_bytes:
                self._waiting += 1
                full = CaptureError("graphs hold as much memory as they may")
                full.by_choice = True
                raise full
            try:
                recorder.wait()
                with torch.inference_mode(False):  # buffers made under it could not be written outside of it
                    graph = capture(recorder)
            except Exception as error:
                self._failures += 1
                why = self._refused[signature] = f"capture failed: {type(error).__name__}: {error}".split("\n")[0]
                if self._failures >= _FAILURES or len(self._refused) >= _REFUSED:
                    self._off = f"{len(self._refused)} captures failed, the last: {why}"
                raise CaptureError(why) from error
            finally:
                recorder.done()
            self._captures += 1
            self._failures = 0
            self._graphs[signature] = graph
            self._nbytes += graph.nbytes
            if len(self._graphs) > self.config.max_graphs:  # the least recently used one goes
                if self._retired:
                    recorder.settle()
                    self._retired.clear()
                self._retired.append(self._graphs.popitem(last=False)[1])
        self._graphs.move_to_end(signature)
        return graph

    def _make_room(self) -> None:
        """All graphs go, if they hold too much: before a call chooses its own, for none may be replayed that went.

        One that goes alone would give nothing back: they share a pool. So all go at once, after ever more calls that
        could not be captured; captures never outweigh replays.
        """
        if self._waiting >= self._patience:
            self._waiting, self._patience = 0, 2 * self._patience
            self._recorder.settle()
            self._drop()
            torch.cuda.empty_cache()  # else the allocator keeps their pool until memory runs out
            self._recorder = CudaRecorder(self._device)
