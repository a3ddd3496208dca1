"""Captures the encoder in CUDA graphs and replays them; knows neither models nor kernels.

A call is cut into bins (`budgets`), each bin's layout padded to a shape (`buffers`), and the graph of that very
signature (array shapes and host decisions) replayed on static buffers. Everything that a graph reads is written before
each replay; what it wrote is copied out, so that no output is ever overwritten. All graphs of a tower share one memory
pool and one set of input and output buffers: replays follow one another, whatever threads and streams they come from.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock

import torch

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.encoder import encode
from hf_vit_accel.graphs import budgets
from hf_vit_accel.graphs.buffers import Shape, pad
from hf_vit_accel.graphs.recorder import CudaRecorder, Recorder, why_not_graphs
from hf_vit_accel.metadata import pack, send
from hf_vit_accel.route import Route, Routes, Spec

__all__ = ["Eager", "GraphStatus", "Runner", "why_not_graphs"]

_FAILURES, _REFUSED, _CHANGES, _REMEMBERED = 3, 32, 4, 4096
"""Limits: failed captures in a row; signatures whose capture failed; replaced weights before calls run eagerly;
signatures that are counted."""


@dataclass(frozen=True)
class Eager:
    """A call that runs without graphs, and why. by_choice: it could be replayed, but that would not pay."""

    why: str
    by_choice: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphStatus:
    """What a tower's graphs did. budgets: merged tokens. graphs: (what it serves, bytes, replays) of each one held.

    replays: graph launches. captures: graphs made. eager: reason -> calls that ran without. padding: rows replayed per
    row asked for. nbytes: device memory of all graphs. off: why graphs are no longer tried.
    """

    budgets: tuple[int, ...]
    graphs: tuple[tuple[str, int, int], ...] = ()
    replays: int = 0
    captures: int = 0
    eager: Mapping[str, int] = field(default_factory=dict)
    padding: float = 1.0
    nbytes: int = 0
    off: str | None = None

    def __str__(self) -> str:
        lines = [
            f"  graphs     {len(self.graphs)} held ({self.nbytes / 2**20:.0f} MiB), {self.captures} captured, "
            f"{self.replays} replays, {self.padding:.2f} rows replayed per row, budgets up to {self.budgets[-1]} tokens"
        ]
        lines += [f"  graphs off {self.off}"] if self.off else []
        return "\n".join(lines + [f"  eager      {count} x {why}" for why, count in self.eager.items()])


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
    packed: torch.Tensor
    pixels_TP: torch.Tensor
    outputs: list[torch.Tensor]
    replay: Callable[[], None]
    nbytes: int
    replays: int = 0


class Runner:
    """The graphs of one tower: which there are, which serves a call, and the one place where they are replayed."""

    def __init__(self, config: GraphConfig, routes: Routes) -> None:
        self.config, self._routes = config, routes
        self.budgets = config.budgets or budgets.ladder(config.max_tokens)
        self._lock = RLock()
        self._replays = self._captures = self._asked = self._replayed = 0
        self._eager: Counter[str] = Counter()
        self._changes = 0
        self._exactly: bool | None = None
        self._reset()

    def _reset(self) -> None:
        self._identity: object = None
        self._off: str | None = None
        self._failures = 0
        self._recorder: Recorder | None = None
        self._graphs: OrderedDict[_Signature, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Signature, int] = OrderedDict()
        self._refused: dict[_Signature, str] = {}
        self._arena: list[torch.Tensor] = []
        self._retired: list[_Graph] = []  # a replay may still be running: they go once it is known to be over

    def close(self) -> None:
        """Give back every graph and buffer."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.settle()
            self._reset()

    def budgets_of(self, merge: int) -> tuple[int, ...]:
        """The budgets in the tokens of a tower: where it merges no patches, those are a quarter of what is meant."""
        return tuple(budget * max(1, 4 // merge**2) for budget in self.budgets)

    def status(self) -> GraphStatus:
        """What happened so far."""
        with self._lock:
            return GraphStatus(
                budgets=self.budgets,
                graphs=tuple((graph.label, graph.nbytes, graph.replays) for graph in self._graphs.values()),
                replays=self._replays,
                captures=self._captures,
                eager=dict(self._eager),
                padding=self._replayed / self._asked if self._asked else 1.0,
                nbytes=sum(graph.nbytes for graph in self._graphs.values()),
                off=self._off,
            )

    def eager(self, why: str, *, by_choice: bool = False) -> Eager:
        """Count a call that runs without graphs."""
        with self._lock:
            self._eager[why] += 1
        return Eager(why, by_choice)

    @property
    def warming(self) -> bool:
        """Whether a call of this moment is there to capture a graph of its shape."""
        return self._exactly is not None

    @contextmanager
    def capturing(self, *, exactly: bool) -> Iterator[None]:
        """Within the with block: only exact shapes, or only budgets, however often a shape came."""
        with self._lock:
            self._exactly = exactly
            try:
                yield
            finally:
                self._exactly = None

    def run(self, route: Route, pixels_TP: torch.Tensor, memory: list[object]) -> list[torch.Tensor] | Eager:
        """A call's outputs, fresh tensors; or why it should run eagerly (counted).

        route: of the call in its own shape. memory: equal while weights and buffers lie where they did; with the
        route's spec that is all that a graph bakes in beside its layout, so another makes every graph stale.
        """
        identity = (
            *(route.spec, memory, pixels_TP.shape[1], torch.are_deterministic_algorithms_enabled()),
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        )
        with self._lock:
            if identity == self._identity:
                self._changes = max(self._changes - 1, 0)
            else:
                self.close()
                self._identity, self._recorder = identity, CudaRecorder(route.spec.request.device)
                self._width = pixels_TP.shape[1]
                self._budgets = self.budgets_of(route.spec.geometry.merge)
                self._changes = min(self._changes + 1, 2 * _CHANGES)  # after as many quiet calls all is forgotten
            assert self._recorder is not None
            if self._changes > _CHANGES:
                return self.eager("weights or modules were replaced at call after call", by_choice=True)
            if why := self._recorder.against():
                return self.eager(why)
            bins = self._bins(route)
            if isinstance(bins, Eager):
                return bins
            try:
                chosen = [self._graph(route, bin_) for bin_ in bins]
            except _CaptureError as error:
                return self.eager(str(error))
            per_token = route.spec.geometry.merge**2
            outputs = self._replay(pixels_TP, per_token, bins, chosen)
            self._count(per_token, bins, chosen)
            return outputs

    def _bins(self, route: Route) -> list[budgets.Bin] | Eager:
        """The call's own shape if it came often enough, else bins of budgets; or why it runs eagerly."""
        grid, merge, signature = route.metadata.grid, route.spec.geometry.merge, _signature(route)
        exact = budgets.exact_bin(grid, merge)
        for choice in route.choices.values():
            if not choice.backend.capturable:
                return self.eager(f"{choice.backend.name} cannot be captured: its launches depend on the layout")
        if self._exactly:
            return [exact]
        count = self._seen[signature] = self._seen.pop(signature, 0) + 1
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        may_capture = self._off is None and signature not in self._refused
        often = 0 < self.config.exact_after <= count and may_capture
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
        signature = _signature(padded)
        graph = self._graphs.get(signature)
        if graph is None:
            if why := self._off or self._refused.get(signature):
                raise _CaptureError(why)
            graph = self._capture(padded, bin_, signature)
            self._graphs[signature] = graph
            self._make_room()
        self._graphs.move_to_end(signature)
        return graph, padded

    def _capture(self, route: Route, bin_: budgets.Bin, signature: _Signature) -> _Graph:
        metadata, recorder, per_token = route.metadata, self._recorder, route.spec.geometry.merge**2
        assert recorder is not None and route.ops is not None
        outputs: list[torch.Tensor] = []

        def run() -> None:
            found = encode(bound, pixels_TP)
            if not outputs:
                outputs.extend(self._output_buffers(found, metadata.rows, per_token))
            for static, fresh in zip(outputs, found, strict=True):
                static.copy_(fresh)

        try:
            recorder.wait()
            # Buffers made under inference_mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                packed = send(pack(route.arrays), route.spec.request.device)
                bound = route.bind(packed)
                pixels_TP = self._pixel_buffer(metadata.rows, per_token, route.spec).zero_()
                replay, nbytes = recorder.record(run)
        except Exception as error:
            self._failures += 1
            why = self._refused[signature] = f"capture failed: {type(error).__name__}: {error}".split("\n")[0]
            if self._failures >= _FAILURES or len(self._refused) >= _REFUSED:
                self._off = f"{len(self._refused)} captures failed, the last: {why}"
            raise _CaptureError(why) from error
        finally:
            recorder.done()
        self._captures += 1
        self._failures = 0
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

    def _pixel_buffer(self, rows: int, per_token: int, spec: Spec) -> torch.Tensor:
        """(T, P), a slice of the one that all budgets share; a layout beyond the largest budget has its own."""
        most, request = self._budgets[-1] * per_token, spec.request
        if rows > most or not self._arena:
            fresh = torch.empty(max(rows, most), self._width, dtype=request.dtype, device=request.device)
            if rows > most:
                return fresh
            self._arena.append(fresh)
        return self._arena[0][:rows]

    def _output_buffers(self, found: list[torch.Tensor], rows: int, per_token: int) -> list[torch.Tensor]:
        """A buffer for each output, shared and sliced in the same way."""
        most = self._budgets[-1] * per_token
        if rows > most:
            return [torch.empty_like(fresh) for fresh in found]
        if len(self._arena) == 1:
            self._arena += [fresh.new_empty(len(fresh) * most // rows, *fresh.shape[1:]) for fresh in found]
        return [buffer[: len(fresh)] for buffer, fresh in zip(self._arena[1:], found, strict=True)]

    def _make_room(self) -> None:
        """The least recently used graphs go while there are too many or they hold too much."""
        assert self._recorder is not None
        most, held = self.config.max_graphs, sum(graph.nbytes for graph in self._graphs.values())
        while len(self._graphs) > 1 and (len(self._graphs) > most or held > self.config.max_bytes):
            if self._retired:
                self._recorder.settle()
                self._retired.clear()
            _, graph = self._graphs.popitem(last=False)
            held -= graph.nbytes
            self._retired.append(graph)

    def _replay(
        self, pixels_TP: torch.Tensor, per_token: int, bins: list[budgets.Bin], chosen: list[tuple[_Graph, Route]]
    ) -> list[torch.Tensor]:
        recorder = self._recorder
        assert recorder is not None
        tokens, start = sum(bin_.tokens for bin_ in bins), 0
        results: list[torch.Tensor] = []
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
                for index, static in enumerate(graph.outputs):
                    each = len(static) * per_token // len(graph.pixels_TP)  # a row of it for each patch, or token
                    if start == 0:
                        results.append(static.new_empty(tokens * each, *static.shape[1:]))
                    results[index][start * each : stop * each].copy_(static[: bin_.tokens * each])
                start = stop
        finally:
            recorder.done()
        return results

    def _count(self, per_token: int, bins: list[budgets.Bin], chosen: list[tuple[_Graph, Route]]) -> None:
        for bin_, (graph, _) in zip(bins, chosen, strict=True):
            graph.replays += 1
            self._replays += 1
            self._asked += bin_.tokens * per_token
            self._replayed += len(graph.pixels_TP)


class _CaptureError(RuntimeError):
    """A capture that failed, now or before."""


def _signature(route: Route) -> _Signature:
    """Made once per route: a route is looked up at every replay."""
    known = route.signature
    if known is None:
        arrays = tuple((name, array.shape, array.dtype.str) for name, array in route.arrays.items())
        plans = tuple((kind, plan.backend.name, tuple(sorted(plan.host.items()))) for kind, plan in route.plans.items())
        route.signature = known = _Signature((route.metadata.rows, arrays, plans))
    assert isinstance(known, _Signature)
    return known
