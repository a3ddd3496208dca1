"""Captures the encoder in CUDA graphs and replays them; knows neither models nor kernels.

A pass is cut into bins (`budgets`), and the layout of every bin padded to a shape. The graph of that
signature then runs on static buffers: inputs are copied in before the replay, outputs copied out after it.
All graphs of a runner share one memory pool and one set of buffers, so replays from all threads and streams take turns.

`T` packed patch rows, `M` merged tokens, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hf_vit_accel.backends import backend_named
from hf_vit_accel.config import GraphConfig
from hf_vit_accel.engine.call import Batch
from hf_vit_accel.engine.encoder import encode
from hf_vit_accel.engine.route import Route, Routes, Spec
from hf_vit_accel.graphs import budgets
from hf_vit_accel.graphs.budgets import Bin, pad
from hf_vit_accel.graphs.policy import AUTOMATIC, NEVER, Accepted, Decision, Thresholds
from hf_vit_accel.graphs.recorder import CudaRecorder
from hf_vit_accel.graphs.status import GraphStatus
from hf_vit_accel.graphs.store import Bins, GraphStore, Identity, StoredGraph
from hf_vit_accel.layout import Grid, VisionMetadata, pack, rows_of, send

_COMES_AGAIN = Accepted("a size is captured when it comes again")
_EXACT_ONLY = Accepted("the backend replays exact shapes only, from the time that they came often")
"""Why a pass is neither padded nor captured, if a backend was named whose graphs serve one layout."""
_NEVER_EXACT = "the backend replays exact shapes only, which exact_after=0 rules out"
_BYTES_PER_VALUE = 36
"""Bytes of memory that an inference call needs for each row and column of the residual stream, at most (H200)."""


@dataclass(kw_only=True, eq=False)
class _Graph(StoredGraph):
    """A graph of inference. The tail of its pixels is zeros.

    Attributes:
        packed: The arrays of a layout, which the graph reads. Only `set_layout` writes them.
        packed_route: The route whose arrays they are.
        rows_per_token: The rows of every output for one merged token.
    """

    packed: Tensor
    packed_route: Route
    rows_per_token: list[int]

    def set_layout(self, route: Route) -> None:
        """Copy the arrays of a route to where the graph reads them, unless they are there already."""
        if self.packed_route is not route:
            self.packed.copy_(route.packed)
            self.packed_route = route


class Runner(GraphStore[_Graph]):
    """The graphs of one tower without gradients: chooses, captures and replays them."""

    def __init__(self, config: GraphConfig | None, routes: Routes) -> None:
        thresholds = AUTOMATIC
        if config is not None:
            exact_calls = config.exact_after or NEVER
            thresholds = Thresholds(
                exact_calls=exact_calls, padded_calls=1, most_graphs=config.max_graphs, most_bytes=config.max_bytes
            )
        super().__init__(thresholds, routes)
        config = config or GraphConfig()
        self.budgets = config.budgets or budgets.ladder(config.max_tokens)
        self._rows_called = 0
        self._rows_replayed = 0
        self._arena: dict[Hashable, Tensor] = {}  # buffers that all budgets share: for pixels, and for every output

    def _drop(self) -> None:
        super()._drop()
        self._arena = {}

    def static_buffers(self) -> list[Tensor]:
        """List the tensors that the next call writes before a graph reads them."""
        return list(self._arena.values())

    def budgets_of(self, merge: int) -> tuple[int, ...]:
        """Return the budgets in a tower's own tokens."""
        return budgets.in_tokens(self.budgets, merge)

    def status(self) -> GraphStatus:
        """Return the counters so far."""
        padding = self._rows_replayed / self._rows_called if self._rows_called else 1.0
        return replace(super().status(), budgets=self.budgets, padding=padding)

    def needed_bytes(self, grid: Grid, identity: Identity) -> int:
        """Estimate the device memory of a graph. All graphs share it, since one runs at a time."""
        spec = identity.spec
        width = spec.request.heads * spec.request.head_dim
        if identity.hidden_states:  # of 36 bytes that a value needs, 4 again for each layer: in the graph, and returned
            width += width * len(spec.full_layers) // 9
        return rows_of(grid) * width * _BYTES_PER_VALUE

    def _bins(self, grid: Grid, spec: Spec) -> Bins:
        merge = spec.geometry.merge
        bins = budgets.pack(grid, merge, self.budgets_of(merge))
        if isinstance(bins, str):
            return Accepted(bins)
        return bins if budgets.pays(bins, merge) else Accepted("padding would cost more than the replay saves")

    def _candidates(self, grid: Grid, spec: Spec, bins: Bins) -> Iterator[Decision | str]:
        limits = self.policy.thresholds
        if self._warming == "exactly":
            yield self._exact(grid, spec)
            return
        if self._warming == "padded":
            yield self._padded(grid, spec, bins)
            return
        is_held = any(graph.grid == grid for graph in self._graphs.values())
        if rows_of(grid) > limits.most_rows and not is_held:
            yield f"calls of more than {limits.most_rows} patches keep the GPU busy without a graph"
            return
        padded: Decision | str = _COMES_AGAIN
        counts = [] if isinstance(bins, str) else [self.policy.counts.get(bin_.budget, 0) for bin_ in bins]
        if all(count >= limits.padded_calls for count in counts):
            padded = self._padded(grid, spec, bins)
        if is_held or self.policy.came_often(grid, is_padded=not isinstance(padded, str)):
            yield self._exact(grid, spec)
        elif not limits.asked_for:
            yield _COMES_AGAIN
        yield padded

    def _exact(self, grid: Grid, spec: Spec) -> Decision:
        """Return the replay of a pass in its own shape. The launches of any backend fit the layout of their capture."""
        route = self._routes.get(grid, spec, "exactly")
        whole = Bin(first=0, last=len(grid), tokens=route.metadata.merged, budget=None)
        return Decision(replay="exactly", bins=(whole,), routes=(route,), keys=(self._key(route.signature),))

    def _padded(self, grid: Grid, spec: Spec, bins: Bins) -> Decision | str:
        """Return the padded replay of a pass, or why there is none."""
        if isinstance(bins, str):
            return bins
        named = spec.settings.attention
        serves_one_layout = named != "auto" and not backend_named(named).replays_other_layouts
        if serves_one_layout and named not in spec.faults:
            return _EXACT_ONLY if self.policy.thresholds.exact_calls < NEVER else _NEVER_EXACT
        routes = []
        for bin_ in bins:
            images = grid[bin_.first : bin_.last]
            plain = self._routes.get(images, spec, "padded")
            for choice in plain.choices.values():
                if not choice.backend.replays_other_layouts:
                    return f"{choice.backend.name} cannot be captured for other layouts"
            assert bin_.budget is not None
            layout = partial(_padded_layout, plain, bin_.budget)
            routes.append(self._routes.get(images, spec, "padded", bin_.budget, layout))
        eager_choices = self._routes.get(grid, spec).choices.values()
        is_slower = not all(choice.backend.replays_other_layouts for choice in eager_choices)
        if is_slower and rows_of(grid) > self.policy.thresholds.padded_rows:
            return "no backend replays many layouts as fast as an eager call of this size runs"
        keys = tuple(self._key(route.signature) for route in routes)
        return Decision(replay="padded", bins=bins, routes=tuple(routes), keys=keys)

    def _capture(self, batch: Batch, route: Route, bin_: Bin | None, recorder: CudaRecorder) -> _Graph:
        assert bin_ is not None
        metadata = route.metadata
        spec = route.spec
        hidden_states = batch.plan.hidden_states
        per_token = spec.geometry.merge**2
        largest = self.budgets_of(spec.geometry.merge)[-1] * per_token
        outputs: list[Tensor] = []

        def buffer(name: Hashable, like: Tensor, length: int) -> Tensor:
            """Return a slice of a buffer that all layouts share; larger layouts have their own."""
            columns = like.shape[1:]
            if metadata.rows > largest:
                return like.new_empty(length, *columns)
            longest = length * largest // metadata.rows
            key = (name, columns, like.dtype, longest)
            if key not in self._arena:
                self._arena[key] = like.new_empty(longest, *columns)
            return self._arena[key][:length]

        def run() -> None:
            encoded = encode(bound, pixels_TP, hidden_states=hidden_states)
            if hidden_states:  # too many to be copied twice: they stay in the graph's memory
                outputs[:] = encoded
                return
            if not outputs:
                outputs.extend(buffer(index, output, len(output)) for index, output in enumerate(encoded))
            for static, fresh in zip(outputs, encoded, strict=True):
                static.copy_(fresh)

        with torch.no_grad():
            packed = send(pack(route.arrays), spec.request.device)
            bound = route.bind(packed)
            empty_TP = torch.empty(0, batch.pixels_TP.shape[1], dtype=spec.request.dtype, device=spec.request.device)
            pixels_TP = buffer("pixels", empty_TP, metadata.rows).zero_()
            (launch,), nbytes = recorder.record(run)
        if metadata.rows > largest:  # these buffers are the graph's own
            nbytes += sum(buffer.nbytes for buffer in (pixels_TP, *outputs))
        rows = f"{metadata.rows} patches exactly" if bin_.budget is None else f"up to {metadata.rows} patches"
        return _Graph(
            label=f"{rows} in {metadata.full.count} segments",
            grid=metadata.grid if bin_.budget is None else None,
            route=bound,
            packed=packed,
            packed_route=route,
            pixels_TP=pixels_TP,
            outputs=outputs,
            rows_per_token=[len(output) * per_token // metadata.rows for output in outputs],
            replay=launch,
            nbytes=nbytes + packed.nbytes,
        )

    def _replay(self, decision: Decision, graphs: list[_Graph], batch: Batch) -> list[Tensor]:
        """Replay a pass in its own shape, or its bins one after the other."""
        recorder = self._recorder  # if memory runs out, the store drops it
        assert recorder is not None
        recorder.wait()
        try:
            if decision.replay == "padded":
                return self._replay_bins(decision, graphs, batch.pixels_TP)
            (route,) = decision.routes
            (graph,) = graphs
            graph.set_layout(route)
            graph.pixels_TP.copy_(batch.pixels_TP)
            graph.replay()
            self._rows_called += route.metadata.rows
            self._rows_replayed += route.metadata.rows
            return [output.clone() for output in graph.outputs]
        finally:
            recorder.done()

    def _replay_bins(self, decision: Decision, graphs: list[_Graph], pixels_TP: Tensor) -> list[Tensor]:
        """Replay padded bins, and join their outputs."""
        tokens = sum(bin_.tokens for bin_ in decision.bins)
        results: list[Tensor] = []
        start = 0
        for bin_, route, graph in zip(decision.bins, decision.routes, graphs, strict=True):
            rows = bin_.tokens * route.spec.geometry.merge**2
            first_row = start * route.spec.geometry.merge**2
            graph.set_layout(route)
            graph.pixels_TP[:rows].copy_(pixels_TP[first_row : first_row + rows])
            if rows < len(graph.pixels_TP):
                graph.pixels_TP[rows:].zero_()
            graph.replay()
            for index, (static, per_token) in enumerate(zip(graph.outputs, graph.rows_per_token, strict=True)):
                fresh = static[: bin_.tokens * per_token]
                if len(decision.bins) == 1:
                    results.append(fresh.clone())
                    continue
                if start == 0:
                    results.append(static.new_empty(tokens * per_token, *static.shape[1:]))
                results[index][start * per_token :][: len(fresh)].copy_(fresh)
            start += bin_.tokens
            self._rows_called += rows
            self._rows_replayed += len(graph.pixels_TP)
        return results


def _padded_layout(plain: Route, tokens: int) -> VisionMetadata:
    """Return the layout of a route, padded to a budget, as coarse as its backend allows at no cost."""
    geometry = plain.spec.geometry
    full = plain.metadata.full
    # One spare segment always: calls that fill their budget then share graphs with calls that do not.
    bounds = full.count + 1, full.max_seqlen, tokens * geometry.merge**2
    segments, max_seqlen = plain.choices["full"].backend.graph_bounds(*bounds)
    return pad(plain.metadata, geometry, tokens, segments, max_seqlen)
