"""What is made once per forward and shared by its layers: metadata on the device, and a plan per kind of layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_vit_accel.backends import FP8, Choice, Kind, Plan, Request, resolve
from hf_vit_accel.faults import KERNELS
from hf_vit_accel.metadata import Array, Geometry, Grid, VisionMetadata, build, to_device
from hf_vit_accel.ops.window_attention import LONGEST

__all__ = ["PLANS", "POPPED", "Layout", "Prepared", "check_pixels", "lay_out", "prepare", "stream_id", "width_of"]

PLANS = "vision_plans"
"""The keyword argument by which plans reach the registered attention function through stock's `**kwargs`."""

_INJECTED = ("position_ids", "cu_seqlens", "window_index", "cu_window_seqlens", "interp_indices", "interp_weights")
POPPED = (*_INJECTED, "max_seqlen", "max_window_seqlen")
"""The keyword arguments that stock towers pop instead of computing what they hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """One layout's metadata on the device and its plans, shared by all layers and by later calls of equal layout."""

    metadata: VisionMetadata
    tensors: Mapping[str, torch.Tensor]
    plans: Mapping[Kind, Plan]
    choices: Mapping[Kind, Choice]

    def plan_for(self, cu_seqlens: torch.Tensor) -> Plan | None:
        """The plan made for these very offsets; None for any others (equal sizes do not make equal layouts)."""
        if cu_seqlens is self.tensors["cu_seqlens"]:
            return self.plans["full"]
        if cu_seqlens is self.tensors.get("cu_window_seqlens"):
            return self.plans["window"]
        return None

    def injected(self) -> dict[str, Any]:
        """The keyword arguments that a stock tower pops instead of computing them, and the plans."""
        kwargs: dict[str, Any] = {name: self.tensors[name] for name in _INJECTED if name in self.tensors}
        kwargs["max_seqlen"] = self.metadata.full.max_length
        if self.metadata.window is not None:
            kwargs["max_window_seqlen"] = self.metadata.window.max_length
        kwargs[PLANS] = self
        return kwargs


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The same on the host, before its arrays are sent."""

    metadata: VisionMetadata
    arrays: Mapping[str, Array]
    plans: Mapping[Kind, Plan]
    choices: Mapping[Kind, Choice]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """With the arrays on the device, by the same names."""
        bound = {
            kind: plan.bind({name: tensors[f"{kind}/{name}"] for name in plan.arrays})
            for kind, plan in self.plans.items()
        }
        return Prepared(metadata=self.metadata, tensors=tensors, plans=bound, choices=self.choices)


def lay_out(
    metadata: VisionMetadata, request: Request, attention: str, fused_windows: bool, faults: Mapping[str, str]
) -> Layout:
    """Choose a backend per kind of layer and let it plan.

    fused_windows: window layers need no plan, a kernel of ours attends them, unless their windows are too long for it.
    faults: backends that failed when they ran.
    """
    arrays, plans, choices = metadata.arrays(), {}, {}
    for kind, segments in metadata.segments().items():
        if kind == "window" and fused_windows and segments.max_length <= LONGEST:
            continue
        wanted = replace(request, kind=kind, longest=segments.max_length)
        if KERNELS in faults:
            faults = {FP8.name: faults[KERNELS], **faults}
        choices[kind] = resolve(attention, wanted, segments, faults)
        plans[kind] = choices[kind].backend.plan(segments, wanted)
        arrays |= {f"{kind}/{name}": array for name, array in plans[kind].arrays.items()}
    return Layout(metadata=metadata, arrays=arrays, plans=plans, choices=choices)


def stream_id(device: torch.device) -> int:
    """The stream that copies to a device are queued on now: what was sent on one may not have arrived for another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def prepare(
    grid: Grid, geometry: Geometry, request: Request, attention: str, fused_windows: bool, faults: Mapping[str, str]
) -> tuple[Prepared, int]:
    """Lay out a grid and send everything in one copy; also the bytes that it holds."""
    layout = lay_out(build(grid, geometry), request, attention, fused_windows, faults)
    return layout.bind(to_device(layout.arrays, request.device)), layout.nbytes


def width_of(weight: torch.Tensor) -> int | None:
    """Values of a patch, by the weight of its convolution; None for a weight packed by a quantiser."""
    return math.prod(weight.shape[1:]) if weight.dim() == 5 else None


def check_pixels(pixels_TP: torch.Tensor, weight: torch.Tensor, *, offloaded: bool) -> None:
    """Raise ValueError for pixels that do not fit the convolution's weight.

    offloaded: weights and inputs are moved by hooks, so that devices may differ.
    """
    if pixels_TP.shape[1] != (width := width_of(weight) or pixels_TP.shape[1]):
        raise ValueError(
            f"expected {width} values per patch (channels * temporal * patch * patch), got {pixels_TP.shape[1]}; "
            "use the processor of this very model"
        )
    if not offloaded and weight.device not in (pixels_TP.device, torch.device("meta")):
        raise ValueError(
            f"expected the pixel values on the tower's device {weight.device}, got them on {pixels_TP.device}; "
            f"move them with .to({str(weight.device)!r})"
        )
