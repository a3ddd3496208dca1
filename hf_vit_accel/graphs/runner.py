"""Captures the encoder in CUDA graphs and replays them; knows neither models nor kernels.

A call is cut into bins (`budgets`), and the layout of every bin padded to a shape (`buffers`). The graph of that
signature then runs on static buffers: inputs are copied in before the replay, outputs copied out after it.
All graphs of a runner share one memory pool and one set of buffers, so replays from all threads and streams take turns.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_vit_accel import machine
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.graphs import budgets, store
from hf_vit_accel.graphs.automatic import NO_ROOM, AutoGraphs, GraphUse
from hf_vit_accel.graphs.buffers import Shape, pad
from hf_vit_accel.graphs.identity import Identity, signature_of
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.status import GraphStatus
from hf_vit_accel.graphs.store import EXACT_ONLY, CaptureError, Eager, GraphStore
from hf_vit_accel.layout import Grid, pack, rows_of, send

_NEVER_EXACT = "the backend replays exact shapes only, which exact_after=0 rules out"
_BYTES_PER_VALUE = 36
"""Bytes of memory that an inference call needs for each row and column of the residual stream, at most (H200)."""


@dataclass(kw_only=True, eq=False)
class _Graph:
    """A captured graph, with the static tensors that it reads and writes.

    Attributes:
        label: What the graph replays, as `status` prints it.
        grid: The one grid that it replays; None for the graph of a budget.
        route: The route that was captured, bound to `packed`.
        packed: The route's arrays in one buffer of bytes.
        pixels_TP: Static pixels; longer than a call's, whose tail is zeros.
        outputs: Static outputs.
        rows_per_token: The rows of every output for one merged token: 1 for merged outputs.
        replay: Launches the graph.
        nbytes: Device memory that the graph took.
        replays: How often it was launched.
        captured_at: The number of calls when it was captured.
    """

    label: str
    grid: Grid | None
    route: Route
    packed: Tensor
    pixels_TP: Tensor
    outputs: list[Tensor]
    rows_per_token: list[int]
    replay: Callable[[], None]
    nbytes: int
    replays: int = 0
    captured_at: int = 0


class Runner(GraphStore[_Graph]):
    """The graphs of one tower without gradients: chooses, captures and replays them."""

    def __init__(self, config: GraphConfig, routes: Routes, auto: AutoGraphs | None = None) -> None:
        super().__init__(config, config.max_bytes, auto)
        self._routes = routes
        self.budgets = config.budgets or budgets.ladder(config.max_tokens)
        self._rows_called = 0
        self._rows_replayed = 0
        self._exactly: bool | None = None
        self._replayed_exactly: set[Grid] = set()  # grids of calls
        self._arena: dict[Hashable, Tensor] = {}  # buffers that all budgets share: for pixels, and for every output
        self._width = 0  # values per patch of the last call
        self._tower_budgets: tuple[int, ...] = ()  # in the tokens of the last call's tower
        self._budgets_by_merge: dict[int, tuple[int, ...]] = {}

    def _drop(self) -> None:
        super()._drop()
        self._arena = {}
        self._replayed_exactly = set()

    def static_buffers(self) -> list[Tensor]:
        """List the tensors that the next call writes before a graph reads them."""
        return [*self._arena.values(), *(graph.packed for graph in self._graphs.values())]

    def budgets_of(self, merge: int) -> tuple[int, ...]:
        """Return the budgets in a tower's own tokens, `merge` x `merge` patches each.

        Budgets are meant for 2 x 2 patches, so a tower that merges no patches has four times as many tokens.
        """
        if merge not in self._budgets_by_merge:
            factor = max(1, 4 // merge**2)
            self._budgets_by_merge[merge] = tuple(budget * factor for budget in self.budgets)
        return self._budgets_by_merge[merge]

    def status(self) -> GraphStatus:
        """Return the counters so far."""
        padding = self._rows_replayed / self._rows_called if self._rows_called else 1.0
        return replace(super().status(), budgets=self.budgets, padding=padding)

    def choose(
        self,
        grid: Grid,
        merge: int,
        width: int,
        device: torch.device,
        is_padding_worse: Callable[[bool], bool],
        *,
        can_pad: bool = True,
    ) -> GraphUse:
        """Decide how a call uses graphs, before it is planned.

        Args:
            is_padding_worse: See `AutoGraphs.choose`.
            can_pad: Whether the backend that was asked for can replay other layouts than the captured one.
        """
        with self._lock:  # calls of other threads wait for the end of `warmup`
            self.device = device
            if self.auto is None:
                return self._choose_as_asked(grid, can_pad=can_pad)
            why = self._why_never()
            if why is not None:
                return GraphUse(why)
            if self._exactly:
                self.auto.expect(grid)
                return GraphUse(exact=grid)
            if self._exactly is False and not can_pad:
                return GraphUse(EXACT_ONLY)
            bins = budgets.pack(grid, merge, self.budgets_of(merge))
            budgets_of_call = None
            if can_pad and not isinstance(bins, str) and budgets.pays(bins, merge):
                budgets_of_call = tuple(bin_.budget for bin_ in bins if bin_.budget is not None)
            if self._exactly is None:
                self.needed_bytes = rows_of(grid) * width * _BYTES_PER_VALUE
                use = self.auto.choose(grid, budgets_of_call, self, is_padding_worse)
                self._count_refusal(use.eager_reason)
                return use
            return self.auto.expect_budgets(grid, budgets_of_call or (), is_padding_worse)

    def _choose_as_asked(self, grid: Grid, *, can_pad: bool) -> GraphUse:
        """Count a call where the user asked for graphs. Choose its exact shape if that came often, else budgets."""
        came_often = 0 < self.config.exact_after <= self._count_calls(grid)
        has_room = self.nbytes <= self.max_bytes or self.will_make_room
        why_not_captured = self.why_not_exact(grid) or self.why_no_capture or (None if has_room else NO_ROOM)
        exactly = grid in self._replayed_exactly or (came_often and why_not_captured is None)
        if self._exactly is not None:
            exactly = self._exactly
        if exactly:
            return GraphUse(exact=grid)
        if can_pad:
            return GraphUse()
        reason = (came_often and why_not_captured) or (EXACT_ONLY if self.config.exact_after else _NEVER_EXACT)
        self._count_refusal(reason)
        return GraphUse(reason)

    @contextmanager
    def capturing(self, *, exactly: bool) -> Iterator[None]:
        """Use only exact shapes, or only budgets, within the with block: a call of `warmup`."""
        with self._lock:
            captures_before = self.captures
            self._forget_waits()
            self._exactly = exactly
            self.is_warming_up = True
            try:
                yield
            finally:
                self._exactly = None
                self.is_warming_up = False
                if self.auto is not None:
                    self.auto.add_free_captures(self.captures - captures_before)

    def run(self, route: Route, pixels_TP: Tensor, memory: list[object], *, exact: Grid | None) -> list[Tensor] | Eager:
        """Replay a call.

        Args:
            memory: Equal while weights and buffers stay at their addresses (see `Identity`).
            exact: See `GraphUse`.

        Returns:
            Fresh output tensors, or why the call runs eagerly (counted).
        """
        identity = Identity(route.spec, memory, pixels_TP.shape[1], machine.numerics())
        with self._lock:
            device = route.spec.request.device
            refused = self._begin(identity, device)
            if refused is not None:
                return refused
            self._make_room(device)
            self._width = pixels_TP.shape[1]
            self._tower_budgets = self.budgets_of(route.spec.geometry.merge)
            bins = self._bins(route, exactly=exact is not None)
            if isinstance(bins, Eager):
                return bins
            try:
                graphs = [self._graph(route, bin_) for bin_ in bins]
            except CaptureError as error:
                if exact is not None:
                    self._choose_anew(exact, error)
                return self.eager_after(error)
            if exact is not None and self.why_not_exact(exact) is None:  # as another pass of the call may have one
                self._note_replayed_exactly(exact)
            return self._replay(pixels_TP, route.spec.geometry.merge**2, bins, graphs)

    def _choose_anew(self, grid: Grid, error: CaptureError) -> None:
        """Choose anew how calls of a grid are replayed. While no capture of their shape may be tried, pad them."""
        self._replayed_exactly.discard(grid)
        self._forget_grid(grid)
        if error.not_before > self._calls:
            _, end = self._not_exact.pop(grid, ("", 0))  # of another pass
            if len(self._not_exact) >= store.REMEMBERED:
                self._not_exact.pop(next(iter(self._not_exact)))
            self._not_exact[grid] = (str(error), max(end, error.not_before))

    def _note_replayed_exactly(self, grid: Grid) -> None:
        """Note a call that is replayed in its exact shape; it stays so, also where no room is left for others."""
        if len(self._replayed_exactly) >= store.REMEMBERED:
            self._replayed_exactly = set()
        self._replayed_exactly.add(grid)

    def _bins(self, route: Route, *, exactly: bool) -> list[budgets.Bin] | Eager:
        """Return one exact bin, or bins of budgets; or why the call runs eagerly."""
        grid = route.metadata.grid
        if exactly:  # the launches of any backend fit the layout that they were captured for
            frames = sum(t for t, _, _ in grid)
            return [budgets.Bin(first=0, last=len(grid), tokens=route.metadata.merged, frames=frames, budget=None)]
        for choice in route.choices.values():
            if not choice.backend.replays_other_layouts:
                return self.eager(f"{choice.backend.name} cannot be captured for other layouts")
        merge = route.spec.geometry.merge
        bins = budgets.pack(grid, merge, self._tower_budgets)
        if isinstance(bins, str):
            return self.eager(bins, allowed_under_strict=True)
        if not budgets.pays(bins, merge):
            return self.eager("padding would cost more than the replay saves", allowed_under_strict=True)
        return bins

    def _padded(self, route: Route, bin_: budgets.Bin) -> Route:
        """Return the route of a bin's images, padded to the shape of its graph."""
        spec = route.spec
        grid = route.metadata.grid[bin_.first : bin_.last]
        plain = route if len(grid) == len(route.metadata.grid) else self._routes.get(grid, spec, route.replay)
        if bin_.budget is None:
            return plain
        shape = self._shape(bin_, plain)
        return self._routes.get(grid, spec, route.replay, bin_.budget, lambda: pad(plain.metadata, shape))

    def _shape(self, bin_: budgets.Bin, plain: Route) -> Shape:
        """Return the shape that a bin is padded to, as coarse as its backend allows at no cost."""
        assert bin_.budget is not None
        tokens = bin_.budget
        merge = plain.spec.geometry.merge
        side = plain.spec.geometry.window
        rows = tokens * merge**2
        full = plain.metadata.full
        # One spare segment always: calls that fill their budget then share graphs with calls that do not.
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
        """Return the graph of a bin, captured if none is stored, and the bin's own route."""
        padded = self._padded(route, bin_)
        graph = self._find_or_capture(signature_of(padded), lambda recorder: self._capture(padded, bin_, recorder))
        return graph, padded

    def _capture(self, route: Route, bin_: budgets.Bin, recorder: CudaRecorder) -> _Graph:
        """Capture the encoder over one route."""
        metadata = route.metadata
        per_token = route.spec.geometry.merge**2
        outputs: list[Tensor] = []

        def run() -> None:
            encoded = encode(bound, pixels_TP)
            if route.spec.hidden_states:  # too many to be copied twice: they stay in the graph's memory
                outputs[:] = encoded
                return
            if not outputs:
                outputs.extend(self._output_buffers(encoded, metadata.rows, per_token))
            for static, fresh in zip(outputs, encoded, strict=True):
                static.copy_(fresh)

        with torch.no_grad():
            packed = send(pack(route.arrays), route.spec.request.device)
            bound = route.bind(packed)
            pixels_TP = self._pixel_buffer(metadata.rows, per_token, route.spec).zero_()
            (replay,), nbytes = recorder.record(run)
        if metadata.rows > self._tower_budgets[-1] * per_token:  # these buffers are the graph's own
            nbytes += sum(buffer.nbytes for buffer in (pixels_TP, *outputs))
        rows = f"{metadata.rows} patches exactly" if bin_.budget is None else f"up to {metadata.rows} patches"
        return _Graph(
            label=f"{rows} in {metadata.full.count} segments",
            grid=metadata.grid if bin_.budget is None else None,
            route=bound,
            packed=packed,
            pixels_TP=pixels_TP,
            outputs=outputs,
            rows_per_token=[len(output) * per_token // metadata.rows for output in outputs],
            replay=replay,
            nbytes=nbytes + packed.nbytes,
        )

    def _pixel_buffer(self, rows: int, per_token: int, spec: Spec) -> Tensor:
        """Return static pixels (T, P)."""
        request = spec.request
        empty_TP = torch.empty(0, self._width, dtype=request.dtype, device=request.device)
        return self._buffer("pixels", empty_TP, rows, rows, per_token)

    def _output_buffers(self, encoded: list[Tensor], rows: int, per_token: int) -> list[Tensor]:
        """Return a static buffer for every output."""
        return [self._buffer(index, output, len(output), rows, per_token) for index, output in enumerate(encoded)]

    def _buffer(self, name: Hashable, like: Tensor, length: int, rows: int, per_token: int) -> Tensor:
        """Return a slice of a buffer that all layouts share. A layout beyond the largest budget gets its own buffer."""
        largest = self._tower_budgets[-1] * per_token
        columns = like.shape[1:]
        if rows > largest:
            return like.new_empty(length, *columns)
        key = (name, columns, like.dtype, length * largest // rows)
        if key not in self._arena:
            self._arena[key] = like.new_empty(length * largest // rows, *columns)
        return self._arena[key][:length]

    def _replay(
        self, pixels_TP: Tensor, per_token: int, bins: list[budgets.Bin], graphs: list[tuple[_Graph, Route]]
    ) -> list[Tensor]:
        """Replay the bins one after the other, and join their outputs."""
        recorder = self._recorder
        tokens = sum(bin_.tokens for bin_ in bins)
        start = 0
        results: list[Tensor] = []
        recorder.wait()
        try:
            if len(bins) == 1:
                graph, route = graphs[0]
                self._launch(graph, route, pixels_TP, tokens * per_token)
                parts = zip(graph.outputs, graph.rows_per_token, strict=True)
                return [static[: tokens * rows].clone() for static, rows in parts]
            for bin_, (graph, route) in zip(bins, graphs, strict=True):
                stop = start + bin_.tokens
                pixels_of_bin_TP = pixels_TP[start * per_token : stop * per_token]
                self._launch(graph, route, pixels_of_bin_TP, bin_.tokens * per_token)
                for index, (static, rows) in enumerate(zip(graph.outputs, graph.rows_per_token, strict=True)):
                    if start == 0:
                        results.append(static.new_empty(tokens * rows, *static.shape[1:]))
                    results[index][start * rows : stop * rows].copy_(static[: bin_.tokens * rows])
                start = stop
        finally:
            recorder.done()
        return results

    def _launch(self, graph: _Graph, route: Route, pixels_TP: Tensor, rows: int) -> None:
        """Copy the inputs of one bin into static buffers, and replay its graph."""
        packed = route.packed()
        graph.packed.copy_(packed)
        self._recorder.keep_until_done(packed)
        static_rows = graph.pixels_TP.shape[0]
        graph.pixels_TP[:rows].copy_(pixels_TP)
        if rows < static_rows:
            graph.pixels_TP[rows:].zero_()
        graph.replay()
        self._count_replay(graph)
        self._rows_called += rows
        self._rows_replayed += static_rows
