"""Captures the encoder in CUDA graphs and replays them; knows neither models nor kernels.

A call is cut into bins (`budgets`), each bin's layout padded to a shape (`buffers`), and the graph of that very
signature (array shapes and host decisions) replayed on static buffers. Everything that a graph reads is written before
each replay; what it wrote is copied out, so that no output is ever overwritten. All graphs of a tower share one memory
pool and one set of input and output buffers: replays follow one another, whatever threads and streams they come from.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.graphs import budgets
from hf_vit_accel.graphs.buffers import Shape, pad
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.store import CaptureError, Eager, GraphStatus, GraphStore
from hf_vit_accel.layout import pack, send


class _Signature:
    """What two layouts must share for one graph to serve both: shapes, dtypes and everything decided on the host.

    Hashed once: the same signature is looked up several times a call.
    """

    def __init__(self, value: Hashable) -> None:
        self._value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signature) and self._value == other._value


@dataclass(kw_only=True, eq=False)
class _Graph:
    label: str
    route: Route
    packed: Tensor
    pixels_TP: Tensor
    outputs: list[Tensor]
    replay: Callable[[], None]
    nbytes: int
    replays: int = 0


class Runner(GraphStore):
    """The graphs of one tower: which there are, which serves a call, and the one place where they are replayed."""

    def __init__(self, config: GraphConfig, routes: Routes) -> None:
        self._routes = routes
        self.budgets = config.budgets or budgets.ladder(config.max_tokens)
        self._asked = self._replayed = 0
        self._exactly: bool | None = None
        super().__init__(config, config.max_bytes)

    def _drop(self) -> None:
        super()._drop()
        self._arena: list[Tensor] = []

    def budgets_of(self, merge: int) -> tuple[int, ...]:
        """The budgets in the tokens of a tower: where it merges no patches, those are a quarter of what is meant."""
        return tuple(budget * max(1, 4 // merge**2) for budget in self.budgets)

    def status(self) -> GraphStatus:
        """What happened so far."""
        padding = self._replayed / self._asked if self._asked else 1.0
        return replace(super().status(), budgets=self.budgets, padding=padding)

    @contextmanager
    def capturing(self, *, exactly: bool) -> Iterator[None]:
        """Within the with block: only exact shapes, or only budgets, however often a shape came."""
        with self._lock:
            self._exactly = exactly
            try:
                yield
            finally:
                self._exactly = None

    def run(self, route: Route, pixels_TP: Tensor, memory: list[object]) -> list[Tensor] | Eager:
        """A call's outputs, fresh tensors; or why it should run eagerly (counted).

        route: of the call in its own shape. memory: equal while weights and buffers lie where they did; with the
        route's spec that is all that a graph bakes in beside its layout, so another makes every graph stale.
        """
        identity = route.spec, memory, pixels_TP.shape[1], machine.numerics()
        with self._lock:
            if against := self._begin(identity, route.spec.request.device):
                return against
            self._make_room()
            self._width = pixels_TP.shape[1]
            self._budgets = self.budgets_of(route.spec.geometry.merge)
            bins = self._bins(route)
            if isinstance(bins, Eager):
                return bins
            try:
                chosen = [self._graph(route, bin_) for bin_ in bins]
            except CaptureError as error:
                return self.eager(str(error), by_choice=error.by_choice)
            per_token = route.spec.geometry.merge**2
            return self._replay(pixels_TP, per_token, bins, chosen)

    def _bins(self, route: Route) -> list[budgets.Bin] | Eager:
        """The call's own shape if it came often enough, else bins of budgets; or why it runs eagerly."""
        grid, merge, signature = route.metadata.grid, route.spec.geometry.merge, _signature(route)
        frames = sum(t for t, _, _ in grid)
        exact = budgets.Bin(first=0, last=len(grid), tokens=route.metadata.merged, frames=frames, budget=None)
        for choice in route.choices.values():
            if not choice.backend.capturable:
                return self.eager(f"{choice.backend.name} cannot be captured: its launches depend on the layout")
        if self._exactly:
            return [exact]
        often = 0 < self.config.exact_after <= self._came(signature) and self._nbytes <= self._max_bytes
        often = often and self._off is None and signature not in self._refused
        if self._exactly is None and (often or signature in self._graphs):
            return [exact]
        bins = budgets.pack(grid, merge, self._budgets)
        if isinstance(bins, str):
            return self.eager(bins, by_choice=True)
        if not budgets.pays(bins, merge):
            return self.eager("padding would cost more than the replay saves", by_choice=True)
        return bins

    def _padded(self, route: Route, bin_: budgets.Bin) -> Route:
        """The route of a bin's images, padded to the shape of its graph."""
        spec, grid = route.spec, route.metadata.grid[bin_.first : bin_.last]
        plain = route if len(grid) == len(route.metadata.grid) else self._routes.get(grid, spec)
        if bin_.budget is None:
            return plain
        return self._routes.get(grid, spec, bin_.budget, lambda: pad(plain.metadata, self._shape(bin_, plain)))

    def _shape(self, bin_: budgets.Bin, plain: Route) -> Shape:
        """The shape that a bin is padded to: what its budget and its backend leave open, as coarse as costs nothing."""
        assert bin_.budget is not None
        tokens, side, merge = bin_.budget, plain.spec.geometry.window, plain.spec.geometry.merge
        rows, full = tokens * merge**2, plain.metadata.full
        # One segment is always to spare, so that calls that fill their budget share graphs with those that do not.
        segments, max_seqlen = plain.choices["full"].backend.graph_bounds(full.count + 1, full.max_seqlen, rows)
        return Shape(
            rows=rows,
            tokens=tokens,
            segments=segments,
            max_seqlen=max_seqlen,
            windows=0 if side is None else budgets.most_windows(tokens, segments, side),
            window_max_seqlen=0 if side is None else (side * merge) ** 2,
        )

    def _graph(self, route: Route, bin_: budgets.Bin) -> tuple[_Graph, Route]:
        """The graph that serves a bin, captured if it is not there, and the bin's own route."""
        padded = self._padded(route, bin_)
        return self._held(_signature(padded), partial(self._capture, padded, bin_)), padded

    def _capture(self, route: Route, bin_: budgets.Bin, recorder: CudaRecorder) -> _Graph:
        metadata, per_token = route.metadata, route.spec.geometry.merge**2
        outputs: list[Tensor] = []

        def run() -> None:
            found = encode(bound, pixels_TP)
            if not outputs:
                outputs.extend(self._output_buffers(found, metadata.rows, per_token))
            for static, fresh in zip(outputs, found, strict=True):
                static.copy_(fresh)

        with torch.no_grad():
            packed = send(pack(route.arrays), route.spec.request.device)
            bound = route.bind(packed)
            pixels_TP = self._pixel_buffer(metadata.rows, per_token, route.spec).zero_()
            (replay,), nbytes = recorder.record(run)
        if metadata.rows > self._budgets[-1] * per_token:
            nbytes += sum(buffer.nbytes for buffer in (pixels_TP, *outputs))
        what = f"{metadata.rows} patches exactly" if bin_.budget is None else f"up to {metadata.rows} patches"
        return _Graph(
            label=f"{what} in {metadata.full.count} segments",
            route=bound,
            packed=packed,
            pixels_TP=pixels_TP,
            outputs=outputs,
            replay=replay,
            nbytes=nbytes + packed.nbytes,
        )

    def _pixel_buffer(self, rows: int, per_token: int, spec: Spec) -> Tensor:
        """(T, P), a slice of the one that all budgets share; a layout beyond the largest budget has its own."""
        most, request = self._budgets[-1] * per_token, spec.request
        if rows > most or not self._arena:
            fresh = torch.empty(max(rows, most), self._width, dtype=request.dtype, device=request.device)
            if rows > most:
                return fresh
            self._arena.append(fresh)
        return self._arena[0][:rows]

    def _output_buffers(self, found: list[Tensor], rows: int, per_token: int) -> list[Tensor]:
        """A buffer for each output, shared and sliced in the same way."""
        most = self._budgets[-1] * per_token
        if rows > most:
            return [torch.empty_like(fresh) for fresh in found]
        if len(self._arena) == 1:
            self._arena += [fresh.new_empty(len(fresh) * most // rows, *fresh.shape[1:]) for fresh in found]
        return [buffer[: len(fresh)] for buffer, fresh in zip(self._arena[1:], found, strict=True)]

    def _replay(
        self, pixels_TP: Tensor, per_token: int, bins: list[budgets.Bin], chosen: list[tuple[_Graph, Route]]
    ) -> list[Tensor]:
        recorder = self._recorder
        tokens, start = sum(bin_.tokens for bin_ in bins), 0
        results: list[Tensor] = []
        recorder.wait()
        try:
            for bin_, (graph, route) in zip(bins, chosen, strict=True):
                stop = start + bin_.tokens
                rows = bin_.tokens * per_token
                graph.packed.copy_(route.packed())
                recorder.uses(route.packed())
                graph.pixels_TP[:rows].copy_(pixels_TP[start * per_token : stop * per_token])
                if rows < len(graph.pixels_TP):
                    graph.pixels_TP[rows:].zero_()
                graph.replay()
                self._replays, graph.replays = self._replays + 1, graph.replays + 1
                self._asked, self._replayed = self._asked + rows, self._replayed + len(graph.pixels_TP)
                for index, static in enumerate(graph.outputs):
                    each = len(static) * per_token // len(graph.pixels_TP)  # a row of it for each patch, or token
                    if start == 0:
                        results.append(static.new_empty(tokens * each, *static.shape[1:]))
                    results[index][start * each : stop * each].copy_(static[: bin_.tokens * each])
                start = stop
        finally:
            recorder.done()
        return results


def _signature(route: Route) -> _Signature:
    """Made once per route: a route is looked up at every replay."""
    if route.signature is None:
        arrays = tuple((name, array.shape, array.dtype.str) for name, array in route.arrays.items())
        plans = tuple((kind, plan.backend.name, tuple(sorted(plan.host.items()))) for kind, plan in route.plans.items())
        route.signature = _Signature((route.metadata.rows, arrays, plans))
    return route.signature
