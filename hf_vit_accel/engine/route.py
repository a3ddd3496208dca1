"""Everything that is decided for one layout: its metadata, a backend and its plan per kind of layer, what is unmet.

A route is laid out on the host, sent to the device in one copy, and kept: later calls of the same grid take it again.
`T` packed patch rows, `H` heads, `D` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_vit_accel.backends import FP8, Attend, Choice, Kind, Plan, Request, resolve
from hf_vit_accel.config import Settings
from hf_vit_accel.layout import Array, Geometry, Grid, Segments, VisionMetadata, build, pack, send, to_device, unpack
from hf_vit_accel.machine import KERNELS, LRU, guarded, outside_modes
from hf_vit_accel.ops import Ops
from hf_vit_accel.ops.training.trained import Trained, TrainedLayer, layer_of
from hf_vit_accel.ops.window_attention import LONGEST, WindowAttention, window_attention

PLANS = "vision_plans"
"""The keyword argument by which plans reach the registered attention function through stock's `**kwargs`; and the
attribute of offsets by which they reach it where a tower passes none of these on."""

_INJECTED = ("position_ids", "cu_seqlens", "window_index", "cu_window_seqlens", "interp_indices", "interp_weights")
POPPED = (*_INJECTED, "max_seqlen", "max_window_seqlen")
"""The keyword arguments that stock towers pop instead of computing what they hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """What decides a route beside the grid. A tower makes one per kind of call and keeps it while nothing changes.

    ops: None where stock's blocks run, on our metadata and attention. full_layers: whether each layer attends per
    frame. faults: what failed when it ran, and is not to be chosen again. max_rows: of a pass; None: no call is cut.
    """

    geometry: Geometry
    request: Request
    ops: Ops | None
    full_layers: tuple[bool, ...]
    faults: tuple[tuple[str, str], ...] = ()
    max_rows: int | None = None
    settings: Settings


@dataclass(kw_only=True, eq=False)
class Route:
    """One layout's way through a tower.

    arrays: what the device needs, by name. unmet: what was named and is not served.
    tensors: the arrays on the device, for a route that was bound. attends: then, what each layer attends by.
    nodes: and what trains it as one node; None where it is several, or no gradient flows.
    """

    spec: Spec
    metadata: VisionMetadata
    arrays: Mapping[str, Array]
    plans: Mapping[Kind, Plan]
    choices: Mapping[Kind, Choice]
    unmet: list[str]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    attends: list[Attend] = field(default_factory=list)
    nodes: list[TrainedLayer | None] = field(default_factory=list)
    signature: Any = None  # the runner's, of this layout's CUDA graph
    _packed: Tensor | None = None
    _bound: Route | None = None

    def packed(self) -> Tensor:
        """The arrays' bytes on the device, sent once."""
        if self._packed is None:
            with outside_modes():
                self._packed = send(pack(self.arrays), self.spec.request.device)
        return self._packed

    def ready(self) -> Route:
        """This route, bound to its own arrays on the device."""
        if self._bound is None:
            self._bound = self.bind(self.packed())
        return self._bound

    def bind(self, packed: Tensor) -> Route:
        """This route with its arrays in packed bytes; what must exist before the first call is built."""
        with outside_modes():
            tensors = unpack(packed, self.arrays)
            plans = {
                kind: guarded(plan.backend.name, plan.bind)({name: tensors[f"{kind}/{name}"] for name in plan.arrays})
                for kind, plan in self.plans.items()
            }
        bound = replace(self, tensors=tensors, plans=plans, signature=None, _packed=None, _bound=None)
        ops = self.spec.ops
        if ops is not None:
            bound.attends = bound._attends(ops)
            pairs, grad = zip(ops.layers, bound.attends, strict=True), self.spec.request.grad
            bound.nodes = [layer_of(*pair) if grad else None for pair in pairs]
        return bound

    def _attends(self, ops: Ops) -> list[Attend]:
        layers = self.spec.full_layers
        made = {
            kind: guarded(plan.backend.name, plan.backend.attend_layers)(plan, len(layers), ops.rotate)
            for kind, plan in self.plans.items()
        }
        made = {kind: [guarded(self.plans[kind].backend.name, one) for one in all_] for kind, all_ in made.items()}
        if "window" not in made and ops.attend_window is not None:
            cu_seqlens, scale = self.tensors["cu_window_seqlens"], self.spec.request.scale
            one: Attend = partial(ops.attend_window, cu_seqlens_S1=cu_seqlens, scale=scale)
            if self.spec.request.grad and getattr(ops.attend_window, "__wrapped__", None) is window_attention:
                one = Trained(function=WindowAttention, settings=(cu_seqlens, scale))
            made["window"] = [one] * len(layers)
        return [made["full" if full else "window"][index] for index, full in enumerate(layers)]

    def plan_for(self, cu_seqlens: Tensor) -> Plan | None:
        """The plan made for these very offsets; None for any others (equal sizes do not make equal layouts)."""
        kinds: dict[str, Kind] = {"cu_seqlens": "full", "cu_window_seqlens": "window"}
        return next((self.plans[kind] for name, kind in kinds.items() if cu_seqlens is self.tensors.get(name)), None)

    def injected(self) -> dict[str, Any]:
        """The keyword arguments that a stock tower pops instead of computing them, and the plans."""
        kwargs: dict[str, Any] = {name: self.tensors[name] for name in _INJECTED if name in self.tensors}
        kwargs["max_seqlen"] = self.metadata.full.max_seqlen
        if self.metadata.window is not None:
            kwargs["max_window_seqlen"] = self.metadata.window.max_seqlen
        kwargs[PLANS] = self
        setattr(kwargs["cu_seqlens"], PLANS, self)  # for towers that pass none of these on to their layers
        return kwargs


def lay_out(layout: Grid | VisionMetadata, spec: Spec) -> Route:
    """Decide everything about a layout on the host. Window layers need no plan where a kernel of ours attends them."""
    metadata = layout if isinstance(layout, VisionMetadata) else build(layout, spec.geometry)
    arrays, plans, choices, faults = metadata.arrays(), {}, {}, dict(spec.faults)
    if KERNELS in faults:
        faults[FP8.name] = faults[KERNELS]
    for kind, segments in metadata.segments().items():
        if kind == "window" and spec.ops and spec.ops.attend_window and segments.max_seqlen <= LONGEST:
            continue
        request = replace(spec.request, kind=kind, max_seqlen=segments.max_seqlen, rows=metadata.rows)
        choices[kind] = choice = resolve(spec.settings.attention, request, segments, faults)
        plans[kind] = guarded(choice.backend.name, choice.backend.plan)(segments, request)
        arrays |= {f"{kind}/{name}": array for name, array in plans[kind].arrays.items()}
    unmet = _unmet(spec, choices, plans)
    return Route(spec=spec, metadata=metadata, arrays=arrays, plans=plans, choices=choices, unmet=unmet)


def _unmet(spec: Spec, choices: Mapping[Kind, Choice], plans: Mapping[Kind, Plan]) -> list[str]:
    """What a call does not get: a backend or parts to fuse that the user named, and whatever failed when it ran."""
    settings, ops, faults, reasons = spec.settings, spec.ops, dict(spec.faults), []
    for choice in choices.values():
        for name, against in choice.rejected.items():
            if name in (settings.attention, FP8.name) or faults.get(name) in against:
                reasons += [f"{name} cannot serve the call: {why}" for why in against]
    if ops is not None and faults.get(KERNELS) in ops.unfused.values():
        reasons.append(f"no fused kernel can serve the call: one {faults[KERNELS]}")
    if ops is not None and settings.fuse is not None:
        reasons += [f"{part} is not fused: {why}" for part, why in ops.unfused.items() if part in settings.fuse]
        if "window_attention" in settings.fuse & ops.fused and "window" in plans:
            reasons.append("window_attention is not fused: the windows are longer than the kernel's")
    return list(dict.fromkeys(reasons))


OFFSETS = "_hf_vit_accel_offsets"
"""The attribute by which offsets on the device tell the attention function what is known of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Offsets:
    """Segments of a tower whose attention alone is ours, as its layers get them: the lengths are known on the host.

    settings, faults: of the tower. plans: by what layers ask for; backends: of each kind of layer, of the tower.
    """

    kind: Kind
    segments: Segments
    settings: Settings
    faults: Mapping[str, str]
    backends: dict[str, str]
    plans: dict[Any, Plan] = field(default_factory=dict)


_SEGMENTS = "cu_seqlens", "window_index", "cu_window_seqlens"


class Routes:
    """The routes of one tower that were taken before; the least recently used go first."""

    def __init__(self) -> None:
        self.cache: LRU[Any] = LRU(entries=1024, cost=1 << 20)  # cost: bytes; raised to 2% of the weights

    def get(
        self, grid: Grid, spec: Spec, budget: int | None = None, layout: Callable[[], VisionMetadata] | None = None
    ) -> Route:
        """The route of a grid, laid out if it is not there. budget, layout: of a CUDA graph, and its padded metadata.

        What was sent to the device on one stream may not have arrived for another: each has routes of its own.
        """
        device = spec.request.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

        def make() -> tuple[Route, int]:
            route = lay_out(grid if layout is None else layout(), spec)
            return route, sum(array.nbytes for array in route.arrays.values())

        return self.cache.get((grid, spec, budget, stream), make)

    def offsets(self, grid: Grid, at: torch.device, geometry: Geometry, *of_tower: Any) -> dict[str, Any]:
        """The keyword arguments with which such a tower neither computes its segments nor asks the device for them.

        Made once for a stream and while the geometry is the same. of_tower: settings, faults and backends of `Offsets`.
        """

        def make() -> tuple[dict[str, Any], int]:
            metadata, (settings, faults, backends) = build(grid, geometry), of_tower
            arrays = {name: array for name, array in metadata.arrays().items() if name in _SEGMENTS}
            with outside_modes():
                tensors = to_device(arrays, at)
            given = dict(settings=settings, faults=faults, backends=backends)
            for name, (kind, segments) in zip(_SEGMENTS[::2], metadata.segments().items(), strict=False):
                setattr(tensors[name], OFFSETS, Offsets(kind=kind, segments=segments, **given))
            return {**tensors, "max_seqlen": metadata.full.max_seqlen}, 8 * len(grid)

        key = grid, at, geometry, torch.cuda.current_stream(at).cuda_stream if at.type == "cuda" else 0
        return self.cache.get(key, make)
