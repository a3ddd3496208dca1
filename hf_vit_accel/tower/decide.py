"""Decide everything about a call before it runs, but the CUDA graphs of its passes: their runner decides about those.

A call goes one of the four ways of `Way`. Its plan says which, with every reason, and holds whatever that way needs.

`T` packed patch rows, `P` pixels of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hf_vit_accel.engine.encoder import CalledBlock, Checkpoint, checkpoints_of
from hf_vit_accel.engine.inputs import Inputs
from hf_vit_accel.engine.route import SEGMENTS, Spec
from hf_vit_accel.families import Tower
from hf_vit_accel.families.copies import CopyFamily
from hf_vit_accel.graphs.policy import Accepted
from hf_vit_accel.layout import Grid, rows_of
from hf_vit_accel.machine import raise_if_any
from hf_vit_accel.options.data_parallel import Sharing
from hf_vit_accel.options.passes import cut, reasons_not_cut
from hf_vit_accel.tower import checks
from hf_vit_accel.tower.modules import WeightMemory
from hf_vit_accel.tower.plan import NOT_SHARED, Call, CallPlan, FastPlan, Pass, SharedCall, StockPlan, Way
from hf_vit_accel.tower.proof import NAMES
from hf_vit_accel.tower.snapshot import Snapshot
from hf_vit_accel.tower.state import HIDDEN_STATES_OF_STEP, SpecKey, TowerState
from hf_vit_accel.versions import keyword_arguments, knows_segments

_OUTER_GRAPH = (
    "A patched tower cannot be captured in an outer CUDA graph. By default it captures its own where that pays, with "
    "hf_vit_accel.patch(model, cuda_graphs=True) at the first call"
)
AUTOMATIC_ON = ("cuda",)
"""The types of devices on which `cuda_graphs="auto"` captures."""


def decide(tower: Tower, state: TowerState, call: Call, not_shared: str | None = None) -> CallPlan:
    """Return the plan of a call.

    Args:
        not_shared: Why the ranks that tried to share this call could not.

    Raises:
        FallbackError: The call would not get what was asked for, under `strict`.
        RuntimeError: A CUDA graph is being captured around the tower.
    """
    if call.inputs is None:
        state.raise_if_strict(list(call.reasons_stock))
        return StockPlan(way=Way.STOCK, reasons=tuple(call.reasons_stock))
    if state.family.attention_only:
        return _decide_attention(tower, state, call)
    inputs = call.inputs
    snapshot = call.snapshot
    weights = call.weights
    assert snapshot is not None and weights is not None
    device = inputs.pixels.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(_OUTER_GRAPH)
    grad = torch.is_grad_enabled() and (bool(call.hooked_parts) or _may_train(inputs, snapshot, call.parameters))
    checkpoints = checkpoints_of(snapshot.parts, snapshot.checkpoint_wrappers) if grad else []
    sharing = state.sharing
    shared = NOT_SHARED if sharing is None else _decide_sharing(state, sharing, call, checkpoints, not_shared)
    reasons_slow = list(call.reasons_slow)
    if not state.family.videos and any(frames > 1 for frames, _, _ in inputs.grid):
        reasons_slow.append("this family takes the frames of a video one by one")
    reasons = list(shared.reasons)
    called = _called_blocks(state, call, reasons, grad=grad) if call.hooked_parts and not reasons_slow else {}
    if called and state.settings.score_mod is not None:
        reasons_slow.append("hooks inside blocks, which may attend without the score_mod")
    runs_stock_blocks = bool(reasons_slow)
    spec = spec_of(
        state,
        snapshot,
        weights,
        device,
        fast=not runs_stock_blocks,
        grad=grad,
        hidden_states=call.hidden_states,
        hooked_parts=call.hooked_parts,
    )
    if runs_stock_blocks:
        return _decide_metadata(tower, state, call, spec, reasons_slow, shared)
    if state.reuse is not None and call.why_whole is not None:
        reasons.append(f"equal pictures are encoded again: {call.why_whole}")
    most_rows = spec.max_rows
    if any(checkpoints) or isinstance(state.settings.max_rows, int):  # else there is nothing to add to the spec
        most_rows, passes_reasons = _most_rows(state, spec, snapshot, checkpoints, len(inputs.pixels))
        reasons += passes_reasons
    grid = inputs.grid
    if inputs.repeats is not None or shared.assignment is not None:
        grid = _own_grid(state, inputs, shared)
        reasons += [] if inputs.repeats is None else inputs.repeats.unmet
    rows = len(inputs.pixels) if grid is inputs.grid else rows_of(grid)
    is_whole = most_rows is None or rows <= most_rows
    if grid is inputs.grid and is_whole:
        passes = [Pass(grid=grid, rows=slice(0, len(inputs.pixels)))]
    else:
        passes = _passes(spec, grid, most_rows)
    runner = state.training_runner if grad else state.inference_runner
    if runner is not None and state.settings.graphs == "auto" and device.type not in AUTOMATIC_ON:
        runner = None
    why_eager = None if runner is None else spec.against_graphs
    memory: list[object] = []
    if runner is not None and why_eager is None:
        if not weights.contiguous:  # a graph identifies weights by `data_ptr`, so a change of strides goes unseen
            why_eager = "a parameter is not contiguous"
        elif any(checkpoints):
            why_eager = "gradient checkpointing runs layers again"
        elif grad and len(passes) > 1:  # such passes run again in the backward pass
            why_eager = Accepted("steps of several passes")
        elif state.settings.graphs == "auto" and len(passes) > 1:
            why_eager = "long calls of several passes"
        else:
            memory = [weights, *[buffer.data_ptr() for buffer in snapshot.buffers()]]
            if snapshot.called_linears:
                memory.append(snapshot.called_memory())
    if state.settings.strict:
        raise_if_any(reasons)
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
        called=called,
        shared=shared,
        runner=runner,
        why_eager=why_eager,
        memory=memory,
        outputs_require_grad=torch.is_grad_enabled() and not grad and snapshot.outputs_require_grad(),
    )


def _may_train(inputs: Inputs, snapshot: Snapshot, parameters: list[nn.Parameter]) -> bool:
    """Return whether a backward of this call may reach parameters or pixels."""
    # An unpredictable module (an adapter) may train parameters outside of the tower.
    has_unknown_parameters = bool(snapshot.unpredictable_others)
    return has_unknown_parameters or inputs.pixels.requires_grad or snapshot.is_trained(parameters)


def _own_grid(state: TowerState, inputs: Inputs, shared: SharedCall) -> Grid:
    """Return the images that this rank encodes: those that are distinct, and its share of them."""
    if shared.assignment is not None and state.sharing is not None:
        return shared.assignment.grid_of(state.sharing.ranks.rank)
    return inputs.grid if inputs.repeats is None else inputs.repeats.distinct(inputs.grid)


def spec_of(
    state: TowerState,
    snapshot: Snapshot,
    weights: WeightMemory,
    device: torch.device,
    *,
    fast: bool,
    grad: bool,
    hidden_states: bool = False,
    hooked_parts: frozenset[int] = frozenset(),
) -> Spec:
    """Return the spec of calls like this one; the same object while nothing of it changes.

    Args:
        hooked_parts: See `Call`.
    """
    autocast = checks.autocast_dtype(device, weights.dtype)
    scales = None if state.settings.fp8 is None else state.scales(snapshot, device)
    halvings = len(state.pass_limit.rows_after_oom)
    key = SpecKey(
        device, autocast, fast, grad, weights.dtype, weights.key, scales, halvings, hidden_states, hooked_parts
    )
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
    assignment = sharing.split(inputs.grid, distinct, snapshot.facts)
    if assignment is None:
        return SharedCall(result="too small to share")
    is_reentrant = any(checkpoint is not None and checkpoint.is_reentrant for checkpoint in checkpoints)
    reasons = sharing.reasons_against(snapshot.facts, reentrant=is_reentrant)
    if call.hidden_states:
        reasons.append(f"not shared by ranks: {call.why_whole}")
    if reasons:
        return SharedCall(reasons=tuple(reasons))
    sharing.note_others_wait(inputs.grid)
    if call.why_whole is not None:  # other ranks may have no hooks
        sharing.decline([call.why_whole])
        return SharedCall(result="encoded by each rank alone", reasons=(call.why_whole,))
    return SharedCall(assignment=assignment, result="shared")


def _decide_attention(tower: Tower, state: TowerState, call: Call) -> StockPlan:
    """Return the plan of a call with our attention alone: offsets carry the lengths of its segments."""
    assert call.inputs is not None and state.popped is not None
    device = call.inputs.pixels.device
    geometry = state.family.geometry(tower)
    offsets = state.routes.segment_arguments(
        call.inputs.grid, device, geometry, state.settings, state.faults, state.attention_backends
    )
    return StockPlan(way=Way.ATTENTION, reasons=(), injected=keyword_arguments(offsets, state.popped | {SEGMENTS}))


def _decide_metadata(
    tower: Tower, state: TowerState, call: Call, spec: Spec, reasons_slow: list[str], shared: SharedCall
) -> StockPlan:
    """Return the plan of a call whose blocks are called one by one, on our metadata and attention."""
    assert call.inputs is not None and call.snapshot is not None
    reasons = [*reasons_slow, *shared.reasons]
    declined = shared if shared.assignment is None else SharedCall(result="encoded by each rank alone")
    if isinstance(state.family, CopyFamily):  # its forward may take no metadata
        state.raise_if_strict(reasons)
        return StockPlan(way=Way.STOCK, reasons=tuple(reasons), shared=declined)
    name = tower.config._attn_implementation
    taken = call.snapshot.proof.taken
    route = state.routes.get(call.inputs.grid, spec)
    reasons += route.unmet
    if state.settings.score_mod is not None and name not in NAMES:
        raise_if_any([*reasons, f"blocks attend by {name!r}"], because="a score_mod was given")
    if state.settings.score_mod is not None and not knows_segments(call.snapshot.proof.code.called_names()):
        raise_if_any([*reasons, "blocks attend without our segments"], because="a score_mod was given")
    if state.settings.strict:
        raise_if_any(reasons)
    return StockPlan(
        way=Way.METADATA,
        reasons=tuple(reasons),
        injected=route.ready().injected(taken),
        route=route,
        shared=declined,
    )


def _called_blocks(state: TowerState, call: Call, reasons: list[str], *, grad: bool) -> dict[int, CalledBlock]:
    """Return the hooked blocks of a call, by the index of the layer. Add to `reasons` what their attention lacks."""
    inputs, snapshot = call.inputs, call.snapshot
    assert inputs is not None and snapshot is not None and call.weights is not None
    hooked = {layer: block for layer, block in snapshot.callable_blocks.items() if id(block) in call.hooked_parts}
    names = snapshot.proof.block_arguments
    if not hooked or names is None:
        return {}
    spec = spec_of(state, snapshot, call.weights, inputs.pixels.device, fast=False, grad=grad)
    route = state.routes.get(inputs.grid, spec).ready()
    reasons += route.unmet
    options = {name: value for name, value in inputs.options.items() if name != "return_dict"}
    return {layer: partial(block, **route.block_arguments(layer, names), **options) for layer, block in hooked.items()}


def _passes(spec: Spec, grid: Grid, most_rows: int | None) -> list[Pass]:
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
        passes.append(Pass(grid=pass_grid, rows=slice(start, stop)))
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
    reasons = reasons_not_cut(snapshot.facts, checkpoints)
    if spec.hidden_states and spec.request.grad:
        reasons.append(f"not cut by max_rows: {HIDDEN_STATES_OF_STEP}")
    if spec.max_rows is not None and not reasons:
        return spec.max_rows, []
    too_long = isinstance(state.settings.max_rows, int) and rows > state.settings.max_rows
    return None, reasons if too_long else []
