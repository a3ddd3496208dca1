"""Make the route of a layout: its metadata, a backend and its plan for every kind of layer, and unmet requests.

A route is decided on the host, sent to the device in one copy, and cached: later calls of the same grid reuse it.
`T` packed patch rows, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_vit_accel.backends import Choice, LayerKind, Request, resolve
from hf_vit_accel.backends.base import Attend, Plan, Replay, plan_alone
from hf_vit_accel.config import Settings
from hf_vit_accel.layout import Array, Geometry, Grid, Segments, VisionMetadata, build, pack, send, unpack
from hf_vit_accel.machine import KERNELS, LRU, guarded, outside_modes
from hf_vit_accel.ops import Ops
from hf_vit_accel.ops.training.nodes import TrainedLayer, trained_layer
from hf_vit_accel.versions import METADATA, keyword_arguments

K = TypeVar("K")
V = TypeVar("V")

ROUTE = "vision_route"
"""The keyword argument that takes a route to the registered attention function, through stock's `**kwargs`."""
_OFFSETS_BY_KIND: Mapping[LayerKind, str] = {"full": "cu_seqlens", "window": "cu_window_seqlens"}
_SEGMENTS = ("cu_seqlens", "window_index", "cu_window_seqlens")
"""The arrays of a tower whose attention alone is ours: its own forward computes positions."""


def _nothing() -> Mapping[K, V]:
    """Return an empty mapping that nobody can change."""
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """The decisions behind a route that do not depend on the grid. A tower has one for every kind of call.

    Attributes:
        request: The request to backends, without a layout. Without layers, it holds the device alone.
        ops: The operations; None where stock's blocks run on our metadata and attention.
        full_layers: Whether each layer attends per frame, not per window. Empty where attention alone is ours: layers
            are unknown, and each makes a request of its own.
        faults: What failed when it ran, with the reason. It is not chosen again.
        against_graphs: Why no CUDA graph serves such calls; None where one may.
        called_linears: The linears of third parties, which a trial must prove safe in CUDA graphs.
    """

    geometry: Geometry
    request: Request
    ops: Ops | None
    full_layers: tuple[bool, ...] = ()
    faults: Mapping[str, str] = field(default_factory=_nothing)
    settings: Settings
    against_graphs: str | None = None
    called_linears: tuple[nn.Module, ...] = ()

    def request_of(self, kind: LayerKind, replay: Replay, segments: Segments | None = None) -> Request:
        """Return the request for layers of a kind; without segments, for a layout that is unknown."""
        request = replace(self.request, kind=kind, replay=replay)
        return request if segments is None else replace(request, max_seqlen=segments.max_seqlen, rows=segments.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The decisions about one layout.

    Attributes:
        choices: The choice of that backend, with the reasons against others.
        unmet: Requested features that the route cannot use, with reasons.
        tensors: The arrays on the device. Empty before `bind`, as are `attends` and `trained`.
        trained: Every layer with gradients; None where no gradient flows.
    """

    spec: Spec
    metadata: VisionMetadata
    arrays: Mapping[str, Array]
    plans: Mapping[LayerKind, Plan] = field(default_factory=_nothing)
    choices: Mapping[LayerKind, Choice] = field(default_factory=_nothing)
    unmet: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=_nothing)
    attends: tuple[Attend, ...] = ()
    trained: tuple[TrainedLayer | None, ...] = ()

    @cached_property
    def signature(self) -> Hashable:
        """Rows, array shapes and dtypes, and host decisions of all plans: layouts that share these share a graph."""
        arrays = tuple((name, array.shape, array.dtype.str) for name, array in self.arrays.items())
        plans = tuple((kind, plan.backend.name, tuple(sorted(plan.host.items()))) for kind, plan in self.plans.items())
        return self.metadata.rows, arrays, plans

    @cached_property
    def packed(self) -> Tensor:
        """The bytes of all arrays on the device, sent once."""
        with outside_modes():
            return send(pack(self.arrays), self.spec.request.device)

    @cached_property
    def bound(self) -> Route:
        """This route, bound to its own arrays on the device."""
        return self.bind(self.packed)

    def bind(self, packed: Tensor) -> Route:
        """Return this route with its arrays in packed bytes on the device, built for its first call."""
        with outside_modes():
            tensors = unpack(packed, self.arrays)
            plans: dict[LayerKind, Plan] = {}
            for kind, plan in self.plans.items():
                arrays_of_plan = {name: tensors[f"{kind}/{name}"] for name in plan.arrays}
                plans[kind] = guarded(plan.backend.name, plan.bind)(arrays_of_plan)
        bound = replace(self, tensors=MappingProxyType(tensors), plans=MappingProxyType(plans))
        ops = self.spec.ops
        if ops is None:
            for kind, segment_plans in bound.segment_plans.items():
                offsets_S1 = tensors.get(_OFFSETS_BY_KIND[kind])
                if offsets_S1 is not None:  # the attention function knows them where towers do not pass `ROUTE` on
                    PLANS_OF_OFFSETS[offsets_S1] = segment_plans
            return bound
        attends = tuple(bound._attends(ops))
        trained = tuple(
            trained_layer(layer, attend) if self.spec.request.grad else None
            for layer, attend in zip(ops.layers, attends, strict=True)
        )
        return replace(bound, attends=attends, trained=trained)

    def _attends(self, ops: Ops) -> list[Attend]:
        """Return the attention of every layer."""
        layers = self.spec.full_layers
        by_kind: dict[LayerKind, list[Attend]] = {}
        for kind, plan in self.plans.items():
            attend_layers = guarded(plan.backend.name, plan.backend.attend_layers)
            by_kind[kind] = attend_layers(plan, len(layers), ops.rotate)
        attend_window = None
        if "window" not in self.plans and ops.attend_window is not None:
            attend_window = ops.attend_window(self.tensors["cu_window_seqlens"], self.spec.request.scale)
        attends: list[Attend] = []
        for index, is_full in enumerate(layers):
            if attend_window is not None and not is_full:
                attends.append(attend_window)
                continue
            kind_of_layer: LayerKind = "full" if is_full else "window"
            attends.append(guarded(self.plans[kind_of_layer].backend.name, by_kind[kind_of_layer][index]))
        return attends

    @cached_property
    def segment_plans(self) -> Mapping[LayerKind, SegmentPlans]:
        """The attention of every kind of layers, for a tower whose layers call it by themselves."""
        plans: dict[LayerKind, SegmentPlans] = {}
        for kind, segments in self.metadata.segments().items():
            plans[kind] = SegmentPlans(
                kind=kind,
                segments=segments,
                settings=self.spec.settings,
                faults=self.spec.faults,
                own=self.plans.get(kind),
            )
        return MappingProxyType(plans)

    @cached_property
    def _quarter_plans(self) -> SegmentPlans:
        """The attention of the layers behind a merger, which leaves a quarter of the rows."""
        full = self.segment_plans["full"]
        return replace(full, segments=Segments(full.segments.lengths_S // 4), plans={})

    def plans_of_equal(self, cu_seqlens: Tensor, rows: int) -> SegmentPlans | None:
        """Return the plans of offsets of this route that equal those of a tower, by a host sync; None without any.

        Equal sizes may be other layouts. Behind a merger, the number of rows alone counts.
        """
        full = self.segment_plans["full"]
        if self.spec.geometry.quarters:
            return next((plans for plans in (full, self._quarter_plans) if plans.segments.rows == rows), None)
        for kind, plans in self.segment_plans.items():
            own_S1 = self.tensors.get(_OFFSETS_BY_KIND[kind])
            if own_S1 is not None and own_S1.device == cu_seqlens.device and torch.equal(own_S1, cu_seqlens):
                return plans
        return None

    @property
    def attended(self) -> dict[str, str]:
        """The backend of every kind of layer that has attended by plans of its own."""
        return {kind: plan.backend.name for kind, plans in self.segment_plans.items() for plan in plans.plans.values()}

    def injected(self, taken: frozenset[str]) -> dict[str, object]:
        """Return the keyword arguments of these names: metadata that a tower pops, and the route for its layers."""
        metadata: dict[str, object] = {name: self.tensors[name] for name in METADATA if name in self.tensors}
        metadata["max_seqlen"] = self.metadata.full.max_seqlen
        if self.metadata.window is not None:
            metadata["max_window_seqlen"] = self.metadata.window.max_seqlen
        return keyword_arguments({**metadata, ROUTE: self}, taken)

    def block_arguments(self, layer: int, names: frozenset[str]) -> dict[str, object]:
        """Return the keyword arguments of these names that stock passes to a block."""
        kind: LayerKind = "full" if self.spec.full_layers[layer] else "window"
        known = {
            "cu_seqlens": self.tensors[_OFFSETS_BY_KIND[kind]],
            "max_seqlen": self.metadata.segments()[kind].max_seqlen,
        }
        return {name: value for name, value in known.items() if name in names}


def make_route(layout: Grid | VisionMetadata, spec: Spec, replay: Replay = "never") -> Route:
    """Make the route of a layout on the host. Windows that our kernel attends need no plan."""
    metadata = layout if isinstance(layout, VisionMetadata) else build(layout, spec.geometry)
    arrays = metadata.arrays()
    if not spec.full_layers:
        arrays = {name: array for name, array in arrays.items() if name in _SEGMENTS}
        return Route(spec=spec, metadata=metadata, arrays=MappingProxyType(arrays))
    choices: dict[LayerKind, Choice] = {}
    plans: dict[LayerKind, Plan] = {}
    for kind, segments in metadata.segments().items():
        request = spec.request_of(kind, replay, segments)
        choice = choose(spec, request, segments)
        if choice is None:
            continue
        plan = guarded(choice.backend.name, choice.backend.plan)(segments, request)
        choices[kind] = choice
        plans[kind] = plan
        for name, array in plan.arrays.items():
            arrays[f"{kind}/{name}"] = array
    unmet = [reason for choice in choices.values() for reason in choice.unmet]
    why_no_kernels = spec.faults.get(KERNELS)
    if spec.ops is not None and why_no_kernels in spec.ops.unfused.values():
        unmet.append(f"no fused kernel can serve the call: one {why_no_kernels}")
    return Route(
        spec=spec,
        metadata=metadata,
        arrays=MappingProxyType(arrays),
        plans=MappingProxyType(plans),
        choices=MappingProxyType(choices),
        unmet=tuple(dict.fromkeys(unmet)),
    )


def choose(spec: Spec, request: Request, segments: Segments | None = None) -> Choice | None:
    """Choose the backend for a request, whose layout may be unknown; None for windows that our kernel attends."""
    if request.kind == "window" and spec.ops is not None and spec.ops.attend_window is not None:
        return None
    return resolve(spec.settings.attention, request, segments, spec.faults)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentPlans:
    """Attention within segments that the host knows: a plan for each kind of layers that asks for one.

    Attributes:
        own: The plan of the tower's route; None without a route.
        plans: The other plans made so far, by stream and request.
    """

    kind: LayerKind
    segments: Segments
    settings: Settings
    faults: Mapping[str, str] = field(default_factory=dict)
    own: Plan | None = None
    plans: dict[Hashable, Plan] = field(default_factory=dict)

    def plan(self, request: Request) -> Plan:
        """Return the plan for a layer's request, whose kind, max_seqlen and score_mod are those of the segments."""
        own = self.own
        fits = own is not None and (own.request.heads, own.request.head_dim) == (request.heads, request.head_dim)
        if own is not None and fits and (own.request.grad or not request.grad):  # any scale will do
            is_same = own.request.scale == request.scale
            return own if is_same else replace(own, request=replace(own.request, scale=request.scale))
        device = request.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        plan = self.plans.get((stream, request))
        if plan is None:
            if self.segments.rows != request.rows:
                raise ValueError(f"expected {self.segments.rows} rows for this grid_thw, got {request.rows}")
            complete = replace(
                request,
                kind=self.kind,
                max_seqlen=self.segments.max_seqlen,
                score_mod=self.settings.score_mod,
                dtype=request.dtype if own is None else own.request.dtype,
            )
            backend = resolve(self.settings.attention, complete, self.segments, self.faults).backend
            self.plans[stream, request] = plan = plan_alone(backend, self.segments, complete)
        return plan


PLANS_OF_OFFSETS = WeakIdKeyDictionary()
"""The `SegmentPlans` of offsets on the device that we made, for the attention function."""


class RouteKey(NamedTuple):
    """The key of a route in its tower's cache.

    Attributes:
        stream: Every stream has its own routes: a copy to the device on one stream may be incomplete for another.
        budget: The budget of a CUDA graph; None for the layout's own shape.
    """

    grid: Grid
    spec: Spec
    stream: int
    replay: Replay = "never"
    budget: int | None = None


class Routes:
    """The routes of one tower; the least recently used ones are dropped.

    Attributes:
        hits: Calls of the tower for which no route was made.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.cache: LRU[Route] = LRU(entries=1024, cost=1 << 20)  # cost: bytes; `allow` raises it

    def allow(self, weights_bytes: int) -> None:
        """Let routes take 2% of the bytes of the weights, and 1 MiB where that is more."""
        self.cache.cost = max(1 << 20, weights_bytes // 50)

    def get(
        self,
        grid: Grid,
        spec: Spec,
        replay: Replay = "never",
        budget: int | None = None,
        layout: Callable[[], VisionMetadata] | None = None,
    ) -> Route:
        """Return the route of a grid, decided if it is not cached."""
        device = spec.request.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

        def make() -> tuple[Route, int]:
            route = make_route(grid if layout is None else layout(), spec, replay)
            return route, sum(array.nbytes for array in route.arrays.values())

        return self.cache.get(RouteKey(grid, spec, stream, replay, budget), make)
