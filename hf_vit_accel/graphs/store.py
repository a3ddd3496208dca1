"""Holds the graphs of one kind of passes of one tower: finds, captures and drops them as the policy decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.backends.base import Replay
from hf_vit_accel.engine.call import HIDDEN_STATES_OF_STEP, HOOKED, Batch
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.graphs.budgets import Bin
from hf_vit_accel.graphs.called import reason_against_capture
from hf_vit_accel.graphs.memory import capture_of_ours, drop_when_memory_runs_out
from hf_vit_accel.graphs.policy import (
    CHANGED,
    CREDIT_OF_REPLAY,
    NEVER,
    NO_ROOM,
    Accepted,
    Decision,
    Key,
    Policy,
    Thresholds,
)
from hf_vit_accel.graphs.recorder import CudaRecorder, free_bytes
from hf_vit_accel.graphs.status import GraphStatus
from hf_vit_accel.layout import Grid
from hf_vit_accel.machine import Fault, raise_if_any
from hf_vit_accel.watch import place_of

_IDENTITIES = 4
"""Identities whose graphs are kept beside each other: what a trainer switches at every step."""
_SHARE = 8
"""The graphs of one kind may hold an eighth of the memory that is free."""


class Identity(NamedTuple):
    """The state that graphs were captured under. They are replayed under an equal identity alone.

    Another memory makes the graphs of all identities stale. Otherwise those of several are kept beside each other.

    Attributes:
        spec: Stands for modules, settings, device and dtypes: one object while these stay.
        hidden_states: Whether they are outputs, too.
        memory: Equal while weights and buffers stay at their addresses.
        requires_grad: Whether the pixels and every parameter require gradients; empty in inference.
    """

    spec: Spec
    hidden_states: bool
    memory: list[object]
    pixel_width: int
    numerics: tuple[object, ...]
    requires_grad: tuple[bool, ...] = ()


STALE_REASONS: Mapping[str, str] = {
    "spec": "the tower was read anew, or the device or dtypes changed",
    "hidden_states": "hidden states are requested, or no longer are",
    "memory": "weights or buffers moved, or were replaced",
    "pixel_width": "patches have another width",
    "numerics": "torch computes in another precision",
    "requires_grad": "other tensors require gradients",
}
"""Field of `Identity` -> why graphs captured under another value cannot be replayed."""


@dataclass(kw_only=True, eq=False)
class StoredGraph:
    """A captured graph of one layout, or of a budget.

    Attributes:
        way: How a call that it serves is reported: at which call it was captured.
        grid: The one grid that it replays; None for the graph of a budget.
        route: The route that was captured. It keeps the tensors alive that the graph reads.
        used_at: The last call that launched it.
    """

    label: str
    way: str = ""
    grid: Grid | None
    route: Route
    pixels_TP: Tensor
    outputs: list[Tensor]
    replay: Callable[[], None]
    nbytes: int
    replays: int = 0
    used_at: int = 0


G = TypeVar("G", bound=StoredGraph)
Bins = tuple[Bin, ...] | str
"""The images of each padded replay of a pass, or why it is not padded."""


class GraphStore(ABC, Generic[G]):
    """The graphs of one kind of passes of one tower. They share one memory pool.

    Those of several identities are kept beside each other while there is room. All go stale if weights move.
    """

    def __init__(self, thresholds: Thresholds, routes: Routes) -> None:
        self.policy = Policy(thresholds)
        self.replays = 0
        self.captures = 0
        self.nbytes = 0
        self.last_way: str | None = None  # how the last call is reported
        self._eager: Counter[str] = Counter()
        self._stale: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._routes = routes
        self._lock = RLock()
        self._warming: Replay | None = None  # the way that a call of `warmup` is replayed
        self._given_up: str | None = None
        self._recorder: CudaRecorder | None = None  # from the first call on
        self._identities: list[Identity] = []  # the current one last
        self._graphs: dict[Key, G] = {}
        self._steady: dict[Hashable, tuple[Decision, list[G]]] = {}  # of the current identity, by grid and stream

    def _drop(self) -> None:
        """Drop all graphs and static buffers."""
        self.nbytes = 0
        self._recorder = None
        self._graphs = {}
        self._steady = {}

    def drop_graphs(self) -> None:
        """Give back every graph and buffer, once no replay runs, and forget failed captures."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.settle()
            self._identities = []
            self.policy.forget_failures()
            self._drop()

    @abstractmethod
    def static_buffers(self) -> list[Tensor]:
        """List the tensors that the next call writes before a graph reads them."""

    def _bins(self, grid: Grid, spec: Spec) -> Bins:
        """Return the images of each padded replay, or why a pass is not padded."""
        return "nothing is padded"

    @abstractmethod
    def _candidates(self, grid: Grid, spec: Spec, bins: Bins) -> Iterator[Decision | str]:
        """Yield the ways to replay a pass that the calls so far allow, the best first, and why there is no other."""

    def _key(self, signature: Hashable) -> Key:
        """Return the key of a graph under the current identity."""
        return id(self._identities[-1]), signature

    @abstractmethod
    def needed_bytes(self, grid: Grid, identity: Identity) -> int:
        """Estimate the device memory of a graph. All graphs share it, since one runs at a time."""

    @abstractmethod
    def _capture(self, batch: Batch, route: Route, bin_: Bin | None, recorder: CudaRecorder) -> G:
        """Capture the graph of a route."""

    @abstractmethod
    def _replay(self, decision: Decision, graphs: list[G], batch: Batch) -> list[Tensor]:
        """Replay a pass; return fresh outputs."""

    def _why_eager(self, batch: Batch) -> str | None:
        """Return why a pass runs eagerly, whatever its layout."""
        plan = batch.plan
        if plan.spec.against_graphs is not None:
            return plan.spec.against_graphs
        if plan.is_hooked:
            return HOOKED
        if plan.hidden_states and plan.spec.request.grad:
            return HIDDEN_STATES_OF_STEP
        if not plan.weights.all_contiguous:  # `Memory.is_of` would not see a change of strides
            return "a parameter is not contiguous"
        if plan.checkpoints:
            return "gradient checkpointing runs layers again"
        if batch.is_part and plan.spec.request.grad:  # such passes run again in the backward pass
            return Accepted("steps of several passes")
        if batch.is_part and not self.policy.thresholds.asked_for:
            return "long calls of several passes"
        return None

    @property
    def device(self) -> torch.device | None:
        """The device of the graphs; None before the first call."""
        return self._identities[-1].spec.request.device if self._identities else None

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
                off=self._given_up or self.policy.off,
                last=self.last_way,
            )

    def _run_eagerly(self, decision: Decision) -> Decision:
        """Count why a pass runs without graphs, and return the decision."""
        self._eager[decision.reason] += 1
        self.policy.without_room += decision.reason == NO_ROOM
        return decision

    def give_up(self, why: str) -> bool:
        """Drop all graphs and capture no other: a program needs their memory. Return that they go.

        If another thread is inside a call, the graphs go at the next call.
        """
        self._given_up = why
        if self._lock.acquire(blocking=False):
            try:
                self.drop_graphs()
            finally:
                self._lock.release()
        return True

    @contextmanager
    def warming_up(self, replay: Replay) -> Iterator[None]:
        """Capture what the calls within the with block need, by exact shapes or by budgets: calls of `warmup`.

        Who warms up asks for graphs again, also after a program needed their memory.
        """
        with self._lock:  # calls of other threads wait
            self.policy.forget_failures()
            if self._given_up is not None:
                self.drop_graphs()  # another thread could not
                self._given_up = None
            self._warming = replay
            try:
                yield
            finally:
                self._warming = None

    def run(self, batch: Batch) -> list[Tensor] | Decision:
        """Replay a pass, by graphs that are captured where they are missing; or return the decision against it."""
        plan = batch.plan
        spec = plan.spec
        device = spec.request.device
        # Each stream has routes of its own: a copy to the device on one may be incomplete for another.
        # `torch.cuda.current_stream` runs seven Python functions.
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        with self._lock:
            why = self._why_eager(batch)
            if why is not None:
                self.policy.count(())
                return self._run_eagerly(Decision(reason=why))
            memory: list[object] = [plan.weights, *map(place_of, plan.reading.buffers())]
            if spec.called_linears:
                memory.append(plan.reading.called_memory())
            requires_grad: tuple[bool, ...] = ()
            if spec.request.grad:
                requires_grad = batch.pixels_TP.requires_grad, *[weight.requires_grad for weight in plan.parameters]
            identity = Identity(
                spec, plan.hidden_states, memory, batch.pixels_TP.shape[1], machine.numerics(), requires_grad
            )
            policy = self.policy
            ready = self._steady.get((batch.grid, stream))
            is_steady = self._warming is None and self._given_up is None
            if ready is None or not is_steady or self._identities[-1] != identity:
                decision, graphs = self._decide_and_capture(batch, identity, stream)
                if decision.replay == "never":
                    return self._run_eagerly(decision)
            else:
                decision, graphs = ready
                policy.calls += 1  # as `Policy.count` and `_follow`, without entering them
                policy.credit += 1
                policy.changes = max(policy.changes - 1, 0)
                policy.counts[batch.grid] = policy.counts.pop(batch.grid, 0) + 1
            for graph in graphs:
                graph.replays += 1
                graph.used_at = policy.calls
            self.replays += len(graphs)
            policy.credit += CREDIT_OF_REPLAY * len(graphs)
            outputs = self._replay(decision, graphs, batch)
            batch.attempt.passes.append((decision.routes[0], graphs[0].way))
            return outputs

    def _decide_and_capture(self, batch: Batch, identity: Identity, stream: int) -> tuple[Decision, list[G]]:
        """Count a pass and decide about it; return its graphs, captured where they are missing; none without."""
        grid = batch.grid
        spec = identity.spec
        bins = self._bins(grid, spec)
        budgets = () if isinstance(bins, str) else [bin_.budget for bin_ in bins]
        self.policy.count((grid, *budgets))
        if self._given_up is not None:
            if self._recorder is not None:  # another thread could not drop them
                self.drop_graphs()
            return Decision(reason=self._given_up), []
        self._follow(identity, grid)
        if self.policy.changes_too_often:
            return Decision(reason=CHANGED), []
        failure: Decision | None = None
        while True:
            decision = self.decide(grid, spec, bins)
            if decision.replay == "never":
                return failure or decision, []
            if spec.settings.strict:
                raise_if_any([why for route in decision.routes for why in route.unmet])
            failure = self._capture_missing(decision, batch)
            if failure is None:
                break
            if failure.routes:
                return failure, []
        ready = decision, [self._graphs[key] for key in decision.keys]
        if len(self._steady) >= self.policy.thresholds.most_graphs:
            self._steady = {}
        if decision.is_final:
            self._steady[grid, stream] = ready
        return ready

    def decide(self, grid: Grid, spec: Spec, bins: Bins) -> Decision:
        """Return how a pass of the current identity is replayed. Asked again, it says the same: it counts nothing."""
        limits = self.policy.thresholds
        refused: list[str] = []
        reasons: list[str] = []
        for candidate in self._candidates(grid, spec, bins):
            if isinstance(candidate, str):
                reasons.append(candidate)
                continue
            missing = {key for key in candidate.keys if key not in self._graphs}
            why = self._why_not_captured(grid, candidate, missing) if missing else None
            makes_room = why == NO_ROOM and self.policy.will_make_room(len(self._graphs))
            if why is None or makes_room:
                return replace(
                    candidate,
                    makes_room=makes_room,
                    is_final=not refused and (candidate.replay == "exactly" or limits.exact_calls == NEVER),
                )
            refused.append(why)
        return Decision(reason=[*refused, *reasons][0])

    def _why_not_captured(self, grid: Grid, candidate: Decision, missing: set[Key]) -> str | None:
        """Return why the missing graphs of a pass are not captured now, or None."""
        spec = candidate.routes[0].spec
        is_asked_for = self.policy.thresholds.asked_for or self._warming is not None
        why = self.policy.why_refused(missing)
        if why is None and not is_asked_for:
            why = self.policy.why_unpaid(len(missing))
        if why is None and spec.called_linears:
            why = reason_against_capture(spec.called_linears, spec.request.dtype, spec.request.device)
        if why is not None:
            return why
        most_bytes = self._most_bytes(spec)
        if not is_asked_for and self.needed_bytes(grid, self._identities[-1]) >= most_bytes:
            return "too little memory of the device is free for another graph"
        return NO_ROOM if self.nbytes >= most_bytes else None

    def _most_bytes(self, spec: Spec) -> int:
        """Return the device memory that all graphs may hold now."""
        limits = self.policy.thresholds
        if limits.asked_for or self._warming is not None:
            return limits.most_bytes
        return min(free_bytes(spec.request.device) // _SHARE, limits.most_bytes)

    def _capture_missing(self, decision: Decision, batch: Batch) -> Decision | None:
        """Capture the missing graphs of a pass; return the decision against graphs if one fails, else None."""
        if decision.makes_room:
            self._make_room()
        bins = decision.bins or (None,) * len(decision.keys)
        for key, route, bin_ in zip(decision.keys, decision.routes, bins, strict=True):
            if key in self._graphs:
                continue
            graph = self._capture_one(key, route, bin_, batch)
            if isinstance(graph, Decision):
                return graph
            self.captures += 1
            graph.way = f"replayed (captured at call {self.policy.calls})"
            self.policy.note_capture(is_free=self._warming is not None)
            self._graphs[key] = graph
            self.nbytes += graph.nbytes
            self._steady = {}
        needed = set(decision.keys)
        while len(self._graphs) > max(self.policy.thresholds.most_graphs, len(needed)):
            others = (key for key in self._graphs if key not in needed)
            assert self._recorder is not None
            self._recorder.settle()
            del self._graphs[min(others, key=lambda key: self._graphs[key].used_at)]
            self._steady = {}
        return None

    def _capture_one(self, key: Key, route: Route, bin_: Bin | None, batch: Batch) -> G | Decision:
        """Return a graph of a route; or note a failure, and return the decision against graphs."""
        recorder = self._recorder
        assert recorder is not None
        if not self.policy.thresholds.asked_for:
            drop_when_memory_runs_out(self)
        try:
            recorder.wait()
            with (
                capture_of_ours(),
                torch.inference_mode(False),
            ):  # buffers of inference mode cannot be written outside of it
                return self._capture(batch, route, bin_, recorder)
        except Exception as error:
            why = f"capture failed: {type(error).__name__}: {error}".split("\n")[0]
            self.policy.note_failure(key, why)
            return Decision(reason=why, routes=(route,) if isinstance(error, Fault) else ())
        finally:
            recorder.done()

    def _make_room(self) -> None:
        """Drop all graphs at once: they share one pool, so dropping one would give nothing back."""
        assert self._recorder is not None and self.device is not None
        self.policy.without_room = 0
        self._recorder.settle()
        self._drop()
        torch.cuda.empty_cache()  # the allocator would keep their pool until memory runs out
        self._recorder = CudaRecorder(self.device)

    def _follow(self, identity: Identity, grid: Grid) -> None:
        """Find the graphs of an earlier identity again, or begin another one. Drop the graphs that are stale."""
        identities = self._identities
        if identities and identities[-1] == identity:
            self.policy.changes = max(self.policy.changes - 1, 0)
            return
        self._steady = {}
        if identity in identities:
            identities.append(identities.pop(identities.index(identity)))
            return
        if identities:
            self._leave(identities[-1], identity, grid)
        self.policy.count_change()
        self._identities.append(identity)
        if self._recorder is None:
            self._recorder = CudaRecorder(identity.spec.request.device)
        if len(self._identities) > _IDENTITIES:
            self._recorder.settle()
            oldest = id(self._identities.pop(0))
            for key in [key for key in self._graphs if key[0] == oldest]:
                del self._graphs[key]  # their memory stays with the pool, for later captures

    def _leave(self, former: Identity, identity: Identity, grid: Grid) -> None:
        """Begin to capture under another identity. Drop all graphs that are stale, or leave no room."""
        needed_bytes = 0 if self.policy.thresholds.asked_for else self.needed_bytes(grid, identity)
        has_room = max(self.nbytes, needed_bytes) < self._most_bytes(identity.spec)
        is_stale = identity.memory != former.memory or not has_room
        counts = self._stale if is_stale else self._kept
        differing = (why for name, why in STALE_REASONS.items() if getattr(former, name) != getattr(identity, name))
        counts[next(differing)] += 1
        if is_stale:
            self.drop_graphs()
        self.policy.forget_failures()
