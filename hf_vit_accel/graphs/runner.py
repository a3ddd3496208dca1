"""Captures the encoder in CUDA graphs and replays them; knows neither models nor kernels.

A call is cut into bins (`budgets`), each bin's layout padded to a shape (`buffers`), and the graph of that very
signature (array shapes and host decisions) replayed on static buffers. Everything that a graph reads is written before
each replay; what it wrote is copied out, so that no output is ever overwritten. All graphs of a tower share one memory
pool and one set of input and output buffers: replays follow one another, whatever threads and streams they come from.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock

import torch

from hf_vit_accel.config import GraphConfig
from hf_vit_accel.graphs import budgets
from hf_vit_accel.graphs.buffers import Shape, pad
from hf_vit_accel.graphs.call import Ahead, Call, Eager, GraphStatus
from hf_vit_accel.graphs.recorder import CudaRecorder, Recorder
from hf_vit_accel.metadata import LRU, Grid, VisionMetadata, build, pack, send, unpack
from hf_vit_accel.planning import Layout, Prepared

__all__ = ["Runner"]

_FAILURES, _REFUSED, _CHANGES, _REMEMBERED = 3, 32, 4, 4096
"""Failed captures, in a row and in all, after which no more are tried; replaced weights, likewise, until calls without;
signatures that are counted."""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A layout in the shape of a graph, on the host, and its packed arrays on the device once it was replayed."""

    layout: Layout
    signature: _Signature
    packed: list[torch.Tensor] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Graph:
    label: str
    prepared: Prepared
    packed: torch.Tensor
    pixels_TP: torch.Tensor
    outputs: list[torch.Tensor]
    replay: Callable[[], None]
    nbytes: int
    replays: int = 0


class Runner:
    """The graphs of one tower: which there are, which serves a call, and the one place where they are replayed."""

    def __init__(self, config: GraphConfig) -> None:
        self.config = config
        self.budgets = config.budgets or budgets.ladder(config.max_tokens)
        self._lock = RLock()
        self._replays = self._captures = self._asked = self._replayed = 0
        self._eager: Counter[str] = Counter()
        self._changes, self._trusting = 0, False
        self._exactly: bool | None = None
        self._reset()

    def _reset(self) -> None:
        self._identity: Sequence[object] | None = None
        self._pointers: list[int] = []
        self._served: OrderedDict[Grid, list[budgets.Bin]] = OrderedDict()
        self._off: str | None = None
        self._failures = 0
        self._recorder: Recorder | None = None
        self._graphs: OrderedDict[_Signature, _Graph] = OrderedDict()
        self._seen: OrderedDict[_Signature, int] = OrderedDict()
        self._refused: dict[_Signature, str] = {}
        self._entries: LRU[_Entry] = LRU(entries=1024, cost=64 << 20)
        self._arena: list[torch.Tensor] = []
        self._retired: list[_Graph] = []  # a replay may still be running: they go once it is known to be over

    def close(self) -> None:
        """Give back every graph and buffer."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.settle()
            self._reset()

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

    @contextmanager
    def capturing(self, *, exactly: bool) -> Iterator[None]:
        """Within the with block: only exact shapes, or only budgets, however often a shape came."""
        with self._lock:
            self._exactly = exactly
            try:
                yield
            finally:
                self._exactly = None

    def run(self, call: Call, pixels_TP: torch.Tensor, check: Callable[[Layout], None]) -> list[torch.Tensor] | Eager:
        """The call's outputs, fresh tensors; or why it should run eagerly (counted).

        check: is shown what will run before it does, and may raise.
        """
        with self._lock:
            self._trusting = False
            if call.pointers == self._pointers and _same(call.identity, self._identity):
                self._changes = max(self._changes - 1, 0)
            else:
                self.close()
                self._identity, self._recorder = call.identity, CudaRecorder(call.request.device)
                self._pointers = call.pointers
                self._changes = min(self._changes + 1, 2 * _CHANGES)  # after as many quiet calls all is forgotten
            assert self._recorder is not None
            if self._changes > _CHANGES:
                return self.eager("weights or modules were replaced at call after call", by_choice=True)
            if why := self._recorder.against():
                return self.eager(why)
            bins = self._bins(call)
            if isinstance(bins, Eager):
                return bins
            try:
                chosen = [self._graph(call, bin_) for bin_ in bins]
            except _CaptureError as error:
                return self.eager(str(error))
            check(chosen[0][1].layout)  # this call's: the graph may have been captured for another
            if call.ahead is not None and call.ahead.chosen == chosen:
                outputs = call.ahead.outputs
            else:
                outputs = self._replay(pixels_TP, call.geometry.merge**2, bins, chosen)
            self._count(call.geometry.merge**2, bins, chosen)
            self._served.pop(call.grid, None)
            self._served[call.grid], self._trusting = bins, True
            if len(self._served) > _REMEMBERED:
                self._served.popitem(last=False)
            return outputs

    def start(self, grid: Grid, pixels_TP: torch.Tensor, pointers: list[int]) -> Ahead | None:
        """Replay at once what served this grid last, so that the device works while the host still checks the call.

        `run` hands the result out only if it comes to the very same choice. What must hold before: no weight has moved
        (its memory might be gone), and the pixels fit. Once a result was dropped, `run` has to replay again first.
        """
        with self._lock:
            bins = self._served.get(grid) if self._trusting and pointers == self._pointers else None
            if bins is None or self._recorder is None or self._recorder.against():
                return None
            chosen = []
            for bin_ in bins:
                entry = self._entries.peek((grid[bin_.first : bin_.last], bin_.budget))
                if entry is None or entry.signature not in self._graphs:
                    return None
                chosen.append((self._graphs[entry.signature], entry))
            static_TP, metadata = chosen[0][0].pixels_TP, chosen[0][1].layout.metadata
            fits = (static_TP.device, static_TP.shape[1]) == (pixels_TP.device, pixels_TP.shape[1])
            if not fits or type(pixels_TP) is not torch.Tensor or pixels_TP.requires_grad:
                return None
            self._trusting = False
            with torch.no_grad():
                return Ahead(chosen, self._replay(pixels_TP, metadata.rows // metadata.merged, bins, chosen))

    def _bins(self, call: Call) -> list[budgets.Bin] | Eager:
        """The call's own shape if it came often enough, else bins of budgets; or why it runs eagerly."""
        merge = call.geometry.merge
        whole = budgets.whole(call.grid, merge)
        entry = self._entry(call, whole)
        for choice in entry.layout.choices.values():
            if not choice.backend.capturable:
                return self.eager(f"{choice.backend.name} cannot be captured: its launches depend on the layout")
        if self._exactly:
            return [whole]
        count = self._seen[entry.signature] = self._seen.pop(entry.signature, 0) + 1
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        may_capture = self._off is None and entry.signature not in self._refused
        often = 0 < self.config.exact_after <= count and may_capture
        if self._exactly is None and (often or entry.signature in self._graphs):
            return [whole]
        bins = budgets.pack(call.grid, merge, self.budgets)
        if isinstance(bins, str):
            return self.eager(bins, by_choice=True)
        if not budgets.pays(bins, merge):
            return self.eager("padding would cost more than the replay saves", by_choice=True)
        return bins

    def _entry(self, call: Call, bin_: budgets.Bin) -> _Entry:
        """The layout of a bin, padded to the shape of its graph; remembered by its grid."""
        grid = call.grid[bin_.first : bin_.last]

        def make() -> tuple[_Entry, int]:
            if bin_.budget is None:
                metadata = build(grid, call.geometry)
            else:
                plain = self._entry(call, replace(bin_, budget=None)).layout
                metadata = pad(plain.metadata, self._shape(call, bin_, plain))
            layout = call.lay_out(metadata)
            return _Entry(layout=layout, signature=_signature(layout)), layout.nbytes

        return self._entries.get((grid, bin_.budget), make)

    def _shape(self, call: Call, bin_: budgets.Bin, plain: Layout) -> Shape:
        """The shape that a bin is padded to: what its budget and its backend leave open, as coarse as costs nothing."""
        assert bin_.budget is not None
        tokens, side, merge = bin_.budget, call.geometry.window, call.geometry.merge
        rows, full = tokens * merge**2, plain.metadata.full
        # One segment is always to spare, so that calls that fill their budget share graphs with those that do not.
        segments, longest = plain.choices["full"].backend.declare(full.count + 1, full.max_length, rows)
        windows = 0 if side is None else budgets.most_windows(tokens, segments, side)
        window_longest = 0 if side is None else (side * merge) ** 2
        return Shape(
            rows=rows,
            tokens=tokens,
            segments=segments,
            longest=longest,
            windows=windows,
            window_longest=window_longest,
        )

    def _graph(self, call: Call, bin_: budgets.Bin) -> tuple[_Graph, _Entry]:
        """The graph that serves a bin, captured if it is not there."""
        entry = self._entry(call, bin_)
        graph = self._graphs.get(entry.signature)
        if graph is None:
            if why := self._off or self._refused.get(entry.signature):
                raise _CaptureError(why)
            graph = self._capture(call, bin_, entry)
            self._graphs[entry.signature] = graph
            self._make_room()
        self._graphs.move_to_end(entry.signature)
        return graph, entry

    def _capture(self, call: Call, bin_: budgets.Bin, entry: _Entry) -> _Graph:
        metadata, device, recorder = entry.layout.metadata, call.request.device, self._recorder
        assert recorder is not None
        outputs: list[torch.Tensor] = []

        def run() -> None:
            found = call.encode(prepared, pixels_TP)
            if not outputs:
                outputs.extend(self._output_buffers(found, metadata, call))
            for static, fresh in zip(outputs, found, strict=True):
                static.copy_(fresh)

        try:
            recorder.wait()
            # Buffers made under inference_mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                packed = send(pack(entry.layout.arrays), device)
                prepared = entry.layout.bind(unpack(packed, entry.layout.arrays))
                pixels_TP = self._pixel_buffer(metadata, call).zero_()
                replay, nbytes = recorder.record(run)
        except Exception as error:
            self._failures += 1
            why = self._refused[entry.signature] = f"capture failed: {type(error).__name__}: {error}".split("\n")[0]
            if self._failures >= _FAILURES or len(self._refused) >= _REFUSED:
                self._off = f"{len(self._refused)} captures failed, the last: {why}"
            raise _CaptureError(why) from error
        finally:
            recorder.done()
        self._captures += 1
        self._failures = 0
        if metadata.rows > self.budgets[-1] * call.geometry.merge**2:
            nbytes += sum(buffer.nbytes for buffer in (pixels_TP, *outputs))
        what = f"{metadata.rows} patches exactly" if bin_.budget is None else f"up to {metadata.rows} patches"
        return _Graph(
            label=f"{what} in {metadata.full.count} segments",
            prepared=prepared,
            packed=packed,
            pixels_TP=pixels_TP,
            outputs=outputs,
            replay=replay,
            nbytes=nbytes + packed.nbytes,
        )

    def _pixel_buffer(self, metadata: VisionMetadata, call: Call) -> torch.Tensor:
        """(T, P), a slice of the one that all budgets share; a layout beyond the largest budget has its own."""
        most = self.budgets[-1] * call.geometry.merge**2
        own = metadata.rows > most
        if own or not self._arena:
            fresh = torch.empty(
                metadata.rows if own else most, call.width, dtype=call.dtype, device=call.request.device
            )
            if own:
                return fresh
            self._arena.append(fresh)
        return self._arena[0][: metadata.rows]

    def _output_buffers(self, found: list[torch.Tensor], metadata: VisionMetadata, call: Call) -> list[torch.Tensor]:
        """A buffer for each output, shared and sliced in the same way."""
        tokens = self.budgets[-1]
        most = tokens * call.geometry.merge**2
        if metadata.rows > most:
            return [torch.empty_like(fresh) for fresh in found]
        if len(self._arena) == 1:
            longest = [most, *[tokens] * (len(found) - 1)]
            self._arena += [fresh.new_empty(rows, *fresh.shape[1:]) for rows, fresh in zip(longest, found, strict=True)]
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
        self, pixels_TP: torch.Tensor, per_token: int, bins: list[budgets.Bin], chosen: list[tuple[_Graph, _Entry]]
    ) -> list[torch.Tensor]:
        recorder = self._recorder
        assert recorder is not None
        tokens, start = sum(bin_.tokens for bin_ in bins), 0
        results: list[torch.Tensor] = []
        recorder.wait()
        try:
            for bin_, (graph, entry) in zip(bins, chosen, strict=True):
                if not entry.packed:
                    entry.packed.append(send(pack(entry.layout.arrays), graph.packed.device))
                stop = start + bin_.tokens
                rows = bin_.tokens * per_token
                graph.packed.copy_(entry.packed[0])
                recorder.uses(entry.packed[0])
                graph.pixels_TP[:rows].copy_(pixels_TP[start * per_token : stop * per_token])
                if rows < len(graph.pixels_TP):
                    graph.pixels_TP[rows:].zero_()
                graph.replay()
                for index, static in enumerate(graph.outputs):
                    each = per_token if index == 0 else 1
                    if start == 0:
                        results.append(static.new_empty(tokens * each, *static.shape[1:]))
                    results[index][start * each : stop * each].copy_(static[: bin_.tokens * each])
                start = stop
        finally:
            recorder.done()
        return results

    def _count(self, per_token: int, bins: list[budgets.Bin], chosen: list[tuple[_Graph, _Entry]]) -> None:
        for bin_, (graph, _) in zip(bins, chosen, strict=True):
            graph.replays += 1
            self._replays += 1
            self._asked += bin_.tokens * per_token
            self._replayed += len(graph.pixels_TP)


class _CaptureError(RuntimeError):
    """A capture that failed, now or before."""


def _same(identity: Sequence[object], other: Sequence[object] | None) -> bool:
    try:
        return identity == other
    except RuntimeError:  # a tensor was among the attributes, and now is another
        return False


def _signature(layout: Layout) -> _Signature:
    arrays = tuple((name, array.shape, array.dtype.str) for name, array in layout.arrays.items())
    plans = tuple((kind, plan.backend.name, tuple(sorted(plan.host.items()))) for kind, plan in layout.plans.items())
    return _Signature((layout.metadata.rows, arrays, plans))
