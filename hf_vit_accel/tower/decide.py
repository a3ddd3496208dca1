"""Decide everything about a call before it runs, but one thing: a runner picks the CUDA graph of each pass, or none.

A call goes one of the four ways of `Way`. Its plan says which, with every reason, and holds whatever that way needs.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn

from hf_vit_accel.engine.encoder import Checkpoint, checkpoints_of
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.passes import cut, reasons_whole
from hf_vit_accel.engine.route import Route, Spec
from hf_vit_accel.families import Tower
from hf_vit_accel.graphs.recorder import why_not_graphs
from hf_vit_accel.graphs.runner import Runner
from hf_vit_accel.graphs.training import TrainingRunner
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import refuse
from hf_vit_accel.sharing.data_parallel import Sharing
from hf_vit_accel.sharing.split import Places
from hf_vit_accel.tower import checks
from hf_vit_accel.tower.modules import Weights
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.snapshot import Snapshot
from hf_vit_accel.tower.state import SpecKey, TowerState


class Way(Enum):
    """The way of a call: through our operations, or one of three ways through the stock forward.

    `reasons_stock` (of a `Snapshot`, of `checks`, of a `Call`) send a call the way STOCK. `reasons_slow` send it the
    way METADATA, where stock calls the blocks one by one. `status` counts FAST and ATTENTION as fast calls.
    """

    FAST = "by our operations and attention"
    METADATA = "through the stock forward, with our metadata and attention"
    ATTENTION = "through the stock forward, with our attention alone: a family whose blocks we do not know"
    STOCK = "through the stock forward, untouched"


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call, as it was read.

    Attributes:
        inputs: Pixels and grid, checked; None for a call that goes `Way.STOCK`.
        reasons_stock: Why it does.
        reasons_slow: Why the blocks must be called one by one.
        snapshot: The tower as it is now; None where it could not be read.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
    """

    inputs: Inputs | None = None
    reasons_stock: Sequence[str] = ()
    reasons_slow: Sequence[str] = ()
    snapshot: Snapshot | None = None
    parameters: list[nn.Parameter] = field(default_factory=list)
    weights: Weights | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """Whole images and frames that are encoded in one pass.

    Attributes:
        grid: Their grid.
        rows: Their rows among those that this rank encodes.
        route: The route of their layout.
    """

    grid: Grid
    rows: slice
    route: Route


@dataclass(frozen=True, kw_only=True)
class SharedCall:
    """Whether the ranks of `data_parallel` share a call.

    Attributes:
        places: Which rank encodes what; None for a call that is not shared.
        result: The result of the call for `Sharing.counts`; None if it is not counted.
        reasons: Why a call that would gain is not shared.
    """

    places: Places | None = None
    result: str | None = None
    reasons: tuple[str, ...] = ()


_NOT_SHARED = SharedCall()


@dataclass(frozen=True, kw_only=True, eq=False)
class StockPlan:
    """The decisions about a call that runs the stock forward.

    Attributes:
        way: Any but `Way.FAST`.
        reasons: Why it is not fast, and why it gets less than was requested.
        injected: Keyword arguments that the stock forward is given.
        route: Of the layout, on the way METADATA.
        shared: Whether ranks share the call.
    """

    way: Way
    reasons: tuple[str, ...]
    injected: Mapping[str, Any] = field(default_factory=dict)
    route: Route | None = None
    shared: SharedCall = _NOT_SHARED


@dataclass(frozen=True, kw_only=True, eq=False)
class FastPlan:
    """The decisions about a call that runs our operations.

    Attributes:
        reasons: Why the call gets less than was requested.
        inputs: Pixels and grid of the whole call, and which images are equal.
        snapshot: The tower as it is now.
        parameters: Of the tower, as they are now.
        weights: Their addresses, dtypes and sizes.
        spec: Of every route.
        passes: In order. More than one for a long call, none if there is nothing to encode.
        most_rows: Rows of a pass at most; None for a call that may not be cut.
        checkpoints: By layer, None for a layer that keeps what its gradient needs.
        shared: Which rank encodes what, if ranks share the call.
        runner: Of CUDA graphs; None for a tower without graphs.
        eager_reason: Why a tower with graphs runs this call eagerly, whatever its layout.
        marks_outputs: Whether the outputs of a frozen tower must require gradients.
        returns_tuple: Whether the caller asked for a tuple.
        way: Always `Way.FAST`.
    """

    reasons: tuple[str, ...]
    inputs: Inputs
    snapshot: Snapshot
    parameters: list[nn.Parameter]
    weights: Weights
    spec: Spec
    passes: Sequence[Pass]
    most_rows: int | None
    checkpoints: Sequence[Checkpoint | None]
    shared: SharedCall
    runner: Runner | TrainingRunner | None
    eager_reason: str | None
    marks_outputs: bool
    returns_tuple: bool
    way: ClassVar[Way] = Way.FAST


CallPlan = StockPlan | FastPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A call that is over.

    Attributes:
        plan: The decisions that it ran by.
        output: An object of the stock output class, or a tuple.
        reasons: More reasons why it got less than was requested, found while it ran.
    """

    plan: CallPlan
    output: Any
    reasons: tuple[str, ...] = ()


def decide(tower: Tower, state: TowerState, call: Call, not_shared: str | None = None) -> CallPlan:
    """Return the plan of a call.

    Args:
        tower: The patched tower.
        state: Its state.
        call: The call, read.
        not_shared: Why the ranks that tried to share this call could not.

    Raises:
        FallbackError: The call would not get what was asked for, under `strict`.
        RuntimeError: A CUDA graph is being captured around the tower.
    """
    if call.inputs is None:
        state.refuse_stock(list(call.reasons_stock))
        return StockPlan(way=Way.STOCK, reasons=tuple(call.reasons_stock))
    if state.family.attention_only:
        return _decide_attention(tower, state, call)
    inputs = call.inputs
    snapshot = call.snapshot
    weights = call.weights
    assert snapshot is not None and weights is not None
    device = inputs.pixels.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A patched tower cannot be captured in an outer CUDA graph; use hf_vit_accel.patch(model, cuda_graphs=True)"
        )
    # A third-party module (an adapter) may train parameters outside of the tower.
    grad_mode = torch.is_grad_enabled()
    grad = grad_mode and bool(snapshot.third_party or inputs.pixels.requires_grad or snapshot.trained(call.parameters))
    checkpoints = checkpoints_of(snapshot.parts) if grad else []
    shared = _NOT_SHARED
    if state.sharing is not None:
        shared = _decide_sharing(state, state.sharing, call, checkpoints, not_shared)
    reasons_slow = list(call.reasons_slow)
    if not state.family.videos and any(frames > 1 for frames, _, _ in inputs.grid):
        reasons_slow.append("this family takes the frames of a video one by one")
    spec = spec_of(state, snapshot, weights, device, fast=not reasons_slow, grad=grad)
    if spec.ops is None:
        return _decide_metadata(tower, state, call, spec, reasons_slow, shared)

    reasons = list(shared.reasons)
    most_rows = spec.max_rows
    if any(checkpoints) or isinstance(state.settings.max_rows, int):  # else there is nothing to add to the spec
        most_rows, passes_reasons = _most_rows(state, spec, snapshot, checkpoints, len(inputs.pixels))
        reasons += passes_reasons
    grid = inputs.grid
    if inputs.repeats is not None:
        grid = inputs.repeats.distinct(grid)
        reasons += inputs.repeats.unmet
    if shared.places is not None and state.sharing is not None:
        grid = shared.places.grid_of(state.sharing.ranks.rank)
    if grid is inputs.grid and (most_rows is None or len(inputs.pixels) <= most_rows):  # nothing is reused or shared
        passes = [Pass(grid=grid, rows=slice(0, len(inputs.pixels)), route=state.routes.get(grid, spec))]
    else:
        passes = _passes(state, spec, grid, most_rows)
    for one_pass in passes:
        reasons += [reason for reason in one_pass.route.unmet if reason not in reasons]
    if state.settings.strict:
        refuse(reasons)
    runner = state.training_runner if grad else state.inference_runner
    if grad and len(passes) > 1:
        runner = None  # such passes run again in the backward pass
    return FastPlan(
        reasons=tuple(reasons),
        inputs=inputs,
        snapshot=snapshot,
        parameters=call.parameters,
        weights=weights,
        spec=spec,
        passes=passes,
        most_rows=most_rows,
        checkpoints=checkpoints,
        shared=shared,
        runner=runner,
        eager_reason=None if runner is None else _reason_against_graphs(snapshot, weights, device, checkpoints),
        marks_outputs=grad_mode and not grad and snapshot.marks_outputs(),
        returns_tuple=inputs.options.get("return_dict", tower.config.return_dict) is False,
    )


def spec_of(
    state: TowerState, snapshot: Snapshot, weights: Weights, device: torch.device, *, fast: bool, grad: bool
) -> Spec:
    """Return the spec of calls like this one; the same object while nothing of it changes."""
    autocast = checks.autocast_dtype(device, weights.dtype)
    scales = None if state.settings.fp8 is None else state.scales(snapshot, device)
    halvings = len(state.pass_limit.rows_after_oom)
    key = SpecKey(device, autocast, fast, grad, weights.dtype, weights.key, scales, halvings)
    spec = snapshot.specs.get(key)
    return state.make_spec(snapshot, weights, key) if spec is None else spec


def _decide_sharing(
    state: TowerState,
    sharing: Sharing,
    call: Call,
    checkpoints: Sequence[Checkpoint | None],
    not_shared: str | None,
) -> SharedCall:
    """Return whether the ranks share a call, and how.

    From here on the other ranks may wait for this one, so this comes before anything that may fail.
    """
    if not_shared is not None:
        return SharedCall(result="encoded by each rank alone", reasons=(not_shared,))
    inputs = call.inputs
    snapshot = call.snapshot
    assert inputs is not None and snapshot is not None
    distinct = inputs.grid if inputs.repeats is None else inputs.repeats.distinct(inputs.grid)
    places = sharing.split(inputs.grid, distinct, snapshot.facts)
    if places is None:
        return SharedCall(result="too small to share")
    is_reentrant = any(checkpoint is not None and checkpoint.reentrant for checkpoint in checkpoints)
    reasons = sharing.reasons_against(snapshot.facts, reentrant=is_reentrant)
    if reasons:
        return SharedCall(reasons=tuple(reasons))
    sharing.note_others_wait(inputs.grid)
    return SharedCall(places=places, result="shared")


def _decide_attention(tower: Tower, state: TowerState, call: Call) -> StockPlan:
    """Return the plan of a call with our attention alone: offsets carry the lengths of its segments."""
    assert call.inputs is not None
    device = call.inputs.pixels.device
    of_tower = state.settings, state.faults, state.attention_backends
    offsets = state.routes.offsets(call.inputs.grid, device, state.family.geometry(tower), *of_tower)
    return StockPlan(way=Way.ATTENTION, reasons=(), injected=offsets)


def _decide_metadata(
    tower: Tower, state: TowerState, call: Call, spec: Spec, reasons_slow: list[str], shared: SharedCall
) -> StockPlan:
    """Return the plan of a call whose blocks are called one by one, on our metadata and attention."""
    assert call.inputs is not None
    name = tower.config._attn_implementation
    route = state.routes.get(call.inputs.grid, spec)
    reasons = reasons_slow + route.unmet
    if state.settings.score_mod is not None and name not in NAMES:
        refuse([*reasons, f"blocks attend by {name!r}"], because="a score_mod was given")
    if state.settings.strict:
        refuse(reasons)
    return StockPlan(
        way=Way.METADATA,
        reasons=tuple(reasons),
        injected=route.ready().injected(),
        route=route,
        shared=shared if shared.places is None else SharedCall(result="encoded by each rank alone"),
    )


def _passes(state: TowerState, spec: Spec, grid: Grid, most_rows: int | None) -> list[Pass]:
    """Return the passes of a grid, of at most `most_rows` rows each where frames allow that."""
    if not grid:
        return []
    grids: tuple[Grid, ...] = (grid,)
    if most_rows is not None and rows_of(grid) > most_rows:
        grids = cut(grid, most_rows, clips=spec.geometry.clips)
    passes = []
    start = 0
    for pass_grid in grids:
        stop = start + rows_of(pass_grid)
        passes.append(Pass(grid=pass_grid, rows=slice(start, stop), route=state.routes.get(pass_grid, spec)))
        start = stop
    return passes


def _most_rows(
    state: TowerState, spec: Spec, snapshot: Snapshot, checkpoints: Sequence[Checkpoint | None], rows: int
) -> tuple[int | None, list[str]]:
    """Return the rows of a pass; or None, and why a call longer than the user's bound is not cut.

    `spec.max_rows` is None for calls that are never cut. Checkpoints, which a spec does not know, may forbid it too.
    """
    if spec.max_rows is not None and not any(checkpoints):
        return spec.max_rows, []
    reasons = reasons_whole(snapshot.facts, checkpoints)
    if spec.max_rows is not None and not reasons:
        return spec.max_rows, []
    too_long = isinstance(state.settings.max_rows, int) and rows > state.settings.max_rows
    return None, reasons if too_long else []


def _reason_against_graphs(
    snapshot: Snapshot, weights: Weights, device: torch.device, checkpoints: Sequence[Checkpoint | None]
) -> str | None:
    """Return why a call cannot be replayed from CUDA graphs, whatever its layout."""
    reason = why_not_graphs(device)
    if reason is not None:
        return reason
    if snapshot.third_party:  # it may act on state that Python holds: an adapter that is switched off, a counter
        return f"{snapshot.third_party}, and might act otherwise at a later call"
    if snapshot.mixing:  # a graph pads its rows, and a module that mixes rows would see them
        return snapshot.mixing[0]
    if not weights.contiguous:  # a graph identifies weights by `data_ptr`, so a change of strides goes unseen
        return "a parameter is not contiguous"
    if snapshot.sharded_layers:
        return "FSDP2 gathers weights again at every call"
    return "gradient checkpointing runs layers again" if any(checkpoints) else None
